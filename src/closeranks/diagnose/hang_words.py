"""Standstills in words: who stands outside, what it does there, and who waits for it where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from closeranks.diagnose.status import (
    blocked_reason,
    call_site,
    collective_text,
    frame_text,
    short_collective,
    stack_text,
    status_text,
)
from closeranks.diagnose.text import clean, fold_ranks
from closeranks.diagnose.verdicts import Finding, line
from closeranks.diagnose.view import View
from closeranks.evidence import EvidenceLine, ProcessFacts, RankEvidence
from closeranks.policy.waits import blocked_forever
from closeranks.progress import Collective, Page, Phase

__all__ = ["early_exit", "frozen", "host_block", "late_arrival", "short_step", "unanswered", "waiting_lines"]


class _Waits(Protocol):
    @property
    def group(self) -> int | None: ...
    @property
    def seq(self) -> int | None: ...


_WaitMap = Mapping[int, tuple[_Waits, ...]]


def waiting_lines(view: View, ranks: Iterable[int], why: str) -> list[EvidenceLine]:
    """Ranks that do the same on one line, the largest group first."""
    same: dict[str, list[int]] = {}
    for rank in ranks:
        same.setdefault(status_text(view, rank), []).append(rank)
    ordered = sorted(same.items(), key=lambda item: -len(item[1]))
    return [line(f"{fold_ranks(who)} progress", text, why) for text, who in ordered[:6]]


def _standing(view: View, rank: int) -> list[EvidenceLine]:
    """What is known of a rank that stands still, its own stack first."""
    entry = view.ranks[rank]
    lines = []
    if stack := stack_text(entry):
        lines.append(line(f"rank {rank} stack", stack, "where it stands"))
    if entry.native_stack:
        lines.append(
            line(f"rank {rank} native stack", " ← ".join(entry.native_stack[:4]), "where it stands in C")
        )
    process = entry.process
    if process is not None:
        main = process.threads[0] if process.threads else None
        where = f", in {clean(main.wchan, 40)}" if main is not None and main.wchan not in ("", "0") else ""
        why = (
            "nothing in it can ever move on by itself" if blocked_forever(process) else "what the kernel says"
        )
        lines.append(
            line(
                f"rank {rank} /proc",
                f"state {clean(process.state, 4)}{where}, {_threads(process)}{process.cpu_s:.1f} s CPU",
                why,
            )
        )
    if not entry.answered and entry.exit is None and any(view.ranks[r].answered for r in view.order):
        lines.append(
            line(
                f"rank {rank} evidence thread",
                "its evidence thread did not answer",
                "it holds the GIL or can't run",
            )
        )
    page = view.pages.get(rank)
    if page is not None:
        lines.append(
            line(
                f"rank {rank} progress",
                f"step {page.step}, phase {clean(page.phase_name, 40)}",
                "how far it came",
            )
        )
    return lines


def _step_text(view: View, page: Page) -> str:
    """Steps are counted from the start of a generation: of a later one that has to be said."""
    return f"step {page.step}{' of this generation' if view.evidence.generation else ''}"


def _threads(process: ProcessFacts) -> str:
    count = len(process.threads)
    return f"{count} thread{'s' if count != 1 else ''}, " if count else ""


def _since(view: View, rank: int) -> str:
    page, now = view.pages.get(rank), view.evidence.trigger.mono_ns
    if page is None or not 0 < page.tick_ns < now:
        return ""
    return f" for {(now - page.tick_ns) / 1e9:.1f} s"


def frozen(view: View, ranks: tuple[int, ...], *, everyone: bool) -> Finding:
    """Stopped by a signal."""
    lines = []
    for rank in ranks:
        process = view.ranks[rank].process
        state = f"state {process.state}" if process is not None else "stopped, said the agent"
        lines.append(
            line(f"rank {rank} /proc", f"{state}{_since(view, rank)}", "T is a process stopped by a signal")
        )
    page = view.pages.get(ranks[0])
    if page is not None:
        lines.append(
            line(
                f"rank {ranks[0]} progress",
                f"last sign of life in {_step_text(view, page)} ({clean(page.phase_name, 40)})",
                "where it was stopped",
            )
        )
    if stack := stack_text(view.ranks[ranks[0]]):
        lines.append(line(f"rank {ranks[0]} stack", stack, "where it was stopped"))
    lines += waiting_lines(view, (r for r in view.order if r not in ranks), "it waits")
    onset = min(
        (p.tick_ns for r in ranks if (p := view.pages.get(r)) is not None and p.tick_ns), default=None
    )
    if everyone:
        return Finding(
            "unknown", "frozen_process", (),
            "all ranks were stopped by a signal, as Ctrl-Z or a scheduler's suspend does",
            "all ranks stopped", 0.6, tuple(lines), onset, ("whether they will be continued",), "wait", False,
        )  # fmt: skip
    be = "was" if len(ranks) == 1 else "were"
    return Finding(
        leaf="app.hang",
        kind="frozen_process",
        ranks=ranks,
        summary=f"{fold_ranks(ranks)} {be} stopped by a signal (SIGSTOP or SIGTSTP); "
        "who sent it is not recorded",
        signature="SIGSTOP",
        confidence=0.98,
        lines=tuple(lines),
        onset_ns=onset,
    )


def _leaf_of(view: View, entry: RankEvidence) -> str:
    page = view.pages.get(entry.rank)
    if entry.process is not None and entry.process.state == "D":
        return "storage.stall"
    if (page is not None and page.phase is Phase.DATA) or "data loader" in blocked_reason(entry):
        return "data.stall"
    return "app.hang"


def host_block(
    view: View, waits: _WaitMap, ranks: tuple[int, ...], waiters: tuple[int, ...], confidence: float
) -> Finding:
    """Ranks outside any collective while others wait for them."""
    first = view.ranks[ranks[0]]
    reason = blocked_reason(first)
    groups = {w.group for r in waiters for w in waits.get(r, ()) if w.group is not None}
    sub = any(ranks[0] in (members := view.members(g)) and len(members) < len(view.order) for g in groups)
    state = first.process.state if first.process is not None else ""
    still = (
        state in ("S", "D")
        or bool(first.native_stack)
        or (bool(waiters) and not first.answered and bool(first.stack))
    )
    kind = "subgroup_hang" if sub else "host_block" if still else "never_enters"
    where, page = frame_text(first), view.pages.get(first.rank)
    doing = reason or ("is busy" if state == "R" else "stands still")
    at = f" at {where}" if where else ""
    step = f" in {_step_text(view, page)}" if page is not None else ""
    waiting = f" while {fold_ranks(waiters)} wait{'s' if len(waiters) == 1 else ''} for it" if waiters else ""
    lines = [entry for rank in ranks[:3] for entry in _standing(view, rank)]
    lines[1:1] = waiting_lines(view, waiters, "it waits for the others")[:3]
    awaited = _awaited(view, first.rank, waiters)
    onset = min(
        (p.tick_ns for r in ranks if (p := view.pages.get(r)) is not None and p.tick_ns), default=None
    )
    return Finding(
        leaf=_leaf_of(view, first),
        kind=kind,
        ranks=ranks,
        summary=f"{fold_ranks(ranks)} {doing}{at}{step}{awaited}{waiting}",
        signature=_place_signature(kind, first, reason),
        confidence=confidence,
        lines=tuple(lines),
        onset_ns=onset,
    )


def short_step(view: View, ranks: tuple[int, ...], behind: tuple[int, ...]) -> Finding:
    """Ranks that completed a step with fewer collectives than usual; ``behind`` wait in one of that step."""
    first = view.ranks[ranks[0]]
    page = view.pages[ranks[0]]
    assert page.short_step is not None
    issued, usual = page.short_step
    where = frame_text(first)
    lines = [
        line(
            f"{fold_ranks(ranks)} progress",
            f"issued {issued} collectives in step {page.step}, {usual} in each step before",
            "it left out what the others wait in",
        ),
        *waiting_lines(view, behind, "it waits for the others")[:3],
        *_standing(view, ranks[0]),
    ]
    return Finding(
        leaf="comm.desync",
        kind="skip_collective",
        ranks=ranks,
        summary=f"{fold_ranks(ranks)} left out {usual - issued} of the usual {usual} collectives of "
        f"{_step_text(view, page)}{' at ' + where if where else ''}, while {fold_ranks(behind)} "
        f"wait{'s' if len(behind) == 1 else ''} for {'it' if len(ranks) == 1 else 'them'}",
        signature=f"skip_collective: {issued} of {usual} a step{' at ' + where if where else ''}",
        confidence=0.9,
        lines=tuple(lines),
        onset_ns=page.step_ns or None,
    )


def _awaited(view: View, culprit: int, waiters: tuple[int, ...]) -> str:
    """Which collective it did not come to: that of the smallest group, where it was needed first."""
    records = [c for rank in waiters if (c := view.open_record(rank)) is not None]
    missed = [c for c in records if culprit in view.members(c.group)]
    if not missed:
        return ""
    nearest = min(missed, key=lambda c: len(view.members(c.group)))
    return f" and never entered {short_collective(view, nearest)}"


def _place_signature(kind: str, entry: RankEvidence, reason: str) -> str:
    place = frame_text(entry)
    return f"{kind}{' at ' + place if place else ''}{' (' + reason + ')' if reason else ''}"


def late_arrival(view: View, place: Collective, late: tuple[int, ...], waited: tuple[int, ...]) -> Finding:
    """Ranks that came only after the others had timed out."""
    record = view.rings[late[0]][place.group][place.seq]
    delay_s = (record.mono_ns - place.mono_ns) / 1e9
    lines = [
        line(
            f"{fold_ranks(late)} collectives",
            f"entered {collective_text(view, record)} {delay_s:.1f} s after rank {waited[0]}",
            "it came when the others had given up",
        ),
        *waiting_lines(view, waited, "it timed out waiting"),
    ]  # fmt: skip
    return Finding(
        leaf="app.hang",
        kind="never_enters",
        ranks=late,
        summary=f"{fold_ranks(late)} came {delay_s:.1f} s late to {short_collective(view, place)}; "
        f"{fold_ranks(waited)} timed out waiting for it",
        signature=f"late for {place.op} at {place.where}",
        confidence=0.8,
        lines=tuple(lines),
        onset_ns=place.mono_ns or None,
    )


def early_exit(
    view: View,
    waits: _WaitMap,
    gone: tuple[int, ...],
    waiters: tuple[int, ...],
    *,
    extra: bool,
    confidence: float,
) -> Finding:
    """Ranks that finished while others still wait for them, or (``extra``) the few that wait for more than
    there was."""
    record = next((c for r in waiters if (c := view.open_record(r)) is not None), None)
    place = short_collective(view, record) if record else "a collective"
    lines = [
        line(f"{fold_ranks(gone)} exit", "finished with exit code 0", "it left the others"),
        *waiting_lines(view, waiters, "nobody else comes to this collective"),
    ]
    for rank in (*gone, *waiters)[:4]:
        page = view.pages.get(rank)
        if page is not None:
            steps = f"{page.step} steps" if page.step else "no optimizer step"
            lines.append(
                line(
                    f"rank {rank} progress",
                    f"{steps}, {page.world_seq} collectives of the default group",
                    "how far it came",
                )
            )
    if extra:
        return Finding(
            "comm.desync", "extra_collective", waiters,
            f"{fold_ranks(waiters)} issued an extra {place} after {fold_ranks(gone)} had finished",
            f"extra_collective {record.op} at {record.where}" if record else "extra_collective at the end",
            confidence, tuple(lines), record.mono_ns if record else None,
        )  # fmt: skip
    page = view.pages.get(gone[0])
    after = f" after {page.step} steps" if page is not None and page.step else ""  # 0: it may have none
    still = (
        f" while {fold_ranks(waiters)} still wait{'s' if len(waiters) == 1 else ''} in {place}"
        if waiters
        else ""
    )
    exits = [e for r in gone if (e := view.ranks[r].exit_mono_ns) is not None]
    return Finding(
        leaf="comm.desync",
        kind="early_exit",
        ranks=gone,
        summary=f"{fold_ranks(gone)} finished with exit code 0{after}{still}",
        signature="early exit with code 0",
        confidence=confidence,
        lines=tuple(lines),
        onset_ns=min(exits, default=None),
    )


def unanswered(view: View, waiters: tuple[int, ...], ended: tuple[int, ...]) -> Finding:
    """Ranks that wait in a send or receive, and nobody is left who might answer. With whom isn't recorded:
    one call too many on this side, or one too few on the other, look the same."""
    calls: dict[str, list[int]] = {}
    records = {rank: c for rank in waiters if (c := view.open_record(rank)) is not None}
    for rank, record in records.items():
        calls.setdefault(f"{record.op} ({call_site(record)})", []).append(rank)
    where = ", ".join(f"{fold_ranks(ranks)} in {call}" for call, ranks in list(calls.items())[:4])
    have = "has" if len(ended) == 1 else "have"
    done = f"; {fold_ranks(ended)} {have} come to the end of the script" if ended else ""
    lines = [
        line(f"{fold_ranks(ranks)} calls", f"waits in {call}, which nobody answers", "open to the end")
        for call, ranks in calls.items()
    ]
    lines += waiting_lines(view, (r for r in view.order if r not in ended), "what came of it")
    lines += waiting_lines(view, ended, "it answers no more")
    places = sorted({f"{c.op} at {c.where}" for c in records.values()})
    return Finding(
        leaf="comm.desync",
        kind="unanswered",
        ranks=(),
        summary=f"a send or receive is never answered: {where}{done}",
        signature=f"unanswered {' / '.join(places[:4])}",
        confidence=0.6,
        lines=tuple(lines),
        onset_ns=min((c.mono_ns for c in records.values() if c.mono_ns), default=None),
        missing=("the peers of send and recv calls",),
    )
