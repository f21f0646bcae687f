"""What ends a job, and whether the screen, the exit code and the report say so truthfully."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import Finished
from system.rig import SOON_S, Run, Start, script


@pytest.mark.torch
def test_no_restart_means_none_even_where_a_rank_never_comes_to_init(run: Run, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, sys
        import torch.distributed as dist
        if os.environ["RANK"] == "1":
            sys.exit(0)
        dist.init_process_group("gloo")
        """,
    )
    done, job = run("--nproc-per-node", 2, "--max-restarts", 0, path, torch=True)
    assert done.returncode == 1
    assert "--max-restarts 0 allows no restart" in done.stderr
    assert "finished with exit code 0" in done.stderr
    assert [entry.name for entry in (job.run_dir / "logs").iterdir()] == ["0"]


def test_an_incident_that_is_shown_during_the_back_off_says_what_comes(run: Run, tmp_path: Path) -> None:
    """Killed before its first step: the next generation waits half a second."""
    path = script(
        tmp_path,
        """
        import os, signal
        if os.environ["CLOSERANKS_GENERATION"] == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSEGV)
        """,
    )
    done, job = run("--nproc-per-node", 2, path)
    assert done.returncode == 0
    screen = done.stderr[done.stderr.index("incident 0001") :].splitlines()
    assert screen[2].endswith("· generation 1 in 0.5 s"), done.stderr
    assert "no restart" not in done.stderr and "the job stops" not in done.stderr
    (verdict,) = [json.loads(file.read_text()) for file in job.run_dir.glob("incidents/*/verdict.json")]
    assert verdict["action"] != "no restart"


@pytest.mark.torch
def test_a_loop_without_an_optimizer_that_fails_later_is_not_said_to_fail_at_start_up(
    run: Run, tmp_path: Path
) -> None:
    path = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        for iteration in range(10):
            dist.all_reduce(torch.ones(1))
            if iteration == 5 and dist.get_rank() == 1:
                raise ValueError("a bad batch")
        """,
    )
    done, _ = run("--nproc-per-node", 2, path, torch=True)
    assert done.returncode == 1
    assert "failed before any step was seen" in done.stderr
    assert "after 6 collectives" in done.stderr
    assert "first step" not in done.stderr


@pytest.mark.parametrize("how", ["os._exit(3)", "sys.exit(3)"])
def test_no_error_is_promised_where_the_script_left_none(run: Run, tmp_path: Path, how: str) -> None:
    done, _ = run("--nproc-per-node", 2, script(tmp_path, f"import os, sys\n{how}"))
    assert done.returncode == 3
    assert "its own error" not in done.stderr
    assert "see incident 0001" in done.stderr
    assert "ended with exit code 3: no restart" in done.stderr


def test_the_line_about_a_restart_says_what_it_is_for(run: Run, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, signal
        if os.environ["CLOSERANKS_GENERATION"] == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    done, _ = run("--nproc-per-node", 2, path)
    assert done.returncode == 0
    assert "rank 1 was killed by SIGKILL: restarting all ranks" in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Where this test's run directories go: a disk of 300 KiB."""
    small = tmp_path / "runs"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=300k tmpfs '{small}' 2>/dev/null") != 0:
        pytest.skip("may not mount")
    yield small
    os.system(f"umount '{small}'")


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Nothing can be written there; what becomes free is taken as well."""
    over = threading.Event()

    def fill() -> None:
        with (disk / "filler").open("ab", 0) as file:
            while not over.wait(0.001):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(64))

    filler = threading.Thread(target=fill)
    filler.start()
    try:
        yield
    finally:
        over.set()
        filler.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_report_of_a_run_whose_disk_is_full_says_that_it_is_incomplete(
    start: Start, run_closeranks: Callable[..., Finished], tmp_path: Path, small_disk: Path
) -> None:
    path = script(
        tmp_path,
        """
        import os, signal, sys, time
        print("ready", os.environ["RANK"])
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        if os.environ["CLOSERANKS_GENERATION"] == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    job = start("--nproc-per-node", 2, path, tmp_path / "go")
    job.running.wait_for("ready 1")
    with filled(small_disk):
        time.sleep(0.2)
        (tmp_path / "go").touch()
        done = job.running.wait()
    report = " ".join(run_closeranks("report", "--log-dir", small_disk).stdout.split())
    told = json.loads(run_closeranks("report", "--log-dir", small_disk, "--json").stdout)
    assert done.returncode == 0, done.stderr
    assert "can't write" in done.stderr, "the incident's files"
    assert not re.search(r"^   files ", done.stderr, re.MULTILINE)
    missing = told["unrecorded_incidents"]
    if missing:  # else SQLite had begun its log anew, and found room in that
        assert re.search(r"The journal is incomplete: its last \d+ records could not be written \(", report)
        assert "1 incident is missing here" in report, report
    assert "1 interruption" in report
    assert "agent was killed" not in report and "interrupted" not in report
    assert (told["outcome"], told["exit_code"], missing <= 1) == ("finished", 0, True)


def test_a_run_whose_journal_has_its_end_leaves_nothing_else(run: Run, tmp_path: Path) -> None:
    done, job = run(script(tmp_path, "import sys; sys.exit(3)"))
    assert done.returncode == 3
    assert not (job.run_dir / "ending.json").exists()


def test_an_agent_that_was_killed_is_told_as_that(
    start: Start, run_closeranks: Callable[..., Finished], tmp_path: Path
) -> None:
    job = start(script(tmp_path, "import time; print('ready'); time.sleep(600)"))
    job.running.wait_for("ready")
    os.kill(job.agent, signal.SIGKILL)
    job.running.wait(SOON_S)
    report = " ".join(run_closeranks("report", "--log-dir", job.runs).stdout.split())
    assert "Interrupted: there is no final record: the agent was killed, or the machine went down." in report
