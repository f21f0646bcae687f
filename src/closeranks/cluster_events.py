"""Facts and actions of a job over many nodes, for closeranks.policy.cluster and whoever drives it. No I/O.

A **node** is a host by its stable name; a **session** is one agent process on it, by a random id. Durations
such as ``deadline_s`` count from when the message is made, as no two hosts share a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.events import Failure, Finish, Progress, RunStarted, StopRequested, Tell

__all__ = [
    "CheckHealth",
    "ClusterAction",
    "ClusterEvent",
    "DrainReady",
    "DrainRequested",
    "EngineDrains",
    "KillNode",
    "NodeAttached",
    "NodeDown",
    "NodeFailed",
    "NodeGone",
    "NodeHealth",
    "NodeHeartbeat",
    "NodeLeft",
    "NodeReady",
    "NodeStarted",
    "NodeSucceeded",
    "NodesRequested",
    "OpenStore",
    "PrepareDrain",
    "ReleaseNode",
    "RequestDenied",
    "RequestNode",
    "StartNode",
    "StopNode",
    "StoreLost",
    "StoreOpened",
    "Tick",
    "cluster_incident_id",
]


def cluster_incident_id(generation: int) -> str:
    """One for each generation that fails: every node knows it without asking."""
    return f"g{generation:04d}"


# --- facts ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeAttached:
    """An agent connected, or connected again. ``running``: the generation whose ranks it holds, or None."""

    node: str
    session: str
    slots: int
    address: str
    running: int | None = None


@dataclass(frozen=True, slots=True)
class NodeHeartbeat:
    """Renews the lease, if the session holds one."""

    node: str
    session: str


@dataclass(frozen=True, slots=True)
class NodeReady:
    """Its workers are imported and warm."""

    node: str
    session: str


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """What a health check found. ``check``: the number of the CheckHealth it answers, 0 if nobody asked."""

    node: str
    ok: bool
    reason: str
    check: int = 0


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """A clean goodbye: the agent ends, and its ranks have ended. Its session never comes back."""

    node: str
    session: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeStarted:
    """Every rank of this generation on this node has been told to go."""

    node: str
    generation: int


@dataclass(frozen=True, slots=True)
class NodeDown:
    """Nothing of this generation runs on this node, and nothing ever will again."""

    node: str
    generation: int


@dataclass(frozen=True, slots=True)
class NodeSucceeded:
    """All ranks of this generation on this node exited with 0."""

    node: str
    generation: int


@dataclass(frozen=True, slots=True)
class NodeFailed:
    """A rank on this node failed; evidence is captured. ``culprit_nodes``: whom the verdict blames."""

    node: str
    failure: Failure
    culprit_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreOpened:
    """The store in which this generation's ranks meet listens at ``address``."""

    node: str
    generation: int
    address: str


@dataclass(frozen=True, slots=True)
class StoreLost:
    """The store of this generation is no longer there, or couldn't be opened."""

    node: str
    generation: int


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Someone wants the node back within ``deadline_s``."""

    node: str
    deadline_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class EngineDrains:
    """The engine has the node marked to be drained, without a deadline."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class DrainReady:
    """This node's ranks have finished their step and saved, or won't within the deadline."""

    node: str
    generation: int


@dataclass(frozen=True, slots=True)
class NodeGone:
    """The engine is certain that the host is dead.

    ``session``: that of the node when the engine was asked; with it the fact can't be about an earlier life
    of the host, and is proof that its ranks are down. Without one it is a reason to stop renewing the lease.
    """

    node: str
    reason: str
    session: str = ""


@dataclass(frozen=True, slots=True)
class NodesRequested:
    """The engine has been asked for the nodes that the job begins with."""

    count: int


@dataclass(frozen=True, slots=True)
class RequestDenied:
    """The engine has ``count`` nodes less to give than it was asked for."""

    count: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed, and every message that had arrived by now was handed in before. Leases end here."""


ClusterEvent = (
    RunStarted
    | NodeAttached
    | NodeHeartbeat
    | NodeReady
    | NodeHealth
    | NodeLeft
    | NodeStarted
    | NodeDown
    | NodeSucceeded
    | NodeFailed
    | StoreOpened
    | StoreLost
    | DrainRequested
    | EngineDrains
    | DrainReady
    | NodeGone
    | NodesRequested
    | RequestDenied
    | Progress
    | StopRequested
    | Tick
)


# --- actions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Open the store of this generation there, and say StoreOpened; say it again if it is open."""

    node: str
    generation: int


@dataclass(frozen=True, slots=True)
class StartNode:
    """Start ranks ``first_rank`` to ``first_rank + ranks - 1`` there, ``delay_s`` seconds from now.

    An agent starts each generation once, none older than one it knows, and none while it holds no lease; of
    one that has ended there, or was killed before it began, it says NodeDown.
    """

    node: str
    generation: int
    node_rank: int
    first_rank: int
    ranks: int
    world_size: int
    node_count: int
    store: str
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class KillNode:
    """SIGCONT + SIGKILL everything of this generation there, its store too, then report NodeDown.

    Of a generation that hasn't started there as well, which then never does.
    """

    node: str
    generation: int


@dataclass(frozen=True, slots=True)
class StopNode:
    """Forward ``signal`` to every rank there, wait the per-rank grace, kill what is left, report NodeDown."""

    node: str
    generation: int
    signal: int


@dataclass(frozen=True, slots=True)
class PrepareDrain:
    """Have the ranks there finish their step and save, then report DrainReady; at the latest after
    ``deadline_s``."""

    node: str
    generation: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """Check the node, and report NodeHealth under the same number."""

    node: str
    reason: str
    check: int


@dataclass(frozen=True, slots=True)
class RequestNode:
    """Ask the engine for so many more nodes; it may have none to give."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseNode:
    """End the agent there and give the node back to the engine."""

    node: str
    reason: str


ClusterAction = (
    OpenStore
    | StartNode
    | KillNode
    | StopNode
    | PrepareDrain
    | CheckHealth
    | RequestNode
    | ReleaseNode
    | Finish
    | Tell
)
