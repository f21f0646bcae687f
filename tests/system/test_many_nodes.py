"""Jobs over several nodes, all of them on this host: whatever is killed, frozen or drained, the parameters in
the end are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Finished, eventually
from system.cluster_rig import SLOW_S, Cluster, write_script
from system.rig import Start, is_alive

pytestmark = pytest.mark.torch

Make = Callable[..., Cluster]


@pytest.fixture
def cluster(start: Start, tmp_path: Path) -> Make:
    """``cluster(*flags) -> Cluster`` whose ranks 0 and 1 have made their first steps."""

    def make(*flags: object) -> Cluster:
        path = write_script(tmp_path / "train")
        flags = ("--engine", "local", "--nproc-per-node", 1, *(flags or ("--nnodes", 2, "--spares", 1)))
        made = Cluster(start(*flags, path, torch=True, cwd=path.parent), path.parent)
        made.wait_for_step(0, 5)
        return made

    return make


@pytest.fixture
def drain(run_closeranks: Callable[..., Finished], runs: Path) -> Callable[..., Finished]:
    return lambda node, *flags: run_closeranks("drain", node, "--runs-dir", runs, *flags)


def test_undisturbed(cluster: Make) -> None:
    job = cluster()
    assert set(job.nodes()) >= {"node0", "node1", "node2"}
    target = job.finish()
    assert job.generations == [0]
    job.assert_no_step_twice(target)


def test_a_rank_that_is_killed_is_named_and_all_start_anew(
    cluster: Make, run_closeranks: Callable[..., Finished], runs: Path
) -> None:
    job = cluster()
    os.kill(job.rank(1), signal.SIGKILL)
    job.wait_for_step(1)
    job.told("running again: generation 1")
    job.finish()
    job.assert_nothing_lost()
    assert job.generations == [0, 1] and "1 incident" in job.job.running.stderr
    assert "SIGKILL" in job.job.running.stderr
    report = run_closeranks("report", "--runs-dir", runs, "latest")
    assert report.returncode == 0 and "rank 1" in report.stdout, report.stdout


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_node_that_is_killed_whole_is_replaced_by_the_spare(cluster: Make, rank: int) -> None:
    job = cluster()
    node, others = job.node_of_rank(rank), set(job.nodes())
    job.signal_node(node, signal.SIGKILL)
    job.wait_for_step(1)
    assert job.node_of_rank(rank) != node and job.node_of_rank(rank) in others
    job.finish()
    job.assert_nothing_lost()
    assert f"node {node}" in job.job.running.stderr


@pytest.mark.slow
def test_a_node_that_is_frozen_is_fenced_and_dies_when_it_wakes(cluster: Make) -> None:
    job = cluster()
    node = job.node_of_rank(1)
    frozen = job.signal_node(node, signal.SIGSTOP)
    old_rank = job.rank(1)
    assert old_rank in frozen
    job.wait_for_step(1)
    assert is_alive(old_rank), "frozen, it could not be killed by its own agent"
    job.signal_node(node, signal.SIGCONT)
    assert eventually(lambda: not is_alive(old_rank), 10.0)
    job.told(f"node {node} is fenced")
    newest = job.newest
    assert eventually(lambda: job.newest > newest + 5, SLOW_S)
    job.finish()
    job.assert_nothing_lost()
    assert job.generations == [0, 1], "what woke up disturbed nobody"


@pytest.mark.slow
def test_a_controller_that_is_killed_again_and_again_costs_nothing(cluster: Make) -> None:
    job = cluster()
    goes_on = "a new controller goes on with this job"
    for count in range(1, 4):
        newest = job.newest
        job.kill_controller()
        assert eventually(lambda count=count: job.job.running.stderr.count(goes_on) == count, SLOW_S)
        assert eventually(lambda newest=newest: job.newest > newest + 20, SLOW_S), "the ranks stopped"
    target = job.finish()
    assert job.generations == [0]
    job.assert_no_step_twice(target)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_controller_that_is_killed_before_it_is_there_again_costs_nothing_either(cluster: Make) -> None:
    job = cluster()
    for _ in range(5):
        job.kill_controller()
    job.told("a new controller goes on with this job")
    newest = job.newest
    assert eventually(lambda: job.newest > newest + 200, SLOW_S), "the ranks stopped"
    target = job.finish()
    assert job.generations == [0]
    job.assert_no_step_twice(target)


@pytest.mark.slow
def test_a_controller_that_was_killed_can_still_replace_a_node(cluster: Make) -> None:
    job = cluster()
    job.kill_controller()
    job.told("a new controller goes on with this job")
    newest = job.newest
    assert eventually(lambda: job.newest > newest + 100, SLOW_S)  # agents have attached by then
    job.signal_node(job.node_of_rank(1), signal.SIGKILL)
    job.wait_for_step(1)
    job.finish()
    job.assert_nothing_lost()


@pytest.mark.slow
def test_all_nodes_can_be_drained_one_after_the_other_without_a_step_done_twice(
    cluster: Make, drain: Callable[..., Finished]
) -> None:
    job = cluster()
    for generation, rank in enumerate((0, 1), start=1):
        node = job.node_of_rank(rank)
        done = drain(node, "--reason", "firmware")
        assert done.returncode == 0 and f"node {node} drains" in done.stdout, done.stderr
        job.wait_for_step(generation)
        assert eventually(lambda node=node: node not in job.nodes(), SLOW_S), "its agent ends"
        newest = job.newest
        assert eventually(lambda newest=newest: job.newest > newest + 100, SLOW_S)  # a new spare comes
    target = job.finish()
    assert job.generations == [0, 1, 2]
    job.assert_no_step_twice(target)
    assert "0 incidents" in job.job.running.stderr


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_drain_without_a_spare_shrinks_the_job_at_its_deadline(
    cluster: Make, drain: Callable[..., Finished]
) -> None:
    job = cluster("--nnodes", "1:2", "--engine-option", "hosts=left,right")
    node = job.node_of_rank(1)
    done = drain(node, "--deadline", "4")
    assert "there is no spare to take its place" in done.stdout
    assert eventually(lambda: len(job.steps(1)) > 5, SLOW_S), job.job.running.stderr[-3000:]
    assert job.steps(1, rank=1) == [], "one rank is left"
    job.assert_nothing_lost()
    (job.folder / "target").write_text("0")
    assert job.job.running.wait(SLOW_S).returncode == 0
    job.job.assert_gone()


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)]
)
def test_a_signal_ends_all_nodes_and_leaves_no_process(cluster: Make, number: int) -> None:
    job = cluster()
    os.kill(job.job.guard, number)
    assert job.job.running.wait(SLOW_S).returncode == 128 + number
    job.job.assert_gone()


@pytest.mark.slow
def test_the_death_of_what_the_user_started_ends_all_nodes(cluster: Make) -> None:
    job = cluster()
    os.kill(job.job.guard, signal.SIGKILL)
    job.job.running.process.wait(SLOW_S)
    assert eventually(lambda: not job.job.running.pids(), 30.0), job.job.running.pids()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_node_that_is_told_to_leave_makes_way_for_the_spare(cluster: Make) -> None:
    job = cluster()
    node = job.node_of_rank(1)
    os.kill(job.nodes()[node], signal.SIGTERM)
    job.wait_for_step(1)
    assert eventually(lambda: node not in job.nodes(), SLOW_S)
    assert job.node_of_rank(1) != node
    target = job.finish()
    job.assert_no_step_twice(target)


@pytest.mark.slow
def test_over_tls_all_is_the_same_and_no_secret_is_left(cluster: Make) -> None:
    job = cluster("--nnodes", 2, "--spares", 1, "--engine-option", "listen=127.0.0.1")
    credentials = job.job.run_dir / "credentials"
    assert credentials.exists() and credentials.stat().st_mode & 0o077 == 0
    job.kill_controller()
    job.told("a new controller goes on with this job")
    os.kill(job.rank(0), signal.SIGKILL)
    job.wait_for_step(1)
    job.finish()
    job.assert_nothing_lost()
    assert not credentials.exists()


@pytest.mark.slow
def test_a_fault_can_be_injected_into_a_rank_of_any_node(
    cluster: Make, run_closeranks: Callable[..., Finished], runs: Path
) -> None:
    job = cluster()
    done = run_closeranks("inject", "kill", "--rank", "1", "--runs-dir", runs)
    assert (done.returncode, done.stdout) == (0, "done: kill:rank=1 (rank 1, generation 0)\n"), done.stderr
    job.wait_for_step(1)
    job.finish()
    job.assert_nothing_lost()


@pytest.mark.slow
def test_a_controller_that_pauses_for_longer_than_a_lease_costs_one_restart_and_excludes_nobody(
    cluster: Make,
) -> None:
    job = cluster("--nnodes", 2)
    nodes, ranks = set(job.nodes()), {job.rank(0), job.rank(1)}
    paused = job.controller
    os.kill(paused, signal.SIGSTOP)
    gone = eventually(lambda: not any(map(is_alive, ranks)), SLOW_S)
    os.kill(paused, signal.SIGCONT)
    assert gone, "without a lease no rank lives on"
    job.wait_for_step(1)
    job.finish()
    job.assert_nothing_lost()
    assert job.generations == [0, 1]
    assert "excluded" not in job.job.running.stderr and nodes == {"node0", "node1"}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_node_and_the_controller_killed_at_once_are_survived_after_the_grace(cluster: Make) -> None:
    job = cluster()
    node = job.node_of_rank(1)
    controller = job.controller
    job.signal_node(node, signal.SIGKILL)
    os.kill(controller, signal.SIGKILL)
    job.wait_for_step(1)
    assert job.node_of_rank(1) != node
    job.finish()
    job.assert_nothing_lost()
    assert job.generations == [0, 1]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_signal_finds_a_controller_that_is_only_starting(cluster: Make) -> None:
    job = cluster()
    job.kill_controller()
    os.kill(job.job.guard, signal.SIGTERM)
    assert job.job.running.wait(SLOW_S).returncode == 143
    job.job.assert_gone()
