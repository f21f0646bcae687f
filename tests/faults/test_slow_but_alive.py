"""What is slow and alive is never killed: no incident, whatever is suspected on the way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "train.py"
# Seconds that look like for ever. 6 is well past every suspicion; minutes, as in life, are for who has them.
SLOW_S = float(os.environ.get("CLOSERANKS_TEST_SLOW_S", "6"))


def no_incident(runs: Path) -> bool:
    return not list(runs.glob("*/incidents/[0-9]*"))


WORKERS = ("--workers", "2")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("what", "flags", "slow_s"),
    [
        ("evaluate-busy", (), SLOW_S),
        # A worker of the DataLoader sleeps past several turns of 5 s in which the loader looks for its data.
        ("data", WORKERS, max(SLOW_S, 12.0)),
        pytest.param("evaluate-asleep", (), SLOW_S, marks=pytest.mark.slow),
        pytest.param("checkpoint", (), SLOW_S, marks=pytest.mark.slow),
        pytest.param("first-step", (), SLOW_S, marks=pytest.mark.slow),
        pytest.param("uneven", (), SLOW_S, marks=pytest.mark.slow),
        pytest.param("data", (), SLOW_S, marks=pytest.mark.slow),
        pytest.param("data", (*WORKERS, "--ahead"), max(SLOW_S, 20.0), marks=pytest.mark.slow),
        pytest.param(
            "data",
            (*WORKERS, "--persistent"),
            max(SLOW_S, 20.0),
            marks=[pytest.mark.slow, pytest.mark.exhaustive],
        ),
        pytest.param("data-busy", WORKERS, SLOW_S, marks=pytest.mark.slow),
        pytest.param(
            "data-busy", (*WORKERS, "--ahead"), SLOW_S, marks=[pytest.mark.slow, pytest.mark.exhaustive]
        ),
        pytest.param("evaluate-asleep", WORKERS, SLOW_S, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_slow_is_not_dead(
    what: str, flags: tuple[str, ...], slow_s: float, run_closeranks: Callable[..., object], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    done = run_closeranks(
        *("run", "--nproc-per-node", "3", "--log-dir", runs, SCRIPT, *flags),
        *("--steps", "40", "--checkpoint", tmp_path / "c.pt", "--slow", what, "--slow-s", str(slow_s)),
        timeout_s=120 + 3 * slow_s,
    )
    assert done.returncode == 0, done.stderr
    assert no_incident(runs), done.stderr
    if what.startswith(("evaluate", "data")):
        assert "suspicious" in done.stderr and "all clear" in done.stderr, done.stderr


def ranks_of(running: object) -> list[int]:
    """The pids of the ranks, from their titles."""
    found = []
    for pid in running.pids():
        try:
            if Path(f"/proc/{pid}/comm").read_text().startswith("rank "):
                found.append(pid)
        except OSError:
            continue
    return sorted(found)


def wait_until_training(running: object) -> None:
    running.wait_for("first step after", 60)


@pytest.mark.torch
@pytest.mark.slow
def test_a_suspended_job_goes_on_when_it_is_continued(
    start_closeranks: Callable[..., object], tmp_path: Path
) -> None:
    """Every process of the job, agent included, as a scheduler's suspend or a closed laptop lid does it."""
    runs = tmp_path / "runs"
    running = start_closeranks(
        *("run", "--nproc-per-node", "2", "--log-dir", runs, SCRIPT),
        *("--steps", "400", "--checkpoint", tmp_path / "c.pt"),
    )
    wait_until_training(running)
    pids = running.pids()
    for number, seconds in ((signal.SIGSTOP, 5), (signal.SIGCONT, 0)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # spares are renewed after the first step
                os.kill(pid, number)
        time.sleep(seconds)
    done = running.wait()
    assert done.returncode == 0, done.stderr
    assert no_incident(runs), done.stderr


@pytest.mark.torch
@pytest.mark.slow
def test_all_ranks_stopped_is_a_suspension_not_a_fault(
    start_closeranks: Callable[..., object], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    running = start_closeranks(
        *("run", "--nproc-per-node", "2", "--log-dir", runs, SCRIPT),
        *("--steps", "400", "--checkpoint", tmp_path / "c.pt"),
    )
    wait_until_training(running)
    ranks = ranks_of(running)
    assert len(ranks) == 2
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    done = running.wait()
    assert done.returncode == 0, done.stderr
    assert no_incident(runs), done.stderr


@pytest.mark.torch
@pytest.mark.slow
def test_a_debugger_may_hold_a_rank(start_closeranks: Callable[..., object], tmp_path: Path) -> None:
    """A tracer (here: strace's way, PTRACE_SEIZE and stop, by gdb where it is installed)."""
    import shutil

    gdb = shutil.which("gdb")
    if gdb is None:
        pytest.skip("needs gdb to trace a rank")
    runs = tmp_path / "runs"
    running = start_closeranks(
        *("run", "--nproc-per-node", "2", "--log-dir", runs, SCRIPT),
        *("--steps", "400", "--checkpoint", tmp_path / "c.pt"),
    )
    wait_until_training(running)
    command = [gdb, "-nx", "-batch", "-p", str(ranks_of(running)[0]), "-ex", "shell sleep 5", "-ex", "detach"]
    subprocess.run(command, check=False, capture_output=True, timeout=60)
    done = running.wait()
    assert done.returncode == 0, done.stderr
    assert no_incident(runs), done.stderr


@pytest.mark.torch
@pytest.mark.slow
def test_a_profiler_may_look_at_a_rank(start_closeranks: Callable[..., object], tmp_path: Path) -> None:
    """py-spy stops its process a hundred times a second; with native frames, for longer each time."""
    tool = Path(sys.executable).with_name("py-spy")
    if not tool.exists():
        pytest.skip("needs py-spy beside the interpreter")
    runs = tmp_path / "runs"
    running = start_closeranks(
        *("run", "--nproc-per-node", "2", "--log-dir", runs, SCRIPT),
        *("--steps", "400", "--checkpoint", tmp_path / "c.pt"),
    )
    wait_until_training(running)
    rank, out = str(ranks_of(running)[0]), tmp_path / "profile"
    command = [
        tool,
        "record",
        "--native",
        "--pid",
        rank,
        "--duration",
        "5",
        "--format",
        "raw",
        "--output",
        out,
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    done = running.wait()
    assert done.returncode == 0, done.stderr
    assert out.stat().st_size > 0, "it saw nothing"
    assert no_incident(runs), done.stderr
