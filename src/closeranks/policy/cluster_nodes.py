"""One node: its lease, its exclusion, and the way back through a health check. Pure."""

from __future__ import annotations

from dataclasses import replace

from closeranks.cluster_events import CheckHealth, NodeAttached, NodeHealth
from closeranks.config import ClusterConfig
from closeranks.events import FailureKind, Tell
from closeranks.policy.budget import one_line
from closeranks.policy.cluster_state import (
    MAX_NODES,
    MAX_SLOTS,
    ClusterState,
    Decision,
    Link,
    Node,
    Standing,
    live_member,
    with_node,
)

__all__ = [
    "HARDWARE_LIKE",
    "MAX_NAME_CHARS",
    "accept",
    "blame",
    "check_standings",
    "exclude",
    "is_acceptable",
    "make_room",
    "on_health",
    "renew",
]

MAX_NAME_CHARS = 255  # of node, session and address; a host name has no more

# What broken hardware looks like from outside. A script's own error is never a node's fault, and a node whose
# ranks are killed from outside, stopped or out of memory isn't broken either.
HARDWARE_LIKE = frozenset(
    {FailureKind.CRASH, FailureKind.HANG_TIMEOUT, FailureKind.INIT_STALL, FailureKind.LAUNCH}
)


# --- attach and lease -------------------------------------------------------------------------------


def is_acceptable(state: ClusterState, event: NodeAttached) -> bool:
    """Whether this agent may hold the node's lease from now on.

    Not while another one of the same node does: two agents by one name, or a message of a dead one that came
    late, look just like an agent's restart. And not while the old ranks of a lost node may still run, as a
    new lease would be a reason for them to live on.
    """
    texts = (event.node, event.session, event.address)
    if not 1 <= event.slots <= MAX_SLOTS or not all(1 <= len(text) <= MAX_NAME_CHARS for text in texts):
        return False
    node = state.nodes.get(event.node)
    if node is None:
        return True
    same = node.session == event.session
    match node.link:
        case Link.ATTACHED:
            return same
        case Link.AWAITED:
            return same or live_member(state, node.name) is None
        case Link.LOST:
            return live_member(state, node.name) is None
        case Link.LEFT:
            return not same and live_member(state, node.name) is None


def accept(state: ClusterState, event: NodeAttached, now_s: float) -> ClusterState:
    """The node with a fresh lease. A new session is a fresh agent on a host whose record stays."""
    lease_end_s = now_s + state.config.lease_length_s
    node = state.nodes.get(event.node)
    if node is None:
        return with_node(state, Node(event.node, event.session, event.slots, event.address, lease_end_s))
    if node.standing is Standing.CHECKING:  # the order may be lost: ask again
        node = replace(node, standing=Standing.EXCLUDED, standing_until_s=now_s)
    if node.session == event.session:
        if node.link is not Link.AWAITED:  # the grace after a restart is over for whoever is back
            lease_end_s = max(lease_end_s, node.lease_end_s)
        return with_node(state, replace(node, link=Link.ATTACHED, lease_end_s=lease_end_s))
    node = replace(
        node,
        session=event.session,
        slots=event.slots,
        address=event.address,
        lease_end_s=lease_end_s,
        link=Link.ATTACHED,
        ready=False,
        drain_due_s=None,
        drain_begin_s=None,
        busy=None,
    )
    return with_node(state, node)


def renew(state: ClusterState, name: str, now_s: float) -> ClusterState:
    node = state.nodes[name]
    lease_end_s = max(node.lease_end_s, now_s + state.config.lease_length_s)
    return with_node(state, replace(node, lease_end_s=lease_end_s))


def make_room(state: ClusterState) -> ClusterState | None:
    """The state with room for one more node: the one unheard of for longest is forgotten. None: no room."""
    if len(state.nodes) < MAX_NODES:
        return state
    absent = [
        node
        for node in state.nodes.values()
        if node.link in (Link.LOST, Link.LEFT) and live_member(state, node.name) is None
    ]
    if not absent:
        return None
    oldest = min(absent, key=lambda node: (node.lease_end_s, node.name))
    return replace(state, nodes={name: node for name, node in state.nodes.items() if name != oldest.name})


# --- exclusion --------------------------------------------------------------------------------------


def exclude(config: ClusterConfig, node: Node, reason: str, now_s: float) -> Node:
    """Out of every new world, for longer each time; too often, and it is out for good."""
    if node.standing is Standing.BANNED:
        return node
    earlier = node.exclusions if now_s - node.excluded_at_s < config.forgive_s else 0
    until_s = now_s + min(config.exclusion_s * config.exclusion_factor**earlier, config.exclusion_max_s)
    return replace(
        node,
        standing=Standing.BANNED if earlier >= config.max_exclusions else Standing.EXCLUDED,
        standing_until_s=until_s,
        standing_reason=one_line(reason),
        exclusions=earlier + 1,
        excluded_at_s=now_s,
        blamed_at_s=None,
    )


def blame(config: ClusterConfig, node: Node, reason: str, now_s: float) -> Node:
    """The culprit of a hardware-like failure: once is bad luck, twice in a short time is a bad node."""
    before_s = node.blamed_at_s
    if before_s is not None and now_s - before_s <= config.blame_window_s:
        return exclude(config, node, f"twice the culprit: {reason}", now_s)
    return replace(node, blamed_at_s=now_s)


def check_standings(state: ClusterState, now_s: float) -> Decision:
    """An exclusion that is over ends in a health check, and one without an answer in another exclusion."""
    actions: list[CheckHealth | Tell] = []
    for node in state.nodes.values():
        if node.link is not Link.ATTACHED or now_s < node.standing_until_s:
            continue
        if node.standing is Standing.EXCLUDED:
            due_s = now_s + state.config.order_timeout_s
            checking = replace(
                node, standing=Standing.CHECKING, standing_until_s=due_s, checks=node.checks + 1
            )
            state = with_node(state, checking)
            actions.append(CheckHealth(node.name, node.standing_reason, checking.checks))
        elif node.standing is Standing.CHECKING:
            state = with_node(state, exclude(state.config, node, "no answer to a health check", now_s))
            actions.append(Tell("warning", f"node {one_line(node.name)} did not answer its health check"))
    return state, tuple(actions)


def on_health(state: ClusterState, event: NodeHealth, now_s: float) -> Decision:
    """An answer counts for the check it answers. Bad news that nobody asked for excludes as well; a world
    that runs goes on, as nothing has failed in it."""
    node = state.nodes.get(event.node)
    asked = node is not None and node.standing is Standing.CHECKING and event.check == node.checks
    unasked = node is not None and node.standing is Standing.GOOD and event.check == 0 and not event.ok
    if node is None or not (asked or unasked):
        return state, ()
    name = one_line(node.name)
    if event.ok:
        state = with_node(state, replace(node, standing=Standing.GOOD, standing_reason=""))
        return state, (Tell("info", f"node {name} passed its health check and is a spare again"),)
    reason = f"health check: {event.reason}"
    tell = Tell("warning", f"node {name} is excluded: {one_line(reason)}")
    return with_node(state, exclude(state.config, node, reason, now_s)), (tell,)
