"""A controller that died and came back: nothing is killed, nothing decided twice, nothing forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_lab import Lab, kills, only, running

from closeranks.cluster_events import (
    CheckHealth,
    DrainReady,
    DrainRequested,
    KillNode,
    NodeDown,
    NodeHeartbeat,
    NodeReady,
    NodeSucceeded,
    OpenStore,
    PrepareDrain,
    RequestNode,
    StopNode,
    Tick,
)
from closeranks.events import FailureKind, Progress, RunExit, StopRequested
from closeranks.policy.cluster import durable, restore
from closeranks.policy.cluster_state import Link, Stage, Standing


def crash(lab: Lab, *, away_s: float = 5.0, shift_s: float = 0.0) -> None:
    """The controller dies and comes back with what the journal held, ``away_s`` later."""
    lab.now_s += away_s + shift_s
    lab.beating = {}
    lab.state = restore(durable(lab.state), lab.now_s, shift_s)


@pytest.mark.parametrize("shift_s", [0.0, -5.0, 1e6])
def test_members_that_attach_again_in_time_go_on_as_if_nothing_had_been(shift_s):
    lab = running("ab", spares="x", reattach_wait_s=30.0)
    lab.wait(100.0)
    before = durable(lab.state)
    crash(lab, shift_s=shift_s)
    assert lab.wait(20.0) == []
    assert lab.attach("a", "b", running=0) == []
    assert lab.attach("x") == []
    assert lab.wait(100.0) == []
    assert lab.state.job.budget == before.job.budget
    assert lab.state.world is not None and before.world is not None
    assert lab.state.world.members == before.world.members
    assert lab.finish(lab.feed(NodeSucceeded("a", 0), NodeSucceeded("b", 0))).exit_code == RunExit.OK


def test_a_member_that_does_not_attach_within_the_grace_is_lost_and_fenced_after_it():
    lab = running("ab", spares="x", reattach_wait_s=30.0)
    crash(lab)
    lab.attach("a", running=0)
    lab.attach("x")
    assert lab.wait(29.5) == []
    assert lab.wait(0.5) == [KillNode("a", 0)]
    assert lab.down("a") == []
    assert lab.wait(0.5) == []
    assert lab.wait(0.5) == [OpenStore("a", 1)]
    assert [start.node for start in lab.start()] == ["a", "x"]


def test_a_member_whose_ranks_ended_meanwhile_fails_the_world():
    lab = running("ab", spares="x")
    crash(lab)
    lab.attach("a", running=0)
    assert lab.attach("b") == []
    assert lab.wait(1.5) == []
    assert lab.wait(0.5) == kills(0, "ab")


def test_a_member_that_says_how_its_ranks_ended_meanwhile_is_believed():
    lab = running("ab")
    crash(lab)
    lab.attach("a", "b")
    assert lab.fail("b", kind=FailureKind.EXCEPTION, startup=True, step=0, exit_code=4) == kills(0, "ab")
    assert lab.finish(lab.down("a", "b")).exit_code == 4


def test_success_while_nobody_listened_is_success():
    lab = running("ab")
    crash(lab)
    lab.attach("a", "b")
    end = lab.feed(NodeSucceeded("a", 0), NodeDown("a", 0), NodeSucceeded("b", 0))
    assert lab.finish(end).exit_code == RunExit.OK


def test_a_restarted_agent_waits_until_the_old_ones_grace_is_over():
    lab = running("ab", spares="x")
    crash(lab)
    lab.attach("a", running=0)
    lab.attach("b", session="s2")
    assert "b" not in lab.beating
    lab.wait(30.0)
    lab.down("a")
    lab.wait(1.0)
    lab.attach("b", session="s2")
    assert lab.state.nodes["b"].standing is Standing.EXCLUDED


def test_a_failure_that_was_decided_is_not_charged_again_and_its_kill_is_said_again():
    lab = running("ab")
    lab.fail("a")
    crash(lab)
    assert lab.attach("a", running=0) == [KillNode("a", 0)]
    assert lab.fail("a") == []
    assert lab.attach("b") == [KillNode("b", 0)]
    assert lab.down("a", "b") == [OpenStore("a", 1)]
    assert lab.state.job.budget.restarts == 1


def test_a_stop_that_was_decided_is_said_again():
    lab = running("ab")
    lab.feed(StopRequested("scancel", 15))
    crash(lab)
    assert lab.attach("a", running=0) == [StopNode("a", 0, 15)]
    lab.attach("b", running=0)
    assert lab.finish(lab.down("a", "b")).exit_code == 143


def test_a_generation_that_was_ordered_starts_once_its_nodes_are_back():
    lab = running("ab")
    lab.fail("a")
    lab.down("a", "b")
    crash(lab)
    assert lab.attach("b") == []
    assert lab.attach("a") == [OpenStore("a", 1)]
    assert [start.generation for start in lab.start()] == [1, 1]


@pytest.mark.parametrize("away_s", [5.0, 3600.0])
def test_nodes_have_their_grace_to_attach_before_there_are_too_few(away_s):
    lab = running("ab", min_nodes=2, join_timeout_s=60.0, reattach_wait_s=30.0)
    lab.fail("a")
    lab.down("a", "b")
    crash(lab, away_s=away_s)
    assert lab.wait(29.0) == []
    lab.attach("a", "b")
    assert [start.generation for start in lab.start()] == [1, 1]


def test_what_a_lost_nodes_agent_may_do_by_now_is_waited_for_anew():
    """It may have seen the controller die before its lease was over, and have gone on for the grace."""
    lab = running("ab", spares="x", reattach_wait_s=30.0)
    lab.silence("b")
    lab.wait(2.0)
    lab.down("a")
    crash(lab)
    lab.attach("a", "x")
    assert only(lab.wait(30.5), OpenStore) == []
    assert only(lab.wait(0.5), OpenStore) == [OpenStore("a", 1)]


def test_exclusions_drains_and_requests_are_remembered():
    lab = running("ab", drain_prepare_s=60.0)
    lab.silence("b")
    lab.wait(2.0)
    lab.down("a")
    lab.wait(1.0)
    assert lab.state.requested == 1
    lab.attach("b", session="s2")
    crash(lab, away_s=100.0, shift_s=1000.0)
    assert only(lab.attach("a"), RequestNode) == []
    assert lab.attach("b", session="s2") == [CheckHealth("b", "no heartbeat for 2 s", 1)]


def test_a_drain_goes_on_where_it_was():
    lab = running("ab", spares="x")
    lab.feed(DrainRequested("b", 300.0, "maintenance"), DrainReady("a", 0))
    crash(lab, away_s=10.0)
    assert lab.attach("a", running=0) == []
    assert lab.attach("b", running=0) == [PrepareDrain("b", 0, 290.0)]
    lab.attach("x")
    assert lab.feed(DrainReady("b", 0)) == kills(0, "ab")
    assert lab.state.job.budget.restarts == 0


def test_a_second_crash_before_all_are_back_waits_again():
    lab = running("ab", reattach_wait_s=30.0)
    crash(lab)
    lab.attach("a", running=0)
    lab.wait(20.0)
    crash(lab)
    assert lab.wait(29.0) == []
    assert {node.link for node in lab.state.nodes.values()} == {Link.AWAITED}
    assert lab.attach("a", "b", running=0) == []


def test_what_belongs_into_the_journal_does_not_change_with_heartbeats_ticks_and_steps():
    lab = running("ab")
    lab.feed(Progress(0, 1))
    before = durable(lab.state)
    lab.now_s += 1.0
    lab.feed(NodeHeartbeat("a", "s1"), NodeHeartbeat("b", "s1"), Tick(), Progress(0, 2))
    assert durable(lab.state) == before
    lab.feed(NodeReady("a", "s1"))
    assert durable(lab.state) != before
    assert durable(durable(lab.state)) == durable(lab.state)


def test_restoring_decides_nothing():
    lab = running("ab")
    lab.fail("a")
    state = durable(lab.state)
    restored = restore(state, 100.0)
    assert restored.job == state.job
    assert restored.world is not None and restored.world.stage is Stage.ENDING
    same = {"nodes": {}, "world": None, "ticked_at_s": 0.0, "denied_until_s": 0.0}
    assert replace(restored, **same) == replace(state, **same)
