"""Injected faults as data: what breaks, where and when. No I/O.

A fault is written ``kind:name=value,...``, for example ``kill:rank=1,step=50`` or
``exception:step=3,message="no, thanks"``. Parameters that every kind takes:

    rank=N           the rank that breaks; left out (or ``any``): one is picked, and named when it fires
    step=N           once N steps are complete, counted from 1 in each generation
    after=T          T seconds after the start (or after the injection): ``2``, ``0.5s``, ``200ms``, ``1m``
    generation=N     only in that generation; 0 is the first and the default; ``any`` = whichever comes

With neither ``step`` nor ``after`` it happens now. What counts as a step: a step of the main optimizer; in
a script without one, a call of ``closeranks.step()``; in a script without either, a collective on the
default group, but for broadcasts, barriers and those on objects, which belong to set-up.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from closeranks.errors import UsageError

__all__ = [
    "AGENT_KINDS",
    "KINDS",
    "MAX_FAULTS",
    "TAMPER_KINDS",
    "WORKER_KINDS",
    "FaultSpec",
    "Kind",
    "Parameter",
    "carried_out_by_worker",
    "format_spec",
    "parse_spec",
]

Value = int | float | str

MAX_FAULTS = 64  # a fault's number is a bit of the progress page's FAULT_FIRED
_MAX_TEXT_CHARS = 4096
_MAX_RANK = 2**24
_MAX_STEP = 2**53
_MAX_AFTER_S = 30 * 86400.0
_ANY = "any"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kind: how its text is read, and what it means. ``default`` None: left out."""

    read: Callable[[str], Value]
    meaning: str
    default: Value | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to break: a line for people, and the parameters that only this kind takes."""

    description: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """What breaks, where and when.

    ``rank`` None: any, to be picked by whoever delivers it. ``step``: completed steps of the generation,
    from 1. ``after_s``: seconds. Both None: now. ``generation`` None: whichever comes.
    """

    kind: str
    rank: int | None = None
    step: int | None = None
    after_s: float | None = None
    generation: int | None = 0
    params: Mapping[str, Value] = field(default_factory=dict)

    def get(self, name: str) -> Value | None:
        """The value of one of the kind's own parameters, or its default."""
        return self.params.get(name, KINDS[self.kind].parameters[name].default)


# --- reading values ---------------------------------------------------------------------------------


def _integer(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text) or not least <= int(text) <= most:
            raise ValueError(f"wants a whole number from {least} to {most}")
        return int(text)

    return read


def _number(least: float, most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not least <= number <= most:  # false for nan, too
            raise ValueError(f"wants a number from {least:g} to {most:g}")
        return number

    return read


def _duration_s(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{0,9})?)(ms|s|m|h)?", text)
    if match is None:
        raise ValueError("wants a time such as 2, 0.5s, 200ms or 1m")
    seconds = float(match[1]) * {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}[match[2] or "s"]
    if seconds > _MAX_AFTER_S:
        raise ValueError("wants at most 30 days")
    return seconds


def _text(text: str) -> str:
    return text


_FOR_STEPS = Parameter(_integer(1, _MAX_STEP), "for that many steps (default: until the end)")
_CODE = Parameter(_integer(0, 255), "exit code", 1)

KINDS: dict[str, Kind] = {
    "kill": Kind("SIGKILL, as the OOM killer or an operator sends it"),
    "stop": Kind("SIGSTOP: the process is frozen and never continued"),
    "hang-python": Kind("waits on a Python lock for ever"),
    "hang-c": Kind("waits in C for ever and holds the GIL, so that no Python of the process runs"),
    "spin": Kind("loops for ever and burns a core"),
    "skip": Kind("leaves out its next collective on the default group"),
    "dtype": Kind("issues its next collective on the default group with another dtype"),
    "size": Kind("issues its next collective on the default group with another size"),
    "op": Kind("issues another kind of collective in place of its next on the default group"),
    "slow": Kind(
        "every step takes longer; nothing is broken",
        {
            "factor": Parameter(_number(1.0, 1000.0), "times as long"),
            "ms": Parameter(_number(0.0, 3.6e6), "milliseconds more (default: 100)"),
            "for": _FOR_STEPS,
        },
    ),
    "exception": Kind(
        "raises RuntimeError", {"message": Parameter(_text, "its message", "injected by closeranks")}
    ),
    "exit": Kind("sys.exit(code)", {"code": _CODE}),
    "os-exit": Kind("os._exit(code): no handlers, no flushing", {"code": _CODE}),
    "segv": Kind("reads address 0 in native code"),
    "oom": Kind(
        "allocates until it is killed for it, or MemoryError at the limit",
        {
            "limit_mb": Parameter(
                _integer(1, 2**24), "stop there (default: the cgroup's limit, else the machine's memory)"
            )
        },
    ),
    "leak": Kind(
        "keeps more memory at every step",
        {"mb": Parameter(_number(0.001, 1e6), "MB a step", 16.0), "for": _FOR_STEPS},
    ),
    "agent-kill": Kind("SIGKILL to the agent: every rank must go with it"),
}

TAMPER_KINDS = frozenset({"skip", "dtype", "size", "op"})  # they change one collective
# Signals from outside: without a step the agent sends them, so that they reach a rank that runs no Python.
AGENT_KINDS = frozenset({"kill", "stop", "agent-kill"})
# What the rank does to itself. The agent's kinds are among them: at a step only the rank is exact.
WORKER_KINDS = frozenset(KINDS)

_COMMON: dict[str, Parameter] = {
    "rank": Parameter(_integer(0, _MAX_RANK), "the rank that breaks"),
    "step": Parameter(_integer(1, _MAX_STEP), "after that many completed steps"),
    "after": Parameter(_duration_s, "after that time"),
    "generation": Parameter(_integer(0, _MAX_RANK), "in that generation"),
}
_ALIASES = {"gen": "generation"}


def carried_out_by_worker(spec: FaultSpec) -> bool:
    """Whether the rank does it to itself (at a step, or what can't be done from outside), or the agent."""
    return spec.step is not None or spec.kind not in AGENT_KINDS


# --- text -> spec -----------------------------------------------------------------------------------


def _suggest(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def _split(text: str, whole: str) -> list[tuple[str, str]]:
    """``a=1,b="x, y"`` -> pairs. A value in double quotes may hold commas; ``\\`` escapes inside them."""
    pairs: list[tuple[str, str]] = []
    pattern = re.compile(r'\s*([A-Za-z][\w-]*)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^,"]*))\s*(,|$)', re.DOTALL)
    at = 0
    while at < len(text):
        match = pattern.match(text, at)
        if match is None or (match[4] and match.end() == len(text)):
            raise UsageError(
                f"fault {whole!r}: can't read {text[at:]!r}; write name=value, with commas between them"
            )
        quoted = match[2]
        value = match[3].strip() if quoted is None else re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL)
        pairs.append((match[1], value))
        at = match.end()
    return pairs


def parse_spec(text: str) -> FaultSpec:
    """``"kill:rank=1,step=50"`` -> FaultSpec.

    Raises UsageError, naming the nearest known word, for an unknown kind or parameter and a bad value.
    """
    shown = text if len(text) <= 80 else text[:77] + "..."
    if len(text) > _MAX_TEXT_CHARS:
        raise UsageError(f"fault {shown!r} is longer than {_MAX_TEXT_CHARS:,} characters; shorten it")
    kind, _, rest = text.partition(":")
    kind = kind.strip()
    if kind not in KINDS:
        raise UsageError(f"fault {shown!r}: no kind {kind!r}{_suggest(kind, KINDS)}")
    own = KINDS[kind].parameters
    known = {**_COMMON, **own}
    common: dict[str, Value | None] = {"rank": None, "step": None, "after": None, "generation": 0}
    params: dict[str, Value] = {}
    seen: set[str] = set()
    for given, value in _split(rest.strip(), shown):
        name = _ALIASES.get(given, given)
        if name not in known:
            raise UsageError(f"fault {shown!r}: {kind} takes no {given!r}{_suggest(given, known)}")
        if name in seen:
            raise UsageError(f"fault {shown!r}: {name} is given twice; leave one out")
        seen.add(name)
        try:
            if name in own:
                params[name] = own[name].read(value)
            elif name in ("rank", "generation") and value == _ANY:
                common[name] = None
            else:
                common[name] = _COMMON[name].read(value)
        except ValueError as error:
            raise UsageError(f"fault {shown!r}: {name}={value} {error}") from None
    if common["step"] is not None and common["after"] is not None:
        raise UsageError(f"fault {shown!r}: step and after exclude each other; leave one out")
    if "factor" in params and "ms" in params:
        raise UsageError(f"fault {shown!r}: factor and ms exclude each other; leave one out")
    return _spec(kind, common, params)


def _spec(kind: str, common: Mapping[str, Value | None], params: Mapping[str, Value]) -> FaultSpec:
    def whole(name: str) -> int | None:
        value = common[name]
        return value if isinstance(value, int) else None

    after = common["after"]
    return FaultSpec(
        kind=kind,
        rank=whole("rank"),
        step=whole("step"),
        after_s=after if isinstance(after, float) else None,
        generation=whole("generation"),
        params=dict(params),
    )


# --- spec -> text -----------------------------------------------------------------------------------


def _format_value(value: Value) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and value < 2**53 else f"{value:.9f}".rstrip("0")
    text = str(value)
    if re.fullmatch(r"[\w./:@%+-][\w ./:@%+-]*(?<! )", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def format_spec(spec: FaultSpec) -> str:
    """The text that ``parse_spec`` reads back as the same spec; what is at its default is left out."""
    parts: list[str] = []
    if spec.rank is not None:
        parts.append(f"rank={spec.rank}")
    if spec.step is not None:
        parts.append(f"step={spec.step}")
    if spec.after_s is not None:
        parts.append(f"after={_format_value(spec.after_s)}")
    if spec.generation != 0:
        parts.append(f"generation={_ANY if spec.generation is None else spec.generation}")
    parts += [f"{name}={_format_value(value)}" for name, value in spec.params.items()]
    return f"{spec.kind}:{','.join(parts)}" if parts else spec.kind
