"""What the system tests share: a job's processes by their parts, and what a job has left behind."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import Finished, Running, eventually, marked_processes

SOON_S = 20.0  # for what takes milliseconds on a machine that isn't busy with other tests
GONE_S = 5.0  # nothing may outlive a job; measured, it is well under a second


def script(folder: Path, *parts: str, name: str = "train.py") -> Path:
    """A script made of these parts, each indented or not."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(textwrap.dedent, parts)))
    return path


def command(runs: Path, *arguments: object) -> list[str]:
    """The command line of ``closeranks run``, for tests that start it in a way of their own."""
    return [sys.executable, "-m", "closeranks", "run", "--log-dir", str(runs), *map(str, arguments)]


def no_torch(folder: Path) -> dict[str, str]:
    """An environment in which torch is an empty package: ready at once, for what isn't about torch."""
    package = folder / "no-torch" / "torch" / "distributed"
    package.mkdir(parents=True, exist_ok=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").touch()
    return {"PYTHONPATH": str(package.parent.parent)}


def parents() -> dict[int, int]:
    """pid -> parent of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(") ")[2].split()
                found[int(entry.name)] = int(fields[1])
    return found


def children(pid: int) -> list[int]:
    return sorted(child for child, parent in parents().items() if parent == pid)


def comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][0] != "Z"
    except (OSError, IndexError):
        return False


@dataclass(slots=True)
class Job:
    """A running job, taken apart."""

    running: Running
    runs: Path

    @property
    def run_dir(self) -> Path:
        return (self.runs / "latest").resolve()

    @property
    def guard(self) -> int:
        return self.running.process.pid

    @property
    def keeper(self) -> int:
        return self._only(self.guard, "cr-keeper")

    @property
    def agent(self) -> int:
        return self._only(self.keeper, "cr-agent")

    def part(self, name: str) -> int:
        """The agent's one child of that name: cr-zygote, closeranks-logs, rank 0, ..."""
        return self._only(self.agent, name)

    def parts(self, name: str) -> list[int]:
        return [pid for pid in children(self.agent) if comm(pid) == name]

    def ranks(self) -> dict[int, int]:
        """rank -> pid, of the ranks that live."""
        living = {pid: comm(pid) for pid in children(self.agent) if is_alive(pid)}
        return {int(name[5:]): pid for pid, name in living.items() if name.startswith("rank ")}

    def _only(self, parent: int, name: str) -> int:
        pids: list[int] = []
        for _ in range(100):  # a process that is just being forked still has its maker's name
            pids = [pid for pid in children(parent) if comm(pid) == name]
            if len(pids) == 1:
                break
            time.sleep(0.02)
        assert len(pids) == 1, f"{len(pids)} children of {parent} are called {name}"
        return pids[0]

    def private_dirs(self) -> list[Path]:
        """Where this job's ranks meet; removed when it ends."""
        pattern = f"closeranks-{self.run_dir.name[-24:]}-*"
        return [path for base in ("/dev/shm", "/tmp") for path in Path(base).glob(pattern)]

    def assert_gone(self, within_s: float = GONE_S) -> None:
        """Not one process of it is left, nor anything outside its run directory."""
        mark = self.running.mark
        gone = eventually(lambda: not [pid for pid in marked_processes(mark) if is_alive(pid)], within_s)
        assert gone, {pid: comm(pid) for pid in marked_processes(mark)}
        self.running.process.wait(SOON_S)
        assert self.private_dirs() == []
        assert not (self.run_dir / "control.json").exists()

    def text(self, which: str, rank: int = 0, generation: int = 0) -> str:
        """What the log of that rank holds; ``which`` is out or err."""
        path = self.run_dir / "logs" / str(generation) / f"{rank}.{which}"
        return path.read_text(errors="replace") if path.exists() else ""


Start = Callable[..., Job]
Run = Callable[..., tuple[Finished, Job]]


def wait_for_ranks(job: Job, count: int) -> dict[int, int]:
    """Wait until ``count`` ranks run; returns them."""
    found: dict[int, int] = {}

    def run() -> bool:
        nonlocal found
        with contextlib.suppress(AssertionError, ValueError):  # no keeper, or no agent yet
            found = job.ranks()
        return len(found) == count

    if not eventually(run, SOON_S * 3):
        pytest.fail(f"{found} run\n{job.running.stdout[-4000:]}\n{job.running.stderr[-4000:]}")
    return found


def settled_spares(job: Job, count: int) -> list[int]:
    """The waiting workers, once they stay the same for a while: they are renewed after a first step."""
    seen: list[int] = []
    since_s = 0.0

    def stay() -> bool:
        nonlocal seen, since_s
        now = job.parts("cr-spare")
        if now != seen:
            seen, since_s = now, time.monotonic()
        return len(seen) == count and time.monotonic() - since_s > 1.0

    assert eventually(stay, SOON_S * 2), seen
    return seen


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process lead to."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(link))  # noqa: PTH115 - it may be no path at all
    return sorted(found)
