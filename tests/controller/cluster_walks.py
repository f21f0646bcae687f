"""Walks of the policy through a cluster in which everything goes wrong, for what keeps its state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from random import Random

from cluster_world_model import Model

from closeranks.cluster_events import ClusterEvent
from closeranks.config import BudgetConfig, ClusterConfig
from closeranks.events import RunStarted
from closeranks.policy.cluster import ClusterState, decide, initial
from closeranks.policy.cluster_state import Member, Node, World

CONFIG = ClusterConfig(
    min_nodes=1,
    max_nodes=3,
    spares=1,
    lease_misses=3,
    join_timeout_s=20.0,
    last_call_s=3.0,
    reattach_grace_s=5.0,
    order_timeout_s=5.0,
    exclusion_s=1.0,
    exclusion_max_s=20.0,
    grow_cooldown_s=20.0,
    drain_deadline_s=20.0,
)
Saw = Callable[[ClusterEvent, ClusterState, float], None]


class Walk(Model):
    """``saw`` is told each fact and the state after it."""

    def __init__(self, seed: int, saw: Saw) -> None:
        self.saw = saw
        super().__init__(Random(seed), CONFIG, [f"n{i}" for i in range(5)])

    def take(self, event: ClusterEvent) -> None:
        super().take(event)
        self.saw(event, self.state, self.now_s)


def walk(seed: int, steps: int, saw: Saw) -> ClusterState:
    """So many quarters of a second, or to the job's end; returns the last state."""
    model = Walk(seed, saw)
    for _ in range(steps):
        if model.end is not None:
            break
        model.go_wrong()
        model.step()
    return model.state


@functools.cache
def big_cluster(nodes: int) -> ClusterState:
    """A world of so many nodes that runs."""
    state = initial(ClusterConfig(min_nodes=nodes, max_nodes=nodes), BudgetConfig())
    state, _ = decide(state, RunStarted(), 0.0)
    names = [f"node-{i:05}.cluster.example.org" for i in range(nodes)]
    known = {
        name: Node(name, f"{i:016x}", 8, f"10.0.{i // 256}.{i % 256}", 2.0) for i, name in enumerate(names)
    }
    members = {
        name: Member(name, f"{i:016x}", 8, f"10.0.{i // 256}.{i % 256}", i, 8 * i, started=True)
        for i, name in enumerate(names)
    }
    world = World(0, members, names[0], "tcp://10.0.0.0:29500", 0.0)
    return replace(state, nodes=known, world=world, forming=None)
