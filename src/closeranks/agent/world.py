"""One generation's processes on this node: told to go, watched to their end, killed to the last one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import signal
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from closeranks import wire
from closeranks.agent.spares import Spare
from closeranks.errors import ProtocolError
from closeranks.events import ExitStatus
from closeranks.evidence import ErrorRecord
from closeranks.progress import PAGE_BYTES, Field, Page, read_page

__all__ = ["Placement", "Rank", "World", "WorldListener"]

_LAST_WORDS = 256  # packets read from a dead rank's line at most


class WorldListener(Protocol):
    """Who is told what happens in a world."""

    def rank_exited(self, world: World, rank: Rank) -> None: ...

    def rank_said(self, world: World, rank: Rank, message: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this node's ranks stand in the world of a generation. ``store``: where all ranks meet, as
    ``tcp://address:port``; "" = in a file of this host."""

    world_size: int
    first_rank: int = 0
    node_rank: int = 0
    node_count: int = 1
    store: str = ""


@dataclass(slots=True, eq=False)
class Rank:
    """A training process of this generation."""

    rank: int
    local_rank: int
    pid: int
    pidfd: int
    socket: socket.socket
    stacks_fd: int
    exit: ExitStatus | None = None
    exit_mono_ns: int | None = None
    error: ErrorRecord | None = None
    replies: dict[str, dict[str, Any]] | None = None

    @property
    def alive(self) -> bool:
        return self.exit is None

    def say(self, message: dict[str, Any]) -> bool:
        """Send a request to the rank; False if it can't take one (gone, or its queue is full)."""
        try:
            self.socket.setblocking(False)
            wire.send(self.socket, message)
        except (OSError, ProtocolError):
            return False
        return True

    def send_signal(self, number: int) -> None:
        """Signal exactly this process: a pidfd can't hit a stranger that got its number."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


class World:
    """The ranks of one generation, from ``go`` to the last exit."""

    _end_ns = struct.Struct("<Q")

    def __init__(
        self, generation: int, spares: Sequence[Spare], listener: WorldListener, placement: Placement
    ) -> None:
        self.generation = generation
        self.placement = placement
        self.listener = listener
        self.began_mono_ns = time.monotonic_ns()
        self.failing = False  # an incident is being handled; later exits are part of it
        self._pages_fd = os.memfd_create(f"closeranks-pages-{generation}", os.MFD_CLOEXEC)
        size_bytes = PAGE_BYTES * len(spares)
        os.ftruncate(self._pages_fd, size_bytes)
        self._pages = mmap.mmap(self._pages_fd, size_bytes)
        self._view = memoryview(self._pages)
        self._all_dead = asyncio.Event()
        self.ranks = [
            Rank(
                rank=placement.first_rank + number,
                local_rank=number,
                pid=spare.pid,
                pidfd=spare.pidfd,
                socket=spare.socket,
                stacks_fd=os.memfd_create(f"closeranks-stacks-{number}", os.MFD_CLOEXEC),
            )
            for number, spare in enumerate(spares)
        ]
        loop = asyncio.get_running_loop()
        for rank in self.ranks:
            loop.add_reader(rank.pidfd, self.reap, rank)

    def go(self, rank: Rank, order: dict[str, Any], stdout_fd: int, stderr_fd: int) -> None:
        """Tell one spare to become this rank. Raises OSError if it died meanwhile.

        The order travels as a file: arguments may be longer than a packet.
        """
        with os.fdopen(os.memfd_create("closeranks-order", os.MFD_CLOEXEC), "wb") as file:
            file.write(json.dumps(order).encode())
            file.flush()
            fds = (stdout_fd, stderr_fd, self._pages_fd, rank.stacks_fd, file.fileno())
            wire.send(rank.socket, {"type": "go"}, fds)
        rank.socket.setblocking(False)
        asyncio.get_running_loop().add_reader(rank.socket, self._hear, rank)

    def page(self, rank: Rank, *, rings: bool = True) -> Page | None:
        """What the rank last wrote about itself; still there when the rank is dead."""
        at = rank.local_rank * PAGE_BYTES
        return read_page(self._view[at : at + PAGE_BYTES], rings=rings)

    def rank(self, number: int) -> Rank | None:
        """The rank of that number, if it is on this node."""
        at = number - self.placement.first_rank
        return self.ranks[at] if 0 <= at < len(self.ranks) else None

    def set_lease(self, end_ns: int) -> None:
        """Until when ranks here may leave anything lasting behind; see Field.LEASE_END_NS."""
        for rank in self.ranks:
            self._end_ns.pack_into(self._pages, rank.local_rank * PAGE_BYTES + Field.LEASE_END_NS, end_ns)

    def alive(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.alive]

    def reap(self, rank: Rank) -> None:
        """The pidfd became readable: the process has ended."""
        now_ns = time.monotonic_ns()
        loop = asyncio.get_running_loop()
        loop.remove_reader(rank.pidfd)
        self._drain(rank)
        try:
            info = os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            info = None
        if info is None:
            status = ExitStatus(code=255)  # someone else reaped it; all we know is that it is gone
        elif info.si_code == os.CLD_EXITED:
            status = ExitStatus(code=info.si_status)
        else:
            status = ExitStatus(signal=info.si_status)
        rank.exit, rank.exit_mono_ns = status, now_ns
        if not self.alive():
            self._all_dead.set()
        self.listener.rank_exited(self, rank)

    def _hear(self, rank: Rank) -> bool:
        """Take one message of the rank; garbage or an end closes the line, never the rank.

        Returns whether there may be more.
        """
        try:
            received = wire.receive(rank.socket)
        except BlockingIOError:
            return False
        except (OSError, ProtocolError):
            received = None
        if received is None:
            asyncio.get_running_loop().remove_reader(rank.socket)
            return False
        message, fds = received
        for fd in fds:
            os.close(fd)
        if message["type"] == "raised":
            rank.error = _error_record(message.get("error"))
        elif rank.replies is not None:
            rank.replies[message["type"]] = message
        self.listener.rank_said(self, rank, message)
        return True

    def _drain(self, rank: Rank) -> None:
        """Hear what a dead rank said last."""
        for _ in range(_LAST_WORDS):
            if not self._hear(rank):
                return

    def kill(self) -> None:
        """SIGKILL every rank; it kills a stopped process too.

        Not its process group: there may be processes in it that remove the rank's shared memory when it is
        gone. See ``processes.Strays`` for what it leaves behind.
        """
        for rank in self.alive():
            rank.send_signal(signal.SIGKILL)

    async def wait_dead(self, timeout_s: float) -> list[Rank]:
        """Wait until every rank has ended; returns those that haven't after ``timeout_s`` (D state)."""
        if self.alive():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_dead.wait(), timeout_s)
        return self.alive()

    def close(self) -> None:
        """Let go of everything this generation held on our side."""
        loop = asyncio.get_running_loop()
        for rank in self.ranks:
            loop.remove_reader(rank.pidfd)
            loop.remove_reader(rank.socket)
            rank.socket.close()
            os.close(rank.pidfd)
            os.close(rank.stacks_fd)
        self._view.release()
        self._pages.close()
        os.close(self._pages_fd)


def _error_record(data: Any) -> ErrorRecord | None:
    """What a worker said of its exception; None if it makes no sense."""
    if not isinstance(data, dict):
        return None
    try:
        return ErrorRecord(
            type=str(data["type"])[:500],
            message=str(data["message"])[:8192],
            place=str(data["place"])[:4096],
            step=int(data["step"]),
            mono_ns=int(data["mono_ns"]),
            traceback=str(data["traceback"])[:65536],
        )
    except (KeyError, TypeError, ValueError):
        return None
