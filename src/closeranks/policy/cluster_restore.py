"""A controller that died comes back: what belongs into the journal, and how to go on from there. Pure.

Nothing is decided again: the state holds what was decided, and orders that may be lost are said again when
their node attaches. Nothing is killed either: an agent in its grace is back within ``reattach_wait_s`` or has
killed its ranks, so nobody is lost, and no lease counts as over, before that.
"""

from __future__ import annotations

from dataclasses import replace

from closeranks.policy.cluster_state import ClusterState, Forming, Link, Member, Node, Planned, Store, World
from closeranks.policy.job import JobState

__all__ = ["durable", "durable_job", "durable_node", "restore"]


def durable(state: ClusterState) -> ClusterState:
    """The state without what every heartbeat and step changes; for the journal, whenever it is another."""
    nodes = {name: durable_node(node) for name, node in state.nodes.items()}
    return replace(state, nodes=nodes, job=durable_job(state.job), ticked_at_s=None)


def durable_node(node: Node) -> Node:
    """The lease of a node that is there begins anew after a restart."""
    return replace(node, lease_end_s=0.0) if node.link in (Link.ATTACHED, Link.AWAITED) else node


def durable_job(job: JobState) -> JobState:
    """Of the steps it matters only whether any was made."""
    return replace(job, steps=min(1, job.steps))


def restore(state: ClusterState, now_s: float, shift_s: float = 0.0) -> ClusterState:
    """Go on from ``durable(...)``. ``shift_s``: what to add to its times, where the clock is another one."""
    awaited_until_s = now_s + max(state.config.reattach_wait_s, state.config.lease_length_s)
    nodes = {name: _restore_node(node, awaited_until_s, shift_s) for name, node in state.nodes.items()}
    budget = replace(state.job.budget, recent_s=tuple(at_s + shift_s for at_s in state.job.budget.recent_s))
    return replace(
        state,
        job=replace(state.job, due_s=state.job.due_s + shift_s, budget=budget),
        nodes=nodes,
        world=None if state.world is None else _restore_world(state.world, awaited_until_s, shift_s),
        forming=None if state.forming is None else _restore_forming(state.forming, awaited_until_s, shift_s),
        ticked_at_s=None,
        # What was asked for may never have been: it is asked for again, unless it comes meanwhile.
        requested=0,
        requested_at_s=state.requested_at_s + shift_s,
        denied_until_s=max(state.denied_until_s + shift_s, awaited_until_s),
    )


def _restore_node(node: Node, awaited_until_s: float, shift_s: float) -> Node:
    link = Link.AWAITED if node.link is Link.ATTACHED else node.link
    is_awaited = link is Link.AWAITED
    return replace(
        node,
        link=link,
        lease_end_s=awaited_until_s if is_awaited else node.lease_end_s + shift_s,
        standing_until_s=node.standing_until_s + shift_s,
        excluded_at_s=node.excluded_at_s + shift_s,
        blamed_at_s=_shifted(node.blamed_at_s, shift_s),
        drain_due_s=_shifted(node.drain_due_s, shift_s),
        drain_begin_s=_shifted(node.drain_begin_s, shift_s),
    )


def _restore_world(world: World, awaited_until_s: float, shift_s: float) -> World:
    planned = world.planned
    return replace(
        world,
        members={
            name: _restore_member(member, awaited_until_s, shift_s) for name, member in world.members.items()
        },
        since_s=world.since_s + shift_s,
        ending_since_s=awaited_until_s,  # who isn't there yet can't be late
        planned=None if planned is None else Planned(planned.due_s + shift_s, planned.reason),
    )


def _restore_member(member: Member, awaited_until_s: float, shift_s: float) -> Member:
    """A lost node's agent may have seen the controller die while its own lease ran, and have gone on."""
    may_run = member.lost_at_s is not None and not member.down
    return replace(
        member,
        ended_at_s=_shifted(member.ended_at_s, shift_s),
        lost_at_s=awaited_until_s if may_run else _shifted(member.lost_at_s, shift_s),
    )


def _restore_forming(forming: Forming, awaited_until_s: float, shift_s: float) -> Forming:
    """Its members aren't there yet, and its store is asked for again when its node attaches."""
    store = forming.store
    return replace(
        forming,
        since_s=forming.since_s + shift_s,
        start_s=forming.start_s + shift_s,
        members={},
        store=None if store is None else Store(store.node, store.session, awaited_until_s),
    )


def _shifted(at_s: float | None, shift_s: float) -> float | None:
    return None if at_s is None else at_s + shift_s
