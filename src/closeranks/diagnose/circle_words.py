"""Ranks that wait for each other in different groups, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from closeranks.diagnose.hang_words import waiting_lines
from closeranks.diagnose.history import Conduct
from closeranks.diagnose.status import short_collective, stack_text
from closeranks.diagnose.text import fold_ranks
from closeranks.diagnose.verdicts import Finding, line
from closeranks.diagnose.view import View
from closeranks.evidence import EvidenceLine
from closeranks.progress import Collective

__all__ = ["circle"]


def circle(
    view: View,
    culprits: tuple[int, ...],
    waiting: Iterable[int],
    confidence: float,
    conducts: Mapping[int, Conduct],
) -> Finding:
    """A deadlock; ``culprits`` is empty where nobody can be told from the others."""
    waiting = sorted(waiting)
    records = {r: c for r in waiting if (c := view.open_record(r)) is not None}
    lines = _lines(view, culprits, waiting)
    onset = min((c.mono_ns for c in records.values() if c.mono_ns), default=None)
    if not culprits:
        places = sorted({f"{c.op} at {c.where}" for c in records.values()})
        seen = "; ".join(sorted({short_collective(view, c) for c in records.values()})[:3])
        return Finding(
            leaf="comm.desync",
            kind="deadlock",
            ranks=(),
            summary=f"all ranks wait for each other: {seen or 'in collectives'}",
            signature=f"deadlock {' / '.join(places[:4])}",
            confidence=confidence,
            lines=tuple(lines),
            onset_ns=onset,
            missing=(
                "earlier steps, which would show who changed the order",
                "the peers of send and recv calls",
            ),
        )
    own = records.get(culprits[0])
    theirs = next(
        (c for r, c in records.items() if r not in culprits and (own is None or c.group != own.group)), None
    )
    skipped = conducts.get(culprits[0]) is Conduct.SKIPPED
    kind = Conduct.SKIPPED if skipped else Conduct.OTHER_ORDER
    about = theirs if skipped and theirs is not None else own
    return Finding(
        leaf="comm.desync",
        kind=kind.value,
        ranks=culprits,
        summary=f"{fold_ranks(culprits)} {_did(view, skipped, own, theirs)}",
        signature=f"{kind.value} {about.op} at {about.where}" if about is not None else kind.value,
        confidence=confidence,
        lines=tuple(lines),
        onset_ns=onset,
    )


def _did(view: View, skipped: bool, own: Collective | None, theirs: Collective | None) -> str:
    here = short_collective(view, own) if own is not None else "a collective"
    there = short_collective(view, theirs) if theirs is not None else "a collective"
    if skipped:
        return f"skipped {there}, which the others wait in, and went on to {here}"
    return f"entered its groups in another order than the others: it waits in {here}, they wait in {there}"


def _lines(view: View, culprits: tuple[int, ...], waiting: list[int]) -> list[EvidenceLine]:
    others = [rank for rank in waiting if rank not in culprits]
    lines = waiting_lines(view, culprits, "not what it came to before, or not what most came to")
    lines += waiting_lines(view, others, "it waits in a group that others have not come to")
    for rank in (*culprits[:1], *others[:1]):
        if stack := stack_text(view.ranks[rank]):
            lines.append(line(f"rank {rank} stack", stack, "where it waits"))
    return lines
