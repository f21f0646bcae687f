"""Shared fixtures: start the real command line, and leave nothing behind.

Every process a test starts through ``closeranks`` carries a variable with a value of that test's own in its
environment, and so do all that descend from it, through sessions and double forks. That is how a test finds
what it must clean up, and how the leak check knows whose process is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import pytest

# The same examples each time, so that a change is judged and not chance. New ones are for who looks for them:
# CLOSERANKS_TEST_RANDOM=1 make test
hypothesis.settings.register_profile("steady", derandomize=True)
if not os.environ.get("CLOSERANKS_TEST_RANDOM"):
    hypothesis.settings.load_profile("steady")

MARK = "CLOSERANKS_TEST_MARK"
SHM = Path("/dev/shm")
_LEAK_GRACE_S = 5.0
_KILL_ROUNDS = 50

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell that runs the tests in the background has it ignored, and what they start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def marked_processes(mark: str) -> list[int]:
    """The pids of living processes, zombies left out, that carry ``mark`` in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # gone, a zombie, or someone else's
            continue
    return sorted(found)


def kill_marked(mark: str) -> None:
    """SIGKILL all that carry ``mark``, and what they start meanwhile."""
    for _ in range(_KILL_ROUNDS):
        pids = marked_processes(mark)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def eventually(condition: Callable[[], bool], timeout_s: float, interval_s: float = 0.02) -> bool:
    """Whether ``condition`` came true within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_s)
    return True


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that came to its end by itself."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def by_rank(self) -> dict[int, str]:
        """Standard output by the ``[rank] `` before each line; a line without one is rank 0's."""
        outputs: dict[int, str] = {}
        for line in self.stdout.splitlines(keepends=True):
            head, bracket, rest = line.partition("] ")
            prefixed = bracket and head.startswith("[") and head[1:].isdigit()
            rank = int(head[1:]) if prefixed else 0
            outputs[rank] = outputs.get(rank, "") + (rest if prefixed else line)
        return outputs


@dataclass(slots=True)
class Running:
    """A ``closeranks`` command in a session of its own; output goes to files, so that no pipe fills up."""

    process: subprocess.Popen[bytes]
    mark: str
    folder: Path

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    def wait(self, timeout_s: float = 120.0) -> Finished:
        """Wait for its end. After ``timeout_s`` all of it is killed and the test fails with its output."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            kill_marked(self.mark)
            self.process.wait()
            pytest.fail(
                f"no end after {timeout_s:g} s: {self.process.args!r}\n"
                f"--- stdout\n{self.stdout[-8000:]}\n--- stderr\n{self.stderr[-8000:]}"
            )
        return Finished(code, self.stdout, self.stderr)

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until ``text`` has been printed, on either stream."""
        ended = False
        deadline = time.monotonic() + timeout_s
        while text not in self.stdout and text not in self.stderr:
            if ended or time.monotonic() > deadline:
                pytest.fail(
                    f"{text!r} was not printed within {timeout_s:g} s\n"
                    f"--- stdout\n{self.stdout[-8000:]}\n--- stderr\n{self.stderr[-8000:]}"
                )
            ended = self.process.poll() is not None
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """Every living process of this run: agent, zygote, ranks, their children."""
        return marked_processes(self.mark)


@dataclass(slots=True)
class Launcher:
    """Starts commands for one test, and cleans up after them."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[Running] = field(default_factory=list)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCH"))}
        return {**plain, "OMP_NUM_THREADS": "1", **(extra or {}), MARK: self.mark}

    def start(
        self,
        *arguments: str | Path,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Running:
        """Start ``closeranks arguments...`` in a session of its own, in ``cwd`` (default: a fresh folder)."""
        folder = self.folder / f"command-{len(self.started)}"
        folder.mkdir()
        (folder / "stdin").write_text(stdin)
        with (
            (folder / "stdin").open("rb") as given,
            (folder / "stdout").open("wb") as out,
            (folder / "stderr").open("wb") as err,
        ):
            process = subprocess.Popen(
                [sys.executable, "-m", "closeranks", *map(str, arguments)],
                stdin=given,
                stdout=out,
                stderr=err,
                cwd=cwd or self.folder,
                env=self.environment(env),
                start_new_session=True,
            )
        running = Running(process, self.mark, folder)
        self.started.append(running)
        return running

    def close(self) -> None:
        kill_marked(self.mark)
        for running in self.started:
            if running.process.poll() is None:
                running.process.kill()
            running.process.wait()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """Starts real ``closeranks`` commands; whatever they leave is killed when the test ends."""
    made = Launcher(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def start_closeranks(launcher: Launcher) -> Callable[..., Running]:
    """``start_closeranks("run", ..., stdin="", env={}, cwd=None) -> Running``."""
    return launcher.start


@pytest.fixture
def run_closeranks(launcher: Launcher) -> Callable[..., Finished]:
    """``run_closeranks("run", ..., timeout_s=120) -> Finished``; fails the test if it doesn't end in time."""

    def run(*arguments: str | Path, timeout_s: float = 120.0, **options: object) -> Finished:
        return launcher.start(*arguments, **options).wait(timeout_s)  # type: ignore[arg-type]

    return run


def _segments() -> set[str]:
    return {entry.name for entry in SHM.iterdir()} if SHM.is_dir() else set()


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test marked ``torch``: no process of it lives on, and no new segment lies in /dev/shm."""
    if request.node.get_closest_marker("torch") is None:
        yield
        return
    made: Launcher | None = None
    if "launcher" in request.fixturenames:
        made = request.getfixturevalue("launcher")
    before = _segments()
    yield
    if made is not None:
        mark = made.mark
        for running in made.started:
            if running.process.poll() is None:  # the test has left it running on purpose
                kill_marked(mark)
        assert eventually(lambda: not marked_processes(mark), _LEAK_GRACE_S), _describe(mark)
    jobs = {path.parent.name for path in made.folder.rglob("journal.db")} if made is not None else set()
    assert eventually(lambda: not _leaked(before, jobs), _LEAK_GRACE_S), (
        f"left in /dev/shm: {_leaked(before, jobs)}"
    )


def _leaked(before: set[str], jobs: set[str]) -> set[str]:
    """New segments that nobody has open; of closeranks' own directories, those of this test's ``jobs``.

    Others may work on the same machine at the same moment.
    """
    found = set()
    for name in _segments() - before:
        if name.startswith("closeranks-"):
            mine = any(job[-24:] in name for job in jobs)
        else:
            mine = (SHM / name).exists() and not _is_open(SHM / name)
        if mine:
            found.add(name)
    return found


def _is_open(segment: Path) -> bool:
    """Whether any process has ``segment`` mapped or open."""
    wanted = str(segment)
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if wanted in (process / "maps").read_text(errors="replace"):
                return True
            if any(os.readlink(fd) == wanted for fd in (process / "fd").iterdir()):  # noqa: PTH115
                return True
        except OSError:
            continue
    return False


def _describe(mark: str) -> str:
    lines = []
    for pid in marked_processes(mark):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            lines.append(f"{pid}: {command}")
    return "processes left behind:\n" + "\n".join(lines)
