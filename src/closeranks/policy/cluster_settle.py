"""What follows once a fact is in: leases that are over, ends that are certain, the next world. Pure.

``settle`` takes each step once and in this order, so that what one of them makes certain the next can act on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from closeranks.cluster_events import ClusterAction, ReleaseNode, RequestNode
from closeranks.events import Finish
from closeranks.policy.budget import one_line
from closeranks.policy.cluster_forming import form
from closeranks.policy.cluster_job import conclude, fail_world, lose
from closeranks.policy.cluster_nodes import check_standings
from closeranks.policy.cluster_plan import plan
from closeranks.policy.cluster_state import (
    ClusterState,
    Decision,
    Link,
    Node,
    Stage,
    Standing,
    live_member,
    with_member,
    with_node,
)
from closeranks.policy.cluster_world import may_stay

__all__ = ["end_leases", "settle"]


def settle(decision: Decision, now_s: float) -> Decision:
    """Everything that the state calls for at this time."""
    state, actions = decision
    for step in _STEPS:
        if state.finished:
            break
        state, more = step(state, now_s)
        actions = (*actions, *more)
    return state, actions


def end_leases(state: ClusterState, now_s: float) -> Decision:
    """The nodes whose lease is over are lost. Not at the first tick after a pause: heartbeats that came
    meanwhile are only being read, and waiting longer than needed is safe."""
    before_s = state.ticked_at_s
    paused = before_s is None or now_s - before_s > state.config.lease_length_s
    state = replace(state, ticked_at_s=now_s)
    actions: tuple[ClusterAction, ...] = ()
    if paused:
        return state, actions
    for node in tuple(state.nodes.values()):
        if node.link not in (Link.ATTACHED, Link.AWAITED) or now_s < node.lease_end_s or state.finished:
            continue
        why = "it did not come back after the controller's restart"
        if node.link is Link.ATTACHED:
            why = f"no heartbeat for {state.config.lease_length_s:g} s"
        state, more = lose(state, node.name, why, now_s)
        actions = (*actions, *more)
    return state, actions


def _fence(state: ClusterState, now_s: float) -> Decision:
    """Ranks of a lost node are down once its agent has had the time to kill them by itself."""
    world = state.world
    if world is None or world.stage is Stage.ENDED:
        return state, ()
    for member in world.members.values():
        lost_at_s = member.lost_at_s
        if lost_at_s is None or member.down or now_s < lost_at_s + state.config.fence_margin_s:
            continue
        state = with_member(state, replace(member, down=True))
    return state, ()


def _explain(state: ClusterState, now_s: float) -> Decision:
    """Ranks that ended without a word: whatever the word would have been, it is lost."""
    world = state.world
    if world is None or world.stage is not Stage.RUNNING:
        return state, ()
    for member in world.members.values():
        ended_at_s = member.ended_at_s
        if ended_at_s is None or member.succeeded or now_s < ended_at_s + state.config.lease_length_s:
            continue
        return fail_world(state, f"ranks of node {member.node} ended without a reason", now_s)
    return state, ()


def _cut_off(state: ClusterState, now_s: float) -> Decision:
    """An agent that lives and doesn't do what it is told gets its lease renewed no more."""
    actions: tuple[ClusterAction, ...] = ()
    for name, why in (*_overdue_store(state, now_s), *_overdue_members(state, now_s)):
        node = state.nodes.get(name)
        if node is not None and node.link is Link.ATTACHED:
            state, more = lose(state, name, why, now_s)
            actions = (*actions, *more)
    return state, actions


def _overdue_store(state: ClusterState, now_s: float) -> list[tuple[str, str]]:
    store = state.forming.store if state.forming is not None else None
    if store is None or store.address or now_s < store.asked_at_s + state.config.order_timeout_s:
        return []
    return [(store.node, "it did not open a store")]


def _overdue_members(state: ClusterState, now_s: float) -> list[tuple[str, str]]:
    """To kill takes an agent alone; to start takes imports, which may be slow, and a stop its own grace."""
    world, config = state.world, state.config
    if world is None or world.stage is Stage.ENDED:
        return []
    live = [member for member in world.members.values() if not member.down]
    if world.stage is Stage.RUNNING and now_s >= world.since_s + config.join_timeout_s:
        return [(member.node, "it did not start its ranks") for member in live if not member.started]
    if world.stage is Stage.ENDING:
        limit_s = config.order_timeout_s if world.stop_signal is None else config.stop_timeout_s
        if now_s >= world.ending_since_s + limit_s:
            return [(member.node, "it did not end its ranks") for member in live]
    return []


def _release(state: ClusterState, now_s: float) -> Decision:
    """Give back what drains or is banned, as soon as no ranks are there and none will be."""
    actions: tuple[ClusterAction, ...] = ()
    for node in tuple(state.nodes.values()):
        if not _is_to_go(node) or live_member(state, node.name) is not None:
            continue
        if _may_be_needed(state, node, now_s):
            continue
        reason = node.drain_reason if node.drain_due_s is not None else node.standing_reason
        state = with_node(state, replace(node, link=Link.LEFT))
        actions = (*actions, ReleaseNode(node.name, one_line(reason)))
    return state, actions


def _may_be_needed(state: ClusterState, node: Node, now_s: float) -> bool:
    """Whether the next world may have the node, though it drains: it isn't known yet who else there is."""
    if state.forming is not None and node.name in state.forming.members:
        return True
    is_open = state.forming is not None or (state.world is not None and state.world.stage is Stage.ENDING)
    return is_open and may_stay(state, node, now_s)


def _is_to_go(node: Node) -> bool:
    unwanted = node.drain_due_s is not None or node.standing is Standing.BANNED
    return unwanted and node.link in (Link.ATTACHED, Link.LOST)


def _request(state: ClusterState, now_s: float) -> Decision:
    """Ask the engine for what the world and its spares lack; again only when its answer is overdue."""
    world, config = state.world, state.config
    if (world is None and not state.asked) or _is_ending(state):
        return state, ()
    size = config.max_nodes if world is None or config.grow_back else len(world.members)
    want = config.spares + size
    have = sum(_is_hopeful(node) for node in state.nodes.values())
    is_overdue = state.requested > 0 and now_s >= state.requested_at_s + config.join_timeout_s
    asked = 0 if is_overdue else state.requested
    missing = max(0, want - have)
    if missing <= asked or now_s < state.denied_until_s:
        return replace(state, requested=asked), ()
    state = replace(state, requested=missing, requested_at_s=now_s)
    return state, (RequestNode(missing - asked, f"{have} of {want} nodes can be used"),)


def _is_ending(state: ClusterState) -> bool:
    """Whether the job needs no more nodes: it stops, or its first ranks are through."""
    world = state.world
    through = world is not None and any(member.succeeded for member in world.members.values())
    return through or isinstance(state.job.plan, Finish)


def _is_hopeful(node: Node) -> bool:
    """Whether the node is one to count on, if not this very moment."""
    is_there = node.link in (Link.ATTACHED, Link.AWAITED)
    return is_there and node.standing is Standing.GOOD and node.drain_due_s is None


_STEPS: tuple[Callable[[ClusterState, float], Decision], ...] = (
    _fence,
    _explain,
    _cut_off,
    plan,
    conclude,
    check_standings,
    form,
    _release,
    _request,
)
