"""A job over many nodes by hand: facts in, orders out, a clock that moves when it is told to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from closeranks.cluster_events import (
    ClusterAction,
    ClusterEvent,
    KillNode,
    NodeAttached,
    NodeDown,
    NodeFailed,
    NodeHeartbeat,
    NodeReady,
    NodeStarted,
    OpenStore,
    StartNode,
    StoreOpened,
    Tick,
)
from closeranks.config import BudgetConfig, ClusterConfig
from closeranks.events import Failure, FailureKind, Finish, RunStarted, Tell
from closeranks.policy.cluster import ClusterState, decide, holds_lease, initial

TICK_S = 0.5
A = TypeVar("A")


def failure(generation: int = 0, kind: FailureKind = FailureKind.SIGNAL, **changes: Any) -> Failure:
    base = Failure(
        generation=generation,
        incident_id=f"{generation:04}",
        kind=kind,
        rank=1,
        signature="SIGKILL",
        step=5,
        startup=False,
        durable_progress=False,
        exit_code=137,
    )
    return replace(base, **changes)


class Lab:
    """Feeds facts and keeps what came of them. ``beating``: whose heartbeats arrive, with their sessions."""

    def __init__(self, config: ClusterConfig, budget: BudgetConfig | None = None) -> None:
        self.state: ClusterState = initial(config, budget or BudgetConfig())
        self.now_s = 0.0
        self.beating: dict[str, str] = {}
        self.told: list[Tell] = []

    def feed(self, *events: ClusterEvent) -> list[ClusterAction]:
        """The actions of these facts, without what is only told."""
        actions: list[ClusterAction] = []
        for event in events:
            self.state, new = decide(self.state, event, self.now_s)
            actions += new
        self.told = [action for action in actions if isinstance(action, Tell)]
        return [action for action in actions if not isinstance(action, Tell)]

    def attach(
        self,
        *names: str,
        session: str = "s1",
        slots: int = 2,
        running: int | None = None,
        ready: bool = False,
    ) -> list[ClusterAction]:
        actions = []
        for name in names:
            actions += self.feed(NodeAttached(name, session, slots, f"{name}:1", running))
            if holds_lease(self.state, name, session):
                self.beating[name] = session
            if ready:
                actions += self.feed(NodeReady(name, session))
        return actions

    def wait(self, for_s: float) -> list[ClusterAction]:
        """Time passes, with a tick every half second and a heartbeat of every node that beats."""
        actions = []
        until_s = self.now_s + for_s
        while self.now_s < until_s:
            self.now_s = min(self.now_s + TICK_S, until_s)
            beats = [NodeHeartbeat(name, session) for name, session in self.beating.items()]
            actions += self.feed(*beats, Tick())
        return actions

    def silence(self, *names: str) -> None:
        for name in names:
            del self.beating[name]

    def open_store(self) -> list[ClusterAction]:
        """The store that was asked for is open: the orders to start."""
        forming = self.state.forming
        assert forming is not None and forming.store is not None, "no store was asked for"
        return self.feed(StoreOpened(forming.store.node, forming.generation, f"{forming.store.node}:29500"))

    def start(self) -> list[StartNode]:
        """Open the store and report every node as started."""
        starts = only(self.open_store(), StartNode)
        assert starts, "nothing was started"
        self.feed(*[NodeStarted(start.node, start.generation) for start in starts])
        return starts

    def down(self, *names: str) -> list[ClusterAction]:
        """These nodes have nothing left of the current generation."""
        assert self.state.world is not None
        return self.feed(*[NodeDown(name, self.state.world.generation) for name in names])

    def fail(self, node: str, *culprits: str, **changes: Any) -> list[ClusterAction]:
        assert self.state.world is not None
        return self.feed(NodeFailed(node, failure(self.state.world.generation, **changes), culprits))

    def finish(self, actions: list[ClusterAction]) -> Finish:
        """The end, which must be the last of these actions."""
        assert self.state.finished, "it goes on"
        end = actions[-1]
        assert isinstance(end, Finish)
        return end

    @property
    def members(self) -> list[str]:
        """The nodes of the world by node rank."""
        assert self.state.world is not None
        seats = self.state.world.members.values()
        return [member.node for member in sorted(seats, key=lambda member: member.node_rank)]


def only(actions: list[ClusterAction], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def running(
    nodes: str = "ab",
    spares: str = "",
    budget: BudgetConfig | None = None,
    *,
    spares_kept: int = 0,
    **config: Any,
) -> Lab:
    """Generation 0 runs on ``nodes``, one letter each, and ``spares`` are attached and ready."""
    usual = {"fence_margin_s": 1.0, "grow_back": False}  # a margin of two ticks, to see its middle
    config = {**usual, "min_nodes": 1, "max_nodes": len(nodes), "spares": spares_kept, **config}
    lab = Lab(ClusterConfig(**config), budget)
    assert lab.feed(RunStarted()) == []
    opens = lab.attach(*nodes)
    if not opens:  # fewer than max_nodes
        opens = lab.wait(lab.state.config.last_call_s)
    assert opens == [OpenStore(nodes[0], 0)]
    assert [start.node for start in lab.start()] == list(nodes)
    lab.attach(*spares, ready=True)
    return lab


def kills(generation: int, nodes: str) -> list[KillNode]:
    return [KillNode(node, generation) for node in nodes]
