"""Who waits for whom: which collectives ranks are in, and which of those can never complete. Pure.

Two witnesses are put together. The progress page holds the collectives that were issued from Python, with
operation and size; the flight recorder's counters also see those issued from C++ (DDP's reducer, compiled
code). Both number a group's collectives alike. Where they differ the later one counts: a rank that either
has seen entering a collective may still complete it, and then nothing is proved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from closeranks.evidence import GroupStatus
from closeranks.policy.hang_model import RankSample
from closeranks.policy.waits import Wait
from closeranks.progress import COLLECTIVE_SLOTS, WORLD_GROUP, Collective, Page

__all__ = ["Hopeless", "Op", "hopeless", "needs_all", "waiting_ops", "waits_for"]

_WORLD = "0"  # torch's name of the default group
_WORLD_NAMES = frozenset({"", _WORLD, "default", "default_pg"})
_PAIRWISE = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
# Nobody leaves one of these before everybody has come: a missing member is all the proof it takes.
_SYMMETRIC = frozenset(
    {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "all_gather_into_tensor",
        "reduce_scatter_tensor", "all_to_all_single", "all_reduce_coalesced", "all_gather_coalesced",
        "all_gather_object", "monitored_barrier",
    }
)  # fmt: skip
_SAME_SIZE = frozenset(
    {"all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"}
)
# Named alike by torch.distributed and by the flight recorder of every backend.
_SAME_WORDS = frozenset({"all_reduce", "broadcast", "reduce", "barrier"})
_SAME_DTYPE = _SAME_SIZE - {"broadcast"}
# An exception leaves its collective's record open; further back than this such a record no longer counts.
_OPEN_WITHIN = 16


@dataclass(frozen=True, slots=True)
class Op:
    """A collective that a rank is in: ``seq`` counts within ``group``."""

    group: str
    seq: int
    name: str
    record: Collective | None = None


@dataclass(frozen=True, slots=True)
class Hopeless:
    """Why a collective can't complete: members that haven't come, members that came with another one, or
    members that have completed theirs, so that nothing is to be had from anybody any more."""

    op: Op
    missing: frozenset[int]
    mismatched: frozenset[int]
    done_by: frozenset[int] = frozenset()


def needs_all(op: Op) -> bool:
    """Whether this collective ends for no member before all have come (a broadcast's source may leave)."""
    return op.name in _SYMMETRIC


def _group_name(page: Page, key: int) -> str | None:
    if key == WORLD_GROUP:
        return _WORLD
    return page.groups[key][0] if key in page.groups else None


def _recorder_name(status: GroupStatus) -> str:
    return _WORLD if status.group in _WORLD_NAMES else status.group


def _status(sample: RankSample, group: str) -> GroupStatus | None:
    return next((status for status in sample.groups if _recorder_name(status) == group), None)


def _pending(sample: RankSample) -> list[Op]:
    """Collectives under way as the flight recorder counts them: the oldest of each group."""
    return [
        Op(_recorder_name(status), status.last_completed + 1, status.pending_op.rpartition(":")[2])
        for status in sample.groups
        if status.last_enqueued > status.last_completed
    ]


def _main_waits(sample: RankSample) -> bool:
    process = sample.process
    return bool(process and process.threads and process.threads[0].wait == Wait.FOREVER)


def waiting_ops(sample: RankSample) -> tuple[Op, ...] | None:
    """The collectives this rank is blocked in; None if it isn't, () if it is and we can't tell in which.

    Collectives that only the flight recorder knows may be under way while the rank computes: they count
    where the main thread waits, and waits without a limit.
    """
    page = sample.page
    if page is None:
        return None
    if page.in_collective:
        ops = []
        for record in page.collectives[-_OPEN_WITHIN:]:
            name = None if record.done else _group_name(page, record.group)
            if name is not None:
                ops.append(Op(name, record.seq, record.op, record))
            elif not record.done:
                return ()
        return tuple(ops)
    ops = _pending(sample)
    return tuple(ops) if ops and _main_waits(sample) else None


def _members(op: Op, samples: Mapping[int, RankSample], world: frozenset[int]) -> frozenset[int] | None:
    if op.group == _WORLD:
        return world
    for sample in samples.values():
        for name, ranks in sample.page.groups.values() if sample.page else ():
            if name == op.group:
                return frozenset(ranks)
    listed = [rank for rank, sample in samples.items() if _status(sample, op.group) is not None]
    return frozenset(listed) if len(listed) > 1 else None


def _records(page: Page, group: str) -> list[Collective]:
    return [
        record
        for record in page.collectives
        if record.op not in _PAIRWISE and _group_name(page, record.group) == group
    ]


def _entered(sample: RankSample, group: str) -> int | None:
    """The newest sequence number of ``group`` that this rank has entered, at least; None = can't tell."""
    page = sample.page
    if page is None or not page.rings:
        return None
    known = [record.seq for record in _records(page, group)]
    status = _status(sample, group)
    if status is not None:
        known.append(status.last_enqueued)
    if not known and len(page.collectives) >= COLLECTIVE_SLOTS:
        return None  # the ring has run over: what it held of this group is lost
    return max(known, default=page.world_seq if group == _WORLD else 0)


def _differs(mine: Collective, theirs: Collective) -> bool:
    if mine.op != theirs.op:
        return "unknown" not in (mine.op, theirs.op)
    if mine.op in _SAME_SIZE and mine.numel != theirs.numel:
        return True
    return mine.op in _SAME_DTYPE and mine.dtype != theirs.dtype and "none" not in (mine.dtype, theirs.dtype)


def _came_with_another(op: Op, sample: RankSample) -> bool:
    page = sample.page
    if page is not None and op.record is not None:
        for record in reversed(_records(page, op.group)):
            if record.seq == op.seq:
                return _differs(op.record, record)
    there = [other.name for other in _pending(sample) if (other.group, other.seq) == (op.group, op.seq)]
    if op.record is None and op.name:
        return any(name not in ("", op.name) for name in there)
    # One seen by the hooks, the other issued from C++: only where both witnesses use the same words.
    return op.name in _SAME_WORDS and any(name in _SAME_WORDS - {op.name} for name in there)


def hopeless(rank: int, op: Op, samples: Mapping[int, RankSample], world: frozenset[int]) -> Hopeless | None:
    """Why ``op``, in which ``rank`` is, can't complete while the other ranks stay where they are.

    None if it may: all members have come, or one of them can't be seen, or it is between two ranks only
    (the page doesn't say which, and what was sent may still be on its way).
    """
    members = _members(op, samples, world)
    if op.name in _PAIRWISE or members is None or not members <= samples.keys():
        return None
    missing, mismatched = set(), set()
    for member in members - {rank}:
        newest = _entered(samples[member], op.group)
        if newest is not None and newest < op.seq:
            missing.add(member)
        elif _came_with_another(op, samples[member]):
            mismatched.add(member)
    if not missing and not mismatched:
        done_by = _done_by(op, samples, members - {rank})
        return Hopeless(op, frozenset(), frozenset(), done_by) if done_by else None
    return Hopeless(op, frozenset(missing), frozenset(mismatched))


def _done_by(op: Op, samples: Mapping[int, RankSample], others: frozenset[int]) -> frozenset[int]:
    """Members for which this collective is over though all came and ``op`` isn't: a symmetric one ends for
    all within moments, unless they met in unequal ones. gloo lets those pass on some ranks.
    """
    if not needs_all(op):
        return frozenset()
    done = set()
    for member in others:
        status = _status(samples[member], op.group)
        if status is not None and status.last_completed >= op.seq:
            done.add(member)
    return frozenset(done)


def waits_for(op: Op, other: int, samples: Mapping[int, RankSample], world: frozenset[int]) -> bool:
    """Whether ``op`` may need ``other`` to come; also true where the group or what it did isn't known."""
    members = _members(op, samples, world)
    if members is not None and other not in members:
        return False
    newest = _entered(samples[other], op.group)
    return newest is None or newest < op.seq
