"""Evidence of one incident from several nodes, as one. Pure.

Every node stamps with a monotonic clock of its own. ``offset_ns`` takes its stamps to the reader's, good
to the time a message takes; deaths that are nearer together than that are judged by their kind, not order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from closeranks.evidence import Evidence, HostFacts, RankEvidence
from closeranks.progress import Page

__all__ = ["NodePart", "merge"]


@dataclass(frozen=True, slots=True)
class NodePart:
    """What one node captured; ``offset_ns``: to be added to its stamps."""

    node: str
    evidence: Evidence
    offset_ns: int = 0


def merge(parts: Sequence[NodePart], *, incident_id: str, generation: int, world_size: int) -> Evidence:
    """The job's evidence: all ranks by number, and the trigger that was pulled first.

    At least one part. Ranks of nodes that gave nothing are missing.
    """
    ranks: dict[int, RankEvidence] = {}
    for part in parts:
        for item in part.evidence.ranks:
            ranks.setdefault(item.rank, _moved(item, part))  # of a rank that two claim, the first word counts
    pulled = [(part, part.evidence.trigger) for part in parts if part.evidence.trigger.ranks]
    if not pulled:
        pulled = [(part, part.evidence.trigger) for part in parts]
    first, trigger = min(pulled, key=lambda item: item[1].mono_ns + item[0].offset_ns)
    p99s = [part.evidence.step_p99_s for part in parts if part.evidence.step_p99_s is not None]
    return Evidence(
        incident_id=incident_id,
        generation=generation,
        world_size=world_size,
        trigger=replace(trigger, mono_ns=trigger.mono_ns + first.offset_ns),
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        node=first.node,
        host=_host_of_first_death(parts, first),
        step_p99_s=max(p99s, default=None),
    )


def _host_of_first_death(parts: Sequence[NodePart], otherwise: NodePart) -> HostFacts:
    """A host's OOM killer explains deaths on that host, so the one on which a rank died first counts."""
    deaths = [
        (item.exit_mono_ns + part.offset_ns, part.node, part)
        for part in parts
        for item in part.evidence.ranks
        if item.exit_mono_ns is not None and item.exit is not None and not item.exit.ok
    ]
    return (min(deaths, key=lambda death: death[:2])[2] if deaths else otherwise).evidence.host


def _moved(item: RankEvidence, part: NodePart) -> RankEvidence:
    by_ns = part.offset_ns
    error, page = item.error, item.page
    return replace(
        item,
        node=part.node,
        exit_mono_ns=None if item.exit_mono_ns is None else item.exit_mono_ns + by_ns,
        error=None if error is None else replace(error, mono_ns=_at(error.mono_ns, by_ns)),
        page=None if page is None else _moved_page(page, by_ns),
    )


def _moved_page(page: Page, by_ns: int) -> Page:
    if by_ns == 0:
        return page
    return replace(
        page,
        tick_ns=_at(page.tick_ns, by_ns),
        step_ns=_at(page.step_ns, by_ns),
        phase_ns=_at(page.phase_ns, by_ns),
        steps=tuple(replace(step, mono_ns=_at(step.mono_ns, by_ns)) for step in page.steps),
        collectives=tuple(replace(record, mono_ns=_at(record.mono_ns, by_ns)) for record in page.collectives),
    )


def _at(mono_ns: int, by_ns: int) -> int:
    """A stamp on our clock; 0 means never."""
    return mono_ns + by_ns if mono_ns else 0
