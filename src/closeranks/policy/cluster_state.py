"""What the policy of many nodes remembers: nodes, the world, and the one that is being formed. Pure data.

Of bounded size, and never changed in place: its dicts are copied, so that a state of long ago stays valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from closeranks.cluster_events import ClusterAction
from closeranks.config import ClusterConfig
from closeranks.errors import ConfigError
from closeranks.policy.job import JobState

__all__ = [
    "MAX_NODES",
    "MAX_SLOTS",
    "ClusterState",
    "Decision",
    "Forming",
    "Link",
    "Member",
    "Node",
    "Planned",
    "Stage",
    "Standing",
    "Store",
    "World",
    "check_cluster_config",
    "is_reachable",
    "live_member",
    "with_member",
    "with_node",
]

MAX_NODES = 8192  # known at a time; four times the nodes of a job of 16,384 GPUs
MAX_SLOTS = 1024  # ranks of one node


class Link(StrEnum):
    """Whether a node can be talked to. ``AWAITED``: it could, before the controller's restart."""

    ATTACHED = "attached"
    AWAITED = "awaited"
    LOST = "lost"
    LEFT = "left"  # said goodbye, or was released: that agent never comes back


class Standing(StrEnum):
    """Whether a node may be in a new world. An excluded one must pass a health check first."""

    GOOD = "good"
    EXCLUDED = "excluded"
    CHECKING = "checking"
    BANNED = "banned"


@dataclass(frozen=True, slots=True)
class Node:
    """One host, and the newest agent on it.

    ``standing_until_s``: when an exclusion ends, or an answer to a health check is overdue. ``busy``: a
    generation that isn't the current one and must end there before the node is of use. ``drain_begin_s``:
    when its ranks are asked to save, should no spare come before.
    """

    name: str
    session: str
    slots: int
    address: str
    lease_end_s: float
    link: Link = Link.ATTACHED
    ready: bool = False
    standing: Standing = Standing.GOOD
    standing_until_s: float = 0.0
    standing_reason: str = ""
    exclusions: int = 0
    excluded_at_s: float = 0.0
    blamed_at_s: float | None = None
    checks: int = 0
    drain_due_s: float | None = None
    drain_begin_s: float | None = None
    drain_reason: str = ""
    busy: int | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A node's place in a world.

    ``down``: known that nothing of this generation runs there. ``lost_at_s``: when its lease ended.
    ``ended_at_s``: since when a fact is owed that says why its ranks ended.
    """

    node: str
    session: str
    ranks: int
    address: str
    node_rank: int
    first_rank: int
    down: bool = False
    started: bool = False
    succeeded: bool = False
    saved: bool = False
    ended_at_s: float | None = None
    lost_at_s: float | None = None


class Stage(StrEnum):
    """``ENDED``: the world is only remembered, for the seats of its members."""

    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Planned:
    """The world's members have been asked to save, and make way at ``due_s`` at the latest."""

    due_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of one generation, from the orders to start on. ``stop_signal``: None where it is killed."""

    generation: int
    members: dict[str, Member]
    store_node: str
    store: str
    since_s: float
    stage: Stage = Stage.RUNNING
    ending_since_s: float = 0.0
    stop_signal: int | None = None
    planned: Planned | None = None


@dataclass(frozen=True, slots=True)
class Store:
    """The store that was asked for; ``address`` is empty until it is open."""

    node: str
    session: str
    asked_at_s: float
    address: str = ""


@dataclass(frozen=True, slots=True)
class Forming:
    """A generation that is ordered and not started. ``start_s``: when its back-off is over.

    ``members``: those it will have, empty as long as there are too few.
    """

    generation: int
    since_s: float
    start_s: float
    members: dict[str, Member] = field(default_factory=dict)
    store: Store | None = None


@dataclass(frozen=True, slots=True)
class ClusterState:
    """All that ``decide`` remembers. ``requested``: nodes asked of the engine that have not come."""

    config: ClusterConfig
    job: JobState
    nodes: dict[str, Node] = field(default_factory=dict)
    world: World | None = None
    forming: Forming | None = None
    finished: bool = False
    ticked_at_s: float | None = None
    requested: int = 0
    requested_at_s: float = 0.0
    asked: bool = False  # the engine has been asked for the first nodes
    denied_until_s: float = 0.0  # the engine had none to give: it isn't asked again before


Decision = tuple[ClusterState, tuple[ClusterAction, ...]]


def with_node(state: ClusterState, node: Node) -> ClusterState:
    return replace(state, nodes={**state.nodes, node.name: node})


def with_member(state: ClusterState, member: Member) -> ClusterState:
    assert state.world is not None, "a member of no world"
    members = {**state.world.members, member.node: member}
    return replace(state, world=replace(state.world, members=members))


def live_member(state: ClusterState, name: str) -> Member | None:
    """The node's place in the current world, if ranks may run there."""
    world = state.world
    if world is None or world.stage is Stage.ENDED:
        return None
    member = world.members.get(name)
    return None if member is None or member.down else member


def is_reachable(state: ClusterState, member: Member) -> bool:
    """Whether the agent that was given this place can be talked to."""
    node = state.nodes.get(member.node)
    return node is not None and node.link is Link.ATTACHED and node.session == member.session


def check_cluster_config(config: ClusterConfig) -> None:
    """Raises ConfigError for settings under which the rules make no sense or nothing is bounded."""
    if not 1 <= config.min_nodes <= config.max_nodes:
        raise ConfigError(
            f"{config.min_nodes} to {config.max_nodes} nodes; give MIN:MAX with 1 <= MIN <= MAX"
        )
    if not 0 <= config.spares <= MAX_NODES - config.max_nodes:
        raise ConfigError(f"{config.spares} spares; give 0 or more, up to {MAX_NODES} nodes in all")
    _check_counts(config)
    above_0 = (
        "lease_s",
        "join_timeout_s",
        "order_timeout_s",
        "stop_timeout_s",
        "exclusion_s",
        "request_again_s",
        "reattach_wait_s",
    )
    at_least_0 = (
        "fence_margin_s", "last_call_s", "reattach_grace_s", "exclusion_max_s", "forgive_s", "blame_window_s",
        "grow_cooldown_s", "drain_deadline_s", "drain_prepare_s", "leave_deadline_s",
    )  # fmt: skip
    for name in (*above_0, *at_least_0):
        time_s: float = getattr(config, name)
        if not math.isfinite(time_s) or time_s < 0 or (name in above_0 and time_s == 0):
            least = "above 0" if name in above_0 else "0 or more"
            raise ConfigError(f"cluster.{name} is {time_s}; give a number of seconds, {least}")
    if not (math.isfinite(config.exclusion_factor) and 1 <= config.exclusion_factor <= 100):
        raise ConfigError(
            f"cluster.exclusion_factor is {config.exclusion_factor}; give a number from 1 to 100"
        )


def _check_counts(config: ClusterConfig) -> None:
    counts: Iterable[tuple[str, int, int]] = (
        ("lease_misses", config.lease_misses, 2),  # with 1, each late heartbeat is a lost node
        ("max_exclusions", config.max_exclusions, 0),
    )
    for name, count, least in counts:
        if not least <= count <= 100:
            raise ConfigError(f"cluster.{name} is {count}; give a number from {least} to 100")
