"""One spare worker a slot: made ahead of time, taken all at once, made again when the ranks are busy."""

from __future__ import annotations

import asyncio
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

    def __init__(self, config: RunConfig, count: int, notice: Callable[[str], None]) -> None:
        self._config = config
        self._count = count
        self._notice = notice
        self._modules = modules_to_preload(config)
        self._environment = env.base_environment(config, count, os.environ)
        # Room in the command line for the titles workers give themselves (see linux.set_title).
        self._room = [f"{config.entrypoint.target}", *config.entrypoint.args, " " * 32]
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

    def open(self) -> None:
        """Start the imports; the first ``take`` waits for them."""
        if self._config.zygote and self._config.entrypoint.kind != "command":
            self._source = ZygoteSource(
                self._modules, self._environment, self._room, self._notice, self._config.python
            )
        else:
            self._source = ExecSource(self._modules, self._environment, self._room, self._config.python)
        self._making = asyncio.get_running_loop().create_task(self._first())

    async def _first(self) -> list[Spare]:
        assert self._source is not None
        try:
            await self._source.start()
        except ZygoteError as error:
            self._fall_back(str(error))
        return await self._make(self._count)

    def _fall_back(self, reason: str) -> None:
        """Workers by exec from now on; the reason is said once."""
        assert self._source is not None
        self.fallback_reason = reason
        self._notice(f"no zygote, workers are started one by one: {reason}")
        self._source.close()
        self._source = ExecSource(self._modules, self._environment, self._room, self._config.python)

    async def _make(self, count: int) -> list[Spare]:
        assert self._source is not None
        try:
            return await self._source.make(count)
        except ZygoteError as error:
            if self._source.kind != "zygote":
                raise
            self._fall_back(str(error))
        return await self._source.make(count)

    def refill(self) -> None:
        """Make what is missing, in the background; an error shows at the next ``take``."""
        if self._making is None and not self.ready and self._source is not None:
            self._making = asyncio.get_running_loop().create_task(self._make(self._count - len(self._spares)))
            self._making.add_done_callback(self._made)

    def _made(self, task: asyncio.Task[list[Spare]]) -> None:
        if task is self._making and not task.cancelled() and task.exception() is None:
            self._spares.extend(task.result())
            self._making = None

    async def take(self) -> list[Spare]:
        """A whole world of living spares. Raises ZygoteError when none can be made."""
        for _ in range(3):
            if self._making is not None:
                making, self._making = self._making, None
                self._spares.extend(await making)
            self._spares = [spare for spare in self._spares if _alive(spare)]
            if self.ready:
                break
            self._spares.extend(await self._make(self._count - len(self._spares)))
        taken, self._spares = self._spares[: self._count], self._spares[self._count :]
        if len(taken) < self._count:
            raise ZygoteError(f"workers die before they start: {len(taken)} of {self._count} are up")
        return taken

    async def learn(self, modules: Sequence[str]) -> None:
        """Import what the script turned out to need, so that the next generation finds it imported."""
        new = [name for name in modules if name not in self._modules]
        if new and self._source is not None and self._source.kind == "zygote":
            self._modules.extend(new)
            try:
                await self._source.load(new)
            except ZygoteError as error:
                self._fall_back(str(error))

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
    os.waitid(os.P_PIDFD, spare.pidfd, os.WEXITED | os.WNOHANG)
    spare.close()
    return False
