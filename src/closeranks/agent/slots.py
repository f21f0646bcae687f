"""One spare worker a slot: made ahead of time, taken all at once, made again when the ranks are busy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
from collections.abc import Callable, Sequence
from pathlib import Path

from closeranks.agent import env
from closeranks.agent.spares import ExecSource, Source, Spare, ZygoteSource
from closeranks.config import RunConfig
from closeranks.errors import ZygoteError

__all__ = ["Slots", "modules_to_preload"]

_SCRIPT_PEEK_BYTES = 1 << 20
_TITLE_ROOM_BYTES = 16 << 10  # a longer command line is cut where processes are listed
_MAX_ZYGOTES = 4  # in a job's life; what kills the zygote again and again isn't chance
_ATTEMPTS = 3
# A script that mentions these will import torch._dynamo at its first optimizer (torch/optim/optimizer.py:
# _disable_dynamo_if_unsupported); that takes as long as torch itself, so it is done once, in the zygote.
_WILL_OPTIMIZE = re.compile(rb"\boptim\b|\bbackward\(|\bcompile\(|fsdp|FSDP|Trainer|accelerate|lightning")


def modules_to_preload(config: RunConfig) -> list[str]:
    """What the spares import before they wait: torch, what the script will surely import, the user's own."""
    if config.entrypoint.kind == "command":
        return []
    modules = ["torch", "torch.distributed"]
    source = b""
    try:
        if config.entrypoint.kind == "script":
            with Path(config.entrypoint.target).open("rb") as file:
                source = file.read(_SCRIPT_PEEK_BYTES)
    except OSError:
        source = b""
    if _WILL_OPTIMIZE.search(source):
        modules.append("torch._dynamo")
    return [*modules, *config.preload]


class Slots:
    """The node's ready workers."""

    def __init__(self, config: RunConfig, count: int) -> None:
        self._config = config
        self._count = count
        self._unheard: list[str] = []
        self._notice: Callable[[str], None] = self._unheard.append
        self._modules = modules_to_preload(config)
        self._environment = env.base_environment(config, count, os.environ)
        self._room = _title_room(config)
        self._zygotes = 0
        self._source: Source | None = None
        self._making: asyncio.Task[list[Spare]] | None = None
        self._spares: list[Spare] = []
        self.fallback_reason = ""

    @property
    def ready(self) -> bool:
        """Whether a whole world of spares waits."""
        return len(self._spares) >= self._count

    @property
    def kind(self) -> str:
        """How workers come to be: "zygote" or "exec"."""
        return self._source.kind if self._source is not None else ""

    def speak_to(self, notice: Callable[[str], None]) -> None:
        """Who hears what there is to notice, from now on and so far."""
        self._notice = notice
        for text in self._unheard:
            notice(text)
        self._unheard.clear()

    def _say(self, text: str) -> None:
        self._notice(text)

    def open(self) -> None:
        """Start the imports; the first ``take`` waits for them. To be called as early as can be."""
        if self._config.zygote and self._config.entrypoint.kind != "command":
            self._source = self._new_zygote()
        else:
            self._source = self._new_exec(self._modules)
        self._making = asyncio.get_running_loop().create_task(self._first())
        self._making.add_done_callback(self._made)

    def _new_zygote(self) -> ZygoteSource:
        self._zygotes += 1
        return ZygoteSource(self._modules, self._environment, self._room, self._say, self._config.python)

    def _new_exec(self, modules: Sequence[str]) -> ExecSource:
        return ExecSource(modules, self._environment, self._room, self._config.python)

    async def _first(self) -> list[Spare]:
        await self._start_source()
        return await self._make(self._count)

    async def _start_source(self) -> None:
        assert self._source is not None
        try:
            await self._source.start()
        except ZygoteError as error:
            self._fall_back(str(error), self._without_preload() if self._source.ended else self._modules)

    def _without_preload(self) -> list[str]:
        """What to import where an import has ended the process: that is not to happen to every worker."""
        return [name for name in self._modules if name not in self._config.preload]

    def _fall_back(self, reason: str, modules: Sequence[str]) -> None:
        """Workers by exec from now on; the reason is said once."""
        assert self._source is not None
        self.fallback_reason = reason
        left_out = [name for name in self._modules if name not in modules]
        without = f"; without preloading {', '.join(left_out)}" if left_out else ""
        self._notice(f"no zygote, workers are started one by one: {reason}{without}")
        self._source.close()
        self._source = self._new_exec(modules)

    async def _make(self, count: int) -> list[Spare]:
        """New spares, from another source where ours can't make any. Raises ZygoteError."""
        assert self._source is not None
        try:
            return await self._source.make(count)
        except ZygoteError as error:
            if self._source.kind != "zygote":
                raise
            if self._source.ended and self._zygotes < _MAX_ZYGOTES:
                self._notice(f"{error}; starting another one")
                self._source.close()
                self._source = self._new_zygote()
                await self._start_source()
            else:
                self._fall_back(str(error), self._modules)
        return await self._source.make(count)

    def refill(self) -> None:
        """Make what is missing, in the background."""
        if self._making is None and not self.ready and self._source is not None:
            self._making = asyncio.get_running_loop().create_task(self._make(self._count - len(self._spares)))
            self._making.add_done_callback(self._made)

    def _made(self, task: asyncio.Task[list[Spare]]) -> None:
        if task is self._making and not task.cancelled():
            self._making = None
            if task.exception() is None:  # else ``take`` tries again, and says what is wrong
                self._spares.extend(task.result())

    async def take(self) -> list[Spare]:
        """A whole world of living spares. Raises ZygoteError when none can be made."""
        problem = ""
        for attempt in range(_ATTEMPTS):
            try:
                if self._making is not None:
                    making, self._making = self._making, None
                    self._spares.extend(await making)
                self._spares = [spare for spare in self._spares if _alive(spare)]
                if self.ready:
                    break
                self._spares.extend(await self._make(self._count - len(self._spares)))
            except ZygoteError as error:
                problem = str(error)
                if attempt:  # once may be chance
                    break
        taken, self._spares = self._spares[: self._count], self._spares[self._count :]
        if len(taken) < self._count:
            for spare in taken:
                spare.close()
            raise ZygoteError(
                problem or f"workers die before they start: {len(taken)} of {self._count} are up"
            )
        return taken

    async def extra(self) -> Spare:
        """One worker more, for something else than a rank. Raises ZygoteError when none can be made."""
        if self._making is not None:
            await asyncio.wait({self._making})  # the imports, at the start
        return (await self._make(1))[0]

    async def learn(self, modules: Sequence[str]) -> None:
        """Import what the script turned out to need, so that the next generation finds it imported."""
        new = [name for name in modules if name not in self._modules]
        source = self._source
        if not new or source is None or source.kind != "zygote":
            return
        try:
            await source.load(new)
            await self._renew()
        except ZygoteError as error:
            if source is self._source and not source.ended:  # else whoever needs it next sees to it
                self._notice(f"can't import ahead what the script uses: {error}")
                source.close()
                self._source = self._new_zygote()
                await self._start_source()
        else:
            self._modules.extend(new)  # for a zygote that takes this one's place

    async def _renew(self) -> None:
        """Put spares that have learned in the place of those that haven't."""
        if self._making is not None:
            await asyncio.wait({self._making})
        old = list(self._spares)
        making = self._making = asyncio.get_running_loop().create_task(self._make(self._count))
        making.add_done_callback(self._made)
        await asyncio.wait({making})
        for spare in old:
            if spare in self._spares and len(self._spares) > self._count:
                self._spares.remove(spare)
                spare.close()

    def pids(self) -> set[int]:
        """Processes that must outlive a generation: the zygote and the waiting spares."""
        source = self._source.pids() if self._source is not None else set()
        return source | {spare.pid for spare in self._spares}

    def close(self) -> None:
        """Let the spares go and end the zygote."""
        if self._making is not None:
            self._making.cancel()
            self._making = None
        for spare in self._spares:
            spare.close()
        self._spares = []
        if self._source is not None:
            self._source.close()
            self._source = None


def _alive(spare: Spare) -> bool:
    poll = select.poll()
    poll.register(spare.pidfd, select.POLLIN)
    if not poll.poll(0):
        return True
    with contextlib.suppress(ChildProcessError):  # it was reaped as an orphan before we knew it
        os.waitid(os.P_PIDFD, spare.pidfd, os.WEXITED | os.WNOHANG)
    spare.close()
    return False


def _title_room(config: RunConfig) -> list[str]:
    """Arguments that make room for the titles workers give themselves (see linux.set_title)."""
    room, left_bytes = [], _TITLE_ROOM_BYTES
    for part in config.entrypoint.argv:
        size_bytes = len(os.fsencode(part)) + 1
        if size_bytes > left_bytes:
            break
        room.append(part)
        left_bytes -= size_bytes
    return [*room, " " * 32]
