"""The many-nodes policy's state in the journal: what has changed, part by part, and all of it again.

A whole state of 2,048 nodes is a megabyte, and nearly every change is to a few nodes. So a record holds the
parts that are others than at the record before; a start goes through them all, in order. Parts that belong
together may take several records; the last of these says so, and what has no last one never happened.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from closeranks.controller.journal import MAX_DATA_BYTES, Record
from closeranks.errors import JournalError
from closeranks.plain import PlainError, from_plain, to_plain
from closeranks.policy.cluster_restore import durable_job, durable_node
from closeranks.policy.cluster_state import ClusterState, Forming, Member, Node, World
from closeranks.policy.job import JobState

__all__ = ["STATE_KIND", "StateDiary", "read_parts", "read_state"]

STATE_KIND = "cluster_state"
_ROOM_BYTES = MAX_DATA_BYTES // 2
_MOST_PARTS = 512  # of one record; they are seldom larger than 200 bytes
_NODE, _MEMBER, _SEAT = "node/", "member/", "seat/"


def _parts(state: ClusterState) -> dict[str, Any]:
    """The state in parts that change together; ``member``: of the world, ``seat``: of the one that forms."""
    world, forming = state.world, state.forming
    parts: dict[str, Any] = {
        "job": durable_job(state.job),
        "world": None if world is None else replace(world, members={}),
        "forming": None if forming is None else replace(forming, members={}),
        "rest": (
            state.finished,
            state.requested,
            state.requested_at_s,
            state.denied_until_s,
            state.asked,
        ),
    }
    parts.update((_NODE + name, node) for name, node in state.nodes.items())
    parts.update((_MEMBER + name, member) for name, member in (world.members if world else {}).items())
    parts.update((_SEAT + name, member) for name, member in (forming.members if forming else {}).items())
    return parts


class StateDiary:
    """Tells, after each decision, what has to be written down."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}  # the parts as they were
        self._written: dict[str, Any] = {}  # what of them is in the journal
        self._whole = True  # the next batch is all there is: what a controller before us left doesn't count

    def go_on(self, names: Iterable[str]) -> None:
        """Parts by these names are written down already; what they hold is to be written again."""
        self._seen = dict.fromkeys(names)
        self._written = dict.fromkeys(self._seen)
        self._whole = False

    def changes(self, state: ClusterState) -> Iterator[dict[str, Any]]:
        """The data of the records that bring the journal up to ``state``; usually none or one."""
        parts = _parts(state)
        before, self._seen = self._seen, parts
        changed: dict[str, Any] = {}
        for key, part in parts.items():
            if key in before and before[key] is part:  # by far most of them: not even compared
                continue
            lasting = durable_node(part) if isinstance(part, Node) else part
            if key not in self._written or self._written[key] != lasting:
                changed[key] = self._written[key] = lasting
        gone = [key for key in before if key not in parts]
        for key in gone:
            del self._written[key]
        if not changed and not gone:
            return
        first = {"first": True, "whole": True} if self._whole else {"first": True}
        self._whole = False
        for batch in _batches(changed, gone):
            yield {**batch, **first}
            first = {}


def _batches(changed: Mapping[str, Any], gone: list[str]) -> Iterator[dict[str, Any]]:
    plain = [(key, _plain_part(part)) for key, part in changed.items()]
    *batches, last = [
        batch
        for at in range(0, max(1, len(plain)), _MOST_PARTS)
        for batch in _fitting(dict(plain[at : at + _MOST_PARTS]))
    ]
    for batch in batches:
        yield {"set": batch, "gone": [], "last": False}
    yield {"set": last, "gone": gone, "last": True}


def _fitting(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts in as few pieces as a record has room for; names may be long."""
    if len(parts) < 2 or len(json.dumps(parts)) <= _ROOM_BYTES:
        return [parts]
    items = list(parts.items())
    middle = len(items) // 2
    return [*_fitting(dict(items[:middle])), *_fitting(dict(items[middle:]))]


def _plain_part(part: Any) -> Any:
    """Nodes and members, of which there are thousands, without what is as it is at first."""
    if not isinstance(part, Node | Member):
        return to_plain(part)
    return {
        name: to_plain(value)
        for name, default in _DEFAULTS[type(part)]
        if (value := getattr(part, name)) is not default and value != default
    }


_DEFAULTS = {kind: [(f.name, f.default) for f in fields(kind)] for kind in (Node, Member)}


def read_state(records: Iterable[Record], fresh: ClusterState) -> ClusterState | None:
    """The newest state that the journal holds whole, under the settings of ``fresh``; None: it holds none.

    Raises JournalError for a record that makes no sense.
    """
    parts: dict[str, Any] = {}
    pending: dict[str, Any] = {}
    whole = found = False
    for record in records:
        if record.kind != STATE_KIND:
            continue
        if record.data.get("first"):  # what is left of a batch that was cut never happened
            pending, whole = {}, bool(record.data.get("whole"))
        changed, gone = record.data.get("set"), record.data.get("gone") or []
        if not isinstance(gone, list):
            raise JournalError(f"the recorded state of the cluster makes no sense: {gone!r} is gone")
        pending.update(changed if isinstance(changed, Mapping) else {})
        if record.data.get("last"):
            parts = pending if whole else {**parts, **pending}
            pending, whole, found = {}, False, True
            for key in gone:
                parts.pop(str(key), None)
    return read_parts(parts, fresh) if found else None


def read_parts(parts: Mapping[str, Any], fresh: ClusterState) -> ClusterState:
    """The state from its parts by name, as records hold them. Raises JournalError."""
    try:
        return _whole(parts, fresh)
    except (PlainError, TypeError, ValueError) as error:
        raise JournalError(f"the recorded state of the cluster makes no sense: {error}") from error


def _whole(parts: Mapping[str, Any], fresh: ClusterState) -> ClusterState:
    def group(prefix: str, kind: Any) -> dict[str, Any]:
        names = (key for key in parts if key.startswith(prefix))
        return {key.removeprefix(prefix): from_plain(kind, parts[key], key) for key in names}

    world = from_plain(World | None, parts.get("world"), "world")
    forming = from_plain(Forming | None, parts.get("forming"), "forming")
    rest = from_plain(tuple[bool, int, float, float, bool], parts.get("rest"), "rest")
    job = from_plain(JobState, parts.get("job"), "job")
    return replace(
        fresh,
        job=replace(job, config=fresh.job.config),
        nodes=group(_NODE, Node),
        world=None if world is None else replace(world, members=group(_MEMBER, Member)),
        forming=None if forming is None else replace(forming, members=group(_SEAT, Member)),
        finished=rest[0],
        requested=rest[1],
        requested_at_s=rest[2],
        denied_until_s=rest[3],
        asked=rest[4],
    )
