"""Which of a job's controllers leads it: a key in etcd that hangs on a lease, and the time until it ends.

A leader counts its lease from when it **sent** the newest renewal that etcd answered, and stops a margin
before that ends. So it has stopped by itself, whatever the network does, when etcd lets go of the key. Who
takes the key then waits as long a margin before it decides anything. What times can't prove, transactions do:
every decision is written under the condition that the key still is the one that this leader made.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from closeranks.config import EtcdConfig
from closeranks.controller.etcd import Etcd, KeyValue, created_at, get, put
from closeranks.errors import EtcdError
from closeranks.linux import boot_id, boottime_s

__all__ = ["Campaign", "Ended", "Leadership", "job_prefix"]

_RENEWALS = 4  # in the time that a lease holds
_RETRY_S = 0.1
_CALL_S = 2.0  # where nothing else limits a call
_RESIGN_S = 1.0


def job_prefix(job_id: str) -> bytes:
    """Where all of one job lies."""
    return f"/closeranks/{job_id}/".encode()


@dataclass(frozen=True, slots=True)
class Ended:
    """The job is over: how its last leader said that it ended."""

    exit_code: int
    reason: str


class Leadership:
    """Held from the moment it was won. ``term``: grows from leader to leader, and is never given twice."""

    def __init__(
        self,
        etcd: Etcd,
        config: EtcdConfig,
        key: bytes,
        term: int,
        lease: int,
        held_until_s: float,
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        self.key = key
        self.term = term
        self.lost = asyncio.Event()
        self.lost_because = ""
        self._etcd = etcd
        self._config = config
        self._lease = lease
        self._held_until_s = held_until_s
        self._clock = clock

    @property
    def left_s(self) -> float:
        """For how long it is certain still; 0: it isn't."""
        return 0.0 if self.lost.is_set() else max(0.0, self._held_until_s - self._clock())

    @property
    def is_held(self) -> bool:
        """Asked before anything is done in the name of the job: a process may have slept in between."""
        if self.left_s > 0:
            return True
        self.lose("etcd has not renewed its lease in time")
        return False

    def lose(self, why: str) -> None:
        """From now on nothing is decided here."""
        if not self.lost.is_set():
            self.lost_because = why
            self.lost.set()

    async def keep(self) -> None:
        """Renew it until it is lost."""
        trouble = ""
        while self.is_held:
            sent_s = self._clock()
            try:
                ttl_s = await self._etcd.keep_alive(self._lease, self.left_s)
            except EtcdError as error:
                trouble = f": {error}"
                await asyncio.sleep(min(_RETRY_S, self.left_s))
                if self.left_s <= 0:
                    self.lose(f"etcd has not renewed its lease in time{trouble}")
                continue
            if ttl_s <= 0:
                self.lose("etcd has ended its lease")
                return
            holds_s = ttl_s - self._config.margin_s
            self._held_until_s = max(self._held_until_s, sent_s + holds_s)
            await asyncio.sleep(min(holds_s / _RENEWALS, self.left_s))

    async def resign(self) -> None:
        """Let go of it now, so that nobody has to wait. Nothing may be decided here any more."""
        self.lose("it has resigned")
        try:
            await self._etcd.revoke(self._lease, _RESIGN_S)
        except EtcdError:
            return  # etcd will end it


class Campaign:
    """Waits for its turn to lead a job. ``begins``: also one that nobody has begun.

    ``leader``: who led when etcd was last asked, "" for nobody; ``looks``: how often it has answered.
    """

    def __init__(
        self,
        etcd: Etcd,
        config: EtcdConfig,
        job_id: str,
        *,
        begins: bool,
        tell: Callable[[str], None],
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        self.leader = ""
        self.looks = 0
        self.trouble = ""
        self._etcd = etcd
        self._config = config
        prefix = job_prefix(job_id)
        self._key, self._ended_key, self._began_key = prefix + b"leader", prefix + b"ended", prefix + b"began"
        self._begins = begins
        self._tell = tell
        self._clock = clock

    async def run(self) -> Leadership | Ended:
        """Returns once this controller leads, and no other one does any more, or once the job is over."""
        while True:
            try:
                outcome = await self._look()
            except EtcdError as error:
                self._trouble(str(error))
                outcome = None
            if outcome is not None:
                return outcome
            await asyncio.sleep(self._config.poll_s)

    async def _look(self) -> Leadership | Ended | None:
        keys = (self._key, self._ended_key, self._began_key)
        seen = await self._etcd.txn([], [get(key) for key in keys], [], _CALL_S)
        self.trouble = ""
        leaders, ended, began = seen.found
        self.leader = leaders[0].value[:200].decode(errors="replace") if leaders else ""
        self.looks += 1
        if leaders:  # also where the job has ended: then its leader has something left to do
            return None
        if ended:
            return _ended(ended[0])
        if not (began or self._begins):
            return None
        leadership = await self._take()
        # Where nothing was ever written, nobody can have acted.
        return leadership if leadership is None or not began or await self._outwait(leadership) else None

    async def _take(self) -> Leadership | None:
        sent_s = self._clock()
        lease, ttl_s = await self._etcd.grant(max(1, round(self._config.ttl_s)), _CALL_S)
        held_until_s = sent_s + ttl_s - self._config.margin_s
        us = {"host": socket.gethostname(), "pid": os.getpid(), "boot": boot_id(), "lease": lease}
        taken = await self._etcd.txn(
            [created_at(self._key, 0), created_at(self._ended_key, 0)],
            [put(self._key, json.dumps(us).encode(), lease)],
            [get(self._key)],
            max(0.0, held_until_s - self._clock()),
        )
        term = taken.revision
        if not taken.succeeded:
            # Somebody was quicker; or it was us, and the answer to a first attempt is lost.
            mine = [row for row in taken.found[0] if row.lease == lease]
            if not mine:
                await self._etcd.revoke(lease, _RESIGN_S)
                return None
            term = mine[0].created_revision
        return Leadership(self._etcd, self._config, self._key, term, lease, held_until_s, self._clock)

    async def _outwait(self, leadership: Leadership) -> bool:
        """Whether we still lead after the margin in which a leader before us may have gone on."""
        keeping = asyncio.get_running_loop().create_task(leadership.keep())
        try:
            await asyncio.sleep(self._config.margin_s)
            return leadership.is_held
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])

    def _trouble(self, text: str) -> None:
        """Told once for each time that etcd goes away, not again and again."""
        self.leader = ""
        if not self.trouble:
            self.trouble = text
            self._tell(f"can't ask etcd who leads this job, and goes on trying: {text}")


def _ended(row: KeyValue) -> Ended:
    try:
        data = json.loads(row.value)
        code, reason = data["exit_code"], data["reason"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise EtcdError(f"etcd's {row.key!r} doesn't say how the job ended") from None
    if not isinstance(code, int) or not 0 <= code <= 255:
        raise EtcdError(f"etcd's {row.key!r} doesn't say how the job ended")
    return Ended(code, str(reason)[:1000])
