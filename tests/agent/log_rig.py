"""A log pump with consoles that a test can read, and real processes as ranks."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

from closeranks.agent.logs import LogPump, Message
from closeranks.config import LogConfig

PATIENCE_S = 30.0  # generous: tests share the machine


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {PATIENCE_S:.0f} s for {what}"
        time.sleep(0.01)


class Console:
    """Something for the pump to print on: a pipe or a terminal, emptied by a thread if ``read``."""

    def __init__(self, kind: str = "pipe", *, read: bool = True) -> None:
        if kind == "pty":
            self.read_fd, self.write_fd = pty.openpty()
            attributes = termios.tcgetattr(self.write_fd)
            attributes[1] &= ~termios.OPOST  # bytes as the pump wrote them
            termios.tcsetattr(self.write_fd, termios.TCSANOW, attributes)
        else:
            self.read_fd, self.write_fd = os.pipe()
        self.bytes = b""
        self._thread: threading.Thread | None = None
        if read:
            self.start_reading()

    def start_reading(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self.read_fd, 1 << 20):
                self.bytes += data

    @property
    def lines(self) -> list[str]:
        return self.bytes.decode("utf-8", "replace").splitlines()

    def wait_for(self, text: bytes) -> None:
        wait_for(lambda: text in self.bytes, f"{text!r} on the console, which has {self.bytes[-2000:]!r}")

    def settle(self) -> None:
        """Wait until the thread has taken in all that was written."""
        if self._thread is None or self.read_fd < 0:
            return
        mark = b"\0settled\n"
        os.write(self.write_fd, mark)
        wait_for(lambda: self.bytes.endswith(mark), "the last of what was written")
        self.bytes = self.bytes.removesuffix(mark)

    def stop_reading(self) -> None:
        """The reader leaves, as ``| head`` does."""
        os.close(self.read_fd)
        self.read_fd = -1

    def close(self) -> None:
        os.close(self.write_fd)
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
        if self.read_fd >= 0:
            os.close(self.read_fd)


class Rig:
    """A pump, its consoles (one for both streams by default), and a log directory."""

    def __init__(
        self, directory: Path, config: LogConfig | None = None, *, out: Console | None = None,
        err: Console | None = None, world_size: int = 4, role: str = "default",
    ) -> None:  # fmt: skip
        self.directory = directory
        self.out = out or Console()
        self.err = err or self.out
        self.world_size = world_size
        self.messages: list[Message] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pump = LogPump.start(config or LogConfig(), self.out.write_fd, self.err.write_fd, role=role)

    def path(self, rank: int, stream: str = "out", generation: int = 0) -> Path:
        return self.directory / "logs" / str(generation) / f"{rank}.{stream}"

    def attach(self, rank: int, generation: int = 0, local_rank: int | None = None) -> tuple[int, int]:
        paths = (self.path(rank, "out", generation), self.path(rank, "err", generation))
        local_rank = rank if local_rank is None else local_rank
        return self.pump.attach(generation, rank, local_rank, *paths, world_size=self.world_size)

    def rank(self, rank: int, script: str, generation: int = 0) -> subprocess.Popen[bytes]:
        """Run ``script`` with its streams attached; it may use os, sys and time."""
        out, err = self.attach(rank, generation)
        process = subprocess.Popen(
            [sys.executable, "-S", "-u", "-c", f"import os, sys, time\n{script}"], stdout=out, stderr=err
        )
        os.close(out)
        os.close(err)
        self.processes.append(process)
        return process

    def poll(self) -> list[Message]:
        self.messages += self.pump.handle_readable()
        return self.messages

    def message(self, kind: str) -> Message:
        """Wait for one of this type."""
        wait_for(lambda: any(m["type"] == kind for m in self.poll()), f"a message {kind!r}")
        return next(m for m in self.messages if m["type"] == kind)

    def shown(self, text: bytes) -> None:
        """Wait until the console has ``text``, as an agent would: with an eye on the pump."""
        wait_for(lambda: self.poll() is None or text in self.out.bytes, f"{text!r} on the console")

    def drain(self, generation: int = 0) -> None:
        assert self.pump.drain(generation, PATIENCE_S)

    def finish(self) -> None:
        """Every rank has ended, and everything is on disk and console."""
        for process in self.processes:
            process.wait(PATIENCE_S)
        self.drain()
        assert self.pump.close(PATIENCE_S)
        for console in {self.out, self.err}:
            console.settle()

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)
        self.pump.close(2.0)
        for console in {self.out, self.err}:
            console.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
