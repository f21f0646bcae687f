"""The log pump: one small process per node that reads every rank's stdout and stderr.

It writes them to files, tees them to the console, and is started by the agent (closeranks.agent.logs), so
that a flood from one rank slows neither the agent's event loop nor another rank's lines. No torch, and as few
imports as possible.

One epoll loop reads: at most ``TURN_BYTES`` a pipe and turn, so a flood starves no one. Writing is done by
threads, as both a disk and a console may block at any time: closeranks.agent.log_files and .log_console say
how. A stream whose file can't keep up is not read from for the moment; nothing else waits for it.

It ignores the terminal's signals, and SIGTERM: the last lines of a job that is stopped are the ones that
matter. It ends when the agent says ``close``, or when the agent is gone (its end of the channel is closed)
and every pipe is at end of file, or ``ORPHAN_S`` + ``FLUSH_S`` after that.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
import termios
import time
from collections import deque

from closeranks.agent.log_console import Console, Line, Source
from closeranks.agent.log_files import FileWriter, LogFile
from closeranks.agent.log_lines import MAX_LINE_BYTES, ConsoleStream, LineFilter, coloured
from closeranks.agent.log_protocol import MAX_PACKET_BYTES, Message, pack, unpack
from closeranks.errors import ProtocolError

__all__ = ["Pump", "main"]

READ_BYTES = MAX_LINE_BYTES
TURN_BYTES = 256 << 10
# A rank that flushes every short line would wake us for each: wait a little between turns that bring little.
SMALL_TURN_BYTES = 32 << 10
PACE_S = 0.002
TICK_S = 0.05
ORPHAN_S = 1.5
FLUSH_S = 0.5  # for files and consoles, when the time to read is over
PACKETS_PER_TURN = 64
MAX_OUTBOX = 1000


class Stream:
    """One pipe: stdout or stderr of one rank in one generation."""

    __slots__ = ("drain_left", "fd", "filter", "filter_key", "generation", "log", "view")

    def __init__(self, fd: int, generation: int, log: LogFile) -> None:
        self.fd = fd
        self.generation = generation
        self.log = log
        self.view: ConsoleStream | None = None
        self.filter: LineFilter | None = None
        self.filter_key: tuple[int, int] | None = None
        self.drain_left = 0  # bytes that a drain still waits for


class Pump:
    """The loop. ``config`` is the agent's first message."""

    def __init__(self, control: socket.socket, config: Message, out_fd: int = 1, err_fd: int = 2) -> None:
        self._control = control
        self._control_fd = control.fileno()
        control.setblocking(False)
        self._max_file_bytes = int(config["max_file_bytes"])
        self._filters = [tuple(os.fsencode(word) for word in words) for words in config["filters"]]
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._reports: deque[Message] = deque(maxlen=MAX_OUTBOX)
        self._outbox: deque[Message] = deque(maxlen=MAX_OUTBOX)
        self.files = FileWriter(self._wake, self._report)
        limit = int(config["console_buffer_bytes"])
        self._console_patience_s = float(config["console_patience_s"])
        out = Console(out_fd, limit, self._wake, self._report)
        # One queue where both are the same terminal, pipe or file, or their lines would tear each other.
        same = _same_file(out_fd, err_fd)
        self.consoles = [out, out if same else Console(err_fd, limit, self._wake, self._report)]
        self._raw_lines = [Line(), Line()]
        if same:
            self._raw_lines[1] = self._raw_lines[0]
        self._agent = Source(b"")
        self._streams: dict[int, Stream] = {}
        self._paused: set[Stream] = set()
        self._ticking: set[Stream] = set()
        self._draining: dict[int, set[Stream]] = {}
        self._filtered: dict[tuple[int, int], LogFile] = {}
        self._close_at_s: float | None = None  # no later than this
        self._asked_to_close = False
        self._epoll = select.epoll()
        self._epoll.register(self._control_fd, select.EPOLLIN)
        self._epoll.register(self._event_fd, select.EPOLLIN)

    def run(self) -> None:
        """Until the end; afterwards all that could be written has been."""
        turn_s = 0.0
        while not self._ended():
            events = self._epoll.poll(self._timeout_s())
            now_s = time.monotonic()
            moved = 0
            for fd, _ in events:
                stream = self._streams.get(fd)
                if stream is not None:
                    moved += self._read(stream, now_s)
                elif fd == self._event_fd:
                    os.eventfd_read(fd)
                elif fd == self._control_fd:
                    self._receive()
            self._housekeeping(now_s)
            if events and moved < SMALL_TURN_BYTES and now_s - turn_s < 2 * PACE_S:
                time.sleep(PACE_S)
            turn_s = now_s
        self._flush()

    # --- pipes ----------------------------------------------------------------------------------------

    def _read(self, stream: Stream, now_s: float) -> int:
        moved, ended = 0, False
        while moved < TURN_BYTES:
            try:
                data = os.read(stream.fd, READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                ended = True
                break
            moved += len(data)
            self.files.put(stream.log, data)
            if stream.view is not None and not stream.view.console.gone:
                stream.view.feed(data, now_s)
            if stream.filter is not None:
                stream.filter.feed(data)
            if len(data) < READ_BYTES:
                break
        if stream.drain_left:
            stream.drain_left = max(0, stream.drain_left - moved)
            if not stream.drain_left:
                self._drained(stream)
        if ended:
            self._finish(stream)
        else:
            if stream.view is not None and stream.view.waiting:
                self._ticking.add(stream)
            if self._full(stream):
                self._epoll.unregister(stream.fd)
                self._paused.add(stream)
                self._watch(True)
        return moved

    def _full(self, stream: Stream) -> bool:
        if self.files.full(stream.log):
            return True
        return stream.view is not None and stream.view.console.full(stream.view.source)

    def _watch(self, on: bool) -> None:
        self.files.watched = on
        for console in self.consoles:
            console.watched = on

    def _finish(self, stream: Stream) -> None:
        """End of file."""
        if stream not in self._paused:
            self._epoll.unregister(stream.fd)
        self._paused.discard(stream)
        self._ticking.discard(stream)
        os.close(stream.fd)
        del self._streams[stream.fd]
        if stream.view is not None:
            stream.view.finish()
            if stream.view.waiting:  # only the notice of what was dropped, once the console has room
                self._ticking.add(stream)
        self.files.close(stream.log)
        if stream.filter is not None:
            stream.filter.finish()
        key = stream.filter_key
        if key is not None and not any(other.filter_key == key for other in self._streams.values()):
            self.files.close(self._filtered.pop(key))
        if stream.drain_left:
            stream.drain_left = 0
            self._drained(stream)

    # --- the agent ------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for _ in range(PACKETS_PER_TURN):
            try:
                packet, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 2)
            except BlockingIOError:
                return
            except OSError:
                packet, fds = b"", []
            if not packet:
                self._epoll.unregister(self._control_fd)
                self._control.close()
                self._control_fd = -1
                if self._close_at_s is None:
                    self._close_at_s = time.monotonic() + ORPHAN_S
                return
            try:
                message, payload = unpack(packet)
                self._handle(message, payload, fds)
            except (ProtocolError, KeyError, TypeError, ValueError) as error:
                for fd in fds:
                    if fd not in self._streams:
                        os.close(fd)
                self._report({"type": "protocol", "error": str(error)})

    def _handle(self, message: Message, payload: bytes, fds: list[int]) -> None:
        kind = message["type"]
        if kind == "attach":
            if len(fds) != 2:
                raise ProtocolError(f"attach came with {len(fds)} file descriptors")
            for which in (0, 1):
                self._attach(message, which, fds[which])
        elif kind == "say":
            self.consoles[1].put(self._agent, payload, fresh=True, force=True)
        elif kind == "drain":
            self._start_drain(int(message["generation"]))
        elif kind == "close":
            self._close_at_s = time.monotonic() + float(message["timeout_s"])
            self._asked_to_close = True
            for generation in {stream.generation for stream in self._streams.values()}:
                self._start_drain(generation)

    def _attach(self, message: Message, which: int, fd: int) -> None:
        generation, rank, path = (
            int(message["generation"]),
            int(message["rank"]),
            str(message["paths"][which]),
        )
        stream = Stream(fd, generation, LogFile(path, self._max_file_bytes))
        prefix = str(message["prefix"]).encode("utf-8", "surrogateescape")
        if message["show"][which]:
            console = self.consoles[which]
            raw = bool(message["raw"])
            shown = coloured(prefix, rank) if prefix and console.is_terminal and _colours_wanted() else prefix
            source = Source(shown, self._raw_lines[which] if raw else None)

            def report(dropped: Message) -> None:
                self._report({**dropped, "generation": generation, "stream": ("stdout", "stderr")[which]})

            stream.view = ConsoleStream(console, source, raw=raw, rank=rank, log=stream.log, report=report)
        if self._filters[which]:
            key = (generation, which)
            if key not in self._filtered:
                name = ("filtered_stdout.log", "filtered_stderr.log")[which]
                filtered = path.rpartition("/")[0] + "/" + name
                self._filtered[key] = LogFile(filtered, self._max_file_bytes)
            sink = self._filtered[key]
            stream.filter = LineFilter(self._filters[which], prefix, lambda data: self.files.put(sink, data))
            stream.filter_key = key
        self._streams[fd] = stream
        self._epoll.register(fd, select.EPOLLIN)

    def _start_drain(self, generation: int) -> None:
        """What is in the pipes now counts: a stray process that goes on writing holds up nothing."""
        waiting = self._draining.setdefault(generation, set())
        for stream in self._streams.values():
            if stream.generation == generation:
                stream.drain_left = _bytes_in(stream.fd)
                if stream.drain_left:
                    waiting.add(stream)
        if not waiting:
            self._mark_drained(generation)

    def _drained(self, stream: Stream) -> None:
        waiting = self._draining.get(stream.generation)
        if waiting is not None:
            waiting.discard(stream)
            if not waiting:
                self._mark_drained(stream.generation)

    def _mark_drained(self, generation: int) -> None:
        del self._draining[generation]
        for stream in self._streams.values():
            if stream.generation == generation and stream.view is not None:
                stream.view.settle()
        self.files.mark(generation)

    def _report(self, message: Message) -> None:
        """Called from the writer threads too."""
        self._reports.append(message)
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._event_fd, 1)

    def _send(self) -> None:
        while self._outbox and self._control_fd >= 0:
            try:
                self._control.send(pack(self._outbox[0]))
            except BlockingIOError:
                return
            except OSError:
                pass  # the agent is gone: _receive sees it too
            self._outbox.popleft()

    # --- time -----------------------------------------------------------------------------------------

    def _timeout_s(self) -> float:
        waiting = self._ticking or self._paused or self._outbox or self._close_at_s is not None
        return TICK_S if waiting or self._draining else -1

    def _housekeeping(self, now_s: float) -> None:
        for stream in list(self._ticking):
            if stream.view is not None:
                stream.view.tick(now_s)
                if stream.view.waiting:
                    continue
            self._ticking.discard(stream)
        for stream in list(self._paused):
            if not self._full(stream):
                self._paused.discard(stream)
                self._epoll.register(stream.fd, select.EPOLLIN)
        if not self._paused:
            self._watch(False)
        for generation in self.files.done():
            self._outbox.append({"type": "drained", "generation": generation})
        while self._reports:
            self._outbox.append(self._reports.popleft())
        self._send()

    def _ended(self) -> bool:
        if self._close_at_s is None:
            return False
        if time.monotonic() >= self._close_at_s:
            return True
        if self._asked_to_close:
            return not self._draining
        return not self._streams

    def _flush(self) -> None:
        """Everything read goes out, as far as disk and console take it in time.

        The job is over: a pager or a slow pipe holds nobody up any more, and what it hasn't taken yet has the
        reason of the end in it. Without the agent nobody has the patience.
        """
        for stream in list(self._streams.values()):
            self._finish(stream)
        end = object()
        self.files.mark(end)
        disk_limit_s = (self._close_at_s or 0.0) + FLUSH_S
        console_limit_s = (
            time.monotonic() + self._console_patience_s if self._asked_to_close else disk_limit_s
        )
        written = shown = told = False
        while not (written and shown):
            if written and not told:
                told = True
                self._outbox.append({"type": "behind"})
                self._send()
            now_s = time.monotonic()
            written = written or end in self.files.done() or self.files.stalled() or now_s >= disk_limit_s
            shown = self._all_shown(now_s) or now_s >= console_limit_s
            time.sleep(PACE_S)
        while self._reports:
            self._outbox.append(self._reports.popleft())
        self._send()

    def _all_shown(self, now_s: float) -> bool:
        """Whether the consoles have everything, notices of what was left out included."""
        waiting = False
        for stream in self._ticking:
            if stream.view is not None and not stream.view.console.gone:
                stream.view.tick(now_s)
                waiting = waiting or bool(stream.view.waiting)
        if not self._asked_to_close and any(console.stalled() for console in self.consoles):
            return True
        return not waiting and all(console.idle() for console in self.consoles)


def _bytes_in(fd: int) -> int:
    size: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]
    return size


def _same_file(first: int, second: int) -> bool:
    try:
        return os.path.samestat(os.fstat(first), os.fstat(second))
    except OSError:
        return False


def _colours_wanted() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _raise_file_limit() -> None:
    """Four descriptors a rank: with many ranks the usual soft limit of 1,024 is too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return  # a hard limit above the kernel's own: then the soft one has to do


def _name_process(name: bytes) -> None:
    """For ps and top; /proc spares the import of ctypes for prctl."""
    try:
        fd = os.open("/proc/self/comm", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    os.write(fd, name)
    os.close(fd)


def main(control_fd: int) -> None:
    """The process: ``control_fd`` is its end of the channel; consoles are fds 1 and 2."""
    for number in (
        signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTSTP,
        signal.SIGTTOU, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXFSZ,
    ):  # fmt: skip
        signal.signal(number, signal.SIG_IGN)
    _raise_file_limit()
    _name_process(b"closeranks-logs")
    os.chdir("/")
    control = socket.socket(fileno=control_fd)
    control.setblocking(True)
    packet = control.recv(MAX_PACKET_BYTES)
    if packet:
        Pump(control, unpack(packet)[0]).run()
    sys.stderr.flush()
    os._exit(0)  # a thread may be blocked in a write for ever
