"""A job's state in etcd, from which another controller goes on: nobody acts on what isn't there yet.

Decisions go there in order, many in one transaction while one is under way, under two conditions: the
leader's key still is the one that this leader made, and nothing was written since its own last transaction.
So neither a deposed leader nor a transaction that was given up and comes late can change anything.

A decision too large for one transaction is laid beside the state first, in chunks; one small transaction says
that it counts, and from then on it does, also where its parts have not found their places yet.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from closeranks.cluster_events import ClusterAction
from closeranks.controller.etcd import MAX_OPS, Etcd, Op, created_at, delete, get, modified_at, put
from closeranks.controller.leadership import Leadership, job_prefix
from closeranks.errors import EtcdError, JournalError
from closeranks.events import Finish
from closeranks.linux import boot_id

__all__ = ["Found", "SharedState"]

_MAX_KEYS = MAX_OPS - 2  # of one transaction; the stamp is one, too
_MAX_TXN_BYTES = 512 << 10  # etcd takes 1.5 MiB
_MAX_LAID = 10_000  # changes in one chunk
_MAX_WAITING = 10_000
_RETRY_S = 0.1
_SLOW_S = 1.0  # when people are told
_LAST_WORDS_S = 2.0
_KEEP_END_S = 86_400  # how long it can be read that a job has ended

_Changes = dict[bytes, bytes | None]  # None: the key goes


@dataclass(slots=True)
class _Waiting:
    """Changes, and what may be done once they are kept."""

    changes: _Changes = field(default_factory=dict)
    calls: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Found:
    """What a leader finds. ``parts``: of the state, by name; ``began``: what is on record of the job's begin;
    ``shift_s``: what to add to the state's times, as the clock may be another host's."""

    parts: Mapping[str, Any]
    began: Mapping[str, Any]
    shift_s: float


class SharedState:
    """One leader's hand on it. ``run`` writes until leadership is lost; raises nothing for what etcd does."""

    def __init__(self, etcd: Etcd, leadership: Leadership, job_id: str, tell: Callable[[str], None]) -> None:
        self.leadership = leadership
        prefix = job_prefix(job_id)
        self._prefix = prefix
        self._state, self._staged = prefix + b"state/", prefix + b"staged/"
        self._began, self._ended, self._counts = prefix + b"began", prefix + b"ended", prefix + b"counts"
        self._stamp_key = prefix + b"stamp"
        self._etcd = etcd
        self._tell = tell
        self._kept: dict[bytes, bytes] = {}  # what is there, or is on its way
        self._stamp_revision = 0
        self._n = 0
        self._waiting: deque[_Waiting] = deque()
        self._busy = False
        self._work = asyncio.Event()

    # --- what went before

    async def load(self, timeout_s: float = 30.0) -> Found | None:
        """What earlier leaders have left, made whole; None: nobody has begun.

        Raises EtcdError, also where leadership is lost meanwhile, and JournalError for what makes no sense.
        """
        rows = await self._etcd.read_prefix(self._prefix, timeout_s)
        values = {row.key: row.value for row in rows}
        self._stamp_revision = next((r.modified_revision for r in rows if r.key == self._stamp_key), 0)
        stamp = _object(values.get(self._stamp_key, b"{}"))
        laid: _Changes = {}
        if self._counts in values:
            for n in range(int(_object(values[self._counts]).get("chunks", 0))):
                chunk = _object(values.get(_numbered(self._staged, n), b""))
                laid.update((k.encode(), None if v is None else str(v).encode()) for k, v in chunk.items())
        for key, value in laid.items():
            if value is None:
                values.pop(key, None)
            else:
                values[key] = value
        try:
            await self._put_in_place(laid, [key for key in values if key.startswith(self._staged)])
        except _DeposedError as error:
            self.leadership.lose(str(error))
            raise EtcdError(str(error)) from None
        self._kept = {key: value for key, value in values.items() if key.startswith(self._state)}
        if not self._kept:
            return None
        parts = {key.removeprefix(self._state).decode(): _json(value) for key, value in self._kept.items()}
        return Found(parts, _object(values.get(self._began, b"{}")), _shift_s(stamp))

    # --- decisions

    def began(self, data: Mapping[str, Any]) -> None:
        """For the record of whoever leads next."""
        self._enqueue({self._began: _text(data)})

    def decided(self, changes: Sequence[Mapping[str, Any]], actions: Iterable[ClusterAction]) -> None:
        """What a decision changes in the state, as for the journal."""
        changed: _Changes = {}
        for change in changes:
            for name, part in change["set"].items():
                changed[self._state + name.encode()] = _text(part)
            for name in change["gone"]:
                changed[self._state + name.encode()] = None
        for key, value in tuple(changed.items()):
            if self._kept.get(key) == value:
                del changed[key]
            elif value is None:
                del self._kept[key]
            else:
                self._kept[key] = value
        for action in actions:
            if isinstance(action, Finish):
                changed[self._ended] = _text({"exit_code": action.exit_code, "reason": action.reason})
        if changed:
            self._enqueue(changed)

    def then(self, call: Callable[[], None]) -> None:
        """Do this once all that was decided so far is kept, in order; never if leadership is lost first."""
        if self._busy or self._waiting:
            self._last().calls.append(call)
        elif self.leadership.is_held:
            call()

    async def settled(self) -> None:
        """Return when all that was decided so far is kept."""
        done = asyncio.Event()
        self.then(done.set)
        await done.wait()

    def _enqueue(self, changes: _Changes) -> None:
        self._waiting.append(_Waiting(changes))
        self._work.set()
        if len(self._waiting) > _MAX_WAITING:
            self.leadership.lose("etcd has taken no decision for too long")

    def _last(self) -> _Waiting:
        if not self._waiting:
            self._waiting.append(_Waiting())
            self._work.set()
        return self._waiting[-1]

    # --- writing

    async def run(self) -> None:
        """Write what is decided."""
        try:
            while self.leadership.is_held:
                self._work.clear()
                self._busy = True
                while self._waiting and self.leadership.is_held:
                    await self._write(*self._take())
                self._busy = False
                await self._work.wait()
        except _DeposedError as error:
            self.leadership.lose(str(error))
        finally:
            self.leadership.lose("its decisions are written no more")

    def _take(self) -> tuple[_Changes, list[Callable[[], None]]]:
        """The next decisions, as many as one transaction holds, but one at least."""
        first = self._waiting.popleft()
        changes, calls = first.changes, first.calls
        while self._waiting:
            more = {**changes, **self._waiting[0].changes}
            if not _fits(more):
                break
            changes = more
            calls = [*calls, *self._waiting.popleft().calls]
        return changes, calls

    async def _write(self, changes: _Changes, calls: list[Callable[[], None]]) -> None:
        large = not _fits(changes)
        chunks: list[bytes] = []
        if large:
            chunks = [_numbered(self._staged, n) for n in range(await self._lay_down(changes))]
            await self._commit([put(self._counts, _text({"chunks": len(chunks)}))])
        elif changes:
            await self._commit(_ops(changes))
        for call in calls:
            if self.leadership.is_held:
                call()
        if large:
            await self._put_in_place(changes, chunks)

    async def _lay_down(self, changes: _Changes) -> int:
        count = 0
        for count, group in enumerate(_groups(changes, _MAX_LAID), 1):
            plain = {k.decode(): None if v is None else v.decode() for k, v in group.items()}
            await self._commit([put(_numbered(self._staged, count - 1), _text(plain))])
        return count

    async def _put_in_place(self, changes: _Changes, chunks: list[bytes]) -> None:
        for group in _groups(changes, _MAX_KEYS):
            await self._commit(_ops(group))
        if changes or chunks:
            await self._commit([delete(self._counts), delete(self._staged, prefix=True)])

    async def _commit(self, ops: Sequence[Op], lease: int = 0) -> None:
        """One transaction, tried until it is known to be done. Raises _DeposedError."""
        self._n += 1
        stamp = _text(
            {
                "term": self.leadership.term, "n": self._n, "boot": boot_id(),
                "wall_ns": time.time_ns(), "mono_ns": time.monotonic_ns(),
            }
        )  # fmt: skip
        ours = [
            created_at(self.leadership.key, self.leadership.term),
            modified_at(self._stamp_key, self._stamp_revision),
        ]
        look = [get(self.leadership.key), get(self._stamp_key)]
        began_s, told = time.monotonic(), False
        while self.leadership.is_held:
            try:
                done = await self._etcd.txn(
                    ours, [*ops, put(self._stamp_key, stamp, lease)], look, self.leadership.left_s
                )
            except EtcdError as error:
                if not told and time.monotonic() - began_s > _SLOW_S:
                    told = True
                    self._tell(f"etcd takes no decisions at present; ranks run on: {error}")
                await asyncio.sleep(_RETRY_S)
                continue
            if done.succeeded:
                self._stamp_revision = done.revision
                return
            leaders, stamps = done.found
            if not leaders or leaders[0].created_revision != self.leadership.term:
                raise _DeposedError("another controller leads the job, or may")
            if not stamps or stamps[0].value != stamp:
                raise _DeposedError("somebody else has written into the job's state")
            self._stamp_revision = stamps[0].modified_revision  # an attempt without an answer was done
            return
        raise _DeposedError(self.leadership.lost_because)

    # --- the end

    async def end(self, finish: Finish) -> None:
        """The job is over: only that stays, for a day, and nobody leads it any more."""
        if not self.leadership.is_held:
            return
        ended = _text({"exit_code": finish.exit_code, "reason": finish.reason})
        parts = (self._state, self._staged, self._counts, self._began)
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                while self._busy or self._waiting:
                    await asyncio.sleep(0.01)
                lease, _ = await self._etcd.grant(_KEEP_END_S, _LAST_WORDS_S)
                gone = [delete(key, prefix=True) for key in parts]
                await self._commit([*gone, put(self._ended, ended, lease)], lease)
        except (EtcdError, TimeoutError, _DeposedError) as error:
            self._tell(f"etcd could not be told that the job has ended: {error or 'it does not answer'}")
        await self.leadership.resign()


class _DeposedError(Exception):
    """Others lead, or may."""


def _fits(changes: _Changes) -> bool:
    return len(changes) <= _MAX_KEYS and sum(map(_size_bytes, changes.items())) <= _MAX_TXN_BYTES


def _size_bytes(change: tuple[bytes, bytes | None]) -> int:
    return len(change[0]) + len(change[1] or b"") + 16


def _groups(changes: _Changes, most: int) -> Iterator[_Changes]:
    group: _Changes = {}
    room_bytes = _MAX_TXN_BYTES
    for key, value in changes.items():
        size_bytes = _size_bytes((key, value))
        if group and (len(group) >= most or size_bytes > room_bytes):
            yield group
            group, room_bytes = {}, _MAX_TXN_BYTES
        group[key] = value
        room_bytes -= size_bytes
    if group:
        yield group


def _ops(changes: _Changes) -> list[Op]:
    return [delete(key) if value is None else put(key, value) for key, value in changes.items()]


def _numbered(prefix: bytes, n: int) -> bytes:
    return prefix + b"%06d" % n


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _json(value: bytes) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise JournalError("the job's state in etcd makes no sense: a part of it is no JSON") from None


def _object(value: bytes) -> dict[str, Any]:
    found = _json(value)
    if not isinstance(found, dict):
        raise JournalError("the job's state in etcd makes no sense: a part of it is no object")
    return found


def _shift_s(stamp: Mapping[str, Any]) -> float:
    """Nothing on the same boot of the same host; else by the wall clocks of both, for want of better."""
    wall_ns, mono_ns = stamp.get("wall_ns"), stamp.get("mono_ns")
    if stamp.get("boot") == boot_id() or not isinstance(wall_ns, int) or not isinstance(mono_ns, int):
        return 0.0
    now_ns = time.monotonic_ns() - max(0, time.time_ns() - wall_ns)
    return (now_ns - mono_ns) / 1e9
