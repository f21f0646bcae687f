"""Exclusion: who is kept out of new worlds, for how long, and how a node comes back."""

from __future__ import annotations

import pytest
from cluster_lab import Lab, only, running
from hypothesis import given
from hypothesis import strategies as st

from closeranks.cluster_events import CheckHealth, NodeHealth, OpenStore, ReleaseNode
from closeranks.config import ClusterConfig
from closeranks.events import FailureKind
from closeranks.policy.cluster_nodes import HARDWARE_LIKE, blame, exclude
from closeranks.policy.cluster_state import Node, Standing


def lost_and_back(**config: float) -> Lab:
    """Generation 1 runs on a and x; b was lost at 2 s, and is back and excluded until 32 s."""
    lab = running("ab", spares="x", **config)
    lab.silence("b")
    lab.wait(2.0)
    lab.down("a")
    lab.wait(1.0)
    lab.start()
    lab.attach("b", session="s2")
    return lab


def check_of(lab: Lab, node: str) -> int:
    return lab.state.nodes[node].checks


# --- the way back -----------------------------------------------------------------------------------


def test_a_lost_node_that_is_back_is_checked_when_its_exclusion_is_over_and_is_a_spare_then():
    lab = lost_and_back()
    assert lab.wait(28.5) == []
    (check,) = lab.wait(0.5)
    assert check == CheckHealth("b", "no heartbeat for 2 s", 1)
    assert lab.state.nodes["b"].standing is Standing.CHECKING
    lab.feed(NodeHealth("b", True, "", check.check))
    assert lab.state.nodes["b"].standing is Standing.GOOD


def test_an_excluded_node_is_in_no_world_before_it_passed():
    lab = lost_and_back(join_timeout_s=600.0)
    lab.fail("x")
    lab.silence("x")
    lab.down("a")
    assert only(lab.wait(25.0), OpenStore) == []
    lab.wait(5.0)
    assert lab.state.nodes["b"].standing is Standing.CHECKING
    assert lab.feed(NodeHealth("b", True, "", 1)) == [OpenStore("a", 2)]


def test_a_failed_check_excludes_for_longer():
    lab = lost_and_back(exclusion_s=30.0, exclusion_factor=4.0)
    lab.wait(29.0)
    assert lab.feed(NodeHealth("b", False, "Xid 79", 1)) == []
    assert lab.wait(119.5) == []
    assert lab.wait(0.5) == [CheckHealth("b", "health check: Xid 79", 2)]


def test_a_check_without_an_answer_is_a_failed_one():
    lab = lost_and_back(order_timeout_s=60.0)
    lab.wait(29.0)
    assert lab.wait(60.0) == []
    assert lab.state.nodes["b"].standing is Standing.EXCLUDED


@pytest.mark.parametrize("check", [0, 2, 99, -1])
def test_an_answer_to_another_check_is_none(check):
    lab = lost_and_back()
    lab.wait(29.0)
    lab.feed(NodeHealth("b", True, "", check))
    assert lab.state.nodes["b"].standing is Standing.CHECKING


def test_a_check_whose_order_may_be_lost_is_asked_for_again():
    lab = lost_and_back()
    lab.wait(29.0)
    assert lab.attach("b", session="s2") == [CheckHealth("b", "no heartbeat for 2 s", 2)]
    lab.feed(NodeHealth("b", True, "", 1))
    assert lab.state.nodes["b"].standing is Standing.CHECKING


def test_bad_news_that_nobody_asked_for_keeps_a_member_out_of_the_next_world_only():
    lab = running("ab", spares="x")
    assert lab.feed(NodeHealth("b", False, "ECC")) == []
    assert lab.members == ["a", "b"]
    lab.fail("a")
    lab.down("a", "b")
    assert [start.node for start in lab.start()] == ["a", "x"]


def test_a_node_that_is_excluded_too_often_is_given_back():
    lab = running("a", max_exclusions=2, spares_kept=1)
    lab.attach("b")
    for exclusion_s in (30.0, 120.0):
        lab.feed(NodeHealth("b", False, "ECC"))
        lab.wait(exclusion_s)
        lab.feed(NodeHealth("b", True, "", check_of(lab, "b")))
        assert lab.state.nodes["b"].standing is Standing.GOOD
    assert ReleaseNode("b", "health check: ECC") in lab.feed(NodeHealth("b", False, "ECC"))
    assert lab.attach("b", session="s2") == [ReleaseNode("b", "health check: ECC")]


# --- blame ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(FailureKind))
def test_twice_the_culprit_of_a_hardware_like_failure_is_excluded_and_nobody_else(kind):
    lab = running("ab", spares="x")
    for generation in range(2):
        lab.fail("a", "b", kind=kind, step=3, durable_progress=True, signature=f"{generation}")
        lab.down("a", "b")
        if generation == 0:
            lab.start()
    bad = kind in HARDWARE_LIKE
    assert (lab.state.nodes["b"].standing is Standing.EXCLUDED) == bad
    assert [start.node for start in lab.start()] == ["a", "x" if bad else "b"]


def test_a_users_error_is_never_hardware_like():
    assert not HARDWARE_LIKE & {FailureKind.EXCEPTION, FailureKind.EXIT_CODE, FailureKind.OUT_OF_MEMORY}


def test_twice_in_a_long_time_is_bad_luck():
    config = ClusterConfig(blame_window_s=600.0)
    node = blame(config, Node("a", "s", 1, "a:1", 0.0), "crash", 0.0)
    assert blame(config, node, "crash", 601.0).standing is Standing.GOOD
    assert blame(config, node, "crash", 600.0).standing is Standing.EXCLUDED


def test_who_only_reports_the_failure_is_not_to_blame():
    lab = running("ab", spares="x")
    for _ in range(2):
        lab.fail("a", kind=FailureKind.CRASH, step=3, durable_progress=True)
        lab.down("a", "b")
        assert [start.node for start in lab.start()] == ["a", "b"]


# --- how long ---------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.0, 50_000.0), min_size=1, max_size=40))
def test_exclusions_grow_up_to_a_bound_and_then_are_for_good(gaps_s):
    config = ClusterConfig()
    node, now_s, before_s = Node("a", "s", 1, "a:1", 0.0), 0.0, 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        node = exclude(config, node, "test", now_s)
        if node.standing is Standing.BANNED:
            assert node.exclusions == config.max_exclusions + 1
            assert exclude(config, node, "test", now_s + 1e9) == node
            return
        for_s = node.standing_until_s - now_s
        assert for_s <= config.exclusion_max_s + 0.1
        assert for_s >= min(before_s, config.exclusion_max_s) - 0.1
        before_s = for_s


def test_old_exclusions_are_forgotten():
    config = ClusterConfig(forgive_s=86_400.0)
    node = exclude(config, Node("a", "s", 1, "a:1", 0.0), "test", 100.0)
    assert exclude(config, node, "test", 200.0).exclusions == 2
    assert exclude(config, node, "test", 90_000.0).exclusions == 1


def test_reasons_from_outside_are_made_fit_for_one_line():
    node = exclude(ClusterConfig(), Node("a", "s", 1, "a:1", 0.0), "x\n\x1b[31m" * 100, 0.0)
    assert node.standing_reason.isprintable() and len(node.standing_reason) < 200
