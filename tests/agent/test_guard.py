"""The processes above the agent: a stand-in agent that does as it is told, killed and signalled for real."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import eventually

PROGRAM = """
    import os, signal, subprocess, sys, time
    from closeranks.agent import guard

    def agent(guard_pid):
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        lone = os.fork()  # a daemon: twice forked, in a session of its own
        if lone == 0:
            os.setsid()
            if os.fork() == 0:
                with open("daemon", "w") as file:
                    file.write(str(os.getpid()))
                time.sleep(600)
            os._exit(0)
        os.waitpid(lone, 0)
        def received(number, frame):
            with open("received", "a") as file:
                file.write(signal.Signals(number).name + chr(10))
        for number in watched - {signal.SIGCHLD}:
            signal.signal(number, received)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        with open("started", "w") as file:
            file.write(f"{os.getpid()} {os.getppid()} {guard_pid} {child.pid}")
        while not os.path.exists("end"):
            time.sleep(0.01)
        child.kill()
        child.wait()
        return 42

    def clean_up():
        with open("cleaned", "a") as file:
            file.write("once" + chr(10))

    def may_restart():
        with open("asked", "a") as file:
            file.write("once" + chr(10))
        return os.path.exists("restart")

    watched = guard.hold_signals(["SIGTERM", "SIGINT"])
    sys.exit(guard.supervise(agent, clean_up, watched, what="controller", may_restart=may_restart))
"""


class Guarded:
    """A guard with its agent. ``guard``, ``keeper``, ``agent``, ``child``, ``daemon``: pids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with (folder / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(PROGRAM)],
                cwd=folder,
                stderr=stderr,
                start_new_session=True,
            )
        assert eventually(lambda: len(self.read("started").split()) == 4 and self.read("daemon"), 20.0)
        self.agent, self.keeper, self.guard, self.child = map(int, self.read("started").split())
        self.daemon = int(self.read("daemon"))

    def read(self, name: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / name).read_text()
        return ""

    def living(self) -> list[int]:
        return [pid for pid in (self.agent, self.keeper, self.child, self.daemon) if _lives(pid)]

    def ends(self) -> int:
        code = self.process.wait(20)
        assert eventually(lambda: not self.living(), 5.0), self.living()
        return code


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    made = Guarded(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()
    assert eventually(lambda: not made.living(), 15.0), made.living()


def test_the_exit_code_is_the_agents_and_a_daemon_does_not_outlive_it(guarded: Guarded) -> None:
    assert guarded.guard == guarded.process.pid != guarded.keeper
    (guarded.folder / "end").touch()
    assert guarded.ends() == 42
    assert set(guarded.read("cleaned").splitlines()) == {"once"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_an_agent_that_is_killed_leaves_nothing_and_one_sentence(guarded: Guarded, number: int) -> None:
    os.kill(guarded.agent, number)
    assert guarded.ends() == 128 + number
    told = guarded.read("stderr")
    assert told.count("was killed by " + signal.Signals(number).name) == 1 and "Traceback" not in told
    assert guarded.read("cleaned")


def test_one_that_is_killed_is_started_again_where_it_may_be_and_what_it_had_lives_on(
    guarded: Guarded,
) -> None:
    (guarded.folder / "restart").touch()
    first, children = guarded.agent, (guarded.child, guarded.daemon)
    for _ in range(2):
        os.kill(guarded.agent, signal.SIGKILL)
        assert eventually(lambda: guarded.read("started").split()[:1] != [str(guarded.agent)], 20.0)
        assert eventually(lambda: len(guarded.read("started").split()) == 4, 5.0)
        guarded.agent, keeper, guard, guarded.child = map(int, guarded.read("started").split())
        assert (keeper, guard) == (guarded.keeper, guarded.guard)
        assert all(map(_lives, children)), "what it had started lives on"
    assert guarded.agent != first and not _lives(first)
    assert guarded.read("cleaned") == "" and guarded.read("stderr") == ""
    os.kill(guarded.guard, signal.SIGTERM)
    assert eventually(lambda: "SIGTERM" in guarded.read("received"), 5.0), "signals go to the new one"
    (guarded.folder / "end").touch()
    assert guarded.ends() == 42
    assert eventually(lambda: not any(map(_lives, children)), 5.0)
    assert guarded.read("asked").splitlines() == ["once"] * 2


def test_one_that_ends_by_itself_is_not_started_again(guarded: Guarded) -> None:
    (guarded.folder / "restart").touch()
    (guarded.folder / "end").touch()
    assert guarded.ends() == 42
    assert guarded.read("asked") == ""


def test_one_whose_guard_was_killed_is_not_started_again(guarded: Guarded) -> None:
    """It would have nobody to answer to."""
    (guarded.folder / "restart").touch()
    os.kill(guarded.guard, signal.SIGKILL)
    guarded.process.wait(20)
    assert eventually(lambda: not guarded.living(), 20.0)
    assert guarded.read("asked") == ""


def test_a_keeper_that_is_killed_leaves_nothing_either(guarded: Guarded) -> None:
    os.kill(guarded.keeper, signal.SIGKILL)
    assert guarded.ends() == 128 + signal.SIGKILL


def test_guard_and_agent_killed_together(guarded: Guarded) -> None:
    os.kill(guarded.guard, signal.SIGKILL)
    os.kill(guarded.agent, signal.SIGKILL)
    guarded.ends()
    assert eventually(lambda: guarded.read("cleaned"), 5.0)


def test_signals_go_to_the_agent(guarded: Guarded) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(guarded.guard, number)
        assert eventually(lambda number=number: number.name in guarded.read("received"), 5.0)
    assert guarded.living() == [guarded.agent, guarded.keeper, guarded.child, guarded.daemon]


def test_a_stopped_agent_whose_guard_is_killed_is_not_left_stopped(guarded: Guarded) -> None:
    """The stand-in doesn't watch its guard: the keeper's grace ends, and it is killed."""
    os.kill(guarded.agent, signal.SIGSTOP)
    began = time.monotonic()
    os.kill(guarded.guard, signal.SIGKILL)
    guarded.process.wait(20)
    assert eventually(lambda: not guarded.living(), 20.0)
    assert time.monotonic() - began < 20.0
