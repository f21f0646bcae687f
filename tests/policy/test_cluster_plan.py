"""Restarts that are planned: drains, and growing back. They cost nothing of the budget."""

from __future__ import annotations

import pytest
from cluster_lab import Lab, kills, only, running

from closeranks.cluster_events import (
    DrainReady,
    DrainRequested,
    EngineDrains,
    KillNode,
    NodeAttached,
    NodeLeft,
    OpenStore,
    PrepareDrain,
    ReleaseNode,
    RequestDenied,
    RequestNode,
    StartNode,
)
from closeranks.events import RunExit
from closeranks.policy.budget import Budget


def saved(lab: Lab, nodes: str) -> list:
    assert lab.state.world is not None
    return lab.feed(*[DrainReady(node, lab.state.world.generation) for node in nodes])


# --- with a spare -----------------------------------------------------------------------------------


def test_a_drain_with_a_spare_saves_restarts_and_releases():
    lab = running("ab", spares="x")
    drain = lab.feed(DrainRequested("b", 300.0, "maintenance"))
    assert only(drain, PrepareDrain) == [PrepareDrain("a", 0, 300.0), PrepareDrain("b", 0, 300.0)]
    assert saved(lab, "a") == []
    assert saved(lab, "b") == kills(0, "ab")
    assert lab.down("a", "b") == [OpenStore("a", 1)]
    actions = lab.open_store()
    assert [start.node for start in only(actions, StartNode)] == ["a", "x"]
    assert only(actions, ReleaseNode) == [ReleaseNode("b", "maintenance")]
    assert lab.state.job.budget == Budget()


def test_a_drain_that_does_not_get_to_save_ends_at_its_deadline():
    lab = running("ab", spares="x")
    lab.feed(DrainRequested("b", 30.0, "maintenance"))
    assert only(lab.wait(29.5), KillNode) == []
    assert lab.wait(0.5) == kills(0, "ab")


def test_the_engines_drain_has_the_usual_deadline():
    lab = running("ab", spares="x", drain_deadline_s=120.0)
    assert PrepareDrain("a", 0, 120.0) in lab.feed(EngineDrains("b", "scontrol"))


def test_the_engine_says_it_again_at_each_poll():
    lab = running("ab", spares="x", drain_deadline_s=120.0)
    lab.feed(EngineDrains("b", "scontrol"))
    before = lab.state
    lab.now_s += 60.0
    assert lab.feed(EngineDrains("b", "scontrol")) == []
    assert lab.state == before


def test_the_earlier_deadline_holds():
    lab = running("ab", spares="x")
    lab.feed(DrainRequested("b", 300.0, "maintenance"), DrainRequested("b", 10.0, "now"))
    lab.wait(9.5)
    assert lab.wait(0.5) == kills(0, "ab")


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("-inf"), float("nan")])
def test_a_deadline_that_is_none_is_now(deadline_s):
    lab = running("ab", spares="x")
    drain = lab.feed(DrainRequested("b", deadline_s, ""))
    assert only(drain, PrepareDrain) == [PrepareDrain("a", 0, 0.0), PrepareDrain("b", 0, 0.0)]
    assert lab.wait(0.5) == kills(0, "ab")


def test_a_spare_that_drains_is_released_at_once():
    lab = running("ab", spares="x")
    assert lab.feed(DrainRequested("x", 300.0, "maintenance")) == [ReleaseNode("x", "maintenance")]
    assert lab.attach("x") == []
    assert lab.fail("a") == kills(0, "ab")


def test_a_drain_of_a_node_that_nobody_knows_is_none():
    assert running("ab").feed(DrainRequested("z", 1.0, "")) == []


def test_orders_to_save_are_said_again_to_a_member_that_attaches_again():
    lab = running("ab", spares="x")
    lab.feed(DrainRequested("b", 300.0, "maintenance"))
    lab.now_s += 100.0
    assert lab.feed(NodeAttached("a", "s1", 2, "a:1", 0)) == [PrepareDrain("a", 0, 200.0)]


def test_ready_that_came_before_anybody_asked_is_none():
    lab = running("ab", spares="x")
    saved(lab, "ab")
    assert only(lab.feed(DrainRequested("b", 300.0, "")), KillNode) == []


def test_a_failure_during_a_drain_is_charged_and_takes_the_spare():
    lab = running("ab", spares="x")
    lab.feed(DrainRequested("b", 300.0, "maintenance"))
    lab.fail("a")
    lab.down("a", "b")
    assert [start.node for start in lab.start()] == ["a", "x"]
    assert lab.state.job.budget.restarts == 1


def test_rolling_drains_of_all_members_work_with_one_spare():
    lab = running("abc", spares="x")
    for number, node in enumerate("abc", 1):
        lab.feed(DrainRequested(node, 300.0, "update"))
        saved(lab, "".join(lab.members))
        lab.down(*lab.members)
        actions = lab.open_store()
        assert ReleaseNode(node, "update") in actions
        assert len(only(actions, StartNode)) == 3
        lab.silence(node)
        lab.wait(20.0)
        lab.attach(node, session=f"after {number}", ready=True)
    assert lab.members == ["x", "a", "b"]
    assert lab.state.job.budget == Budget()


def test_drains_of_all_members_at_once_work_with_one_spare_if_there_is_time():
    lab = running("abc", spares="x")
    for node in "abc":
        lab.feed(DrainRequested(node, 3000.0, "update"))
    for number in range(3):
        assert saved(lab, "".join(lab.members)) != []
        lab.down(*lab.members)
        (released,) = only(lab.open_store(), ReleaseNode)
        lab.silence(released.node)
        lab.wait(20.0)
        lab.attach(released.node, session=f"after {number}", ready=True)
    assert {lab.state.nodes[name].drain_due_s for name in lab.members} == {None}
    assert lab.state.job.budget == Budget()


# --- without a spare --------------------------------------------------------------------------------


def test_a_drain_without_a_spare_asks_for_one_and_begins_when_it_is_there():
    lab = running("ab")
    actions = lab.feed(DrainRequested("b", 300.0, "maintenance"))
    assert actions == [RequestNode(1, "1 of 2 nodes can be used")]
    assert lab.wait(100.0) == []
    assert lab.attach("x") == [PrepareDrain("a", 0, 200.0), PrepareDrain("b", 0, 200.0)]


def test_a_drain_without_a_spare_saves_before_its_deadline_and_goes_on_with_fewer():
    lab = running("ab", drain_prepare_s=60.0)
    lab.feed(DrainRequested("b", 300.0, "maintenance"), RequestDenied(1))
    assert only(lab.wait(239.5), PrepareDrain) == []
    assert only(lab.wait(0.5), PrepareDrain) == [PrepareDrain("a", 0, 60.0), PrepareDrain("b", 0, 60.0)]
    assert saved(lab, "ab") == kills(0, "ab")
    lab.feed(RequestDenied(1))
    assert lab.down("a", "b") == [OpenStore("a", 1), ReleaseNode("b", "maintenance")]
    assert [start.node for start in lab.start()] == ["a"]
    assert lab.state.job.budget == Budget()


def test_a_drain_below_the_least_number_of_nodes_ends_the_job_as_drained():
    lab = running("ab", min_nodes=2)
    lab.feed(DrainRequested("b", 30.0, "maintenance"), RequestDenied(1))
    assert only(lab.wait(30.0), KillNode) == kills(0, "ab")
    end = lab.finish(lab.down("a", "b"))
    assert end.exit_code == RunExit.DRAINED
    assert "1 of at least 2 nodes" in end.reason


def test_all_nodes_drained_end_the_job_as_drained():
    lab = running("ab")
    lab.feed(DrainRequested("a", 30.0, "maintenance"), DrainRequested("b", 30.0, "maintenance"))
    lab.feed(RequestDenied(2))
    lab.wait(30.0)
    assert lab.finish(lab.down("a", "b")).exit_code == RunExit.DRAINED


def test_a_drained_job_waits_for_a_node_that_the_engine_is_bringing():
    lab = running("ab", min_nodes=2)
    assert only(lab.feed(DrainRequested("b", 30.0, "maintenance")), RequestNode)
    lab.wait(30.0)
    lab.down("a", "b")
    assert not lab.state.finished
    assert lab.attach("c", ready=True) == [OpenStore("a", 1)]
    assert [start.node for start in lab.start()] == ["a", "c"]


def test_a_short_drain_leaves_half_of_its_time_to_a_spare_that_may_come():
    lab = running("ab", drain_prepare_s=60.0)
    lab.feed(DrainRequested("b", 20.0, "maintenance"), RequestDenied(1))
    assert only(lab.wait(9.5), PrepareDrain) == []
    assert only(lab.wait(0.5), PrepareDrain) == [PrepareDrain("a", 0, 10.0), PrepareDrain("b", 0, 10.0)]


def test_an_engine_that_has_no_node_is_asked_again_later_and_not_at_once():
    lab = running("ab", request_again_s=60.0)
    assert only(lab.feed(DrainRequested("b", 3000.0, "maintenance")), RequestNode)
    lab.feed(RequestDenied(1))
    assert only(lab.wait(59.0), RequestNode) == []
    assert len(only(lab.wait(2.0), RequestNode)) == 1


def test_a_failure_before_the_deadline_keeps_the_node_that_drains_until_then():
    lab = running("ab", min_nodes=2)
    lab.feed(DrainRequested("b", 300.0, "maintenance"))
    lab.fail("a")
    lab.down("a", "b")
    starts = lab.start()
    assert [start.node for start in starts] == ["a", "b"]
    assert {start.store for start in starts} == {"a:29500"}


# --- growing back -----------------------------------------------------------------------------------


def small() -> Lab:
    """Generation 0 runs on a and b of at most three, and x is there and not warm yet."""
    lab = running("ab", max_nodes=3, grow_back=True, grow_cooldown_s=600.0)
    lab.attach("x")
    return lab


def test_a_world_that_is_too_small_is_restarted_to_grow_after_the_cool_down_when_a_spare_is_warm():
    lab = running("ab", spares="x", max_nodes=3, grow_back=True, grow_cooldown_s=600.0)
    assert only(lab.wait(599.5), PrepareDrain) == []
    assert only(lab.wait(0.5), PrepareDrain) == [PrepareDrain("a", 0, 60.0), PrepareDrain("b", 0, 60.0)]
    assert saved(lab, "ab") == kills(0, "ab")
    lab.down("a", "b")
    assert [start.node for start in lab.start()] == ["a", "b", "x"]
    assert lab.state.job.budget == Budget()
    assert only(lab.wait(2000.0), PrepareDrain) == []


def test_a_spare_that_is_not_warm_is_no_reason_to_restart():
    assert only(small().wait(2000.0), PrepareDrain) == []


def test_a_world_of_full_size_is_left_alone():
    lab = running("ab", spares="x", grow_back=True)
    assert lab.wait(2000.0) == []


def test_a_node_that_leaves_while_the_others_save_is_a_failure_like_any():
    lab = running("ab", spares="x")
    lab.feed(DrainRequested("b", 300.0, "maintenance"))
    actions = lab.feed(NodeLeft("b", "s1", "could not wait"))
    assert only(actions, KillNode) == kills(0, "a")
    assert only(lab.down("a"), OpenStore) == [OpenStore("a", 1)]


def test_a_failure_after_the_planned_kill_is_its_consequence():
    lab = running("ab", spares="x")
    lab.feed(DrainRequested("b", 300.0, "maintenance"))
    saved(lab, "ab")
    assert lab.fail("a") == []
    lab.down("a", "b")
    assert lab.state.job.budget == Budget()
