"""Nobody died and yet nothing moves: who waits for whom, and who is outside while the others wait.

Every rank that waits in a collective points at the members that have not come to it. Following the arrows
ends at a rank that waits for nobody (the cause), or goes round in a circle (groups entered in different
orders). A rank that finished is a cause too: it left while others still needed it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

from closeranks.diagnose.circle_words import circle
from closeranks.diagnose.deaths import Fallen, Role
from closeranks.diagnose.hang_words import (
    early_exit,
    frozen,
    host_block,
    late_arrival,
    short_step,
    unanswered,
)
from closeranks.diagnose.history import Conduct, History
from closeranks.diagnose.stacks import in_backward, in_collective, is_raising
from closeranks.diagnose.status import is_stopped
from closeranks.diagnose.verdicts import Finding
from closeranks.diagnose.view import P2P_OPS, View
from closeranks.policy.waits import blocked_forever
from closeranks.progress import Phase

__all__ = ["Wait", "WaitGraph", "find_frozen", "find_hang_cause", "find_short_step", "wait_graph"]


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank waits in collective ``seq`` of ``group``; None where that isn't known."""

    rank: int
    group: int | None
    seq: int | None


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """``edges``: rank -> those it waits for. ``roots`` are waited for and wait for nobody."""

    waits: Mapping[int, tuple[Wait, ...]]
    edges: Mapping[int, frozenset[int]]

    @property
    def roots(self) -> tuple[int, ...]:
        awaited = {rank for targets in self.edges.values() for rank in targets}
        return tuple(sorted(rank for rank in awaited if not self.edges.get(rank)))

    @property
    def waiters(self) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, targets in self.edges.items() if targets))


def _waits_of(view: View, rank: int, role: Role | None) -> tuple[Wait, ...]:
    if role in (Role.FINISHED, Role.BROKE):
        return ()
    record = view.open_record(rank)
    if record is not None:
        return (Wait(rank, record.group, None if record.op in P2P_OPS else record.seq),)
    pending = tuple(
        Wait(rank, group, counters[0] - view.shift(group))
        for group, counters in sorted(view.enqueued.get(rank, {}).items())
        if counters[0] > counters[1]
    )
    if pending:
        return pending
    entry, page = view.ranks[rank], view.pages.get(rank)
    asleep = entry.process is not None and entry.process.state == "S"
    backward = in_backward(entry.stack) and asleep
    inside = page is not None and page.in_collective
    failed = role in (Role.VICTIM, Role.MISMATCH) or is_raising(entry.stack)
    if failed or inside or backward or in_collective(entry.stack):
        return (Wait(rank, None, None),)
    return ()


def wait_graph(view: View, fallen: Fallen) -> WaitGraph:
    """Who waits for whom."""
    roles = {death.rank: death.role for death in fallen.deaths}
    waits = {rank: w for rank in view.order if (w := _waits_of(view, rank, roles.get(rank)))}
    edges: dict[int, frozenset[int]] = {}
    for rank, mine in waits.items():
        targets: set[int] = set()
        for wait in mine:
            members = view.members(wait.group) if wait.group is not None else view.order
            if wait.seq is None or wait.group is None:
                targets.update(m for m in members if m not in waits)
            else:
                targets.update(m for m in members if view.passed(m, wait.group) < wait.seq)
        edges[rank] = frozenset(targets - {rank})
    return WaitGraph(waits, edges)


def find_frozen(view: View, fallen: Fallen) -> Finding | None:
    """Ranks stopped by a signal, if not all of them were."""
    ended = {death.rank for death in fallen.deaths}
    living = [rank for rank in view.order if rank not in ended]
    trigger = view.evidence.trigger
    named = trigger.ranks if trigger.kind == "stopped" else ()
    stopped = [
        rank for rank in living
        if is_stopped(view.ranks[rank].process) or (rank in named and view.ranks[rank].process is None)
    ]  # fmt: skip
    if not stopped:
        return None
    return frozen(view, tuple(stopped), everyone=len(stopped) == len(view.order) > 1)


def find_short_step(view: View, fallen: Fallen) -> Finding | None:
    """Ranks that wait after a step with fewer collectives than they usually issue, while others are behind
    them: what they left out was issued in C++, as DDP does, so no record shows it."""
    ended = {death.rank for death in fallen.deaths}
    short = tuple(
        rank for rank in view.order
        if rank not in ended and (page := view.pages.get(rank)) is not None and page.short_step is not None
    )  # fmt: skip
    if not short or 2 * len(short) > len(view.order):
        return None
    ahead = min(view.pages[rank].step for rank in short)
    behind = tuple(
        rank for rank in view.order
        if rank not in ended and (page := view.pages.get(rank)) is not None and page.step < ahead
    )  # fmt: skip
    return short_step(view, short, behind) if behind else None


def find_hang_cause(view: View, fallen: Fallen) -> Finding | None:
    """The explanation of a standstill; None where the facts don't decide."""
    late = _late(view, fallen)
    if late is not None:
        return late
    graph = wait_graph(view, fallen)
    finished = {death.rank for death in fallen.of(Role.FINISHED)}
    pairs = _in_pairs(view, graph)
    if pairs and set(pairs) == set(graph.waits):
        ended = finished | {rank for rank, page in view.pages.items() if page.phase is Phase.EXIT}
        others = ended.difference(pairs)
        lost = any(not death.timeout for death in fallen.of(Role.VICTIM))
        if others.issuperset(graph.roots) and (others or not lost):
            return unanswered(view, pairs, tuple(sorted(others)))
    roots = [rank for rank in graph.roots if not _is_victim(fallen, rank)]
    gone = [rank for rank in roots if rank in finished and _is_missed(graph, rank, pairs)]
    if gone:
        return _left(view, graph, gone)
    roots = [rank for rank in roots if rank not in finished]
    if roots:
        culprits = _narrow(view, graph, roots)
        return host_block(view, graph.waits, culprits, graph.waiters, _sure(view)) if culprits else None
    if graph.waiters:
        return _circle(view, graph)
    trigger = view.evidence.trigger
    outside = tuple(
        r for r in trigger.ranks if r in view.ranks and r not in graph.waits and r not in finished
    )
    if trigger.kind == "blocked" and outside:
        return host_block(view, graph.waits, outside, (), 0.8)
    if trigger.kind == "deadlock" and len(graph.waits) == len(view.order):
        return circle(view, (), graph.waits, 0.5, {})
    return None


def _in_pairs(view: View, graph: WaitGraph) -> tuple[int, ...]:
    """Ranks that wait for one peer, in a send or a receive: for which one, the page doesn't say."""
    records = {rank: view.open_record(rank) for rank in graph.waits}
    return tuple(rank for rank, record in records.items() if record is not None and record.op in P2P_OPS)


def _is_missed(graph: WaitGraph, rank: int, pairs: tuple[int, ...]) -> bool:
    """Whether somebody waits for this rank who isn't in a send or receive with who knows whom."""
    return any(rank in targets for waiter, targets in graph.edges.items() if waiter not in pairs)


def _is_victim(fallen: Fallen, rank: int) -> bool:
    return any(d.rank == rank and d.role in (Role.VICTIM, Role.MISMATCH) for d in fallen.deaths)


def _sure(view: View) -> float:
    return {"blocked": 0.93, "deadlock": 0.93, "hang_timeout": 0.8}.get(view.evidence.trigger.kind, 0.75)


def _narrow(view: View, graph: WaitGraph, roots: list[int]) -> tuple[int, ...]:
    """Of several ranks that others wait for, those that are proved to stand still; none if it stays open."""
    named = [rank for rank in roots if rank in view.evidence.trigger.ranks]
    if view.evidence.trigger.kind in ("blocked", "deadlock", "hang_timeout") and named:
        roots = named
    if len(roots) > 1:
        stuck = [r for r in roots if (p := view.ranks[r].process) is not None and blocked_forever(p)]
        roots = stuck or roots
    return tuple(roots) if len(roots) <= max(1, len(graph.waiters)) or named else ()


def _left(view: View, graph: WaitGraph, gone: list[int]) -> Finding | None:
    """Some finished, others wait for them: did they leave too early, or do the others do too much?"""
    pairs = _in_pairs(view, graph)
    waiters = [rank for rank in graph.waiters if rank not in gone and rank not in pairs]
    if len(gone) == len(waiters) and _out_of_step(view, (*gone, *waiters)):
        return None
    extra = [rank for rank in waiters if _open_conduct(view, rank) is Conduct.EXTRA]
    if extra and len(extra) == len(waiters) <= len(gone):  # a collective that comes once: most know it
        return early_exit(view, graph.waits, tuple(gone), tuple(extra), extra=True, confidence=0.85)
    if len(waiters) < len(gone):
        return early_exit(view, graph.waits, tuple(gone), tuple(waiters), extra=True, confidence=0.75)
    return early_exit(view, graph.waits, tuple(gone), tuple(waiters), extra=False, confidence=0.93)


def _out_of_step(view: View, ranks: Collection[int]) -> bool:
    """Whether these ranks have come to meet in different steps, or seen with unseen collectives: then one of
    them skipped or added one before, and which one isn't recorded. Ranks whose steps differ ever again have
    it by habit: they count them differently."""
    for group in view.groups():
        rings = [ring for r in ranks if (ring := view.rings.get(r, {}).get(group))]
        if len(rings) < len(ranks):
            continue
        common = set(rings[0]).intersection(*rings[1:])
        apart = [tuple(ring[seq].step - rings[0][seq].step for ring in rings) for seq in sorted(common)]
        changes = sum(1 for before, after in pairwise(apart) if before != after)
        if apart and any(apart[-1]) and changes <= 1:
            return True
        first, last = max(min(ring) for ring in rings), min(max(ring) for ring in rings)
        if any(first <= seq <= last and seq not in common for ring in rings for seq in ring):
            return True
    return False


def _open_conduct(view: View, rank: int) -> Conduct:
    record, page = view.open_record(rank), view.pages.get(rank)
    if record is None or page is None:
        return Conduct.NO_HISTORY
    history = History(page)
    index = history.index_of(record.group, record.seq)
    return history.judge(index).conduct if index is not None else Conduct.NO_HISTORY


def _circle(view: View, graph: WaitGraph) -> Finding | None:
    """All who are waited for wait themselves: someone entered its groups in another order than the rest."""
    concerned = set(graph.waiters).union(*graph.edges.values())
    if any(wait.seq is None for rank in concerned for wait in graph.waits.get(rank, ())):
        return None  # not a circle as far as is known: nobody knows where that rank was
    conducts = {rank: _open_conduct(view, rank) for rank in graph.waiters}
    odd = tuple(rank for rank, conduct in conducts.items() if conduct.deviates)
    if odd and len(odd) < len(conducts):
        return circle(view, odd, graph.waits, 0.85, conducts)
    absent = _absent_from_fullest(view, graph)
    if absent:
        return circle(view, absent, graph.waits, 0.65, conducts)
    return circle(view, (), graph.waits, 0.5, conducts)


def _absent_from_fullest(view: View, graph: WaitGraph) -> tuple[int, ...]:
    """The members missing from the collective that most of its members have come to; () in a tie."""
    places = {(w.group, w.seq) for mine in graph.waits.values() for w in mine if w.seq is not None}
    scored: list[tuple[float, tuple[int, ...]]] = []
    for group, seq in places:
        assert group is not None and seq is not None
        members = view.members(group)
        absent = tuple(m for m in members if view.passed(m, group) < seq)
        if absent and members:
            scored.append((1 - len(absent) / len(members), absent))
    scored.sort(key=lambda s: s[0], reverse=True)
    if not scored or scored[0][0] <= 0.5 or (len(scored) > 1 and scored[1][0] == scored[0][0]):
        return ()
    return scored[0][1]


def _late(view: View, fallen: Fallen) -> Finding | None:
    """A rank that came to a collective only after its peers had given up waiting there."""
    timeouts = [d for d in fallen.of(Role.VICTIM) if d.timeout and d.when_ns is not None]
    if not timeouts:
        return None
    first = timeouts[0]
    assert first.when_ns is not None
    place = view.open_record(first.rank)
    if place is None or place.op in P2P_OPS:
        return None
    waited = {d.rank for d in timeouts}
    late = []
    for rank in view.members(place.group):
        record = view.rings.get(rank, {}).get(place.group, {}).get(place.seq)
        if rank not in waited and record is not None and record.mono_ns > first.when_ns:
            late.append(rank)
    return late_arrival(view, place, tuple(late), tuple(sorted(waited))) if late else None
