"""Which nodes make up a world, and who sits where. Pure.

Ranks are stable by node: a node that stays keeps its node rank, and a spare takes the one that fell vacant.
Only where a world gets smaller do the highest node ranks move down into the vacant ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from closeranks.policy.cluster_state import ClusterState, Link, Member, Node, Standing, World

__all__ = ["Pool", "choose", "is_usable", "may_stay", "order_of_ranks", "pool_of", "seat", "spares_of"]


@dataclass(frozen=True, slots=True)
class Pool:
    """The nodes a world can be formed from: ``fit``, and ``leaving`` ones that a drain still lets stay."""

    fit: tuple[Node, ...]
    leaving: tuple[Node, ...]

    @property
    def count(self) -> int:
        """A world needs a node for its store that is not about to leave."""
        return len(self.fit) + len(self.leaving) if self.fit else 0


def is_usable(node: Node, now_s: float) -> bool:
    """Whether a new world may have this node: attached, not suspect, excluded, draining or busy."""
    return _is_sound(node, now_s) and node.drain_due_s is None


def may_stay(state: ClusterState, node: Node, now_s: float) -> bool:
    """Whether a node that drains may be in one more world: it was in the last, and its time has not come."""
    seated = state.world is not None and node.name in state.world.members
    return seated and _is_sound(node, now_s) and node.drain_due_s is not None and now_s < node.drain_due_s


def pool_of(state: ClusterState, now_s: float) -> Pool:
    nodes = state.nodes.values()
    fit = tuple(node for node in nodes if is_usable(node, now_s))
    return Pool(fit, tuple(node for node in nodes if may_stay(state, node, now_s)))


def spares_of(state: ClusterState, now_s: float) -> list[Node]:
    """The usable nodes outside of the world, in the order in which they are promoted: ready ones first."""
    seated = state.world.members if state.world is not None else {}
    spares = [node for node in state.nodes.values() if node.name not in seated and is_usable(node, now_s)]
    return sorted(spares, key=_promotion)


def choose(pool: Pool, last: World | None, size: int) -> list[Node]:
    """``size`` nodes: those of the last world by node rank, spares, then those that must leave soon."""
    ranks = _last_ranks(last)
    seated = sorted((node for node in pool.fit if node.name in ranks), key=lambda node: ranks[node.name])
    spares = sorted((node for node in pool.fit if node.name not in ranks), key=_promotion)
    leaving = sorted(pool.leaving, key=lambda node: (-(node.drain_due_s or 0.0), node.name))
    return [*seated, *spares, *leaving][:size]


def seat(chosen: Sequence[Node], last: World | None) -> dict[str, Member]:
    """Their places, by name: node ranks 0 to n - 1 and all ranks exactly once."""
    ranks = _last_ranks(last)
    keep = {node.name: ranks[node.name] for node in chosen if ranks.get(node.name, len(chosen)) < len(chosen)}
    vacant = iter(sorted(set(range(len(chosen))) - set(keep.values())))
    node_ranks = {node.name: keep[node.name] if node.name in keep else next(vacant) for node in chosen}
    members: dict[str, Member] = {}
    first_rank = 0
    for node in sorted(chosen, key=lambda node: node_ranks[node.name]):
        members[node.name] = Member(
            node.name, node.session, node.slots, node.address, node_ranks[node.name], first_rank
        )
        first_rank += node.slots
    return members


def order_of_ranks(members: Iterable[Member]) -> list[Member]:
    return sorted(members, key=lambda member: member.node_rank)


def _is_sound(node: Node, now_s: float) -> bool:
    trusted = node.link is Link.ATTACHED and node.standing is Standing.GOOD
    return trusted and node.busy is None and now_s < node.lease_end_s


def _last_ranks(last: World | None) -> dict[str, int]:
    return {} if last is None else {name: member.node_rank for name, member in last.members.items()}


def _promotion(node: Node) -> tuple[bool, str]:
    return (not node.ready, node.name)
