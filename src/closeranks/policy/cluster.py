"""The policy of a job over many nodes: facts in, actions out. Pure; controller and simulator both drive it.

::

    waiting ──enough nodes──> forming ──StoreOpened──> running ──failure, drain──> ending
                                 ^                                                    │
                                 └──────────────────── all down ──────────────────────┘

Whether a failed generation is worth another one is for policy.job; here is which nodes it gets. A new world
starts only when every member of the old one is known to be down: by NodeDown, by NodeLeft or NodeGone of its
session, or because its lease ended ``fence_margin_s`` ago, by when an agent has killed its ranks by itself.
Facts of another generation, of another session, or of a node without a lease are dropped.

What whoever drives this owes: a Tick at least twice a lease, after everything that had arrived; an answer to
a heartbeat if ``holds_lease`` says so afterwards, and else an end of that connection, so that orders on their
way are lost and the agent attaches again. An agent counts its lease from when it sent the newest message that
was answered, says NodeFailed or NodeSucceeded before the NodeDown of the same generation, and says NodeDown
whenever it is told to kill.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from closeranks.cluster_events import (
    ClusterEvent,
    DrainReady,
    DrainRequested,
    EngineDrains,
    KillNode,
    NodeAttached,
    NodeDown,
    NodeFailed,
    NodeGone,
    NodeHealth,
    NodeHeartbeat,
    NodeLeft,
    NodeReady,
    NodesRequested,
    NodeStarted,
    NodeSucceeded,
    OpenStore,
    PrepareDrain,
    RequestDenied,
    StoreLost,
    StoreOpened,
    Tick,
)
from closeranks.config import BudgetConfig, ClusterConfig
from closeranks.events import Progress, RunStarted, StopRequested
from closeranks.policy import job
from closeranks.policy.budget import one_line
from closeranks.policy.cluster_job import ask_job, end_order, fail_world, lose
from closeranks.policy.cluster_nodes import (
    HARDWARE_LIKE,
    accept,
    blame,
    exclude,
    is_acceptable,
    make_room,
    on_health,
    renew,
)
from closeranks.policy.cluster_plan import on_drain
from closeranks.policy.cluster_restore import durable, restore
from closeranks.policy.cluster_settle import end_leases, settle
from closeranks.policy.cluster_state import (
    ClusterState,
    Decision,
    Link,
    Member,
    Stage,
    Standing,
    World,
    check_cluster_config,
    live_member,
    with_member,
    with_node,
)
from closeranks.policy.cluster_world import is_usable

__all__ = ["ClusterState", "decide", "durable", "holds_lease", "initial", "restore"]

# Thousands of nodes say these at once. Nothing follows from them that can't wait for the next tick.
_QUIET = (NodeHeartbeat, NodeReady, NodeStarted, Progress)


def initial(config: ClusterConfig, budget: BudgetConfig) -> ClusterState:
    """The state before anything happened. Raises ConfigError for settings that can't work."""
    check_cluster_config(config)
    return ClusterState(config, job.initial(budget))


def holds_lease(state: ClusterState, name: str, session: str) -> bool:
    """Whether this agent's heartbeats count, and are to be answered."""
    node = state.nodes.get(name)
    return node is not None and node.session == session and node.link is Link.ATTACHED


def decide(state: ClusterState, event: ClusterEvent, now_s: float) -> Decision:
    """What follows from ``event``, for any event in any state. ``now_s`` is seconds on a monotonic clock."""
    if state.finished:
        return state, ()
    decision = _take(state, event, now_s)
    return decision if _is_quiet(decision[0], event, now_s) else settle(decision, now_s)


def _is_quiet(state: ClusterState, event: ClusterEvent, now_s: float) -> bool:
    """Whether nothing follows that can't wait: of what every member says, the last one's word counts."""
    world = state.world
    if isinstance(event, _QUIET):
        return True
    if isinstance(event, NodeAttached):
        return _is_one_of_many(state, event, now_s)
    if not isinstance(event, NodeDown | NodeSucceeded | DrainReady):
        return False
    if world is None or world.generation != event.generation:
        return False
    # From the end, as most are heard in the order in which they were told: so one that is missing is found
    # soon.
    members = reversed(world.members.values())
    match event:
        case NodeDown():
            return not all(member.down for member in members)
        case NodeSucceeded():
            return not all(member.succeeded for member in members)
        case DrainReady():
            return not all(member.saved or member.down for member in members)


def _is_one_of_many(state: ClusterState, event: NodeAttached, now_s: float) -> bool:
    """Whether it is one of a crowd that comes: to a first world that others are missing from still, or back
    to one that runs."""
    node, world = state.nodes.get(event.node), state.world
    if node is None or node.standing is not Standing.GOOD or node.drain_due_s is not None:
        return False
    if world is None:
        return len(state.nodes) < _enough(state, now_s)
    runs = world.stage is Stage.RUNNING and world.planned is None
    return runs and event.node in world.members and event.running == world.generation


def _enough(state: ClusterState, now_s: float) -> int:
    """How many nodes a first world could start with at this time."""
    config, forming = state.config, state.forming
    is_last_call_over = forming is not None and now_s >= forming.since_s + config.last_call_s
    return config.min_nodes if is_last_call_over else config.max_nodes


def _take(state: ClusterState, event: ClusterEvent, now_s: float) -> Decision:
    match event:
        case NodeHeartbeat(node, session):
            return (renew(state, node, now_s) if holds_lease(state, node, session) else state), ()
        case Tick():
            return end_leases(state, now_s)
        case RunStarted() | StopRequested() | Progress():
            return ask_job(state, event, now_s)
        case NodeAttached():
            return _on_attached(state, event, now_s)
        case NodeLeft() | NodeGone():
            return _on_absence(state, event, now_s)
        case NodeReady(node, session):
            if not holds_lease(state, node, session):
                return state, ()
            return with_node(state, replace(state.nodes[node], ready=True)), ()
        case NodeHealth():
            return on_health(state, event, now_s)
        case NodeFailed():
            return _on_failed(state, event, now_s)
        case NodeStarted() | NodeDown() | NodeSucceeded() | DrainReady():
            return _on_member(state, event, now_s)
        case StoreOpened() | StoreLost():
            return _on_store(state, event, now_s)
        case NodesRequested(count):
            return replace(state, requested=max(0, count), requested_at_s=now_s, asked=True), ()
        case RequestDenied(count):
            denied_until_s = now_s + state.config.request_again_s
            left = max(0, state.requested - max(0, count))
            return replace(state, requested=left, denied_until_s=denied_until_s), ()
        case DrainRequested():
            return on_drain(state, event, now_s)
        case EngineDrains(node, reason):
            return on_drain(state, DrainRequested(node, state.config.drain_deadline_s, reason), now_s)
    assert_never(event)


# --- nodes come and go ------------------------------------------------------------------------------


def _on_attached(state: ClusterState, event: NodeAttached, now_s: float) -> Decision:
    """A fresh agent, or one whose connection broke: whatever was on its way to it may be lost, and is said
    again."""
    if not is_acceptable(state, event):
        return state, ()
    before = state.nodes.get(event.node)
    room = make_room(state) if before is None else state
    if room is None:
        return state, ()
    state = accept(room, event, now_s)
    is_fresh = before is None or before.session != event.session
    if is_fresh and state.nodes[event.node].standing is Standing.GOOD:
        state = replace(state, requested=max(0, state.requested - 1))
    member, world = live_member(state, event.node), state.world
    if member is not None and world is not None and event.running in (None, world.generation):
        return _on_member_attached(state, world, member, event, now_s)
    if event.running is not None:  # of a world that has ended, or that the journal lost
        state = with_node(state, replace(state.nodes[event.node], busy=event.running))
        return state, (KillNode(event.node, event.running),)
    forming = state.forming
    store = forming.store if forming is not None else None
    if forming is None or store is None or (store.node, store.session) != (event.node, event.session):
        return state, ()
    # One that is to leave since it was asked isn't asked again: another one will be.
    if store.address or not is_usable(state.nodes[event.node], now_s):
        return state, ()
    return state, (OpenStore(event.node, forming.generation),)


def _on_member_attached(
    state: ClusterState, world: World, member: Member, event: NodeAttached, now_s: float
) -> Decision:
    if world.stage is Stage.ENDING:
        return state, end_order(state, member)
    # Its ranks are gone or never started. It may be about to say why, and that would be the better reason.
    gone = event.running is None and not member.succeeded
    state = with_member(state, replace(member, started=True, ended_at_s=now_s if gone else None))
    if world.planned is None or member.saved or gone:
        return state, ()
    return state, (PrepareDrain(member.node, world.generation, max(0.0, world.planned.due_s - now_s)),)


def _on_absence(state: ClusterState, event: NodeLeft | NodeGone, now_s: float) -> Decision:
    """Gone is gone, if it is certain which session: it is known to be down, and never comes back."""
    node = state.nodes.get(event.node)
    if node is None or node.link is Link.LEFT:
        return state, ()
    is_gone = isinstance(event, NodeGone)
    why = f"the engine says that it is gone: {event.reason}" if is_gone else f"it left: {event.reason}"
    if is_gone and not event.session:
        return (state, ()) if node.link is Link.LOST else lose(state, event.node, why, now_s)
    if event.session != node.session:
        return state, ()
    if is_gone and node.link is not Link.LOST:
        node = exclude(state.config, node, why, now_s)
    state = with_node(state, replace(node, link=Link.LEFT, ready=False))
    member = live_member(state, event.node)
    if member is None or member.session != event.session:
        return state, ()
    state = with_member(state, replace(member, down=True))
    if member.succeeded:
        return state, ()
    return fail_world(state, f"node {event.node} lost: {why}", now_s)


# --- what members say -------------------------------------------------------------------------------


def _on_member(
    state: ClusterState, event: NodeStarted | NodeDown | NodeSucceeded | DrainReady, now_s: float
) -> Decision:
    node = state.nodes.get(event.node)
    if isinstance(event, NodeDown) and node is not None and node.busy == event.generation:
        state = with_node(state, replace(node, busy=None))
    member = live_member(state, event.node)
    if member is None or state.world is None or state.world.generation != event.generation:
        return state, ()
    match event:
        case NodeStarted():
            member = replace(member, started=True, ended_at_s=None)
        case NodeSucceeded():
            member = replace(member, succeeded=True)
        case DrainReady():
            member = replace(member, saved=state.world.planned is not None)
        case NodeDown():
            member = replace(member, down=True, ended_at_s=now_s)
    return with_member(state, member), ()


def _on_failed(state: ClusterState, event: NodeFailed, now_s: float) -> Decision:
    world = state.world
    if world is None or world.stage is not Stage.RUNNING or event.node not in world.members:
        return state, ()
    if event.failure.generation != world.generation:
        return state, ()
    if event.failure.kind in HARDWARE_LIKE:
        for name in sorted(set(event.culprit_nodes) & set(world.members)):
            node = state.nodes.get(name)
            if node is not None and node.session == world.members[name].session:
                reason = f"{event.failure.kind.value}, {event.failure.signature}"
                state = with_node(state, blame(state.config, node, one_line(reason), now_s))
    return ask_job(state, event.failure, now_s)


def _on_store(state: ClusterState, event: StoreOpened | StoreLost, now_s: float) -> Decision:
    world, forming = state.world, state.forming
    if forming is not None and forming.store is not None:
        store = forming.store
        if (store.node, forming.generation) != (event.node, event.generation):
            return state, ()
        if isinstance(event, StoreOpened):
            store = replace(store, address=store.address or event.address)
            return replace(state, forming=replace(forming, store=store)), ()
        return _on_no_store(state, event.node, now_s)
    if isinstance(event, StoreOpened) or world is None or world.stage is not Stage.RUNNING:
        return state, ()
    if (world.store_node, world.generation) != (event.node, event.generation):
        return state, ()
    return fail_world(state, f"the store on node {event.node} is lost", now_s)


def _on_no_store(state: ClusterState, name: str, now_s: float) -> Decision:
    """A node that can't hold a store is tried once more, then excluded."""
    assert state.forming is not None, "no store to lose"
    state = replace(state, forming=replace(state.forming, store=None))
    node = state.nodes.get(name)
    if node is None:
        return state, ()
    return with_node(state, blame(state.config, node, "it could not hold a store", now_s)), ()
