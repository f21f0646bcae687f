"""Real training under a leader that is killed or frozen, with another controller beside it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from closeranks.controller.journal import read
from conftest import eventually
from controller.etcd_rig import etcd_server

TRAIN = Path(__file__).parent.parent.parent / "examples" / "train_tiny.py"
STEPS = 150
pytestmark = [pytest.mark.slow, pytest.mark.torch]


@pytest.fixture
def server(tmp_path: Path):
    (tmp_path / "server").mkdir()
    with etcd_server(tmp_path / "server") as found:
        yield found


def digest(output: str) -> str:
    found = re.search(r"parameters sha256 ([0-9a-f]{64})", output)
    assert found, output[-2000:]
    return found[1]


def undisturbed(run_closeranks, folder: Path) -> str:
    folder.mkdir()
    flags = ("--nproc-per-node", "2", TRAIN, "--steps", str(STEPS))
    return digest(run_closeranks("run", *flags, cwd=folder).stdout)


def started(start_closeranks, server, folder: Path):
    folder.mkdir()
    return start_closeranks(
        "run", "--engine", "local", "--nnodes", "2", "--etcd", server.url, "--standbys", "1", TRAIN,
        "--steps", str(STEPS), "--sleep-ms", "100", cwd=folder,
    )  # fmt: skip


def leader(folder: Path) -> int:
    """Its pid; 0 while nobody leads."""
    try:
        return int(json.loads((folder / "closeranks-runs/latest/control.json").read_text())["pid"])
    except (OSError, ValueError):
        return 0


def test_a_leader_that_is_killed_costs_no_step(run_closeranks, start_closeranks, server, tmp_path):
    job = started(start_closeranks, server, tmp_path / "job")
    for kills in range(1, 3):
        job.wait_for(f"step {20 * kills} ")
        before = leader(tmp_path / "job")
        os.kill(before, signal.SIGKILL)
        assert eventually(lambda pid=before: leader(tmp_path / "job") not in (0, pid), 20.0), job.stderr
    done = job.wait()
    assert done.returncode == 0, done.stderr
    assert digest(done.stdout) == undisturbed(run_closeranks, tmp_path / "quiet")
    steps = [int(step) for step in re.findall(r"step (\d+) loss", done.stdout)]
    assert steps == [*range(20, STEPS + 1, 20), STEPS]  # each once
    assert done.stdout.count("started from scratch") == 1
    records = list(read(next((tmp_path / "job/closeranks-runs/latest").glob("journal.db"))))
    assert [r.generation for r in records if r.kind == "generation_starting"] == [0]
    assert [r.data["resumed"] for r in records if r.kind == "controller_started"] == [False, True, True]


def test_a_leader_that_is_frozen_is_replaced_and_does_no_harm(
    run_closeranks, start_closeranks, server, tmp_path
):
    job = started(start_closeranks, server, tmp_path / "job")
    job.wait_for("step 20 ")
    frozen = leader(tmp_path / "job")
    os.kill(frozen, signal.SIGSTOP)
    try:
        assert eventually(lambda: leader(tmp_path / "job") not in (0, frozen), 20.0), job.stderr
        job.wait_for("generation 1 starts", 90.0)
        time.sleep(2.0)
    finally:
        os.kill(frozen, signal.SIGCONT)
    done = job.wait()
    assert done.returncode == 0, done.stderr
    assert "this controller leads no more" in done.stderr
    assert digest(done.stdout) == undisturbed(run_closeranks, tmp_path / "quiet")
    assert "generation 2" not in done.stderr
    latest = tmp_path / "job/closeranks-runs/latest"
    (journal,) = latest.glob("controller-*/journal.db")  # as the frozen one had the first open
    assert "finished" in run_closeranks("report", journal.parent).stdout
