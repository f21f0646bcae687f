"""Log files with a bound, written by a thread of their own.

``<rank>.out`` holds the first half of the bound. What comes later goes to ``<rank>.out.tail``, a quarter of
the bound; when that is full it becomes ``<rank>.out.tail.1`` (the one before is dropped) and a new ``.tail``
begins. So the order to read is ``.out``, ``.out.tail.1``, ``.out.tail``; one readable line at the end of the
first file and at the head of each later one says where bytes may be missing. Below the bound a file is the
output byte for byte. Cuts are made at line ends where there is one near.

The thread: a disk that is slow or hung (a network file system) must hold up neither the console nor the
pipes of other ranks. A stream with too much in flight is not read from for the moment, so a flood waits for
the disk as it would if it wrote the file itself; once the disk has not answered for ``STALL_S``, output is
left out of the file instead, and a line in the file says how much. Errors (full, read-only, quota) do the
same, and opening is tried again now and then.
"""
# ruff: noqa: PTH103, PTH105, PTH110, PTH119, PTH120
# (pathlib alone would add several milliseconds to the pump's start)

from __future__ import annotations

import errno
import os
import queue
import stat
import threading
import time
from collections.abc import Callable

from closeranks.agent.log_protocol import Message

__all__ = ["BoundedFile", "FileWriter", "LogFile"]

STALL_S = 2.0
MIN_BOUND_BYTES = 4096
CUT_BYTES = 65536  # how far back from a bound a line end is looked for
STREAM_IN_FLIGHT_BYTES = 1 << 20
TOTAL_IN_FLIGHT_BYTES = 64 << 20
FAIR_IN_FLIGHT_BYTES = 256 << 10  # what a stream may have in flight even when others use up the total
RETRY_FIRST_S = 1.0
RETRY_MAX_S = 30.0
QUIET_S = 60.0  # a problem seen again within this time is the same problem
MAX_PROBLEMS = 64


class BoundedFile:
    """One log file and its tail segments. Used by the writer thread alone."""

    __slots__ = ("_fd", "_in_tail", "_max_bytes", "_offset", "_path", "_regular", "_size", "at_line_start")

    def __init__(self, path: str, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max(max_bytes, MIN_BOUND_BYTES)
        self._fd = -1
        self._size = 0
        self._in_tail = False
        self._regular = True
        self._offset: int | None = 0  # of the whole output; None = lost count
        self.at_line_start = True

    def append(self, data: bytes) -> tuple[int, OSError | None]:
        """Store ``data``; returns how many bytes of it are stored and the error that kept out the rest."""
        done = 0
        try:
            while done < len(data):
                if self._fd < 0:
                    self._open()
                size = self._fitting(data, done)
                if size == 0:
                    self._next_segment()
                    continue
                written = os.write(self._fd, memoryview(data)[done : done + size])
                done += written
                self._count(written)
                self.at_line_start = data[done - 1] == 10
        except OSError as error:
            return done, self._given_up(error)
        return done, None

    def skipped(self, size_bytes: int) -> None:
        """Count bytes that were left out, so that the offsets that segments name stay right."""
        if self._offset is not None:
            self._offset += size_bytes

    def close(self) -> None:
        """Raises OSError where the file system tells only now that it could not keep the bytes."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _given_up(self, error: OSError) -> OSError:
        try:
            self.close()
        except OSError as later:
            return later
        return error

    def _count(self, size: int) -> None:
        self._size += size
        self.skipped(size)

    def _fitting(self, data: bytes, start: int) -> int:
        """How much of ``data[start:]`` belongs into the open file; 0 = it is full."""
        left = len(data) - start
        if not self._regular:
            return left
        room = self._max_bytes // (4 if self._in_tail else 2) - self._size
        if left <= room:
            return left
        if room <= 0:
            return 0
        cut = data.rfind(b"\n", max(start, start + room - CUT_BYTES), start + room) + 1
        if cut:
            return cut - start
        return 0 if room < CUT_BYTES and self._size else room

    def _open(self) -> None:
        if not self._in_tail and os.path.exists(self._path + ".tail"):
            self._in_tail, self._offset = True, None  # an earlier pump was here
        path = self._path + ".tail" if self._in_tail else self._path
        # O_NONBLOCK: no effect on a file, but a FIFO that someone put there must not hold us.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        try:
            fd = os.open(path, flags, 0o666)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = os.open(path, flags, 0o666)
        info = os.fstat(fd)
        self._fd, self._size = fd, info.st_size
        self._regular = stat.S_ISREG(info.st_mode)
        if info.st_size and self._offset == 0:
            self._offset = None

    def _next_segment(self) -> None:
        name = os.path.basename(self._path)
        tail = self._path + ".tail"
        if self._in_tail:
            os.replace(tail, tail + ".1")
        else:
            self._mark(
                f"[closeranks: the first {self._size:,} bytes end here; the newest ones go on in "
                f"{name}.tail.1 (older) and {name}.tail]\n"
            )
        self.close()
        self._in_tail = True
        self._open()
        where = "" if self._offset is None else f" from byte {self._offset:,} on"
        self._mark(f"[closeranks: {name} continued{where}]\n")

    def _mark(self, text: str) -> None:
        """Our own line; not part of the output, so it moves no offset."""
        line = text.encode("utf-8", "surrogateescape")
        written = os.write(self._fd, line if self.at_line_start else b"\n" + line)
        self._size += written
        self.at_line_start = True


class LogFile:
    """One stream's file as both threads see it."""

    __slots__ = ("_bound", "file", "in_flight", "lost", "lost_why", "path", "retry_at_s", "retry_delay_s",
                 "skipped", "total", "whole")  # fmt: skip

    def __init__(self, path: str, max_bytes: int) -> None:
        self.path = path
        self.file = BoundedFile(path, max_bytes)
        self._bound = max_bytes // 2
        self.in_flight = 0  # under the writer's lock
        self.total = 0  # reading thread: all that came in
        self.skipped = 0  # reading thread: left out while the disk hung, not yet told the writer
        self.lost = 0  # writer thread, as the rest
        self.lost_why = ""
        self.whole = True
        self.retry_at_s = 0.0
        self.retry_delay_s = RETRY_FIRST_S

    @property
    def complete(self) -> bool:
        """All of the output so far is in ``path`` itself (or about to be)."""
        return self.whole and self.total <= self._bound


_DATA, _SKIPPED, _CLOSE, _MARK = range(4)


class FileWriter:
    """The thread that writes log files. ``wake()`` is called from it when the reading thread should look."""

    def __init__(self, wake: Callable[[], None], report: Callable[[Message], None]) -> None:
        self._wake = wake
        self._report = report
        self._queue: queue.SimpleQueue[tuple[int, LogFile | None, bytes, object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._total = 0
        self._busy_since_s = 0.0
        self._busy_path = ""
        self._stall_told_s = float("-inf")
        self._problems: dict[tuple[int, str], float] = {}
        self._done: list[object] = []
        self.watched = False  # the reading thread waits for room
        threading.Thread(target=self._run, name="files", daemon=True).start()

    # --- the reading thread ---------------------------------------------------------------------------

    def put(self, log: LogFile, data: bytes) -> None:
        log.total += len(data)
        if log.in_flight >= STREAM_IN_FLIGHT_BYTES and self.stalled():
            log.skipped += len(data)
            log.whole = False
            return
        if log.skipped:
            self._queue.put((_SKIPPED, log, b"", log.skipped))
            log.skipped = 0
        with self._lock:
            log.in_flight += len(data)
            self._total += len(data)
        self._queue.put((_DATA, log, data, None))

    def full(self, log: LogFile) -> bool:
        """Whether this stream should not be read from until ``wake``."""
        if log.in_flight < FAIR_IN_FLIGHT_BYTES:
            return False
        if log.in_flight < STREAM_IN_FLIGHT_BYTES and self._total < TOTAL_IN_FLIGHT_BYTES:
            return False
        return not self.stalled()

    def stalled(self) -> bool:
        since_s, now_s = self._busy_since_s, time.monotonic()
        if not since_s or now_s - since_s < STALL_S:
            return False
        if now_s - self._stall_told_s > QUIET_S:
            self._report({"type": "disk", "error": f"no answer for {STALL_S:.0f} s", "path": self._busy_path})
        self._stall_told_s = now_s
        return True

    def close(self, log: LogFile) -> None:
        if log.skipped:
            self._queue.put((_SKIPPED, log, b"", log.skipped))
            log.skipped = 0
        self._queue.put((_CLOSE, log, b"", None))

    def mark(self, token: object) -> None:
        """``token`` is returned by ``done`` once all that was put before is in the files or given up."""
        self._queue.put((_MARK, None, b"", token))

    def done(self) -> list[object]:
        with self._lock:
            tokens, self._done = self._done, []
        return tokens

    # --- the writer thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            kind, log, data, extra = self._queue.get()
            if log is None:
                with self._lock:
                    self._done.append(extra)
                self._wake()
                continue
            self._busy_path = log.path
            self._busy_since_s = time.monotonic()
            if kind == _DATA:
                self._store(log, data)
            elif kind == _SKIPPED and isinstance(extra, int):
                self._lose(log, extra, "the disk did not answer")
            elif kind == _CLOSE:
                self._recover(log)
                try:
                    log.file.close()
                except OSError as error:
                    self._fail(log, error)
            self._busy_since_s = 0.0

    def _store(self, log: LogFile, data: bytes) -> None:
        stored = 0
        if self._recover(log):
            stored, error = log.file.append(data)
            if error is not None:
                self._fail(log, error)
        if stored < len(data):
            self._lose(log, len(data) - stored, log.lost_why)
        with self._lock:
            log.in_flight -= len(data)
            self._total -= len(data)
        if self.watched:
            self._wake()

    def _lose(self, log: LogFile, size: int, why: str) -> None:
        log.lost += size
        log.lost_why = why
        log.whole = False
        log.file.skipped(size)

    def _recover(self, log: LogFile) -> bool:
        """Whether the file can take data; after a loss it first gets the line that says so."""
        if not log.lost:
            return True
        if time.monotonic() < log.retry_at_s:
            return False
        before = b"" if log.file.at_line_start else b"\n"
        text = before + f"[closeranks: {log.lost:,} bytes left out here: {log.lost_why}]\n".encode()
        stored, error = log.file.append(text)
        log.file.skipped(-stored)
        if error is not None:
            self._fail(log, error)
            return False
        log.lost = 0
        log.retry_delay_s = RETRY_FIRST_S
        return True

    def _fail(self, log: LogFile, error: OSError) -> None:
        now_s = time.monotonic()
        log.lost_why = error.strerror or str(error)
        log.retry_at_s = now_s + log.retry_delay_s
        log.retry_delay_s = min(RETRY_MAX_S, log.retry_delay_s * 2)
        problem = (error.errno or errno.EIO, os.path.dirname(log.path))
        last_s = self._problems.pop(problem, None)
        if len(self._problems) >= MAX_PROBLEMS:
            self._problems.pop(next(iter(self._problems)))
        self._problems[problem] = now_s
        if last_s is None or now_s - last_s > QUIET_S:
            self._report({"type": "disk", "error": log.lost_why, "path": log.path})
