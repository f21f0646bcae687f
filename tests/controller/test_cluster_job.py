"""The shell around the policy of many nodes: whenever it is killed, the next one goes on where it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from closeranks.cluster_events import (
    ClusterEvent,
    NodeAttached,
    NodeHeartbeat,
    NodeStarted,
    OpenStore,
    StartNode,
    StoreOpened,
    Tick,
)
from closeranks.config import BudgetConfig, ClusterConfig
from closeranks.controller import cluster_job
from closeranks.controller.cluster_job import ClusterJob
from closeranks.controller.cluster_journal import STATE_KIND
from closeranks.controller.journal import Record, read
from closeranks.errors import ConfigError, JournalError
from closeranks.events import Progress, RunStarted
from closeranks.policy.cluster import ClusterState, durable, restore
from closeranks.policy.cluster_state import Link

from .cluster_walks import CONFIG, walk

BUDGET = BudgetConfig(default_max_restarts=10_000)
TWO = ClusterConfig(min_nodes=2, max_nodes=2)
BEGIN: list[ClusterEvent] = [
    RunStarted(),
    NodeAttached("a", "s1", 2, "a"),
    NodeAttached("b", "s1", 2, "b"),
    StoreOpened("a", 0, "a:1"),
    NodeStarted("a", 0),
    NodeStarted("b", 0),
]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def settled(job: ClusterJob) -> ClusterJob:
    """With all its records, those that wait for a tick too, on a disk that other tests keep busy."""
    job.handle(Tick())
    assert job._journal.flush(20.0)
    return job


def crashed(job: ClusterJob, path: Path, folder: Path) -> Path:
    """What the disk holds while its writer still lives: all that a SIGKILL would leave."""
    settled(job)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for part in path.parent.glob(f"{path.name}*"):
        if not part.name.endswith("lock"):
            shutil.copy(part, folder / part.name)
    return folder / path.name


def reopened(
    job: ClusterJob, path: Path, folder: Path, clock: Clock, config: ClusterConfig = TWO
) -> ClusterJob:
    return ClusterJob.open(crashed(job, path, folder), config, BUDGET, clock=clock)


def records_of(job: ClusterJob, path: Path) -> list[Record]:
    settled(job)
    return list(read(path))


def begin(path: Path, clock: Clock) -> ClusterJob:
    job = ClusterJob.open(path, TWO, BUDGET, clock=clock)
    for event in BEGIN:
        job.handle(event)
    return job


@pytest.mark.parametrize("count", range(len(BEGIN) + 1))
def test_a_crash_after_any_fact_goes_on_from_it(path: Path, tmp_path: Path, clock: Clock, count: int) -> None:
    job = ClusterJob.open(path, TWO, BUDGET, clock=clock)
    for event in BEGIN[:count]:
        job.handle(event)
    clock.now_s += 5
    next_one = reopened(job, path, tmp_path / "crash", clock)
    assert next_one.resumed
    assert next_one.state == restore(durable(job.state), clock.now_s)
    next_one.close()
    job.close()


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1))
def test_a_crash_at_any_point_of_a_walk_goes_on_from_there(tmp_path: Path, seed: int) -> None:
    """Every so often the files are copied as they are, and opened as the next controller would."""
    clock, path = Clock(), tmp_path / f"{seed}" / "journal.db"
    shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.mkdir()
    jobs = [ClusterJob.open(path, CONFIG, BUDGET, clock=clock)]
    facts = 0

    def saw(event: ClusterEvent, state: ClusterState, now_s: float) -> None:
        nonlocal facts
        facts += 1
        job = jobs[-1]
        clock.now_s = now_s
        if job.state.finished:
            return
        job.handle(event)
        if facts % 23 == 0:
            next_one = reopened(job, path, path.parent / "crash", clock, CONFIG)
            assert next_one.state == restore(durable(job.state), now_s)
            next_one.close()

    walk(seed, 60, saw)
    assert facts > 23
    jobs[-1].close()


def test_one_crash_after_the_other_forgets_nothing(path: Path, tmp_path: Path, clock: Clock) -> None:
    job = begin(path, clock)
    for crash in range(3):
        expected = restore(durable(job.state), clock.now_s)
        next_one = reopened(job, path, tmp_path / f"{crash}", clock)
        job.close()
        assert next_one.resumed and next_one.state == expected
        next_one.handle(NodeAttached("a", "s1", 2, "a", running=0))
        next_one.handle(NodeAttached(f"spare{crash}", "s1", 2, "c"))
        job, path = next_one, tmp_path / f"{crash}" / path.name
    assert set(job.state.nodes) == {"a", "b", "spare0", "spare1", "spare2"}
    job.close()


def test_decision_and_state_can_be_read_when_handle_returns(path: Path, clock: Clock) -> None:
    job = begin(path, clock)
    records = records_of(job, path)
    assert [record.kind for record in records][:3] == ["controller_started", "decided", STATE_KIND]
    decided = [record for record in records if record.kind == "decided"]
    named = [[action["action"] for action in record.data["actions"]] for record in decided]
    assert named == [[OpenStore.__name__], ["Tell", StartNode.__name__]]  # one entry for both nodes
    assert decided[1].data["because"] == {
        "event": "StoreOpened", "node": "a", "generation": 0, "address": "a:1",
    }  # fmt: skip
    assert "generation 0 starts" in decided[1].data["reason"] and decided[1].generation == 0
    job.close()


def test_heartbeats_steps_and_ticks_cost_no_record(path: Path, clock: Clock) -> None:
    job = begin(path, clock)
    job.handle(Progress(0, 1))
    before = len(records_of(job, path))
    for step in range(2, 50):
        clock.now_s += 0.1
        for node in "ab":
            job.handle(NodeHeartbeat(node, "s1"))
        job.handle(Progress(0, step))
        job.handle(Tick())
    assert len(records_of(job, path)) == before
    job.close()


def test_nobody_s_heartbeat_counts_after_a_crash_until_it_attaches(
    path: Path, tmp_path: Path, clock: Clock
) -> None:
    job = begin(path, clock)
    assert job.holds_lease("a", "s1") and not job.holds_lease("a", "s2") and not job.holds_lease("x", "s1")
    next_one = reopened(job, path, tmp_path / "crash", clock)
    assert next_one.state.nodes["a"].link is Link.AWAITED and not next_one.holds_lease("a", "s1")
    assert next_one.handle(NodeAttached("a", "s1", 2, "a", running=0)) == ()
    assert next_one.holds_lease("a", "s1")
    next_one.close()
    job.close()


def begin_on_a_host_that_is_up_for_days(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> ClusterJob:
    clock.now_s = 1_000_000.0
    monkeypatch.setattr(cluster_job.time, "time_ns", lambda: 10**18)
    monkeypatch.setattr(cluster_job.time, "monotonic_ns", lambda: 10**15)
    return settled(begin(path, clock))


def boot_anew(after_s: float, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """So much later by the wall clock; the new monotonic one shows 40 s."""
    monkeypatch.setattr(cluster_job.time, "time_ns", lambda: 10**18 + int(after_s * 1e9))
    monkeypatch.setattr(cluster_job.time, "monotonic_ns", lambda: 40 * 10**9)
    monkeypatch.setattr(cluster_job, "boot_id", lambda: "another boot")
    clock.now_s = 40.0


def test_another_boot_has_another_clock(
    path: Path, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is 30 s old by the wall clock is 30 s old on the new monotonic clock, whatever that shows."""
    job = begin_on_a_host_that_is_up_for_days(path, clock, monkeypatch)
    boot_anew(30.0, clock, monkeypatch)
    next_one = reopened(job, path, tmp_path / "crash", clock)
    assert next_one.state.world is not None
    assert next_one.state.world.since_s == pytest.approx(10.0)
    next_one.handle(NodeAttached("a", "s1", 2, "a", running=0))
    again = reopened(next_one, tmp_path / "crash" / path.name, tmp_path / "again", clock)
    assert again.state.world is not None and again.state.world.since_s == pytest.approx(10.0), "shifted once"
    for opened in (job, next_one, again):
        opened.close()


def test_another_boot_whose_first_controller_dies_at_once_has_another_clock_still(
    path: Path, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = begin_on_a_host_that_is_up_for_days(path, clock, monkeypatch)
    boot_anew(30.0, clock, monkeypatch)
    next_one = reopened(job, path, tmp_path / "crash", clock)
    again = reopened(next_one, tmp_path / "crash" / path.name, tmp_path / "again", clock)
    for opened in (job, next_one, again):
        opened.close()
    assert again.state.world is not None and again.state.world.since_s == pytest.approx(10.0)


def test_a_wall_clock_that_went_back_ages_nothing(
    path: Path, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = begin(path, clock)
    monkeypatch.setattr(cluster_job, "boot_id", lambda: "another boot")
    monkeypatch.setattr(cluster_job.time, "time_ns", lambda: 0)
    monkeypatch.setattr(cluster_job.time, "monotonic_ns", lambda: 10**9)
    mono_s = job.state.world.since_s if job.state.world is not None else 0.0
    last = records_of(job, path)[-1]
    clock.now_s = 1.0
    next_one = reopened(job, path, tmp_path / "crash", clock)
    assert next_one.state.world is not None
    assert next_one.state.world.since_s == pytest.approx(mono_s + 1.0 - last.mono_ns / 1e9)
    next_one.close()
    job.close()


def test_two_controllers_of_one_journal_are_one_too_many(path: Path, clock: Clock) -> None:
    job = begin(path, clock)
    with pytest.raises(JournalError):
        ClusterJob.open(path, TWO, BUDGET, clock=clock)
    job.close()


def test_settings_that_can_t_work_are_refused_before_anything_is_written(path: Path) -> None:
    with pytest.raises(ConfigError):
        ClusterJob.open(path, ClusterConfig(min_nodes=3, max_nodes=2), BUDGET)
    assert not path.exists()


def test_a_journal_of_a_controller_that_decided_nothing_is_a_beginning(path: Path, clock: Clock) -> None:
    ClusterJob.open(path, TWO, BUDGET, clock=clock).close()
    job = ClusterJob.open(path, TWO, BUDGET, clock=clock)
    assert not job.resumed and job.journal_problem is None
    job.close()
