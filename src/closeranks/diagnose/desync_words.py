"""A clash of collectives in words: its kind, what is missing or wrong, and both sides' call sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from closeranks.diagnose.deaths import Fallen, Role
from closeranks.diagnose.history import Conduct, Judgement
from closeranks.diagnose.status import call_site, collective_text, frame_text, stack_text
from closeranks.diagnose.text import clean, fold_ranks
from closeranks.diagnose.verdicts import Finding, line
from closeranks.diagnose.view import View
from closeranks.evidence import EvidenceLine
from closeranks.progress import Collective

__all__ = ["Clash", "to_finding"]


@dataclass(frozen=True, slots=True)
class Clash:
    """Ranks that differ at ``seq`` of ``group``. ``present`` holds each one's record, None for a collective
    that no hook saw; ``culprits`` is empty where nobody can be blamed."""

    group: int
    seq: int
    present: Mapping[int, Collective | None]
    rings: Mapping[int, Mapping[int, Collective]]
    offsets: Mapping[int, int]
    judgements: Mapping[int, Judgement]
    culprits: tuple[int, ...]
    confidence: float
    majority: bool

    def next_of(self, rank: int) -> Collective | None:
        """The rank's first visible collective after this one."""
        following = [s for s in self.rings[rank] if s > self.seq]
        return self.rings[rank][min(following)] if following else None

    def step_of(self, rank: int, record: Collective) -> int:
        return record.step - self.offsets.get(rank, 0)


_SITE = tuple[str, int, str]


def _site(record: Collective) -> _SITE:
    return (record.file, record.line, record.op)


def _kind(clash: Clash, culprit: int, reference: int) -> str:
    """What the culprit did, from both sides' records at this place and the next; its own past decides what
    they leave open."""
    wrong, right = clash.present[culprit], clash.present[reference]
    past = clash.judgements[culprit].conduct
    by_past = past.value if past.deviates else ""
    if wrong is None:
        return by_past if past is Conduct.EXTRA else Conduct.SKIPPED.value
    if right is None:
        return by_past or Conduct.EXTRA.value
    ahead = clash.step_of(culprit, wrong) - clash.step_of(reference, right)
    if ahead:
        return (Conduct.SKIPPED if ahead > 0 else Conduct.EXTRA).value
    if _site(wrong) != _site(right):
        their_next, own_next = clash.next_of(reference), clash.next_of(culprit)
        if their_next is not None and _site(their_next) == _site(wrong):
            return Conduct.SKIPPED.value
        if own_next is not None and _site(own_next) == _site(right):
            return Conduct.EXTRA.value
    if (wrong.file, wrong.line) != (right.file, right.line) and by_past:
        return by_past
    if wrong.op != right.op:
        return Conduct.OTHER_TYPE.value
    if wrong.numel != right.numel:
        return Conduct.OTHER_SIZE.value
    if wrong.dtype != right.dtype:
        return Conduct.OTHER_DTYPE.value
    return by_past or "wrong_order"


def to_finding(view: View, clash: Clash, fallen: Fallen) -> Finding:
    """The finding that a clash amounts to, blamed or not."""
    if not clash.culprits:
        return _undecided(view, clash, fallen)
    culprit = clash.culprits[0]
    others = [r for r in clash.present if r not in clash.culprits]
    reference = max(others, key=lambda r: (clash.present[r] is not None, len(clash.rings[r])))
    kind = _kind(clash, culprit, reference)
    wrong, right = clash.present[culprit], clash.present[reference]
    went_on = wrong or clash.next_of(culprit)
    due = right or clash.judgements[culprit].expected
    about = (due if kind == Conduct.SKIPPED.value else wrong) or wrong or right
    onset = min((c.mono_ns for c in (wrong, right) if c is not None and c.mono_ns), default=None)
    return Finding(
        leaf="comm.desync",
        kind=kind,
        ranks=clash.culprits,
        summary=_summary(view, clash, kind, wrong, due, went_on),
        signature=f"{kind} {about.op} at {about.where}" if about is not None else kind,
        confidence=clash.confidence,
        lines=(*_lines(view, clash), *_past_lines(clash), *_stack_lines(view, clash), *_abort_lines(fallen)),
        onset_ns=onset,
    )


def _summary(
    view: View,
    clash: Clash,
    kind: str,
    wrong: Collective | None,
    due: Collective | None,
    went_on: Collective | None,
) -> str:
    who = fold_ranks(clash.culprits)
    group = view.group_label(clash.group)
    others = fold_ranks(r for r in clash.present if r not in clash.culprits)
    if kind == Conduct.SKIPPED.value:
        missed = (
            f"{due.op} #{clash.seq} of {group} (step {due.step}, {call_site(due)})"
            if due
            else f"#{clash.seq} of {group}"
        )
        then = (
            f"{went_on.op} ({call_site(went_on)})"
            if went_on is not None
            else "one issued from C++ (backward?)"
        )
        return f"{who} skipped {missed} and went on to {then}"
    if wrong is None:
        return f"{who} is in another collective than {others} at #{clash.seq} of {group}"
    here = f"#{clash.seq} of {group} (step {wrong.step}, {call_site(wrong)})"
    if kind == Conduct.EXTRA.value and _are_unseen(clash):
        cpp = "one issued from C++ (backward?)"
        return (
            f"{who} issued {wrong.op} {here}, where {others} came to {cpp}: it is extra, or that was skipped"
        )
    if kind == Conduct.EXTRA.value:
        theirs = f"{due.op} ({call_site(due)})" if due is not None else "another collective"
        return f"{who} issued an extra {wrong.op} {here}, where {others} came to {theirs}"
    if due is None:
        return f"{who} issued {wrong.op} {here}, unlike {others}"
    if kind == Conduct.OTHER_SIZE.value:
        return f"{who} issued {wrong.op} {here} with {wrong.numel} elements, {others} with {due.numel}"
    if kind == Conduct.OTHER_DTYPE.value:
        return f"{who} issued {wrong.op} {here} with {wrong.dtype}, {others} with {due.dtype}"
    if kind == Conduct.OTHER_ORDER.value:
        return f"{who} entered its groups in another order than {others}: {wrong.op} {here}"
    return f"{who} issued {wrong.op} {here}, where {others} came to {due.op} ({call_site(due)})"


def _are_unseen(clash: Clash) -> bool:
    """Whether no hook saw what the others issued there."""
    return all(record is None for rank, record in clash.present.items() if rank not in clash.culprits)


def _lines(view: View, clash: Clash) -> list[EvidenceLine]:
    """The culprits' side, then the others', ranks with the same record on one line."""
    lines = []
    for ranks, why in (
        (
            clash.culprits,
            "not what the others came to" if clash.majority else "not what this rank always did here",
        ),
        ([r for r in clash.present if r not in clash.culprits], "the collective that was due"),
    ):
        same: dict[str, list[int]] = {}
        for rank in ranks:
            record = clash.present[rank]
            if record is not None:
                text = collective_text(view, record)
            else:
                here = f"#{clash.seq} of {view.group_label(clash.group)}"
                text = f"{here}: no record; issued from C++, or not at all"
            same.setdefault(text, []).append(rank)
        lines += [line(f"{fold_ranks(who)} collectives", text, why) for text, who in same.items()]
    return lines


def _past_lines(clash: Clash) -> list[EvidenceLine]:
    lines = []
    for rank in clash.culprits[:2]:
        judgement = clash.judgements[rank]
        expected = judgement.expected
        if judgement.conduct.deviates and expected is not None:
            size = f"{expected.numel} x {expected.dtype}"
            text = f"at this place it came to {expected.op} ({call_site(expected)}, {size}) before"
            times = f" ({judgement.agreeing} times in its ring)" if judgement.agreeing else ""
            lines.append(line(f"rank {rank} history", text + times, "it left its own ways"))
        following = clash.next_of(rank)
        if following is not None:
            lines.append(
                line(
                    f"rank {rank} collectives",
                    f"next: {following.op} #{following.seq} (step {following.step}, {call_site(following)})",
                    "where it went on",
                )
            )
    return lines


def _stack_lines(view: View, clash: Clash) -> list[EvidenceLine]:
    lines = []
    innocent = [r for r in clash.present if r not in clash.culprits]
    for ranks in (clash.culprits[:1], innocent[:1]):
        for rank in ranks:
            stack = stack_text(view.ranks[rank])
            if stack:
                lines.append(line(f"rank {rank} stack", stack, "where it is now"))
    return lines


def _abort_lines(fallen: Fallen) -> list[EvidenceLine]:
    return [
        line(d.line.source, d.line.line, "gloo aborts whoever receives too many bytes, not whoever sent them")
        for d in fallen.of(Role.MISMATCH)
    ]


def _sides(view: View, clash: Clash) -> list[str]:
    """``rank 0 in barrier (train.py:66)`` of each collective that somebody came to there."""
    same: dict[str, list[int]] = {}
    for rank, record in clash.present.items():
        if record is not None:
            text = f"{record.op} ({call_site(record)})"
        else:
            op = clean(view.enqueued.get(rank, {}).get(clash.group, (0, 0, ""))[2], 40) or "one"
            where = frame_text(view.ranks[rank])
            text = f"{op} issued from C++" + (f" ({where})" if where else "")
        same.setdefault(text, []).append(rank)
    return [f"{fold_ranks(ranks)} in {text}" for text, ranks in same.items()]


def _undecided(view: View, clash: Clash, fallen: Fallen) -> Finding:
    shown = [(r, c) for r, c in clash.present.items() if c is not None]
    seen = " and ".join(_sides(view, clash)[:4])
    onset = min((c.mono_ns for _, c in shown if c.mono_ns), default=None)
    sites = sorted({f"{c.op} at {c.where}" for _, c in shown})
    differing = (
        (Conduct.OTHER_TYPE.value, {c.op for _, c in shown}),
        (Conduct.OTHER_SIZE.value, {c.numel for _, c in shown}),
        (Conduct.OTHER_DTYPE.value, {c.dtype for _, c in shown}),
    )
    kind = next((name for name, values in differing if len(values) > 1), "unknown")
    return Finding(
        leaf="comm.desync",
        kind=kind,
        ranks=(),
        summary=f"{fold_ranks(clash.present)} are in different collectives at #{clash.seq} of "
        f"{view.group_label(clash.group)}: {seen}; which of them is in error can't be told",
        signature=f"desync {' / '.join(sites[:4])}",
        confidence=clash.confidence,
        lines=(*_lines(view, clash), *_abort_lines(fallen)),
        onset_ns=onset,
        missing=(
            "a majority: no side has more ranks than the other",
            "earlier steps of these ranks to compare with",
        ),
    )
