"""A controller that isn't alone: it waits until it leads the job, or until others have led it to its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from closeranks.config import EtcdConfig
from closeranks.controller.etcd import Etcd
from closeranks.controller.leadership import Campaign, Ended, Leadership
from closeranks.controller.shared_state import Found, SharedState
from closeranks.errors import EtcdError

__all__ = ["Candidacy", "Reign"]

_INSISTENT = 3  # signals after which a controller that waits ends, whoever leads
_MAX_RENEWAL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Reign:
    """What a leader holds. ``found``: what its predecessors have left, None where nothing was decided yet."""

    leadership: Leadership
    shared: SharedState
    found: Found | None
    keeping: asyncio.Task[None]

    @contextlib.asynccontextmanager
    async def running(self, depose: Callable[[str], None]) -> AsyncIterator[None]:
        """While its decisions are written; ``depose`` is told when it is over."""
        loop = asyncio.get_running_loop()
        tasks = [self.keeping, loop.create_task(self.shared.run()), loop.create_task(self._watch(depose))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _watch(self, depose: Callable[[str], None]) -> None:
        await self.leadership.lost.wait()
        depose(self.leadership.lost_because)


class Candidacy:
    """``begins``: this one may begin the job; else it waits for one that has begun. ``is_first``: it is about
    to, and somebody waits for that.

    ``leaves_at_once``: a signal ends it while it waits, as it is meant for this one alone; where whoever
    leads gets the same signal, only if nobody leads.
    """

    def __init__(
        self,
        config: EtcdConfig,
        job_id: str,
        *,
        begins: bool,
        is_first: bool,
        leaves_at_once: bool,
        tell: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._job_id = job_id
        self._begins = begins
        self._is_first = is_first
        self._leaves_at_once = leaves_at_once
        self._tell = tell
        self._etcd = Etcd(config)
        self._renewer = Etcd(config, max_answer_bytes=_MAX_RENEWAL_BYTES)  # nothing holds up a renewal
        self._campaign = Campaign(self._renewer, config, job_id, begins=begins, tell=self._warn)
        self._left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._signals = 0

    async def run(self) -> Reign | Ended | int:
        """A reign, the job's end, or the exit code of a controller that was told to end.

        Raises EtcdError where a job can't begin for want of an etcd.
        """
        if not self._begins:
            self._tell("info", "a standby is there: it leads this job when its controller does so no more")
        waiting = asyncio.get_running_loop().create_task(self._win())
        either: list[asyncio.Future[Any]] = [waiting, self._left]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._left.done():
            return waiting.result()
        waiting.cancel()
        await asyncio.wait([waiting])
        return self._left.result()

    async def await_end(self, patience_s: float) -> None:
        """After the job's end: whoever led it has its last words to say, and ends us by ending itself."""
        if self._campaign.looks > 1:  # else that one is gone, and we are here in its place
            await asyncio.wait([self._left], timeout=patience_s)

    def signalled(self, number: int) -> None:
        self._signals += 1
        if self._leaves_at_once or not self._campaign.leader or self._signals >= _INSISTENT:
            self.leave(128 + number)

    def leave(self, exit_code: int) -> None:
        if not self._left.done():
            self._left.set_result(exit_code)

    def close(self) -> None:
        self._etcd.close()
        self._renewer.close()

    def _warn(self, text: str) -> None:
        self._tell("warning", text)

    async def _win(self) -> Reign | Ended:
        while True:
            won = await self._await_turn()
            if isinstance(won, Ended):
                return won
            keeping = asyncio.get_running_loop().create_task(won.keep())
            shared = SharedState(self._etcd, won, self._job_id, self._warn)
            try:
                return Reign(won, shared, await shared.load(), keeping)
            except EtcdError as error:
                self._warn(f"leads, but can't read the job's state from etcd: {error}")
            keeping.cancel()
            await won.resign()
            await asyncio.sleep(self._config.poll_s)

    async def _await_turn(self) -> Leadership | Ended:
        campaign = asyncio.get_running_loop().create_task(self._campaign.run())
        try:
            if self._is_first:
                await asyncio.wait([campaign], timeout=self._config.start_timeout_s)
                if not campaign.done() and not self._campaign.looks:
                    raise EtcdError(f"no etcd keeps this job's state: {self._campaign.trouble}")
            return await campaign
        finally:
            campaign.cancel()
