"""Where workers come from: forked by the zygote, or started by exec. Either way they wait as spares.

A spare is a process with its imports done that blocks on one message. One per slot is kept ready, so that
a restart takes neither an import nor a fork.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import closeranks
from closeranks import wire
from closeranks.errors import ProtocolError, ZygoteError

__all__ = ["ExecSource", "Source", "Spare", "ZygoteSource", "python_command"]

_READY_TIMEOUT_S = 600.0  # torch on a cold network file system takes minutes; death is seen at once anyway
_HELLO_TIMEOUT_S = 60.0
_WORKER = Path(closeranks.__file__).parent / "worker"


class Spare:
    """A process that has said hello and waits for its order."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.socket = sock
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    def close(self) -> None:
        """Close our ends; a waiting spare ends by itself when its line closes."""
        self.socket.close()
        os.close(self.pidfd)


def python_command(module: str, interpreter: str | None) -> list[str]:
    """The interpreter (default: ours), unbuffered as under torchrun, running one of our worker files."""
    interpreter = interpreter or sys.executable
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [interpreter, "-u", *flags, str(_WORKER / f"{module}.py")]


async def _hello(sock: socket.socket, timeout_s: float) -> Spare:
    """Wait for the hello of a new worker on its channel."""
    message = await receive_one(sock, timeout_s, "a new worker did not report")
    return Spare(sock, int(message["pid"]))


async def receive_one(sock: socket.socket, timeout_s: float, complaint: str) -> dict[str, Any]:
    """One message from ``sock``, without blocking. Raises ZygoteError on silence, an end or garbage."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not readable.done():
            readable.set_result(None)

    sock.setblocking(False)
    loop.add_reader(sock, ready)
    try:
        await asyncio.wait_for(readable, timeout_s)
        received = wire.receive(sock)
    except TimeoutError:
        raise ZygoteError(f"{complaint} within {timeout_s:.0f} s") from None
    except (OSError, ProtocolError) as error:
        raise ZygoteError(f"{complaint}: {error}") from error
    finally:
        loop.remove_reader(sock)
    if received is None:
        raise ZygoteError(f"{complaint}: it ended")
    for fd in received[1]:
        os.close(fd)
    return received[0]


class Source:
    """Makes spares. Two implementations, one behaviour: see ``tests/agent/test_spares.py``."""

    kind = ""

    async def start(self) -> None:
        """Get ready to make spares. Raises ZygoteError when that can't be done."""

    async def make(self, count: int) -> list[Spare]:
        """``count`` new spares. Raises ZygoteError; spares made before the error are let go."""
        raise NotImplementedError

    async def load(self, modules: Sequence[str]) -> None:
        """Import more modules before the next spare is made."""

    def pids(self) -> set[int]:
        """Processes of the source itself."""
        return set()

    def close(self) -> None:
        """End the source's own process. Spares already made live on."""


class ExecSource(Source):
    """Starts each worker as a fresh interpreter."""

    kind = "exec"

    def __init__(
        self,
        modules: Sequence[str],
        environment: dict[str, str],
        room: Sequence[str],
        interpreter: str | None = None,
    ) -> None:
        self._interpreter = interpreter
        self._modules = list(modules)
        self._environment = environment
        self._room = list(room)
        self._starting: set[int] = set()

    def _spawn(self) -> socket.socket:
        ours, theirs = wire.socketpair()
        arguments = [str(theirs.fileno()), str(os.getpid()), ",".join(self._modules), *self._room]
        with theirs:
            process = subprocess.Popen(
                [*python_command("standalone", self._interpreter), *arguments],
                env=self._environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        # We reap by pidfd; Popen must neither do so nor warn that nobody did.
        process.returncode = 0
        self._starting.add(process.pid)
        return ours

    async def make(self, count: int) -> list[Spare]:
        sockets = [self._spawn() for _ in range(count)]
        waits = [_hello(sock, _READY_TIMEOUT_S) for sock in sockets]
        results = await asyncio.gather(*waits, return_exceptions=True)
        self._starting.clear()
        return _all_or_none(sockets, results)

    def pids(self) -> set[int]:
        return set(self._starting)

    async def load(self, modules: Sequence[str]) -> None:
        self._modules.extend(name for name in modules if name not in self._modules)


class ZygoteSource(Source):
    """Forks workers from one process that has done the imports."""

    kind = "zygote"

    def __init__(
        self,
        modules: Sequence[str],
        environment: dict[str, str],
        room: Sequence[str],
        notice: Callable[[str], None],
        interpreter: str | None = None,
    ) -> None:
        self._modules = list(modules)
        self._notice = notice
        self._lock = asyncio.Lock()
        self.import_s = 0.0
        self._began = time.monotonic()
        self._socket, theirs = wire.socketpair()
        arguments = [str(theirs.fileno()), str(os.getpid()), ",".join(self._modules), *room]
        with theirs:
            process = subprocess.Popen(
                [*python_command("zygote", interpreter), *arguments],
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = process.pid
        process.returncode = 0

    async def start(self) -> None:
        """Wait for the imports. Raises ZygoteError with the reason when forking would be unsafe."""
        message = await receive_one(self._socket, _READY_TIMEOUT_S, "the zygote did not become ready")
        self.import_s = float(message.get("import_s", 0.0))
        for failure in message.get("failed", []):
            self._notice(f"can't preload {failure['module']}: {failure['error']}")
        if message.get("unsafe"):
            raise ZygoteError(str(message["unsafe"]))

    async def _ask(self, message: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        async with self._lock:
            try:
                wire.send(self._socket, message, fds)
            except OSError as error:
                raise ZygoteError(f"the zygote is gone: {error}") from error
            reply = await receive_one(self._socket, _READY_TIMEOUT_S, "the zygote did not answer")
        if reply["type"] == "unsafe":
            raise ZygoteError(str(reply["reason"]))
        return reply

    async def make(self, count: int) -> list[Spare]:
        pairs = [wire.socketpair() for _ in range(count)]
        sockets = [ours for ours, _ in pairs]
        try:
            for first in range(0, count, 64):
                batch = [theirs.fileno() for _, theirs in pairs[first : first + 64]]
                await self._ask({"type": "fork"}, batch)
        except ZygoteError:
            for sock in sockets:
                sock.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        waits = [_hello(sock, _HELLO_TIMEOUT_S) for sock in sockets]
        results = await asyncio.gather(*waits, return_exceptions=True)
        return _all_or_none(sockets, results)

    async def load(self, modules: Sequence[str]) -> None:
        reply = await self._ask({"type": "import", "modules": list(modules)})
        for failure in reply.get("failed", []):
            self._notice(f"can't preload {failure['module']}: {failure['error']}")

    def pids(self) -> set[int]:
        return {self.pid}

    def close(self) -> None:
        self._socket.close()
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def _all_or_none(sockets: Sequence[socket.socket], results: Sequence[Spare | BaseException]) -> list[Spare]:
    spares = [result for result in results if isinstance(result, Spare)]
    errors = [result for result in results if isinstance(result, BaseException)]
    if not errors:
        return spares
    for spare in spares:
        spare.close()
    for sock in sockets:
        sock.close()
    raise errors[0]
