"""Signals to the launcher: passed on, waited for, and told in the exit code."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import Launcher, eventually
from system.rig import GONE_S, SOON_S, Job, Start, command, is_alive, script, wait_for_ranks

SLOW_IMPORT = "import time\nprint('importing', flush=True)\ntime.sleep(600)"
WAITS = """
    import os, time
    print("ready", os.environ["RANK"])
    time.sleep(600)
"""
HANDLES = """
    import os, signal, sys, time

    def stop(number, frame):
        print("rank", os.environ["RANK"], "got", signal.Signals(number).name)
        sys.exit(5)

    for name in sys.argv[1:]:
        signal.signal(getattr(signal, name), stop)
    print("ready", os.environ["RANK"])
    time.sleep(600)
"""
STUBBORN = """
    import os, signal, time
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    print("ready", os.environ["RANK"])
    while True:
        time.sleep(600)
"""


def ready(job: Job, ranks: int) -> Job:
    for rank in range(ranks):
        job.running.wait_for(f"ready {rank}")
    return job


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"])
def test_a_signal_stops_the_ranks_and_is_the_exit_code(start: Start, tmp_path: Path, name: str) -> None:
    path = script(tmp_path, HANDLES)
    job = ready(start("--nproc-per-node", 2, path, name), 2)
    number = getattr(signal, name)
    os.kill(job.guard, number)
    done = job.running.wait(SOON_S)
    assert done.returncode == 128 + number
    for rank in (0, 1):
        assert f"rank {rank} got {name}" in job.text("out", rank)
    assert f"stopped by {name} · " in done.stderr
    assert done.stderr.count("stop") == 2, "one line when it is asked for, one at the end"
    assert "Traceback" not in done.stderr
    assert "incident" not in done.stderr.replace("0 incidents", "")
    job.assert_gone()


def test_ranks_without_a_handler_die_of_the_signal(start: Start, tmp_path: Path) -> None:
    job = ready(start("--nproc-per-node", 2, script(tmp_path, WAITS)), 2)
    os.kill(job.guard, signal.SIGTERM)
    done = job.running.wait(SOON_S)
    assert done.returncode == 143
    assert "killed" not in done.stderr, "the grace was not used up"
    job.assert_gone()


def test_what_ignores_the_signal_is_killed_after_the_grace(start: Start, tmp_path: Path) -> None:
    path = script(tmp_path, STUBBORN)
    job = ready(start("--nproc-per-node", 2, "--shutdown-timeout", 1, path), 2)
    began = time.monotonic()
    os.kill(job.guard, signal.SIGTERM)
    done = job.running.wait(SOON_S)
    assert time.monotonic() - began >= 1.0
    assert done.returncode == 143
    assert "ranks 0,1 did not end within 1 s of SIGTERM: killed" in done.stderr
    job.assert_gone()


def test_the_second_ctrl_c_doesnt_wait(start: Start, tmp_path: Path) -> None:
    job = ready(start("--nproc-per-node", 2, script(tmp_path, STUBBORN)), 2)
    os.kill(job.guard, signal.SIGINT)
    job.running.wait_for("stopping the ranks")
    time.sleep(0.3)  # a second press within 0.2 s is taken for the echo of the first
    assert len(wait_for_ranks(job, 2)) == 2
    os.kill(job.guard, signal.SIGINT)
    done = job.running.wait(SOON_S)  # the grace is 30 s
    assert done.returncode == 130
    assert "asked to stop again: killing generation 0" in done.stderr
    job.assert_gone()


def test_a_stopped_rank_gets_the_signal_too(start: Start, tmp_path: Path) -> None:
    path = script(tmp_path, HANDLES)
    job = ready(start("--nproc-per-node", 2, "--hang-detection", "off", path, "SIGTERM"), 2)
    os.kill(job.ranks()[1], signal.SIGSTOP)
    os.kill(job.guard, signal.SIGTERM)
    assert job.running.wait(SOON_S).returncode == 143
    assert "rank 1 got SIGTERM" in job.text("out", 1)


def test_a_signal_during_the_imports_stops_at_once(start: Start, tmp_path: Path) -> None:
    script(tmp_path, SLOW_IMPORT, name="no-torch/slow_import.py")
    job = start("--preload", "slow_import", script(tmp_path, WAITS))
    job.running.wait_for("importing")
    os.kill(job.guard, signal.SIGINT)
    done = job.running.wait(SOON_S)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    job.assert_gone()


def test_a_signal_at_the_very_start_is_not_lost(start: Start, tmp_path: Path) -> None:
    """The agent takes signals a little later than the guard does."""
    for delay_s in (0.0, 0.05, 0.15):
        (tmp_path / "runs/latest").unlink(missing_ok=True)
        job = start(script(tmp_path, WAITS))
        if not eventually((tmp_path / "runs/latest").exists, SOON_S, 0.001):
            pytest.fail("no run directory")
        time.sleep(delay_s)
        os.kill(job.guard, signal.SIGTERM)
        done = job.running.wait(SOON_S)
        assert done.returncode == 143, done.stderr
        assert "Traceback" not in done.stderr
        job.assert_gone()


# --- in the background of a script ------------------------------------------------------------------


@pytest.fixture
def sigint_ignored() -> Iterator[None]:
    """As a shell without job control starts what it puts into the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_ignored")
@pytest.mark.parametrize("how", [[], ["--no-zygote"], ["--no-python", sys.executable, "-u"]], ids=str)
def test_sigint_stops_a_job_that_was_started_with_it_ignored(
    start: Start, tmp_path: Path, how: list[str]
) -> None:
    job = ready(start("--nproc-per-node", 2, *how, script(tmp_path, WAITS)), 2)
    began = time.monotonic()
    os.kill(job.guard, signal.SIGINT)
    done = job.running.wait(SOON_S)
    assert done.returncode == 130
    assert time.monotonic() - began < 10, "the ranks ended of it; their grace is 30 s"
    assert "did not end" not in done.stderr
    if "--no-python" not in how:
        assert "KeyboardInterrupt" in job.text("err", 0)
    job.assert_gone()


@pytest.mark.usefixtures("sigint_ignored")
def test_sigint_that_is_ignored_and_not_to_be_handled_stays_ignored(start: Start, tmp_path: Path) -> None:
    job = ready(start("--signals-to-handle", "SIGTERM", script(tmp_path, WAITS)), 1)
    pids = job.ranks()
    os.kill(job.guard, signal.SIGINT)
    time.sleep(0.5)
    assert job.ranks() == pids
    os.kill(job.guard, signal.SIGTERM)
    assert job.running.wait(SOON_S).returncode == 143
    job.assert_gone()


# --- SIGUSR1 and SIGUSR2 ----------------------------------------------------------------------------


def test_sigusr1_goes_to_ranks_that_handle_it(start: Start, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGUSR1, lambda *_: print("saving"))
        print("ready", os.environ["RANK"])
        for _ in range(6000):
            time.sleep(0.1)
        """,
    )
    job = ready(start("--nproc-per-node", 2, path), 2)
    pids = job.ranks()
    os.kill(job.guard, signal.SIGUSR1)
    job.running.wait_for("saving")
    job.running.wait_for("SIGUSR1 passed on to 1 rank")
    assert job.ranks() == pids
    assert job.part("cr-zygote")


def test_sigusr1_without_a_handler_is_ignored_and_said(start: Start, tmp_path: Path) -> None:
    job = ready(start("--nproc-per-node", 2, script(tmp_path, WAITS)), 2)
    pids = job.ranks()
    os.kill(job.guard, signal.SIGUSR2)
    job.running.wait_for("SIGUSR2 ignored: no rank has a handler for it")
    assert job.ranks() == pids


def test_sigusr1_to_every_process_at_once_stops_nobody(start: Start, tmp_path: Path) -> None:
    """Slurm's ``--signal=USR1@60`` reaches each process of the step, not the launcher alone."""
    path = script(tmp_path, HANDLES.replace("sys.exit(5)", "pass"))
    job = ready(start("--nproc-per-node", 2, path, "SIGUSR1"), 2)
    assert eventually(lambda: len(job.parts("cr-spare")) == 2, SOON_S)
    before = job.running.pids()
    for pid in before:
        os.kill(pid, signal.SIGUSR1)
    job.running.wait_for("SIGUSR1 passed on")
    time.sleep(0.2)
    assert job.running.pids() == before


def test_signals_to_handle_can_be_others(start: Start, tmp_path: Path) -> None:
    path = script(tmp_path, HANDLES)
    job = ready(start("--nproc-per-node", 2, "--signals-to-handle", "SIGUSR1,SIGALRM", path, "SIGALRM"), 2)
    os.kill(job.guard, signal.SIGALRM)
    done = job.running.wait(SOON_S)
    assert done.returncode == 128 + signal.SIGALRM
    assert "rank 0 got SIGALRM" in job.text("out", 0)
    job.assert_gone()


def test_a_signal_that_isnt_handled_ends_all_at_once(start: Start, tmp_path: Path) -> None:
    job = ready(start("--nproc-per-node", 2, "--signals-to-handle", "SIGUSR1", script(tmp_path, STUBBORN)), 2)
    os.kill(job.guard, signal.SIGTERM)
    done = job.running.wait(SOON_S)
    assert done.returncode == 143
    assert "was killed by SIGTERM; every rank was stopped with it" in done.stderr
    job.assert_gone()


# --- terminals --------------------------------------------------------------------------------------


def test_nohup_survives_the_terminal(tmp_path: Path, launcher: Launcher) -> None:
    path = script(tmp_path, "import time\nprint('ready 0')\ntime.sleep(1)\nprint('done')")
    words = ["nohup", *command(tmp_path / "runs", path)]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env=launcher.environment(), cwd=tmp_path)
    try:
        assert eventually(lambda: "ready 0" in (tmp_path / "out").read_text(), SOON_S * 2)
        os.kill(process.pid, signal.SIGHUP)
        assert process.wait(SOON_S) == 0
    finally:
        process.kill()
        process.wait()
    assert "done" in (tmp_path / "out").read_text()


class Terminal:
    """A command in a session of its own with a real controlling terminal."""

    def __init__(self, words: list[str], env: dict[str, str], cwd: Path) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execvpe(words[0], words, env)
        os.set_blocking(self.fd, False)
        self.output = ""

    def wait_for(self, text: str) -> None:
        assert eventually(lambda: text in self.read(), SOON_S * 2), self.output

    def read(self) -> str:
        with contextlib.suppress(OSError):
            self.output += os.read(self.fd, 1 << 16).decode(errors="replace")
        return self.output

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait(self) -> int:
        done: list[int] = []

        def ended() -> bool:
            self.read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                done.append(os.waitstatus_to_exitcode(status))
            return bool(done)

        assert eventually(ended, SOON_S), self.output
        return done[0]


@pytest.fixture
def terminal(launcher: Launcher, tmp_path: Path) -> Callable[..., Terminal]:
    def open_terminal(*arguments: object, env: dict[str, str] | None = None) -> Terminal:
        return Terminal(
            command(tmp_path / "runs", *arguments),
            launcher.environment({"TERM": "xterm", **(env or {})}),
            tmp_path,
        )

    return open_terminal


def test_ctrl_c_on_a_terminal_is_one_request(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    tty = terminal("--nproc-per-node", 2, script(tmp_path, HANDLES), "SIGINT")
    tty.wait_for("ready 0")
    tty.wait_for("ready 1")
    tty.type("\x03")
    assert tty.wait() == 130
    assert "rank 0 got SIGINT" in tty.output
    assert "rank 1 got SIGINT" in tty.output
    assert "asked to stop again" not in tty.output
    assert "\x1b[" in tty.output, "colours, as this is a terminal"


def test_a_closed_terminal_stops_the_job(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    tty = terminal(script(tmp_path, WAITS))
    tty.wait_for("ready 0")
    os.close(tty.fd)

    def ended() -> bool:
        return os.waitpid(tty.pid, os.WNOHANG)[0] == tty.pid

    assert eventually(ended, SOON_S)
    assert eventually(lambda: not is_alive(tty.pid), GONE_S)
