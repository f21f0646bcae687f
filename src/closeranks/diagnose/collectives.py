"""Ranks in different collectives: the first sequence number at which they differ, and who is in error there.

After a skipped collective everything that follows differs too, so only the first difference counts. With
three ranks or more the minority is wrong; with two, or in a tie, each rank is held against its own past.
A rank may pass a sequence number without a record of it: DDP and compiled code issue collectives from C++,
where no hook sees them. Such a silence is compared like a record, and judged by whether it is as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from closeranks.diagnose.deaths import Fallen, Role
from closeranks.diagnose.desync_words import Clash, to_finding
from closeranks.diagnose.history import Conduct, History, Judgement
from closeranks.diagnose.stacks import in_backward, is_raising
from closeranks.diagnose.verdicts import Finding
from closeranks.diagnose.view import View
from closeranks.progress import COLLECTIVE_SLOTS, WORLD_GROUP, Collective

__all__ = ["Desync", "find_desync"]

# Their sizes and types must agree. all_to_all, gather, scatter and lists of tensors may differ in size.
_SAME_SHAPE = frozenset(
    {
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_reduce_coalesced",
    }
)
_BYTES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
_MAX_JUDGED = 64  # faint differences looked into per group; a script that has more of them has them by habit

_Site = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Desync:
    """``hard``: the collectives can't be one. Otherwise they may only be of different steps or lines, or
    unseen, and the culprit's own past has to speak. ``proved``: that ranks clashed just there is known.
    ``finding.ranks`` is empty where neither side can be blamed."""

    finding: Finding
    hard: bool
    proved: bool

    @property
    def decided(self) -> bool:
        return bool(self.finding.ranks)


@dataclass(slots=True)
class _Scan:
    """One group under comparison."""

    view: View
    group: int
    rings: Mapping[int, Mapping[int, Collective]]
    first: dict[int, int]  # by rank: the lowest sequence number that its ring still speaks for
    passed: dict[int, int]  # and the highest it has issued, seen or unseen
    proved: frozenset[int]  # sequence numbers at which a worker has seen the mismatch itself
    fallen: Fallen
    offsets: dict[int, int] = field(default_factory=dict)  # steps that a rank is ahead by habit
    judged: int = 0
    unclear: int | None = None  # since when there were differences that decided nothing
    meetings: dict[tuple[int, int, _Site], set[_Site]] | None = None
    histories: dict[int, History] = field(default_factory=dict)

    def history(self, rank: int) -> History:
        if rank not in self.histories:
            self.histories[rank] = History(self.view.pages[rank])
        return self.histories[rank]

    def judge(self, rank: int, seq: int) -> Judgement:
        index = self.history(rank).index_of(self.group, seq)
        if index is None:
            return self.history(rank).judge_silence(self.group, seq)
        return self.history(rank).judge(index)

    def is_first_time(self, rank: int, seq: int) -> bool:
        """Whether the rank never came to this line before, as far as its ring reaches."""
        index = self.history(rank).index_of(self.group, seq)
        if index is None:
            return False
        records = self.history(rank).records
        return all(_site(record)[:2] != _site(records[index])[:2] for record in records[:index])

    def is_own_line(self, present: Mapping[int, Collective | None]) -> bool:
        """Whether ranks that are at different lines here are so by habit: these lines have always met each
        other, and never themselves, as with ``if rank == 0: ... else: ...``."""
        if self.meetings is None:
            self.meetings = {}
            for seq in set().union(*self.rings.values()):
                for key, other in self._pairs(
                    {r: ring[seq] for r, ring in self.rings.items() if seq in ring}
                ):
                    self.meetings.setdefault(key, set()).add(other)
        shown = {rank: record for rank, record in present.items() if record is not None}
        return all(self.meetings.get(key, {other}) == {other} for key, other in self._pairs(shown))

    @staticmethod
    def _pairs(records: Mapping[int, Collective]) -> Iterator[tuple[tuple[int, int, _Site], _Site]]:
        """Which line of the second rank a line of the first rank meets: the lowest rank with each other."""
        lowest = min(records)
        for rank, record in records.items():
            if rank != lowest:
                yield (lowest, rank, _site(records[lowest])), _site(record)
                yield (rank, lowest, _site(record)), _site(records[lowest])


def _site(record: Collective) -> _Site:
    return (record.file, record.line, record.op)


def find_desync(view: View, fallen: Fallen) -> Desync | None:
    """The earliest mismatch over all groups; None if every common sequence number agrees."""
    found = [d for group in view.groups() if (d := _first_difference(view, group, fallen)) is not None]
    if not found:
        return None
    never = 1 << 63
    return min(found, key=lambda d: (not d.decided, d.finding.onset_ns or never))


def _first_difference(view: View, group: int, fallen: Fallen) -> Desync | None:
    scan = _prepare(view, group, fallen)
    if scan is None:
        return None
    for seq in sorted({s for ring in scan.rings.values() for s in ring}):
        present: dict[int, Collective | None] = {
            rank: scan.rings[rank].get(seq)
            for rank in scan.rings
            if scan.first[rank] <= seq <= scan.passed[rank]
        }
        if len(present) < 2:
            continue
        hard = len({_shape(record) for record in present.values() if record is not None}) > 1
        if not hard and _same(scan, present):
            scan.unclear = None
            continue
        if not hard:
            scan.judged += 1
            if scan.judged > _MAX_JUDGED or _is_habit(scan, present):
                _get_used_to(scan, present)
                continue
        desync = _decide(scan, seq, present, hard)
        if desync is not None:
            return desync
        scan.unclear = seq if scan.unclear is None else scan.unclear
        _get_used_to(scan, present)
    return None


def _prepare(view: View, group: int, fallen: Fallen) -> _Scan | None:
    members = [rank for rank in view.members(group) if rank in view.pages]
    rings = {rank: view.rings[rank].get(group, {}) for rank in members}
    if sum(1 for ring in rings.values() if ring) < 1 or len(rings) < 2:
        return None
    first: dict[int, int] = {}
    for rank, ring in rings.items():
        wrapped = len(view.pages[rank].collectives) >= COLLECTIVE_SLOTS
        first[rank] = (min(ring) if ring else 1 << 63) if wrapped else 0
    pages = view.pages.values()
    proved = {p.desync_seq for p in pages if p.desync_rank is not None} if group == WORLD_GROUP else set()
    scan = _Scan(view, group, rings, first, _passed(view, group, rings, fallen), frozenset(proved), fallen)
    _take_offsets(scan)
    return scan


def _passed(
    view: View, group: int, rings: Mapping[int, Mapping[int, Collective]], fallen: Fallen
) -> dict[int, int]:
    """How far each member has come in the group, counting what no hook saw."""
    opened = {r: c for r in rings if (c := view.open_record(r)) is not None and c.group == group}
    passed = {rank: view.passed(rank, group) for rank in rings}
    if group == WORLD_GROUP and opened and fallen.of(Role.MISMATCH):
        frontier = min(record.seq for record in opened.values())
        unseen = [rank for rank in rings if rank not in opened and passed[rank] < frontier]
        for rank in unseen:
            if len(unseen) == 1 or _was_inside(view, fallen, rank):
                passed[rank] = frontier
    return passed


def _was_inside(view: View, fallen: Fallen, rank: int) -> bool:
    """Of several ranks that have no record of the collective in which another was aborted: whether this one
    met it there, in one that no hook saw. Its end, or where it stands, says that it was in a collective."""
    ended = any(d.rank == rank for role in (Role.MISMATCH, Role.VICTIM) for d in fallen.of(role))
    stack = view.ranks[rank].stack
    return ended or is_raising(stack) or in_backward(stack)


def _take_offsets(scan: _Scan) -> None:
    """Steps by which ranks differ at the oldest common record are how they count, not a fault: unless that
    is the very first one, where all must be at the start."""
    common = None
    for ring in scan.rings.values():
        if ring:
            common = set(ring) if common is None else common & set(ring)
    if not common:
        return
    seq = min(common)
    if any(scan.first[rank] for rank in scan.rings):
        records = {rank: ring[seq] for rank, ring in scan.rings.items() if seq in ring}
        usual = Counter(record.step for record in records.values()).most_common(1)[0][0]
        scan.offsets = {rank: record.step - usual for rank, record in records.items()}


def _shape(record: Collective) -> tuple[object, ...]:
    if record.op not in _SAME_SHAPE or record.dtype == "none":
        return (record.op,)
    if record.op == "broadcast":  # it only moves bytes
        return (record.op, record.numel * _BYTES.get(record.dtype, 1))
    return (record.op, record.numel, record.dtype)


def _mark(scan: _Scan, rank: int, record: Collective | None) -> tuple[object, ...] | None:
    if record is None:
        return None
    step = record.step - scan.offsets.get(rank, 0)
    return (*_shape(record), record.dtype, record.file, record.line, step)


def _same(scan: _Scan, present: Mapping[int, Collective | None]) -> bool:
    marks = iter(present.items())
    rank, record = next(marks)
    first = _mark(scan, rank, record)
    return all(_mark(scan, rank, record) == first for rank, record in marks)


def _is_habit(scan: _Scan, present: Mapping[int, Collective | None]) -> bool:
    """Different lines in the same step, none of them unseen: are these lines counterparts?"""
    shown = {rank: record for rank, record in present.items() if record is not None}
    steps = {record.step - scan.offsets.get(rank, 0) for rank, record in shown.items()}
    return len(shown) == len(present) and len(steps) == 1 and scan.is_own_line(present)


def _get_used_to(scan: _Scan, present: Mapping[int, Collective | None]) -> None:
    """A difference that turned out to be harmless: from here on these ranks count steps that much apart."""
    records = {rank: record for rank, record in present.items() if record is not None}
    if len(records) > 1:
        usual = Counter(record.step for record in records.values()).most_common(1)[0][0]
        scan.offsets.update({rank: record.step - usual for rank, record in records.items()})


def _is_proved(scan: _Scan, seq: int, present: Mapping[int, Collective | None]) -> bool:
    """Whether something other than these records says that ranks clashed just here."""
    if seq in scan.proved:
        return True
    # Equal collectives of different lines or steps would have gone through. One that a hook saw beside one
    # that none saw would not: where a clash is known, and they stand there, this is it. gloo may also let
    # some pass: then those who are left in what others have completed met them in another.
    clashed = bool(scan.fallen.of(Role.MISMATCH)) or scan.view.evidence.trigger.kind in ("desync", "deadlock")
    if not clashed or None not in present.values():
        return False
    inside = [rank for rank, record in present.items() if record is None and _is_inside(scan, rank, seq)]
    return bool(inside) or all(record is None or not record.done for record in present.values())


def _is_inside(scan: _Scan, rank: int, seq: int) -> bool:
    """Whether the flight recorder has the rank in this collective, entered and not completed."""
    counters = scan.view.enqueued.get(rank, {}).get(scan.group)
    shift = scan.view.shift(scan.group)
    return counters is not None and counters[1] - shift < seq <= counters[0] - shift


def _decide(scan: _Scan, seq: int, present: Mapping[int, Collective | None], hard: bool) -> Desync | None:
    """Who is in error at ``seq``; None if the difference is faint and nobody's past objects to it."""
    sides: dict[object, list[int]] = {}
    for rank, record in present.items():
        mark = (_shape(record) if record is not None else None) if hard else _mark(scan, rank, record)
        sides.setdefault(mark, []).append(rank)
    at = seq
    if hard and scan.unclear is not None and len(present) == 2:
        at = scan.unclear  # two ranks have been apart since then: there it began, and here it only shows
    judgements = {rank: scan.judge(rank, at) for rank in present}
    proved = hard or _is_proved(scan, seq, present)
    deviants = [r for r in present if judgements[r].conduct.deviates]
    if not proved:
        deviants = _sure_deviants(scan, judgements, present)
    by_past = deviants if len(deviants) < len(present) else []
    largest = max(sides.values(), key=len)
    majority = len(present) >= 3 and 2 * len(largest) > len(present)
    minority = [rank for rank in present if rank not in largest]
    if majority and (proved or set(minority) <= set(by_past)):
        culprits, confidence = minority, 0.96 if set(minority) <= set(by_past) else 0.92
    elif by_past:
        known = all(judgements[r].conduct is Conduct.AS_BEFORE for r in present if r not in by_past)
        culprits, confidence = by_past, 0.92 if known else 0.8
        if all(scan.is_first_time(rank, seq) for rank in by_past):
            confidence = 0.7  # nothing tells whether it did something new, or the others left it out
    elif proved:
        culprits, confidence = _by_step_counts(scan, list(present)), 0.65
    else:
        return None
    clash = Clash(
        group=scan.group,
        seq=seq,
        present=dict(present),
        rings=scan.rings,
        offsets=scan.offsets,
        judgements=judgements,
        culprits=tuple(culprits),
        confidence=confidence if culprits else 0.5,
        majority=majority,
    )
    return Desync(to_finding(scan.view, clash, scan.fallen), hard or seq in scan.proved, proved)


def _sure_deviants(
    scan: _Scan, judgements: Mapping[int, Judgement], present: Mapping[int, Collective | None]
) -> list[int]:
    """For a difference that may be harmless: the few whose past clearly objects to it, if all the others did
    just what they always do."""
    sure = [r for r in present if judgements[r].firm and judgements[r].conduct.deviates]
    sure = [r for r in sure if _objects(scan, judgements[r], present)]
    rest = [judgements[r].conduct for r in present if r not in sure]
    return sure if 2 * len(sure) <= len(present) and set(rest) == {Conduct.AS_BEFORE} else []


def _objects(scan: _Scan, judgement: Judgement, present: Mapping[int, Collective | None]) -> bool:
    """Whether a rank's past objects to what sets it apart here. Where the lines are counterparts and only
    the steps differ, that is the number of steps it took, not that it came to this line."""
    if None in present.values() or judgement.expected is None or judgement.actual is None:
        return True
    return _site(judgement.expected) == _site(judgement.actual) or not scan.is_own_line(present)


def _by_step_counts(scan: _Scan, ranks: list[int]) -> list[int]:
    """Collectives per step, unseen ones included: who made another number of them than it always did, in
    the first step in which the ranks' numbers differ?"""
    counts: dict[int, dict[int, int]] = {}
    for rank in ranks:
        steps = scan.view.pages[rank].steps
        counts[rank] = {
            after.step: after.world_seq - before.world_seq
            for before, after in pairwise(steps)
            if after.step == before.step + 1
        }
    for step in sorted(set.intersection(*(set(c) for c in counts.values()))):
        if len({c[step] for c in counts.values()}) > 1:
            odd = [
                rank for rank in ranks
                if len(counts[rank]) >= 3
                and counts[rank][step] != Counter(counts[rank].values()).most_common(1)[0][0]
            ]  # fmt: skip
            return odd if len(odd) < len(ranks) else []
    return []
