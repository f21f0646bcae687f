"""From an ordered generation to its start: when, with which nodes, and when to give up. Pure.

Nothing runs yet, so a node that is lost meanwhile costs neither a generation nor the budget: the others are
seated anew.
"""

from __future__ import annotations

from dataclasses import replace

from closeranks.cluster_events import ClusterAction, KillNode, OpenStore, StartNode
from closeranks.events import Finish, GenerationStarted, RunExit, Tell
from closeranks.policy.budget import one_line
from closeranks.policy.cluster_job import ask_job, finish
from closeranks.policy.cluster_state import ClusterState, Decision, Forming, Link, Member, Node, Store, World
from closeranks.policy.cluster_world import Pool, choose, is_usable, may_stay, order_of_ranks, pool_of, seat

__all__ = ["form"]

_NAMED = 4  # nodes that a reason names


def form(state: ClusterState, now_s: float) -> Decision:
    """The next thing to do for the generation that is being formed: wait, open a store, start, or give up."""
    forming = state.forming
    if forming is None:
        return state, ()
    if not _is_intact(state, forming, now_s):
        pool = pool_of(state, now_s)
        size = _size(state, forming, pool, now_s)
        if size == 0:
            return _give_up(state, pool, now_s)
        members = {} if size is None else seat(choose(pool, state.world, size), state.world)
        forming = replace(forming, members=members)
        state = replace(state, forming=forming)
    if not forming.members:
        return state, ()
    place, store = _place_of_store(state, forming, now_s), forming.store
    if store is None or (store.node, store.session) != (place.name, place.session):
        return _open_store(state, forming, place, now_s)
    return _start(state, forming, store, now_s) if store.address else (state, ())


def _is_intact(state: ClusterState, forming: Forming, now_s: float) -> bool:
    """Whether all that were seated can still take part, one at least of them with a store."""
    if not forming.members:
        return False
    nodes = [state.nodes.get(name) for name in forming.members]
    return any(node is not None and is_usable(node, now_s) for node in nodes) and all(
        node is not None
        and node.session == forming.members[node.name].session
        and (is_usable(node, now_s) or may_stay(state, node, now_s))
        for node in nodes
    )


def _size(state: ClusterState, forming: Forming, pool: Pool, now_s: float) -> int | None:
    """How many nodes to start with now; None: wait for more, 0: there won't be enough."""
    config, world = state.config, state.world
    target = config.max_nodes if world is None else len(world.members)
    if pool.count >= target:
        most = config.max_nodes if world is None or config.grow_back else target
        return max(target, min(len(pool.fit), most))
    if any(node.link is Link.AWAITED for node in state.nodes.values()):
        return None  # those that a controller's restart cut off have their grace
    enough = pool.count >= config.min_nodes
    if world is None and enough and now_s >= forming.since_s + config.last_call_s:
        return pool.count
    # Until its deadline a drain has waited for others; those that are on their way may still come.
    is_over = _is_drained(state, now_s) and state.requested == 0
    if now_s >= forming.since_s + config.join_timeout_s or is_over:
        return pool.count if enough else 0
    return None


def _is_drained(state: ClusterState, now_s: float) -> bool:
    """Whether a drain of the last world has come to its deadline."""
    if state.world is None:
        return False
    nodes = [state.nodes.get(name) for name in state.world.members]
    return any(
        node is not None and node.drain_due_s is not None and node.drain_due_s <= now_s for node in nodes
    )


def _place_of_store(state: ClusterState, forming: Forming, now_s: float) -> Node:
    """The member of the lowest node rank that is not about to leave; and an open store stays where it is."""
    nodes = [state.nodes[member.node] for member in order_of_ranks(forming.members.values())]
    fit = [node for node in nodes if is_usable(node, now_s)]
    assert fit, "a world without a place for its store"
    old = forming.store.node if forming.store is not None else None
    return next((node for node in fit if node.name == old), fit[0])


def _open_store(state: ClusterState, forming: Forming, place: Node, now_s: float) -> Decision:
    orders: tuple[ClusterAction, ...] = (OpenStore(place.name, forming.generation),)
    old = state.nodes.get(forming.store.node) if forming.store is not None else None
    # A member can't be told to kill a generation that it is about to start; its unused store ends with that.
    if old is not None and old.link is Link.ATTACHED and old.name not in forming.members:
        orders = (KillNode(old.name, forming.generation), *orders)
    return replace(state, forming=replace(forming, store=Store(place.name, place.session, now_s))), orders


def _start(state: ClusterState, forming: Forming, store: Store, now_s: float) -> Decision:
    assert forming.generation == state.job.generation, "a generation that nobody ordered"
    members = order_of_ranks(forming.members.values())
    starts_s = max(now_s, forming.start_s)
    world = World(forming.generation, forming.members, store.node, store.address, starts_s)
    shrunk = state.world is not None and len(members) < len(state.world.members)
    state = replace(state, world=world, forming=None)
    # From here on ranks may run, also where a back-off delays them: a request to stop has to wait for all.
    state, actions = ask_job(state, GenerationStarted(world.generation), now_s)
    world_size = sum(member.ranks for member in members)
    tell = Tell(
        "warning" if shrunk else "info",
        f"generation {world.generation} starts with {world_size} ranks on {len(members)} nodes",
    )
    orders = tuple(_order(world, member, world_size, len(members), starts_s - now_s) for member in members)
    return state, (*actions, tell, *orders)


def _order(world: World, member: Member, world_size: int, node_count: int, delay_s: float) -> StartNode:
    return StartNode(
        node=member.node,
        generation=world.generation,
        node_rank=member.node_rank,
        first_rank=member.first_rank,
        ranks=member.ranks,
        world_size=world_size,
        node_count=node_count,
        store=world.store,
        delay_s=delay_s,
    )


def _give_up(state: ClusterState, pool: Pool, now_s: float) -> Decision:
    least = state.config.min_nodes
    have = f"{len(pool.fit) or 'none'} of at least {least} nodes can be used"
    if _is_drained(state, now_s):
        reason = f"drained: {have}, and nothing came in the place of those that had to go"
        return finish(state, Finish(RunExit.DRAINED, reason))
    assert state.forming is not None, "given up without a try"
    waited = f"{now_s - state.forming.since_s:g} s"
    known = [
        f"{one_line(node.name)}: {_trouble(node)}"
        for node in state.nodes.values()
        if not is_usable(node, now_s)
    ]
    names = "; ".join(known[:_NAMED]) + (f"; and {len(known) - _NAMED} more" if len(known) > _NAMED else "")
    reason = (
        f"{have} after {waited} ({names or 'no others attached'}); repair them, or lower the least number"
    )
    return finish(state, Finish(RunExit.NO_NODES, reason))


def _trouble(node: Node) -> str:
    """Why a node can't be used."""
    if node.standing_reason:
        return one_line(f"{node.standing.value}, {node.standing_reason}")
    if node.drain_due_s is not None:
        return one_line(f"draining, {node.drain_reason}")
    return node.link.value
