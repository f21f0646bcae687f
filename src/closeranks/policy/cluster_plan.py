"""Restarts that are planned: to drain a node, or to grow back. Pure.

Every member is asked to finish its step and save; when all have, or at the deadline, the generation makes way
for the next one, at no charge to the budget. A drain begins as soon as there is a spare for the place, and
without one only so early that the ranks can save before the deadline. A world that is too small grows at any
restart; it is restarted only for that after a cool-down, and only if a spare is warm.
"""

from __future__ import annotations

from dataclasses import replace

from closeranks.cluster_events import DrainRequested, PrepareDrain
from closeranks.events import RestartPlanned, Tell
from closeranks.policy.budget import one_line
from closeranks.policy.cluster_job import ask_job
from closeranks.policy.cluster_state import (
    ClusterState,
    Decision,
    Node,
    Planned,
    Stage,
    World,
    is_reachable,
    with_node,
)
from closeranks.policy.cluster_world import order_of_ranks, spares_of

__all__ = ["on_drain", "plan"]

MAX_DRAIN_S = 30 * 86_400.0


def on_drain(state: ClusterState, event: DrainRequested, now_s: float) -> Decision:
    """The earliest deadline asked for holds. A spare is released at once, by ``release``."""
    node = state.nodes.get(event.node)
    if node is None:
        return state, ()
    # Written so that what is no number counts as no time at all.
    within_s = min(event.deadline_s, MAX_DRAIN_S) if event.deadline_s > 0 else 0.0
    due_s = now_s + within_s if node.drain_due_s is None else min(node.drain_due_s, now_s + within_s)
    if due_s == node.drain_due_s:
        return state, ()
    reason = one_line(event.reason)
    begin_s = due_s - min(state.config.drain_prepare_s, within_s / 2)
    state = with_node(state, replace(node, drain_due_s=due_s, drain_begin_s=begin_s, drain_reason=reason))
    return state, (Tell("info", f"node {one_line(node.name)} drains within {within_s:g} s: {reason}"),)


def plan(state: ClusterState, now_s: float) -> Decision:
    """Ask the members to save where a restart is due, and restart once they have."""
    world = state.world
    if world is None or world.stage is not Stage.RUNNING:
        return state, ()
    draining = [
        node
        for name in world.members
        if (node := state.nodes.get(name)) is not None and node.drain_due_s is not None
    ]
    if world.planned is not None:
        return _carry_out(state, world, world.planned, draining, now_s)
    planned = _drain(state, draining, now_s) if draining else _growth(state, world, now_s)
    if planned is None:
        return state, ()
    state = replace(state, world=replace(world, planned=planned))
    left_s = max(0.0, planned.due_s - now_s)
    return state, tuple(
        PrepareDrain(member.node, world.generation, left_s)
        for member in order_of_ranks(world.members.values())
        if not member.down and is_reachable(state, member)  # the others are told when they attach again
    )


def _drain(state: ClusterState, draining: list[Node], now_s: float) -> Planned | None:
    due_s = _first_due_s(draining)
    begin_s = min((node.drain_begin_s for node in draining if node.drain_begin_s is not None), default=due_s)
    if not spares_of(state, now_s) and now_s < begin_s:
        return None
    names = ", ".join(sorted(one_line(node.name) for node in draining)[:4])
    return Planned(due_s, f"drain of {names}")


def _growth(state: ClusterState, world: World, now_s: float) -> Planned | None:
    config = state.config
    is_small = config.grow_back and len(world.members) < config.max_nodes
    if not is_small or now_s < world.since_s + config.grow_cooldown_s:
        return None
    if not any(node.ready for node in spares_of(state, now_s)):
        return None
    return Planned(now_s + config.drain_prepare_s, "a spare makes the world larger")


def _carry_out(
    state: ClusterState, world: World, planned: Planned, draining: list[Node], now_s: float
) -> Decision:
    due_s = min(planned.due_s, _first_due_s(draining)) if draining else planned.due_s
    if now_s < due_s and not all(member.saved or member.down for member in world.members.values()):
        return state, ()
    for node in draining:
        # What has saved for its deadline goes now, and not once more in a minute.
        if node.drain_due_s is not None and (node.drain_begin_s or 0.0) <= now_s:
            state = with_node(state, replace(node, drain_due_s=min(node.drain_due_s, now_s)))
    return ask_job(state, RestartPlanned(world.generation, planned.reason), now_s)


def _first_due_s(draining: list[Node]) -> float:
    return min(node.drain_due_s for node in draining if node.drain_due_s is not None)
