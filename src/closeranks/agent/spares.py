"""Where workers come from: forked by the zygote, or started by exec. Either way they wait as spares.

A spare is a process with its imports done that blocks on one message. One per slot is kept ready, so that
a restart takes neither an import nor a fork.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import closeranks
from closeranks import wire
from closeranks.errors import ProtocolError, ZygoteError
from closeranks.events import ExitStatus

__all__ = ["ExecSource", "Source", "Spare", "ZygoteSource", "python_command"]

_READY_TIMEOUT_S = 600.0  # torch on a cold network file system takes minutes; death is seen at once anyway
_HELLO_TIMEOUT_S = 60.0
_REAP_TRIES = 50  # a millisecond each
_END_TIMEOUT_S = 1.0  # between the end of a process's line and its own
_END_PAUSE_S = 0.005
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


class _LineEnded(ZygoteError):
    """The process at the other end closed its line: most likely it is gone."""


def python_command(module: str, interpreter: str | None) -> list[str]:
    """The interpreter (default: ours), unbuffered as under torchrun, running one of our worker files."""
    interpreter = interpreter or sys.executable
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [interpreter, "-u", *flags, str(_WORKER / f"{module}.py")]


def _start_python(
    what: str, module: str, interpreter: str | None, environment: dict[str, str], arguments: Sequence[str]
) -> tuple[socket.socket, int]:
    """Start one of our worker files; returns our end of its channel, and its pid. Raises ZygoteError."""
    try:
        ours, theirs = wire.socketpair()
    except OSError as error:
        raise ZygoteError(f"can't start {what}: {error.strerror}") from error
    with theirs:
        head = [str(theirs.fileno()), str(os.getpid())]
        try:
            process = subprocess.Popen(
                [*python_command(module, interpreter), *head, *arguments],
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise ZygoteError(f"can't start {what}: {error.strerror}") from error
    process.returncode = 0  # we reap it; Popen must neither do so nor warn that nobody did
    return ours, process.pid


async def _how_it_ended(pid: int) -> str:
    """How our child ended, as a clause. Waits a moment for one that is just ending.

    It stays a zombie, so that its number can't become a stranger's: whoever reaps orphans reaps it.
    """
    deadline = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return "it ended"
        if info is not None:
            exited = info.si_code == os.CLD_EXITED
            status = ExitStatus(code=info.si_status) if exited else ExitStatus(signal=info.si_status)
            return f"it {'was ' if status.signal else ''}{status.describe()}"
        await asyncio.sleep(_END_PAUSE_S)
    return "it closed its line to the agent"


async def _hello(sock: socket.socket, timeout_s: float, pid: int = 0) -> Spare:
    """Wait for the hello of a new worker on its channel; ``pid`` where it is known before."""
    complaint = "a new worker did not report"
    try:
        message = await receive_one(sock, timeout_s, complaint)
    except _LineEnded:
        if not pid:
            raise
        raise ZygoteError(f"{complaint}: {await _how_it_ended(pid)}") from None
    try:
        return Spare(sock, int(message["pid"]))
    except OSError as error:  # it is gone already, or no descriptor is left for it
        raise ZygoteError(f"a new worker can't be watched: {error.strerror}") from error


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
        async with asyncio.timeout(timeout_s):  # wait_for swallows a cancellation that comes with the answer
            await readable
        received = wire.receive(sock)
    except TimeoutError:
        raise ZygoteError(f"{complaint} within {timeout_s:.0f} s") from None
    except ProtocolError as error:
        raise ZygoteError(f"{complaint}: {error}") from error
    except OSError:  # reset: it went away with something unread
        received = None
    finally:
        loop.remove_reader(sock)
    if received is None:
        raise _LineEnded(f"{complaint}: it ended")
    for fd in received[1]:
        os.close(fd)
    return received[0]


class Source(abc.ABC):
    """Makes spares. Two implementations, one behaviour: see ``tests/agent/test_spares.py``."""

    kind: ClassVar[str]
    ended = False  # its process died, was killed or doesn't answer: another one may do better

    @abc.abstractmethod
    async def start(self) -> None:
        """Get ready to make spares. Raises ZygoteError when that can't be done."""

    @abc.abstractmethod
    async def make(self, count: int) -> list[Spare]:
        """``count`` new spares. Raises ZygoteError; spares made before the error are let go."""

    @abc.abstractmethod
    async def load(self, modules: Sequence[str]) -> None:
        """Import more modules, as far as that works, before the next spare is made."""

    @abc.abstractmethod
    def pids(self) -> set[int]:
        """Processes of the source itself."""

    @abc.abstractmethod
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

    async def start(self) -> None:
        """There is nothing to get ready: each worker does its own imports."""

    def _spawn(self) -> tuple[socket.socket, int]:
        arguments = [",".join(self._modules), *self._room]
        sock, pid = _start_python("a worker", "standalone", self._interpreter, self._environment, arguments)
        self._starting.add(pid)
        return sock, pid

    async def make(self, count: int) -> list[Spare]:
        started: list[tuple[socket.socket, int]] = []
        try:
            for _ in range(count):
                started.append(self._spawn())
        except ZygoteError:
            for sock, _ in started:
                sock.close()
            raise
        waits = [_hello(sock, _READY_TIMEOUT_S, pid) for sock, pid in started]
        results = await asyncio.gather(*waits, return_exceptions=True)
        self._starting.clear()
        return _all_or_none([sock for sock, _ in started], results)

    def pids(self) -> set[int]:
        return set(self._starting)

    async def load(self, modules: Sequence[str]) -> None:
        self._modules.extend(name for name in modules if name not in self._modules)

    def close(self) -> None:
        """It has no process of its own; workers that are still starting end when their line closes."""


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
        self._environment = environment
        self._room = list(room)
        self._notice = notice
        self._interpreter = interpreter
        self._lock = asyncio.Lock()
        self._socket: socket.socket | None = None
        self.pid = 0

    async def start(self) -> None:
        """Start it and wait for its imports. Raises ZygoteError with the reason where it can't be used."""
        async with self._lock:  # who asks for workers meanwhile, waits
            arguments = [",".join(self._modules), *self._room]
            self._socket, self.pid = _start_python(
                "the zygote", "zygote", self._interpreter, self._environment, arguments
            )
            message = await self._receive(_READY_TIMEOUT_S, "the zygote did not become ready")
        for failure in message.get("failed", []):
            self._notice(f"can't preload {failure['module']}: {failure['error']}")
        if message.get("unsafe"):
            raise ZygoteError(str(message["unsafe"]))

    async def _receive(self, timeout_s: float, complaint: str) -> dict[str, Any]:
        assert self._socket is not None
        try:
            return await receive_one(self._socket, timeout_s, complaint)
        except _LineEnded:
            self.ended = True
            raise ZygoteError(f"{complaint}: {await _how_it_ended(self.pid)}") from None
        except ZygoteError:
            self.ended = True
            raise

    async def _ask(self, message: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        async with self._lock:
            assert self._socket is not None
            try:
                wire.send(self._socket, message, fds)
            except OSError:
                self.ended = True
                raise ZygoteError(f"the zygote is gone: {await _how_it_ended(self.pid)}") from None
            timeout_s = _HELLO_TIMEOUT_S if message["type"] == "fork" else _READY_TIMEOUT_S
            reply = await self._receive(timeout_s, "the zygote did not answer")
        if reply["type"] == "unsafe":
            raise ZygoteError(str(reply["reason"]))
        return reply

    async def make(self, count: int) -> list[Spare]:
        pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            pairs.extend(wire.socketpair() for _ in range(count))
            for first in range(0, count, 64):
                batch = [theirs.fileno() for _, theirs in pairs[first : first + 64]]
                await self._ask({"type": "fork"}, batch)
        except (ZygoteError, OSError) as error:
            for ours, _ in pairs:
                ours.close()
            if isinstance(error, OSError):
                raise ZygoteError(f"can't make {count} workers: {error.strerror}") from error
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        sockets = [ours for ours, _ in pairs]
        waits = [_hello(sock, _HELLO_TIMEOUT_S) for sock in sockets]
        results = await asyncio.gather(*waits, return_exceptions=True)
        return _all_or_none(sockets, results)

    async def load(self, modules: Sequence[str]) -> None:
        await self._ask({"type": "import", "modules": list(modules)})

    def pids(self) -> set[int]:
        return {self.pid} if self.pid else set()

    def close(self) -> None:
        """End it, and reap it if it ends at once; else whoever reaps orphans does, and not before this."""
        if self._socket is not None:
            self._socket.close()
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                for _ in range(_REAP_TRIES):
                    if os.waitpid(self.pid, os.WNOHANG)[0]:
                        break
                    time.sleep(0.001)
            self.pid = 0


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
