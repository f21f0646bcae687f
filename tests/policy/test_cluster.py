"""What members, stores and nodes say: when a generation ends, and that the next waits for proof."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_lab import Lab, failure, kills, only, running

from closeranks.cluster_events import (
    DrainReady,
    KillNode,
    NodeAttached,
    NodeDown,
    NodeFailed,
    NodeGone,
    NodeHealth,
    NodeHeartbeat,
    NodeLeft,
    NodeReady,
    NodeStarted,
    NodeSucceeded,
    OpenStore,
    StartNode,
    StopNode,
    StoreLost,
    StoreOpened,
    Tick,
)
from closeranks.config import BudgetConfig, ClusterConfig
from closeranks.errors import ConfigError
from closeranks.events import FailureKind, Progress, RunExit, StopRequested
from closeranks.policy.cluster import holds_lease, initial
from closeranks.policy.cluster_nodes import MAX_NAME_CHARS
from closeranks.policy.cluster_state import MAX_NODES, MAX_SLOTS, Stage, Standing

SIGTERM = 15
TERM = StopRequested("scancel", SIGTERM)


# --- the straight story -----------------------------------------------------------------------------


def test_a_job_ends_with_0_when_the_ranks_of_every_node_succeeded():
    lab = running("ab")
    assert lab.feed(NodeSucceeded("a", 0), NodeDown("a", 0)) == []
    lab.wait(60.0)
    assert lab.finish(lab.feed(NodeSucceeded("b", 0))).exit_code == RunExit.OK


def test_a_failure_kills_every_node_and_the_next_world_starts_when_all_are_down():
    lab = running("ab")
    assert lab.fail("a") == kills(0, "ab")
    assert lab.down("a") == []
    assert lab.wait(10.0) == []
    assert lab.down("b") == [OpenStore("a", 1)]
    assert [(start.node, start.generation, start.node_rank) for start in lab.start()] == [
        ("a", 1, 0),
        ("b", 1, 1),
    ]


def test_the_scripts_own_error_ends_the_job_with_its_code_once_all_are_down():
    lab = running("ab")
    error = {"kind": FailureKind.EXCEPTION, "step": 0, "startup": True, "exit_code": 3}
    assert lab.fail("b", "b", **error) == kills(0, "ab")
    assert lab.finish(lab.down("a", "b")).exit_code == 3


def test_the_back_off_is_part_of_the_orders():
    lab = running("ab")
    lab.fail("a", step=0)
    lab.now_s += 0.125
    lab.down("a", "b")
    assert {start.delay_s for start in lab.start()} == {0.5}


def test_progress_that_all_made_counts_when_a_node_is_lost():
    lab = running("ab", spares="cdefg", budget=BudgetConfig(no_progress_generations=1))
    lab.feed(Progress(0, 7))
    lab.feed(NodeLeft("b", "s1", "maintenance"))
    assert lab.down("a") == [OpenStore("a", 1)]
    lab.start()
    lab.feed(NodeLeft("c", "s1", "maintenance"))
    assert lab.finish(lab.down("a")).exit_code == RunExit.NO_PROGRESS


# --- stop requests ----------------------------------------------------------------------------------


def test_a_stop_goes_to_every_node_and_ends_as_a_shell_shows_it():
    lab = running("ab")
    assert lab.feed(TERM) == [StopNode("a", 0, SIGTERM), StopNode("b", 0, SIGTERM)]
    lab.down("a")
    assert lab.finish(lab.down("b")).exit_code == 143


def test_a_second_stop_kills():
    lab = running("ab")
    lab.feed(TERM)
    assert lab.feed(TERM) == kills(0, "ab")


def test_a_stop_while_nothing_runs_ends_the_job_at_once():
    lab = running("ab")
    lab.fail("a")
    lab.down("a", "b")
    assert lab.finish(lab.feed(TERM)).exit_code == 143


def test_a_stop_during_a_back_off_whose_orders_are_out_waits_for_every_node():
    lab = running("ab")
    lab.fail("a", step=0)
    lab.down("a", "b")
    assert only(lab.open_store(), StartNode)
    assert lab.feed(TERM) == [StopNode("a", 1, SIGTERM), StopNode("b", 1, SIGTERM)]
    assert lab.finish(lab.down("a", "b")).exit_code == 143


def test_a_stop_that_a_node_was_lost_after_ends_when_its_ranks_must_be_dead():
    lab = running("ab")
    lab.silence("b")
    lab.feed(TERM)
    assert lab.down("a") == []
    assert lab.wait(2.5) == []
    assert lab.finish(lab.wait(0.5)).exit_code == 143


# --- never two worlds -------------------------------------------------------------------------------


def test_a_lost_nodes_ranks_count_as_down_when_its_lease_has_been_over_for_the_margin():
    lab = running("ab", spares="c")
    lab.silence("b")
    assert lab.wait(1.5) == []
    assert lab.wait(0.5) == [KillNode("a", 0)]
    assert lab.down("a") == []
    assert lab.wait(0.5) == []
    assert lab.wait(0.5) == [OpenStore("a", 1)]
    assert [start.node for start in lab.start()] == ["a", "c"]


def test_nobody_is_lost_at_the_first_tick_after_a_pause_of_the_controller():
    lab = running("ab")
    lab.wait(1.0)
    lab.now_s += 60.0
    assert lab.feed(Tick()) == []
    assert lab.wait(30.0) == []


def test_a_session_that_is_gone_is_down_at_once_and_its_node_excluded():
    lab = running("ab", spares="c")
    assert lab.feed(NodeGone("b", "power", "s1")) == [KillNode("a", 0)]
    assert lab.state.nodes["b"].standing is Standing.EXCLUDED
    assert lab.down("a") == [OpenStore("a", 1)]
    assert lab.attach("b") == []
    assert not holds_lease(lab.state, "b", "s1")


def test_a_node_that_is_gone_in_who_knows_which_session_is_waited_for_like_a_lost_one():
    """The engine may speak of the agent before this one, twice even."""
    lab = running("ab", spares="c")
    lab.silence("b")
    assert lab.feed(NodeGone("b", "power")) == [KillNode("a", 0)]
    assert lab.down("a") == []
    assert lab.feed(NodeGone("b", "power")) == []
    assert lab.wait(2.5) == []
    assert lab.wait(0.5) == [OpenStore("a", 1)]


def test_a_lost_session_that_is_gone_is_not_waited_for_any_longer():
    lab = running("ab", spares="c", fence_margin_s=60.0)
    lab.silence("b")
    lab.wait(2.0)
    assert lab.down("a") == []
    assert lab.feed(NodeGone("b", "power", "s1")) == [OpenStore("a", 1)]
    assert lab.state.nodes["b"].exclusions == 1


def test_a_node_that_said_goodbye_is_down_and_not_excluded():
    lab = running("ab", spares="c")
    assert lab.feed(NodeLeft("b", "s1", "end of allocation")) == [KillNode("a", 0)]
    assert lab.down("a") == [OpenStore("a", 1)]
    assert lab.attach("b") == []
    assert not holds_lease(lab.state, "b", "s1")
    lab.attach("b", session="s2")
    assert lab.state.nodes["b"].standing is Standing.GOOD


def test_a_goodbye_of_an_older_session_is_dropped():
    lab = running("ab")
    assert lab.feed(NodeLeft("b", "s0", "late")) == []
    assert lab.wait(5.0) == []


def test_another_session_gets_no_lease_while_one_is_held():
    lab = running("ab")
    assert lab.feed(NodeAttached("b", "s2", 2, "b:2")) == []
    assert not holds_lease(lab.state, "b", "s2")
    assert lab.wait(5.0) == []


@pytest.mark.parametrize("session", ["s1", "s2"])
def test_a_lost_node_gets_no_lease_while_its_old_ranks_may_run(session):
    lab = running("ab", spares="c")
    lab.silence("b")
    lab.wait(2.0)
    assert lab.attach("b", session=session) == []
    assert not holds_lease(lab.state, "b", session)
    lab.down("a")
    lab.wait(1.0)
    lab.attach("b", session=session)
    assert holds_lease(lab.state, "b", session)
    assert lab.state.nodes["b"].standing is Standing.EXCLUDED


def test_heartbeats_after_the_end_of_a_lease_do_not_bring_it_back():
    lab = running("ab", spares="c")
    lab.silence("b")
    lab.wait(2.0)
    lab.down("a")
    lab.beating["b"] = "s1"
    assert lab.wait(1.0) == [OpenStore("a", 1)]
    assert not holds_lease(lab.state, "b", "s1")


def test_a_node_that_does_not_stop_is_cut_off_and_the_job_ends():
    lab = running("ab", stop_timeout_s=40.0, order_timeout_s=10.0)
    lab.feed(TERM)
    lab.down("a")
    assert lab.wait(39.5) == [] and holds_lease(lab.state, "b", "s1"), "ranks have their grace"
    actions = lab.wait(0.5) + lab.wait(5.0)
    assert not holds_lease(lab.state, "b", "s1")
    assert lab.finish(actions).exit_code == 143


def test_a_node_that_does_not_kill_is_cut_off_and_counts_as_down_when_its_lease_is_over():
    lab = running("ab", spares="c", order_timeout_s=10.0)
    lab.fail("a")
    lab.down("a")
    assert lab.wait(9.5) == []
    assert lab.wait(0.5) == []
    assert not holds_lease(lab.state, "b", "s1")
    assert lab.wait(2.5) == []
    assert lab.wait(0.5) == [OpenStore("a", 1)]


def test_a_node_that_does_not_start_is_lost_after_the_time_that_joining_may_take():
    lab = running("ab", join_timeout_s=40.0, spares="c")
    lab.fail("a")
    lab.down("a", "b")
    lab.open_store()
    lab.feed(NodeStarted("a", 1))
    assert lab.wait(39.5) == []
    assert lab.wait(0.5) == [KillNode("a", 1)]


@pytest.mark.parametrize(
    "late",
    [
        NodeStarted("a", 0),
        NodeDown("a", 0),
        NodeSucceeded("a", 0),
        NodeFailed("a", failure(0)),
        NodeFailed("z", failure(1)),
        NodeDown("z", 1),
        StoreOpened("a", 0, "a:1"),
        StoreOpened("b", 1, "b:1"),
        StoreLost("a", 0),
        StoreLost("b", 1),
        DrainReady("a", 0),
        DrainReady("a", 1),
        Progress(0, 9),
        NodeLeft("a", "s0", ""),
        NodeLeft("z", "s1", ""),
        NodeGone("z", ""),
        NodeGone("a", "", "s0"),
        NodeHeartbeat("a", "s0"),
        NodeHeartbeat("z", "s1"),
        NodeReady("a", "s0"),
        NodeHealth("a", True, "fine", 3),
        NodeHealth("a", False, "late", 3),
        NodeHealth("z", False, "unknown"),
        NodeAttached("a", "s0", 2, "a:1", None),
        NodeAttached("y", "s1", 0, "y:1", None),
        NodeAttached("y", "s1", MAX_SLOTS + 1, "y:1", None),
        NodeAttached("y" * (MAX_NAME_CHARS + 1), "s1", 1, "y:1", None),
    ],
    ids=str,
)
def test_facts_of_another_generation_session_or_node_change_nothing(late):
    lab = running("ab")
    lab.fail("a")
    lab.down("a", "b")
    lab.start()
    before = lab.state
    assert lab.feed(late) == []
    assert lab.state == before


def test_after_the_end_nothing_happens_any_more():
    lab = running("a")
    lab.feed(NodeSucceeded("a", 0))
    before = lab.state
    assert lab.feed(Tick(), TERM, NodeFailed("a", failure(0)), NodeAttached("b", "s1", 2, "b:1")) == []
    assert lab.state == before


# --- ends without a word ----------------------------------------------------------------------------


def test_ranks_that_ended_have_a_moment_to_say_why():
    lab = running("ab")
    assert lab.down("b") == []
    assert lab.fail("b", kind=FailureKind.EXCEPTION, step=0, startup=True, exit_code=4) == kills(0, "a")
    assert lab.finish(lab.down("a")).exit_code == 4


def test_ranks_that_ended_without_a_word_fail_the_world():
    lab = running("ab")
    assert lab.down("b") == []
    assert lab.wait(1.5) == []
    assert lab.wait(0.5) == [KillNode("a", 0)]
    assert lab.down("a") == [OpenStore("a", 1)]


def test_a_node_that_is_lost_after_its_ranks_succeeded_fails_nothing():
    lab = running("ab")
    lab.feed(NodeSucceeded("b", 0))
    lab.silence("b")
    assert lab.wait(10.0) == []
    assert lab.finish(lab.feed(NodeSucceeded("a", 0))).exit_code == RunExit.OK


def test_a_goodbye_after_success_fails_nothing():
    lab = running("ab")
    assert lab.feed(NodeSucceeded("b", 0), NodeLeft("b", "s1", "done")) == []
    assert lab.finish(lab.feed(NodeSucceeded("a", 0))).exit_code == RunExit.OK


def test_a_store_that_is_lost_fails_the_world():
    lab = running("ab")
    assert lab.feed(StoreLost("a", 0)) == kills(0, "ab")


def test_an_error_of_one_node_never_ends_the_job():
    """It can't launch a rank, again and again: it is excluded, and the others wait for another one."""
    lab = running("ab", join_timeout_s=3600.0)
    for generation in range(2):
        lab.fail("b", "b", kind=FailureKind.LAUNCH, signature=f"EAGAIN {generation}", step=1)
        lab.down("a", "b")
        if generation == 0:
            lab.start()
    assert lab.state.nodes["b"].standing is Standing.EXCLUDED
    lab.wait(3000.0)
    assert not lab.state.finished
    lab.attach("c")
    assert [start.node for start in lab.start()] == ["a", "c"]


# --- connections that break -------------------------------------------------------------------------


def test_a_member_that_attaches_again_with_its_ranks_is_left_alone():
    lab = running("ab")
    assert lab.attach("b", running=0) == []
    assert lab.wait(10.0) == []


def test_a_member_that_attaches_again_without_its_ranks_fails_the_world():
    lab = running("ab")
    assert lab.attach("b") == []
    assert lab.wait(1.5) == []
    assert lab.wait(0.5) == kills(0, "ab")


def test_orders_are_said_again_to_a_member_that_attaches_again():
    lab = running("ab")
    lab.fail("a")
    assert lab.attach("b", running=0) == [KillNode("b", 0)]
    lab.down("a", "b")
    assert lab.attach("a") == [OpenStore("a", 1)]
    lab.start()
    lab.feed(TERM)
    assert lab.attach("b", running=1) == [StopNode("b", 1, SIGTERM)]


def test_ranks_of_a_generation_that_is_not_the_current_one_are_killed_before_the_node_is_of_use():
    lab = running("ab")
    assert lab.attach("c", running=7) == [KillNode("c", 7)]
    lab.feed(NodeLeft("b", "s1", "gone"))
    assert only(lab.down("a"), OpenStore) == []
    assert lab.feed(NodeDown("c", 7)) == [OpenStore("a", 1)]


# --- bounds -----------------------------------------------------------------------------------------


def test_nodes_beyond_the_bound_push_out_the_absent_and_nobody_else():
    lab = Lab(ClusterConfig(max_nodes=MAX_NODES))
    lab.attach("absent", "n0")
    lab.feed(NodeLeft("absent", "s1", ""))
    one = lab.state.nodes["n0"]
    others = {f"n{i}": replace(one, name=f"n{i}") for i in range(1, MAX_NODES - 1)}
    lab.state = replace(lab.state, nodes={**lab.state.nodes, **others})
    lab.attach("late")
    assert len(lab.state.nodes) == MAX_NODES
    assert "absent" not in lab.state.nodes and "late" in lab.state.nodes
    lab.attach("later")
    assert "later" not in lab.state.nodes and len(lab.state.nodes) == MAX_NODES


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"min_nodes": 0}, "MIN:MAX"),
        ({"min_nodes": 3, "max_nodes": 2}, "MIN:MAX"),
        ({"spares": -1}, "spares"),
        ({"max_nodes": MAX_NODES, "spares": 1}, "spares"),
        ({"lease_s": 0.0}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"fence_margin_s": -1.0}, "fence_margin_s"),
        ({"lease_misses": 1}, "lease_misses"),
        ({"max_exclusions": 101}, "max_exclusions"),
        ({"exclusion_factor": 0.5}, "exclusion_factor"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, word):
    with pytest.raises(ConfigError, match=word):
        initial(ClusterConfig(**changes), BudgetConfig())


def test_the_stage_of_a_world_is_ending_from_the_first_kill_to_the_last_end():
    lab = running("ab")
    lab.fail("a")
    assert lab.state.world is not None and lab.state.world.stage is Stage.ENDING
    lab.down("a", "b")
    assert lab.state.world is not None and lab.state.world.stage is Stage.ENDED
