"""A console (stdout or stderr of the agent) and the thread that writes to it.

Why a thread: the console may stop taking bytes at any time (a pager, Ctrl-S, a slow ssh), and the pump must
not. O_NONBLOCK would be set on the open file that the user's shell shares, and would break the shell; and
after poll() says "writable" a blocking write can still block, on a terminal or when others write to the same
pipe. A thread that blocks in write(2) costs nothing while it does.

What waits is bounded. Order is that of arrival while streams have little waiting; a stream that has more than
``BURST_BYTES`` waiting lets the others pass (start-time fair queueing), so a flood delays no other rank's
line by more than one write. When the bound is reached, ``put`` refuses, and one stream can't use it all up.

A console that is a regular file is as fast as the disk: there ``put`` refuses nothing while it makes
progress, and ``full`` asks the reader of that stream to pause, so that ``closeranks run > out.log`` is whole.
"""

from __future__ import annotations

import errno
import heapq
import os
import select
import stat
import threading
import time
from collections.abc import Callable

from closeranks.agent.log_protocol import Message

__all__ = ["Console", "Line", "Source"]

BURST_BYTES = 256 << 10
WRITE_BYTES = 32 << 10
STALL_S = 2.0
# The console is gone for good: the reader of the pipe left, the terminal hung up, the fd was closed.
_GONE = frozenset({errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET, errno.EINVAL})


class Line:
    """What a console's cursor may stand in the middle of. Streams that share one are never separated."""

    __slots__ = ("broken",)

    def __init__(self) -> None:
        self.broken = False  # another line was put in between before this one ended


class Source:
    """Someone who writes to a console, in its own order."""

    __slots__ = ("finish", "line", "prefix", "queued")

    def __init__(self, prefix: bytes, line: Line | None = None) -> None:
        self.prefix = prefix
        self.line = line or Line()
        self.queued = 0
        self.finish = 0  # virtual time at which all that it has put will have been written


class Console:
    """``put`` and friends are for the reading thread."""

    def __init__(
        self, fd: int, limit_bytes: int, wake: Callable[[], None], report: Callable[[Message], None]
    ) -> None:
        self.fd = fd
        self._limit = max(limit_bytes, BURST_BYTES)
        self._wake = wake
        self._report = report
        self._ready = threading.Condition()
        self._heap: list[tuple[int, int, Source, bool, bytes]] = []
        self._clock = 0
        self._count = 0
        self._queued = 0
        self._busy_since_s = 0.0
        self._open: Line | None = None
        self._told: set[int] = set()
        self.gone = False
        self.watched = False
        try:
            self._lossless = stat.S_ISREG(os.fstat(fd).st_mode)
            self.is_terminal = os.isatty(fd)
        except OSError:
            self._lossless, self.is_terminal, self.gone = False, False, True
        if not self.gone:
            threading.Thread(target=self._run, name=f"console {fd}", daemon=True).start()

    def put(self, source: Source, data: bytes, *, fresh: bool, force: bool = False) -> bool:
        """Queue ``data``; False = no room, and nothing was queued. A console that is gone swallows it.

        ``fresh``: it starts a line (and carries its own prefixes); else it goes on where this source stopped.
        ``force`` is for our own few lines: they may go over the bound by as much again.
        """
        if self.gone or not data:
            return True
        size = len(data)
        with self._ready:
            if force:
                if self._queued + size > 2 * self._limit:
                    return False
            elif not self._fits(source, size) and not (self._lossless and not self.stalled()):
                return False
            start = max(self._clock, source.finish)
            source.finish = start + size
            self._count += 1
            tag = max(self._clock, start - BURST_BYTES)
            heapq.heappush(self._heap, (tag, self._count, source, fresh, data))
            source.queued += size
            self._queued += size
            self._ready.notify()
        return True

    def _fits(self, source: Source, size: int) -> bool:
        free = self._limit - self._queued
        # Two thirds of the buffer is the most a single stream gets; n floods leave 1/(2n+1) to the others.
        return (size <= free and source.queued + size <= 2 * free) or not self._queued

    def has_room(self, source: Source) -> bool:
        """Whether a stream that was refused should begin again: not before most of its own is out."""
        return self.gone or source.queued * 4 <= self._limit - self._queued

    def full(self, source: Source) -> bool:
        """Whether reading that stream should pause until ``wake`` (regular files only)."""
        if not self._lossless or self.gone or source.queued < BURST_BYTES:
            return False
        return source.queued > 2 * (self._limit - self._queued) and not self.stalled()

    def idle(self) -> bool:
        """All that was put has been written, or never will be."""
        return self.gone or not self._queued

    def stalled(self) -> bool:
        """A write has been under way for so long that nobody seems to read."""
        since = self._busy_since_s
        return bool(since) and time.monotonic() - since > STALL_S

    # --- the writer thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.gone:
            batch, taken = self._take()
            self._busy_since_s = time.monotonic()
            self._write(batch)
            self._busy_since_s = 0.0
            with self._ready:
                for source, size in taken:
                    source.queued -= size
                    self._queued -= size
            if self.watched:
                self._wake()
        with self._ready:
            self._heap.clear()
        self._wake()

    def _take(self) -> tuple[bytes, list[tuple[Source, int]]]:
        parts: list[bytes] = []
        taken: list[tuple[Source, int]] = []
        size = 0
        with self._ready:
            while not self._heap:
                self._ready.wait()
            while self._heap and size < WRITE_BYTES:
                self._clock, _, source, fresh, data = heapq.heappop(self._heap)
                taken.append((source, len(data)))
                size += len(data)
                parts.append(self._render(source, fresh, data))
        return b"".join(parts), taken

    def _render(self, source: Source, fresh: bool, data: bytes) -> bytes:
        """Keep lines whole: whoever comes while another's line is open begins a new one."""
        line, head = source.line, b""
        if self._open is not None and (fresh or self._open is not line):
            head = b"\n"
            self._open.broken = self._open is not line
            self._open = None
        if fresh:
            line.broken = False
        elif line.broken:
            line.broken = False
            if data.startswith(b"\n"):
                data = data[1:]  # that line has been ended already
            else:
                head += source.prefix
        if data:
            self._open = None if data.endswith(b"\n") else line
        return head + data

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:  # someone else made the shared console non-blocking: wait for it
                poller = select.poll()
                poller.register(self.fd, select.POLLOUT)
                poller.poll()
            except OSError as error:
                number = error.errno or errno.EIO
                self.gone = number in _GONE
                if number not in self._told:
                    self._told.add(number)
                    message = {"type": "console", "fd": self.fd, "error": error.strerror, "gone": self.gone}
                    self._report(message)
                return  # a full disk behind the console: this batch is lost, the next may not be
