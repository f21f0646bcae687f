"""What controller and agents say to each other: a table of message types and their fields. No I/O.

A field's shape is written in a small language:

    bool                  true or false
    int, count            a whole number of 64 bits; count: 0 or more
    float, seconds        a finite number; seconds: 0 or more
    str, name             text; name: 1 to 1,024 printable characters, so that it can be shown and compared
    object                a JSON object whose content the receiver looks at itself
    list[shape]           any number of them
    (shape, shape, ...)   a row: a list of exactly these
    shape?                may be left out, or null

Fields that the table doesn't know are ignored: a newer peer may send them. A type that it doesn't know is an
error, and costs that message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from closeranks.errors import ProtocolError

__all__ = ["MAX_NAME_CHARS", "MESSAGES", "NODE_EVENTS", "Shape", "check", "parse"]

MAX_NAME_CHARS = 1024
# What agents put on record with "event"; all else in the job's journal is the controller's own.
NODE_EVENTS = frozenset(
    {"rank_exited", "killed", "notice", "fault_injected", "suspected", "suspicion_cleared"}
)
_MAX_WHOLE = 2**63 - 1
_SIMPLE = ("bool", "int", "count", "float", "seconds", "str", "name", "object")

MESSAGES: Mapping[str, Mapping[str, str]] = {
    # Attach and stay attached. ``boot``: of the host, see linux.boot_id; ``running``: a generation.
    "hello": {
        "job": "name", "node": "name", "session": "name", "slots": "count", "address": "name",
        "running": "count?", "version": "name", "boot": "str",
    },
    # ``lease_s``: how long one answered heartbeat lasts; ``beat_s``: how often one is due; ``grace_s``: how
    # long ranks may go on while the controller's own host says that it isn't there; ``term``: of a leader.
    "welcome": {"lease_s": "seconds", "beat_s": "seconds", "grace_s": "seconds", "term": "count?"},
    "refused": {"reason": "str", "for_good": "bool"},
    "heartbeat": {
        "seq": "count", "mono_ns": "count", "generation": "count?",
        "ranks": "list[(count, int, int, str, bool)]",  # rank, step, ticks, phase, in_collective
        "progress": "(count, int, count, count, bool)?",  # step, absolute, saves, step saved, init done
    },
    "heartbeat_ack": {"seq": "count"},
    "goodbye": {"reason": "str"},
    "ready": {},
    # A generation's life.
    "start": {
        "generation": "count", "node_rank": "count", "first_rank": "count", "ranks": "count",
        "world_size": "count", "node_count": "count", "store": "name", "delay_s": "seconds",
    },
    "started": {"generation": "count"},
    "kill": {"generation": "count"},
    "stop": {"generation": "count", "signal": "count"},
    "down": {"generation": "count"},
    "succeeded": {"generation": "count"},
    "finish": {"exit_code": "count", "reason": "str"},
    # What broke. ``durable``: as in events.Failure; ``texts``: raw stacks, for people.
    "failed": {"generation": "count", "durable": "bool", "evidence": "object", "texts": "object"},
    "broke": {"generation": "count", "kind": "name", "reason": "str"},  # without evidence
    "evidence_request": {"generation": "count", "trigger": "str"},
    "evidence": {"generation": "count", "durable": "bool", "evidence": "object", "texts": "object"},
    # A look at all ranks at once, while something is suspicious. ``samples``: as policy.hang.RankSample.
    "look": {"generation": "count", "closely": "bool"},
    "seen": {"generation": "count", "samples": "list[object]", "step_p99_s": "seconds?"},
    # Where ranks meet.
    "store_open": {"generation": "count"},
    "store_opened": {"generation": "count", "address": "name"},
    "store_lost": {"generation": "count"},
    # Nodes.
    # ``last_call``: others have saved, and wait.
    "prepare": {"generation": "count", "deadline_s": "seconds", "last_call": "bool"},
    "prepared": {"generation": "count", "saves": "count"},
    "leaving": {"deadline_s": "seconds", "reason": "str"},
    "health_check": {"check": "count", "reason": "str"},
    "health": {"check": "count", "ok": "bool", "reason": "str"},
    # Faults on purpose, and what was seen.
    "inject": {"id": "name", "spec": "str"},
    "injected": {"id": "name", "reply": "object"},
    "event": {"kind": "name", "generation": "count?", "data": "object"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """One field's shape; ``parts``: what a list holds, or each place of a row."""

    kind: str
    parts: tuple[Shape, ...] = ()
    optional: bool = False


def parse(text: str) -> Shape:
    """``"list[(count, str)]?"`` -> Shape. Raises ValueError for what isn't of that language."""
    tokens = re.findall(r"\w+|[^\w\s]", text)
    shape, at = _parse(tokens, 0)
    if at != len(tokens):
        raise ValueError(f"{text!r}: nothing is expected after {''.join(tokens[:at])!r}")
    return shape


def _parse(tokens: list[str], at: int) -> tuple[Shape, int]:
    kind, at = _token(tokens, at), at + 1
    parts: list[Shape] = []
    if kind in ("list", "("):
        closing = ")"
        if kind == "list":
            at, closing = _expect(tokens, at, "["), "]"
        part, at = _parse(tokens, at)
        parts.append(part)
        while kind == "(" and _token(tokens, at) == ",":
            part, at = _parse(tokens, at + 1)
            parts.append(part)
        at = _expect(tokens, at, closing)
    elif kind not in _SIMPLE:
        raise ValueError(f"no shape {kind!r}; known: {', '.join(_SIMPLE)}, list[...], (...)")
    optional = _token(tokens, at) == "?"
    return Shape("row" if kind == "(" else kind, tuple(parts), optional), at + optional


def _token(tokens: list[str], at: int) -> str:
    return tokens[at] if at < len(tokens) else ""


def _expect(tokens: list[str], at: int, wanted: str) -> int:
    if _token(tokens, at) != wanted:
        raise ValueError(f"{''.join(tokens)!r}: {wanted!r} is missing")
    return at + 1


_SHAPES = {kind: {name: parse(text) for name, text in fields.items()} for kind, fields in MESSAGES.items()}


def check(message: Mapping[str, Any]) -> None:
    """Raises ProtocolError, with the field's name, for a message that isn't as the table has it."""
    kind = message.get("type")
    fields = _SHAPES.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise ProtocolError(f"no message of type {_shown(kind)}")
    for name, shape in fields.items():
        if (wrong := _wrong(message.get(name), shape)) is not None:
            raise ProtocolError(f"message {kind!r}: {name}{wrong if name in message else ' is missing'}")


def _wrong(value: object, shape: Shape) -> str | None:
    """What is wrong with ``value``, as it goes on after its name: " is 7, not a str", "[3] is ..."."""
    if value is None:
        return None if shape.optional else f" is null, not {_named(shape)}"
    if shape.kind in ("list", "row"):
        return _wrong_list(value, shape)
    return None if _is(value, shape.kind) else f" is {_shown(value)}, not {_named(shape)}"


def _wrong_list(value: object, shape: Shape) -> str | None:
    if not isinstance(value, (list, tuple)) or (shape.kind == "row" and len(value) != len(shape.parts)):
        return f" is {_shown(value)}, not {_named(shape)}"
    for place, item in enumerate(value):
        if (wrong := _wrong(item, shape.parts[place if shape.kind == "row" else 0])) is not None:
            return f"[{place}]{wrong}"
    return None


def _is(value: object, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind in ("int", "count"):
        least = 0 if kind == "count" else -_MAX_WHOLE
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MAX_WHOLE
    if kind in ("float", "seconds"):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return False
        return abs(value) <= _MAX_WHOLE and math.isfinite(value) and (kind == "float" or value >= 0)
    if kind == "object":
        return isinstance(value, Mapping)
    return isinstance(value, str) and (
        kind == "str" or (0 < len(value) <= MAX_NAME_CHARS and value.isprintable())
    )


def _named(shape: Shape) -> str:
    if shape.kind == "row":
        return f"a row of {len(shape.parts)}"
    return {"list": "a list", "object": "an object", "int": "an int"}.get(shape.kind, f"a {shape.kind}")


def _shown(value: object) -> str:
    """``value`` in few, printable characters: it is a stranger's."""
    if isinstance(value, (Mapping, list, tuple)):
        return f"{'an object' if isinstance(value, Mapping) else 'a list'} of {len(value):,}"
    if isinstance(value, str) and len(value) > 40:
        return f"{value[:40]!a}..."
    if isinstance(value, int) and abs(value) > _MAX_WHOLE:
        return "a number out of range"
    return ascii(value)
