"""Between the job, which knows generations, and its nodes: what policy.job decides, as orders. Pure.

The job hears of a generation's end when every member is known to be down, and of nothing else that happens to
a single node.
"""

from __future__ import annotations

from dataclasses import replace

from closeranks.cluster_events import ClusterAction, KillNode, StopNode
from closeranks.events import (
    Action,
    AllRanksSucceeded,
    Event,
    Failure,
    FailureKind,
    Finish,
    GenerationDown,
    KillGeneration,
    StartGeneration,
    StopGracefully,
    Tell,
)
from closeranks.policy import job
from closeranks.policy.budget import one_line
from closeranks.policy.cluster_nodes import exclude
from closeranks.policy.cluster_state import (
    ClusterState,
    Decision,
    Forming,
    Link,
    Member,
    Stage,
    is_reachable,
    live_member,
    with_member,
    with_node,
)
from closeranks.policy.cluster_world import order_of_ranks

__all__ = ["ask_job", "conclude", "end_order", "fail_world", "finish", "lose"]


def ask_job(state: ClusterState, event: Event, now_s: float) -> Decision:
    """What the job decides about ``event``, translated. What it tells comes first: an end ends it."""
    new, actions = job.decide(state.job, event, now_s)
    state = replace(state, job=new)
    orders: tuple[ClusterAction, ...] = ()
    for action in sorted(actions, key=lambda action: not isinstance(action, Tell)):
        state, more = _translate(state, action, now_s)
        orders = (*orders, *more)
    return state, orders


def conclude(state: ClusterState, now_s: float) -> Decision:
    """Tell the job of success once all members have succeeded, and of an end once all of them are down."""
    world = state.world
    if world is None or world.stage is Stage.ENDED:
        return state, ()
    members = world.members.values()
    if all(member.succeeded for member in members):
        return ask_job(state, AllRanksSucceeded(world.generation), now_s)
    if world.stage is Stage.ENDING and all(member.down for member in members):
        state = replace(state, world=replace(world, stage=Stage.ENDED))
        return ask_job(state, GenerationDown(world.generation), now_s)
    return state, ()


def fail_world(state: ClusterState, signature: str, now_s: float) -> Decision:
    """The world can't go on, for a reason that no rank gave."""
    world = state.world
    assert world is not None, "nothing that could fail"
    failure = Failure(
        generation=world.generation,
        incident_id=f"node-lost-{world.generation:04}",
        kind=FailureKind.NODE_LOST,
        rank=None,
        signature=one_line(signature),
        step=state.job.steps,
        startup=state.job.steps < 1,
        durable_progress=False,
        exit_code=1,
    )
    return ask_job(state, failure, now_s)


def lose(state: ClusterState, name: str, why: str, now_s: float) -> Decision:
    """A node's lease is over, or is no longer renewed: nobody knows what it does.

    It is excluded. Its ranks count as down ``fence_margin_s`` after the end of its lease, not before.
    """
    node = state.nodes[name]
    lost = exclude(state.config, replace(node, link=Link.LOST, ready=False), why, now_s)
    state = with_node(state, lost)
    if state.forming is not None and state.forming.store is not None and state.forming.store.node == name:
        state = replace(state, forming=replace(state.forming, store=None))
    tell = Tell("warning", f"node {one_line(name)} is lost and excluded: {one_line(why)}")
    member = live_member(state, name)
    if member is None:
        return state, (tell,)
    state = with_member(state, replace(member, lost_at_s=node.lease_end_s))
    if member.succeeded:  # what it was to do is done
        return state, (tell,)
    state, actions = fail_world(state, f"node {name} lost", now_s)
    return state, (tell, *actions)


def end_order(state: ClusterState, member: Member) -> tuple[ClusterAction, ...]:
    """What a member of a world that ends is told, where it can be."""
    world = state.world
    assert world is not None and world.stage is Stage.ENDING, "an end without a beginning"
    if member.down or not is_reachable(state, member):
        return ()
    if world.stop_signal is None:
        return (KillNode(member.node, world.generation),)
    return (StopNode(member.node, world.generation, world.stop_signal),)


def finish(state: ClusterState, end: Finish) -> Decision:
    assert not state.finished, "finished twice"
    return replace(state, finished=True, forming=None), (end,)


def _translate(state: ClusterState, action: Action, now_s: float) -> Decision:
    match action:
        case StartGeneration(generation, delay_s):
            assert state.world is None or state.world.stage is Stage.ENDED, "two worlds at once"
            return replace(state, forming=Forming(generation, now_s, now_s + delay_s)), ()
        case KillGeneration(generation):
            return _end(state, generation, None, now_s)
        case StopGracefully(generation, signal):
            return _end(state, generation, signal, now_s)
        case Finish():
            return finish(state, action)
        case Tell():
            return state, (action,)


def _end(state: ClusterState, generation: int, signal: int | None, now_s: float) -> Decision:
    """End the generation; one of which nobody has been told to start anything is down already."""
    world = state.world
    if world is None or world.generation != generation:
        state = replace(state, forming=None)
        return ask_job(state, GenerationDown(generation), now_s)
    assert world.stage is not Stage.ENDED, "ended twice"
    world = replace(world, stage=Stage.ENDING, ending_since_s=now_s, stop_signal=signal)
    state = replace(state, world=world)
    members = order_of_ranks(world.members.values())
    return state, tuple(order for member in members for order in end_order(state, member))
