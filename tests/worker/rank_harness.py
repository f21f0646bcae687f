"""Ranks for the tests: forked from here, hooks live, on a page and a control line as an agent has them.

Nothing is imitated: the ranks run torch and gloo, the line is the worker's own. Only the agent is played
by the test, which hears, asks and kills.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from closeranks import wire
from closeranks.progress import PAGE_BYTES, Page, read_page
from closeranks.worker.control import Control
from closeranks.worker.page import PageWriter

TIMEOUT_S = 90.0


def init(rank: int) -> None:
    """In a rank: make the default process group."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['TEST_STORE']}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
    )


class Ranks:
    """``size`` processes that each run ``body(rank)``; use as a context manager: none outlives it."""

    def __init__(
        self,
        body: Callable[[int], Any],
        size: int,
        directory: Path,
        *,
        faults: dict[int, Sequence[str]] | None = None,
        with_torch: bool = True,
        kill_on_desync: bool = True,
    ) -> None:
        self.size = size
        self.messages: list[list[dict[str, Any]]] = [[] for _ in range(size)]
        self.status: list[int | None] = [None] * size
        self._kill_on_desync = kill_on_desync
        self._pages = mmap.mmap(-1, PAGE_BYTES * size)
        self._results = [directory / f"result-{rank}.json" for rank in range(size)]
        self._store = directory / "store"
        self._lines: list[socket.socket] = []
        self.pids: list[int] = []
        pairs = [wire.socketpair() for _ in range(size)]
        for rank, (_, theirs) in enumerate(pairs):
            pid = os.fork()
            if pid == 0:
                self._be(rank, theirs, body, (faults or {}).get(rank, ()), with_torch)
            self.pids.append(pid)
        for ours, theirs in pairs:
            theirs.close()
            self._lines.append(ours)

    def _be(
        self,
        rank: int,
        line: socket.socket,
        body: Callable[[int], Any],
        faults: Sequence[str],
        with_torch: bool,
    ) -> None:
        code = 1
        warnings.resetwarnings()  # as in a script: torch warns of itself
        try:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(self.size),
                GLOO_SOCKET_IFNAME="lo",
                TEST_STORE=str(self._store),
            )
            writer = PageWriter(self._pages, rank, self.size, rank, 0)
            orders = [{"id": number, "spec": spec} for number, spec in enumerate(faults)]
            if with_torch:
                import torch

                from closeranks.worker import hooks

                torch.set_num_threads(1)
                hooks.install(writer, Control(line), orders)
                value = body(rank)
            else:
                value = body(writer, Control(line))
            self._results[rank].write_text(json.dumps(value))
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            traceback.print_exc()
            self._results[rank].write_text(json.dumps({"raised": traceback.format_exc()}))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    # --- what the test, as the agent, does -----------------------------------------------------------

    def page(self, rank: int) -> Page:
        page = read_page(memoryview(self._pages)[rank * PAGE_BYTES : (rank + 1) * PAGE_BYTES])
        assert page is not None, f"rank {rank} has not written its page"
        return page

    def say(self, rank: int, message: dict[str, Any]) -> None:
        wire.send(self._lines[rank], message)

    def heard(self, rank: int, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages[rank] if message["type"] == kind]

    def all_heard(self, kind: str) -> list[tuple[int, dict[str, Any]]]:
        return [(rank, message) for rank in range(self.size) for message in self.heard(rank, kind)]

    def turn(self, timeout_s: float = 0.02) -> None:
        """Hear what is there, and see who has ended."""
        open_lines = [line for line in self._lines if line.fileno() >= 0]
        ready, _, _ = select.select(open_lines, [], [], timeout_s)
        for line in ready:
            rank = self._lines.index(line)
            received = wire.receive(line)
            if received is None:
                line.close()
                continue
            self.messages[rank].append(received[0])
            proved = received[0]["type"] == "desync" or "proved_by" in received[0]
            if proved and self._kill_on_desync:
                self.kill()
        for rank, pid in enumerate(self.pids):
            if self.status[rank] is None:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.status[rank] = status

    def until(self, condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
        """Wait for something to become true; fails after the timeout."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s} s; {self.describe()}"
            self.turn()

    def wait(self, timeout_s: float = TIMEOUT_S) -> list[int]:
        """Wait until all have ended; their exit codes (negative: signals)."""
        self.until(lambda: all(status is not None for status in self.status), timeout_s)
        for _ in range(100):  # what they said last
            self.turn(0)
        return [os.waitstatus_to_exitcode(status or 0) for status in self.status]

    def kill(self) -> None:
        for rank, pid in enumerate(self.pids):
            if self.status[rank] is None:
                os.kill(pid, signal.SIGKILL)

    def results(self) -> list[Any]:
        """Wait for all to end well; what each body returned."""
        codes = self.wait()
        assert codes == [0] * self.size, f"exit codes {codes}; {self.describe()}"
        return [json.loads(path.read_text()) for path in self._results]

    def describe(self) -> str:
        lines = []
        for rank in range(self.size):
            path = self._results[rank]
            said = path.read_text() if path.exists() else ""
            lines.append(
                f"rank {rank}: status {self.status[rank]}, {self.messages[rank][-3:]}, {said[-1500:]}"
            )
        return "\n".join(lines)

    def _has_page(self, rank: int) -> bool:
        return read_page(memoryview(self._pages)[rank * PAGE_BYTES : (rank + 1) * PAGE_BYTES]) is not None

    def __enter__(self) -> Ranks:
        try:
            self.until(
                lambda: all(
                    self._has_page(rank) or self.status[rank] is not None for rank in range(self.size)
                )
            )
        except AssertionError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        for rank, pid in enumerate(self.pids):
            if self.status[rank] is None:
                _, self.status[rank] = os.waitpid(pid, 0)
        for line in self._lines:
            line.close()
        self._pages.close()
