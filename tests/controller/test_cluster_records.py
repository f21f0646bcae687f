"""The shell around the policy of many nodes: what is in the journal when, and going on from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from closeranks.cluster_events import (
    KillNode,
    NodeAttached,
    NodeDown,
    NodeGone,
    NodeStarted,
    OpenStore,
    StartNode,
    StoreOpened,
    Tick,
)
from closeranks.config import BudgetConfig, ClusterConfig
from closeranks.controller.cluster_job import ClusterJob
from closeranks.controller.cluster_journal import STATE_KIND, StateDiary, read_state
from closeranks.controller.journal import MAX_DATA_BYTES, Record, read
from closeranks.controller.progress_board import ProgressBoard
from closeranks.controller.sessions import NodeProgress
from closeranks.events import RunStarted
from closeranks.plain import to_plain
from closeranks.policy.cluster import initial
from closeranks.policy.cluster_state import ClusterState, Link, Node, Stage, with_node

CONFIG = ClusterConfig(min_nodes=3, max_nodes=3, spares=1)
NAMES = ("a", "b", "c", "d")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def job(path: Path) -> Iterator[ClusterJob]:
    opened = ClusterJob.open(path, CONFIG, BudgetConfig(), clock=Clock())
    opened.handle(RunStarted())
    yield opened
    opened.close()


def run(job: ClusterJob) -> None:
    for name in NAMES:
        job.handle(NodeAttached(name, f"{name}-1", 2, "127.0.0.1"))
    job.handle(StoreOpened("a", 0, "127.0.0.1:1"))
    for name in NAMES[:3]:
        job.handle(NodeStarted(name, 0))


def states(path: Path) -> list[Record]:
    return [record for record in read(path) if record.kind == STATE_KIND]


def state_on_disk(path: Path) -> ClusterState:
    state = read_state(states(path), initial(CONFIG, BudgetConfig()))
    assert state is not None
    return state


def decisions(path: Path) -> list[dict[str, Any]]:
    return [record.data for record in read(path) if record.kind == "decided"]


def test_what_nothing_follows_from_is_written_with_the_next_decision(job: ClusterJob, path: Path) -> None:
    run(job)
    assert KillNode("a", 0) in job.handle(NodeGone("b", "no power", "b-1"))
    written = len(states(path))
    assert job.handle(NodeDown("a", 0)) == ()
    assert len(states(path)) == written
    assert job.handle(NodeDown("c", 0)) == (OpenStore("a", 1),)
    world = state_on_disk(path).world
    assert world is not None and world.stage is Stage.ENDED
    assert all(member.down for member in world.members.values())


def test_what_nothing_follows_from_is_written_at_the_next_tick(job: ClusterJob, path: Path) -> None:
    job.handle(NodeAttached("a", "a-1", 2, "127.0.0.1"))
    job.handle(Tick())
    assert state_on_disk(path).nodes["a"].session == "a-1"
    written = len(states(path))
    job.handle(Tick())
    assert len(states(path)) == written, "nothing is new"


def test_the_same_order_for_many_nodes_is_one_entry(job: ClusterJob, path: Path) -> None:
    run(job)
    starts = [entry for entry in decisions(path)[-1]["actions"] if entry["action"] == "StartNode"]
    assert [(entry["node"], entry["node_rank"], entry["generation"]) for entry in starts] == [
        (["a", "b", "c"], [0, 1, 2], 0)
    ]
    job.handle(NodeGone("a", "no power", "a-1"))
    kills = [entry for entry in decisions(path)[-1]["actions"] if entry["action"] == "KillNode"]
    assert kills == [{"action": "KillNode", "node": ["b", "c"], "generation": 0}]


def test_a_controller_that_was_killed_is_followed_by_one_that_knows_all(job: ClusterJob, path: Path) -> None:
    run(job)
    job.handle(Tick())
    job.close()
    after = ClusterJob.open(path, CONFIG, BudgetConfig(), clock=Clock())
    try:
        assert after.resumed
        before, world = job.state.world, after.state.world
        assert before is not None and world is not None and world.members == before.members
        assert {node.link for node in after.state.nodes.values()} == {Link.AWAITED}
        # A crowd that comes back: nothing is asked of the members, and the spare is there for the next world.
        for name in NAMES:
            running = 0 if name != "d" else None
            assert after.handle(NodeAttached(name, f"{name}-1", 2, "127.0.0.1", running)) == ()
        assert KillNode("a", 0) in after.handle(NodeGone("b", "no power", "b-1"))
        after.handle(NodeDown("a", 0))
        assert after.handle(NodeDown("c", 0)) == (OpenStore("a", 1),)
        starts = after.handle(StoreOpened("a", 1, "127.0.0.1:2"))
        assert [action.node for action in starts if isinstance(action, StartNode)] == ["a", "d", "c"]
    finally:
        after.close()


def test_a_state_of_many_nodes_comes_in_records_that_fit_and_is_read_back_as_it_was() -> None:
    fresh = initial(CONFIG, BudgetConfig())
    state = fresh
    for n in range(1500):
        name = f"{n:04}" + "n" * (250 if n % 2 else 10)
        node = Node(name, "s", 8, "127.0.0.1", 0.0, ready=n % 3 == 0, drain_reason="why" if n == 7 else "")
        state = with_node(state, node)
    found = list(StateDiary().changes(state))
    records = [Record(n, STATE_KIND, data, None, 0, 0) for n, data in enumerate(found)]
    assert len(records) > 2 and all(len(str(to_plain(data))) < MAX_DATA_BYTES for data in found)
    assert [data["last"] for data in found] == [False] * (len(found) - 1) + [True]
    assert read_state(records, fresh) == state
    assert read_state(records[:-1], fresh) is None, "what has no last record never happened"


def test_the_slowest_node_says_how_far_the_job_has_come() -> None:
    noted: list[str] = []
    board = ProgressBoard(lambda kind, _data, _generation: noted.append(kind))
    board.begin(0, ["a", "b"])

    def take(node: str, step: int, *, begun: bool = True) -> bool:
        return board.take(node, NodeProgress(0, step, step, 0, 0, begun))

    assert not take("a", 5) and board.step == 0
    assert not take("b", 0, begun=False) and "init_done" not in noted
    assert not take("b", 0) and noted.count("init_done") == 1
    assert take("b", 3) and board.step == 3
    assert not take("b", 9) and board.step == 5
    assert not take("a", 12) and board.step == 9
    assert not take("stranger", 1) and board.step == 9
    board.begin(1, ["a"])
    assert board.step == 0
    assert board.take("a", NodeProgress(1, 2, 2, 0, 0, True)) and board.step == 2
