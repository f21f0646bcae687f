"""The agent's side of log capture: starts the log pump, makes each rank's pipes, and never waits for it.

All calls return at once except ``drain`` and ``close``, which are bounded. What the pump's channel does not
take now is sent when it does: watch ``fileno()`` (readable when there is something to do) and call
``handle_readable()``.

The pump may die; its pipes must not, or every rank would get SIGPIPE. So the agent keeps a copy of each read
end until ``forget(generation)``, and ``restart()`` hands them to a new pump.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from string import Template

import closeranks
from closeranks.agent.log_protocol import MAX_PACKET_BYTES, MAX_SAY_BYTES, Message, pack, unpack
from closeranks.agent.log_tail import printable, tail
from closeranks.config import LogConfig
from closeranks.errors import CloseranksError, ConfigError, ProtocolError

__all__ = ["LogPump", "Message", "printable", "tail"]

# The kernel lets an unprivileged user have 64 MiB of pipes (pipe-user-pages-soft) and cuts every further
# pipe of that user to 8 KiB: so the size asked for goes down as their number goes up.
_PIPE_SIZES = ((16, 1 << 20), (64, 256 << 10))
_MAX_PREFIX_CHARS = 256
_MAX_UNSENT_SAY_BYTES = 1 << 20
_MAX_RESTARTS = 10
_RESTART_WINDOW_S = 60.0
_KILL_WAIT_S = 1.0
_START = "import sys; sys.path.append(sys.argv[1]); from closeranks.agent.log_pump import main; main({})"


class LogPump:
    """One per agent. Made by ``start``; ``close`` it, or leave it to end by itself when the agent dies."""

    def __init__(self, config: LogConfig, console_out_fd: int, console_err_fd: int, role: str) -> None:
        self._config = config
        self._console_fds = (console_out_fd, console_err_fd)
        self._role = role
        self._epoll = select.epoll()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._writable_wanted = False
        # (packet, read ends that travel with it, generation of an attach, is it a say)
        self._outbox: deque[tuple[bytes, tuple[int, ...], int | None, bool]] = deque()
        self._unsent_say_bytes = 0
        self._unsent_say_dropped = 0
        self._inbox: deque[Message] = deque()
        self._attached: dict[int, list[tuple[bytes, tuple[int, int]]]] = {}
        self._draining: set[int] = set()
        self._restarts_s: deque[float] = deque(maxlen=_MAX_RESTARTS)
        self._closed = False
        self._ended_well = False

    @classmethod
    def start(
        cls, config: LogConfig, console_out_fd: int = 1, console_err_fd: int = 2, *, role: str = "default"
    ) -> LogPump:
        """Start the pump process; does not wait for it. ``role`` is for prefix templates.

        Raises ConfigError when the process can't be started.
        """
        pump = cls(config, console_out_fd, console_err_fd, role)
        try:
            pump._spawn()
        except ConfigError:
            pump._epoll.close()
            raise
        return pump

    @property
    def pid(self) -> int | None:
        """The pump's process id; None when there is none. Whoever reaps children should leave it to us."""
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._channel is not None

    def fileno(self) -> int:
        """Readable when ``handle_readable`` has something to do; the number stays the same over restarts."""
        return self._epoll.fileno()

    # --- streams --------------------------------------------------------------------------------------

    def attach(
        self, generation: int, rank: int, local_rank: int, stdout_path: Path, stderr_path: Path, *,
        world_size: int,
    ) -> tuple[int, int]:  # fmt: skip
        """Make the pipes of one rank; returns the write ends for its stdout and stderr.

        The caller gives them to the worker and closes its own copies at once (end of file is how the pump
        knows that a rank is done). Directories and files appear with the first byte. In a world of one rank
        the console shows the bytes as they are, without prefix. Raises ConfigError when the machine has no
        file descriptors left.
        """
        reads, writes = [], []
        try:
            for _ in range(2):
                read_fd, write_fd = os.pipe()
                reads.append(read_fd)
                writes.append(write_fd)
                os.set_blocking(
                    read_fd, False
                )  # the read end is an open file of its own: writers still block
                self._enlarge(write_fd)
        except OSError as error:
            for fd in (*reads, *writes):
                os.close(fd)
            raise ConfigError(
                f"can't make the output pipes of rank {rank}: {error.strerror}; raise the limit on "
                "open files (ulimit -n) or run fewer ranks on this machine"
            ) from error
        prefix, raw = self._prefix(rank, local_rank, world_size)
        header: Message = {
            "type": "attach",
            "generation": generation,
            "rank": rank,
            "paths": [os.path.abspath(path) for path in (stdout_path, stderr_path)],  # noqa: PTH100 - keeps symlinks
            "show": [self._shown(local_rank, bit) for bit in (1, 2)],
            "prefix": prefix,
            "raw": raw,
        }
        packet, fds = pack(header), (reads[0], reads[1])
        self._attached.setdefault(generation, []).append((packet, fds))
        self._post(packet, fds, generation=generation)
        return writes[0], writes[1]

    def forget(self, generation: int) -> None:
        """Close our copies of this generation's pipes: all its processes are gone, or may get SIGPIPE."""
        self._outbox = deque(entry for entry in self._outbox if entry[2] != generation)
        self._draining.discard(generation)
        for _, fds in self._attached.pop(generation, []):
            for fd in fds:
                os.close(fd)

    def say(self, text: bytes) -> None:
        """Show the agent's own lines on the console's stderr, never torn by or into a rank's line.

        In order with ranks' output that was drained before. Up to 32 KiB of text stays in one piece; a
        line longer than that is split. While no pump takes it, 1 MiB waits and the rest is counted.
        """
        if text and not text.endswith(b"\n"):
            text += b"\n"
        while text:
            cut = len(text)
            if cut > MAX_SAY_BYTES:
                cut = text.rfind(b"\n", 0, MAX_SAY_BYTES) + 1 or MAX_SAY_BYTES
            part, text = text[:cut], text[cut:]
            if self._unsent_say_bytes + len(part) > _MAX_UNSENT_SAY_BYTES:
                self._unsent_say_dropped += part.count(b"\n")
            else:
                self._post(pack({"type": "say"}, part), say=True)

    def request_drain(self, generation: int) -> None:
        """Ask for ``{"type": "drained", "generation": g}`` once all that is in its pipes now is in the files.

        Bound the wait for the answer: a hung disk gives none.
        """
        self._draining.add(generation)
        self._post(pack({"type": "drain", "generation": generation}))

    def drain(self, generation: int, timeout_s: float) -> bool:
        """Wait for that answer; False = none in time. Other messages stay for ``handle_readable``."""
        self.request_drain(generation)
        deadline_s = time.monotonic() + timeout_s
        while generation in self._draining:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self.alive:
                return False
            self._wait(left_s)
        return True

    # --- the channel ----------------------------------------------------------------------------------

    def handle_readable(self) -> list[Message]:
        """Send what waited, and return what the pump said. Never blocks.

        ``drained`` (generation), ``disk`` (error, path), ``console`` (fd, error, gone), ``dropped``
        (generation, rank, stream, lines, path), ``died`` (call ``restart``), ``protocol`` (error: a bug).
        """
        self._exchange()
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def restart(self) -> None:
        """Start a new pump on the same pipes, in place of one that died or no longer answers.

        Raises CloseranksError when that happens too often: ranks would wait for their output to be read.
        """
        now_s = time.monotonic()
        if len(self._restarts_s) == _MAX_RESTARTS and now_s - self._restarts_s[0] < _RESTART_WINDOW_S:
            raise CloseranksError(
                f"the log pump died {_MAX_RESTARTS} times within {_RESTART_WINDOW_S:.0f} s, so the ranks' "
                "output can't be read; see what kills processes here (a memory limit?), then start again"
            )
        self._restarts_s.append(now_s)
        self._drop_channel()
        self._reap(kill=True)
        said = deque(entry for entry in self._outbox if entry[3])
        self._outbox.clear()
        self._spawn()
        for generation, entries in self._attached.items():
            for packet, fds in entries:
                self._post(packet, fds, generation=generation)
        for generation in self._draining:
            self._post(pack({"type": "drain", "generation": generation}))
        self._outbox.extend(said)
        self._exchange()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Write out all there is and end the pump; False = it had to be killed.

        Within about ``timeout_s``; a console that is behind gets ``console_patience_s`` more. Calling it
        again does nothing.
        """
        if self._closed:
            return True
        self._closed = True
        deadline_s = time.monotonic() + timeout_s
        if not self.alive and self._attached:
            with contextlib.suppress(CloseranksError):  # what its pipes still hold
                self.restart()
        if self.alive:
            self._post(pack({"type": "close", "timeout_s": timeout_s * 0.8}))
        patient = False
        while self.alive and (left_s := deadline_s - time.monotonic()) > 0:
            self._wait(left_s)  # it ends by closing its end of the channel
            if not patient and any(message["type"] == "behind" for message in self._inbox):
                patient = True  # it is alive, and all it waits for is a reader
                deadline_s = time.monotonic() + timeout_s + self._config.console_patience_s
        ended = not self.alive
        self._drop_channel()
        self._reap(kill=not ended)
        for generation in list(self._attached):
            self.forget(generation)
        self._last_words()
        self._epoll.close()
        return self._ended_well

    # --- inside ---------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        root = str(Path(closeranks.__file__).resolve().parent.parent)
        # Isolated and without site: a tenth of a second less, and no stray module of the user's gets in.
        # An interpreter that lives by PYTHONHOME needs its environment.
        flags = ("-S", "-s") if "PYTHONHOME" in os.environ else ("-S", "-I")
        try:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _START.format(theirs.fileno()), root],
                stdin=subprocess.DEVNULL,
                stdout=_open_or_null(self._console_fds[0]),
                stderr=_open_or_null(self._console_fds[1]),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # the terminal's signals are not for it
            )
        except OSError as error:
            ours.close()
            raise ConfigError(
                f"can't start the log pump ({sys.executable}): {error.strerror or error}"
            ) from error
        finally:
            theirs.close()
        self._channel = ours
        self._writable_wanted = False
        self._epoll.register(ours.fileno(), select.EPOLLIN)
        config = self._config
        settings: Message = {
            "type": "config",
            "max_file_bytes": config.max_file_bytes,
            "console_buffer_bytes": config.console_buffer_bytes,
            "console_patience_s": config.console_patience_s,
            "filters": [list(config.stdout_filters), list(config.stderr_filters)],
        }
        self._outbox.appendleft((pack(settings), (), None, False))
        self._exchange()

    def _post(
        self, packet: bytes, fds: tuple[int, ...] = (), *, generation: int | None = None, say: bool = False
    ) -> None:
        """Send in order, now or later. Without a pump only what was said is kept: restart makes the rest."""
        if not self.alive and not say:
            return
        if say:
            self._unsent_say_bytes += len(packet)
        self._outbox.append((packet, fds, generation, say))
        self._send()

    def _send(self) -> None:
        while self._outbox and self._channel is not None:
            packet, fds, _, say = self._outbox[0]
            try:
                socket.send_fds(self._channel, [packet], fds, socket.MSG_NOSIGNAL)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS, errno.EINTR):
                    break
                return  # it died; the read side says so too, and nothing is lost from the outbox
            self._outbox.popleft()
            if say:
                self._unsent_say_bytes -= len(packet)
            if say and self._unsent_say_dropped:
                lost, self._unsent_say_dropped = self._unsent_say_dropped, 0
                self.say(b"[closeranks: %d of its own lines are not shown here]\n" % lost)
        wanted = bool(self._outbox)
        if self._channel is not None and wanted != self._writable_wanted:
            self._writable_wanted = wanted
            self._epoll.modify(self._channel.fileno(), select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def _exchange(self) -> None:
        self._send()
        while self._channel is not None:
            try:
                packet = self._channel.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._drop_channel()
                self._reap(kill=False)
                if not self._closed:
                    self._inbox.append({"type": "died"})
                return
            try:
                message = unpack(packet)[0]
            except ProtocolError as error:
                message = {"type": "protocol", "error": str(error)}
            if message["type"] == "drained":
                self._draining.discard(message["generation"])
            self._inbox.append(message)

    def _wait(self, timeout_s: float) -> None:
        self._epoll.poll(timeout_s)
        self._exchange()

    def _drop_channel(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            self._epoll.unregister(channel.fileno())
            channel.close()

    def _reap(self, *, kill: bool) -> None:
        """Bounded. ``_ended_well`` = the process ended by itself."""
        process = self._process
        if process is None:
            return
        if kill and process.poll() is None:
            process.kill()
        # Without kill its channel is closed already: it is in exit(2) and takes a moment.
        for again in (True, False):
            try:
                process.wait(_KILL_WAIT_S)
                break
            except subprocess.TimeoutExpired:
                if again:
                    process.kill()
        self._process = None
        self._ended_well = process.returncode == 0

    def _enlarge(self, fd: int) -> None:
        pipes = 2 * sum(len(entries) for entries in self._attached.values())
        size = next((size for most, size in _PIPE_SIZES if pipes < most), None)
        if size is not None:
            with contextlib.suppress(OSError):  # over the user's share: the kernel's default size will do
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size)

    def _shown(self, local_rank: int, bit: int) -> bool:
        config = self._config
        if config.console_ranks is not None and local_rank not in config.console_ranks:
            return False
        return bool(config.tee.mask(local_rank) & bit) or not config.redirects.mask(local_rank) & bit

    def _prefix(self, rank: int, local_rank: int, world_size: int) -> tuple[str, bool]:
        """The prefix, and whether the console gets the bytes as they are. A template always holds."""
        template = self._config.prefix_template
        if not template:
            return ("", True) if world_size == 1 else (f"[{rank}] ", False)
        names = {"role_name": self._role, "rank": rank, "local_rank": local_rank}
        text = Template(template).safe_substitute(names).replace("\n", " ").replace("\r", " ")
        return text[:_MAX_PREFIX_CHARS], False

    def _last_words(self) -> None:
        """What the agent said and no pump showed goes to stderr directly, as far as that takes it now."""
        poller = select.poll()
        poller.register(self._console_fds[1], select.POLLOUT)
        text = b"".join(entry[0].partition(b"\n")[2] for entry in self._outbox if entry[3])
        self._outbox.clear()
        with contextlib.suppress(OSError):
            while text and any(events & select.POLLOUT for _, events in poller.poll(100)):
                text = text[os.write(self._console_fds[1], text[:512]) :]


def _open_or_null(fd: int) -> int:
    """``closeranks run >&-`` leaves no stdout to give away."""
    try:
        os.fstat(fd)
    except OSError:
        return subprocess.DEVNULL
    return fd
