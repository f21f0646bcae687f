"""When a world starts, with how many nodes, and when the job gives up."""

from __future__ import annotations

import pytest
from cluster_lab import Lab, kills, only, running

from closeranks.cluster_events import (
    DrainRequested,
    KillNode,
    NodeHealth,
    NodeLeft,
    NodeReady,
    OpenStore,
    RequestNode,
    StartNode,
    StoreLost,
    StoreOpened,
)
from closeranks.config import ClusterConfig
from closeranks.events import RunExit, RunStarted, StopRequested
from closeranks.policy.cluster_state import Standing


def gathering(**config: float) -> Lab:
    settings = {"min_nodes": 2, "max_nodes": 3, "last_call_s": 30.0, "join_timeout_s": 600.0, **config}
    lab = Lab(ClusterConfig(**settings))
    lab.feed(RunStarted())
    return lab


# --- the first world --------------------------------------------------------------------------------


def test_the_first_world_starts_as_soon_as_all_nodes_are_there():
    lab = gathering()
    assert lab.attach("a", "b") == []
    assert lab.attach("c") == [OpenStore("a", 0)]
    assert [start.node for start in lab.start()] == ["a", "b", "c"]


def test_with_enough_but_not_all_it_starts_after_the_last_call():
    lab = gathering()
    lab.attach("a", "b")
    assert lab.wait(29.5) == []
    assert lab.wait(0.5) == [OpenStore("a", 0)]


def test_the_last_call_is_over_when_the_last_needed_node_comes_later_than_that():
    lab = gathering()
    lab.attach("a")
    assert lab.wait(100.0) == []
    assert lab.attach("b") == [OpenStore("a", 0)]


def test_too_few_nodes_end_the_job_at_the_join_timeout_and_say_so():
    lab = gathering()
    lab.attach("a")
    assert lab.wait(599.5) == []
    end = lab.finish(lab.wait(0.5))
    assert end.exit_code == RunExit.NO_NODES
    assert "1 of at least 2 nodes" in end.reason


def test_the_reason_names_nodes_that_cannot_be_used():
    lab = gathering()
    lab.attach("a", "b")
    lab.feed(NodeHealth("b", False, "Xid 79"))
    lab.silence("b")
    end = lab.finish(lab.wait(600.0))
    assert "b: " in end.reason and "no heartbeat" in end.reason


def test_nothing_starts_before_the_run_has():
    lab = Lab(ClusterConfig(max_nodes=1))
    assert lab.attach("a") == []
    assert lab.wait(5.0) == []
    assert lab.feed(RunStarted()) == [OpenStore("a", 0)]


def test_a_stop_before_the_first_world_ends_the_job():
    lab = gathering()
    lab.attach("a", "b", "c")
    assert lab.finish(lab.feed(StopRequested("scancel", 15))).exit_code == 143
    assert lab.feed(StoreOpened("a", 0, "a:1")) == []


# --- the store --------------------------------------------------------------------------------------


def test_orders_to_start_carry_the_stores_address_and_the_ranks():
    lab = gathering()
    lab.attach("a", "b", "c", slots=4)
    starts = lab.start()
    assert {start.store for start in starts} == {"a:29500"}
    assert [(s.node_rank, s.first_rank, s.ranks, s.world_size, s.node_count) for s in starts] == [
        (0, 0, 4, 12, 3),
        (1, 4, 4, 12, 3),
        (2, 8, 4, 12, 3),
    ]


def test_each_generation_has_a_store_of_its_own():
    lab = running("ab")
    lab.fail("a")
    assert lab.down("a", "b") == [OpenStore("a", 1)]
    assert lab.feed(StoreOpened("a", 0, "a:old")) == []
    assert only(lab.feed(StoreOpened("a", 1, "a:new")), StartNode)[0].store == "a:new"


def test_the_node_of_the_store_that_is_lost_costs_no_generation():
    lab = gathering(max_nodes=2)
    lab.attach("a", "b", "c")
    lab.silence("a")
    assert lab.wait(2.0) == [OpenStore("b", 0)]
    assert lab.feed(StoreOpened("a", 0, "a:1")) == []
    assert [start.node for start in lab.start()] == ["b", "c"]
    assert lab.state.job.budget.restarts == 0


def test_another_member_that_is_lost_leaves_the_store_where_it_is():
    lab = gathering(max_nodes=2)
    lab.attach("a", "b", "c")
    lab.silence("b")
    assert lab.wait(2.0) == []
    assert [start.node for start in lab.start()] == ["a", "c"]


def test_an_agent_that_restarts_before_the_start_is_asked_for_a_store_again():
    lab = gathering(max_nodes=2)
    lab.attach("a", "b")
    lab.feed(NodeLeft("a", "s1", "restart"))
    assert lab.attach("a", session="s2") == [OpenStore("a", 0)]


def test_the_store_moves_away_from_a_node_that_drains():
    lab = gathering(max_nodes=2)
    lab.attach("a", "b", "c")
    actions = lab.feed(DrainRequested("a", 60.0, "maintenance"))
    assert actions[:2] == [KillNode("a", 0), OpenStore("b", 0)]


def test_a_node_that_drains_is_not_asked_for_a_store_again():
    """It was asked, is alone, and its connection broke."""
    lab = gathering(min_nodes=1, max_nodes=1, last_call_s=0.0)
    assert lab.attach("a") == [OpenStore("a", 0)]
    lab.feed(DrainRequested("a", 60.0, "maintenance"))
    assert only(lab.attach("a"), OpenStore) == []
    lab.attach("b")
    assert [start.node for start in lab.start()] == ["b"]


def test_a_node_that_opens_no_store_is_cut_off():
    lab = gathering(max_nodes=2, order_timeout_s=10.0)
    lab.attach("a", "b", "c")
    assert lab.wait(9.5) == []
    assert lab.wait(0.5) == [OpenStore("b", 0)]
    assert lab.state.nodes["a"].standing is Standing.EXCLUDED


def test_a_node_that_twice_cannot_hold_a_store_is_excluded():
    lab = gathering(max_nodes=2)
    lab.attach("a", "b", "c")
    assert lab.feed(StoreLost("a", 0)) == [OpenStore("a", 0)]
    assert lab.feed(StoreLost("a", 0)) == [OpenStore("b", 0)]


# --- later worlds -----------------------------------------------------------------------------------


def test_a_spare_is_promoted_at_once_into_the_vacant_place():
    lab = running("abc", spares="x")
    lab.feed(NodeLeft("b", "s1", ""))
    assert lab.down("a", "c") == [OpenStore("a", 1)]
    assert [start.node for start in lab.start()] == ["a", "x", "c"]


def test_a_ready_spare_goes_before_one_that_is_not():
    lab = running("ab")
    lab.attach("x", "y")
    lab.feed(NodeReady("y", "s1"))
    lab.feed(NodeLeft("b", "s1", ""))
    lab.down("a")
    assert [start.node for start in lab.start()] == ["a", "y"]


def test_without_a_spare_the_engine_is_asked_and_its_node_taken():
    lab = running("ab")
    actions = lab.feed(NodeLeft("b", "s1", ""))
    assert only(actions, RequestNode) == [RequestNode(1, "1 of 2 nodes can be used")]
    assert lab.down("a") == []
    assert lab.wait(100.0) == []
    assert lab.attach("x") == [OpenStore("a", 1)]


def test_without_a_spare_the_world_shrinks_at_the_join_timeout():
    lab = running("abc", min_nodes=2, join_timeout_s=60.0)
    lab.feed(NodeLeft("a", "s1", ""))
    lab.down("b", "c")
    assert only(lab.wait(59.5), OpenStore) == []
    assert only(lab.wait(0.5), OpenStore) == [OpenStore("c", 1)]
    assert [(start.node, start.node_rank) for start in lab.start()] == [("c", 0), ("b", 1)]


def test_below_the_least_number_of_nodes_the_job_ends():
    lab = running("abc", min_nodes=3, join_timeout_s=60.0)
    lab.feed(NodeLeft("a", "s1", "power cut"))
    lab.down("b", "c")
    end = lab.finish(lab.wait(60.0))
    assert end.exit_code == RunExit.NO_NODES
    assert "2 of at least 3 nodes" in end.reason and "a: left" in end.reason


def test_the_engine_is_asked_again_when_its_answer_is_overdue():
    lab = running("abc", join_timeout_s=600.0, spares_kept=1)
    assert lab.state.requested == 1
    assert lab.wait(599.5) == []
    assert lab.wait(0.5) == [RequestNode(1, "3 of 4 nodes can be used")]
    assert lab.wait(599.5) == []


def test_what_the_engine_brings_is_not_asked_for_twice():
    lab = running("abc")
    actions = lab.feed(NodeLeft("a", "s1", ""), NodeLeft("b", "s1", ""))
    assert [request.count for request in only(actions, RequestNode)] == [1, 1]
    lab.attach("x")
    assert lab.state.requested == 1
    actions = lab.feed(NodeLeft("x", "s1", ""))
    assert [request.count for request in only(actions, RequestNode)] == [1]


def test_spares_that_are_used_up_are_asked_for():
    lab = running("ab", spares="x", spares_kept=1)
    assert only(lab.feed(NodeLeft("b", "s1", "")), RequestNode) == [
        RequestNode(1, "2 of 3 nodes can be used")
    ]


def test_a_job_that_ends_asks_for_nothing():
    lab = running("ab", spares_kept=0)
    lab.feed(StopRequested("scancel", 15))
    lab.silence("b")
    assert only(lab.wait(10.0), RequestNode) == []


def test_a_world_that_is_too_small_grows_at_any_restart():
    lab = running("ab", max_nodes=3, grow_back=True)
    lab.attach("x")
    lab.fail("b")
    lab.down("a", "b")
    assert [start.node for start in lab.start()] == ["a", "b", "x"]


def test_without_grow_back_a_world_keeps_its_size():
    lab = running("ab", max_nodes=3, grow_back=False)
    lab.attach("x")
    lab.fail("b")
    lab.down("a", "b")
    assert [start.node for start in lab.start()] == ["a", "b"]


@pytest.mark.parametrize("nodes", ["a", "abcdefgh"])
def test_generations_are_numbered_in_order(nodes):
    lab = running(nodes)
    for generation in range(5):
        assert lab.fail("a") == kills(generation, nodes)
        lab.down(*nodes)
        assert {start.generation for start in lab.start()} == {generation + 1}
