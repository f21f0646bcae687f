"""The proofs that a job can't go on, each a function of what is known of all ranks at one moment. Pure.

A proof here is a statement about one look alone. closeranks.policy.hang sees to it that it goes on to hold,
that nobody gives a sign of life meanwhile, and that nobody is being debugged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from closeranks.policy.hang_graph import Hopeless, hopeless, needs_all, waiting_ops, waits_for
from closeranks.policy.hang_model import CONFIRM_S, Candidate, RankSample, Scene
from closeranks.policy.hang_text import choose, describe_ranks, others_wait, who_holds_up
from closeranks.policy.waits import at_rest, blocked_forever
from closeranks.progress import Phase

__all__ = ["candidates", "desync", "evaluated", "hang_timeout", "takes_part"]


def candidates(scene: Scene) -> list[Candidate]:
    """The proofs of impossibility that hold on this sample, the most telling first."""
    found: list[Candidate | None] = []
    if scene.letters:
        found.append(_stopped(scene))
    if scene.detailed and scene.whole:
        found += [_stuck(scene), _blocked(scene), _init_stall(scene)]
    return [candidate for candidate in found if candidate is not None]


def evaluated(scene: Scene) -> frozenset[str]:
    """The kinds that this sample can confirm or refute."""
    kinds = {"stopped"} if scene.letters else set()
    if scene.detailed:
        kinds |= {"deadlock", "desync", "early_exit", "blocked", "init_stall"}
    return frozenset(kinds)


def _stopped(scene: Scene) -> Candidate | None:
    """Somebody is in state T (not all: a suspended job isn't asked about)."""
    tracks = scene.tracks.values()
    stopped = sorted(t.rank for t in tracks if t.stopped_s is not None and t.seen and t.seen.letter == "T")
    if not stopped:
        return None
    stopped_s = max(scene.tracks[rank].stopped_s or 0.0 for rank in stopped)
    text = f"{describe_ranks(stopped)} {choose(stopped, 'has', 'have')} been stopped (state T)"
    text += f" for {stopped_s:.1f} s" + others_wait(scene, stopped, choose(stopped, "for it", "for them"))
    return Candidate("stopped", tuple(stopped), text, CONFIRM_S, ready=stopped_s >= scene.bound_s)


def desync(scene: Scene) -> Candidate | None:
    """A rank has itself seen that its neighbour is in another collective at the same place."""
    for track in scene.tracks.values():
        page = track.seen.page if track.seen is not None and track.seen.alive else None
        if page is None or page.desync_rank is None or page.desync_rank == track.rank:
            continue
        if 0 <= page.desync_rank < scene.world_size:
            ranks = tuple(sorted((track.rank, page.desync_rank)))
            text = f"{describe_ranks(ranks)} are in different collectives at sequence {page.desync_seq}"
            return Candidate("desync", ranks, text, 0.0)
    return None


def _dead_ends(scene: Scene, ranks: Iterable[int]) -> dict[int, list[Hopeless]] | None:
    """Why each of these ranks can't get out of the collectives it is in; None if one of them may."""
    world = frozenset(range(scene.world_size))
    found: dict[int, list[Hopeless]] = {}
    for rank in ranks:
        for op in waiting_ops(scene.samples[rank]) or ():
            verdict = hopeless(rank, op, scene.samples, world)
            if verdict is None:
                return None
            found.setdefault(rank, []).append(verdict)
        if rank not in found:
            return None
    return found


def _stuck(scene: Scene) -> Candidate | None:
    """Every living rank is in a collective that can't complete: desync, early exit, or deadlock."""
    living = [s.rank for s in scene.living]
    ends = _dead_ends(scene, living) if living else None
    if ends is None:
        return None
    verdicts = [verdict for found in ends.values() for verdict in found]
    missing = {rank for verdict in verdicts for rank in verdict.missing}
    if any(not scene.samples[rank].alive and not _left(scene.samples[rank]) for rank in missing):
        return None  # it died: an incident of its own, and known by its exit
    need_s: float = CONFIRM_S
    idle: tuple[int, ...] = ()
    if not all(_final(scene, verdict) for verdict in verdicts):
        # Somebody who hasn't come yet could still come, from another thread than the one that waits.
        if not all(_may_be_waiting_only(sample) for sample in scene.living):
            return None
        need_s, idle = scene.bound_s / 2, tuple(living)
    ready = min(scene.quiet_s(rank) for rank in living) >= scene.bound_s
    if any(verdict.mismatched for verdict in verdicts):
        ranks = _odd_ones(ends)
        text = f"{describe_ranks(ranks)} {choose(ranks, 'is', 'are')} in another collective than the rest"
        return Candidate("desync", ranks, f"{text}: {_places(scene, living)}", need_s, ready, idle)
    outrun = tuple(sorted(rank for rank, found in ends.items() if any(end.done_by for end in found)))
    if outrun:
        text = f"{describe_ranks(outrun)} {choose(outrun, 'is', 'are')} left in what others completed"
        return Candidate("desync", outrun, f"{text}: {_places(scene, living)}", need_s, ready, idle)
    left = tuple(sorted(rank for rank in missing if not scene.samples[rank].alive))
    if left:
        ready = ready and all((scene.tracks[rank].gone_s or 0.0) >= scene.bound_s for rank in left)
        text = f"{describe_ranks(left)} exited with code 0"
        text += f" while {len(living)} rank{choose(living, ' waits', 's wait')}"
        text += f" for {choose(left, 'it', 'them')}: {_places(scene, living)}"
        return Candidate("early_exit", left, text, need_s, ready, idle)
    text = f"{describe_ranks(living)} wait for each other: {_places(scene, living)}"
    return Candidate("deadlock", tuple(sorted(living)), text, need_s, ready, idle)


def _left(sample: RankSample) -> bool:
    return not sample.alive and sample.exit is not None and sample.exit.ok


def _final(scene: Scene, verdict: Hopeless) -> bool:
    """Whether nothing that any thread anywhere may still do could complete this collective."""
    gone = any(not scene.samples[rank].alive for rank in verdict.missing)
    return bool(verdict.mismatched) or (gone and needs_all(verdict.op))


def _may_be_waiting_only(sample: RankSample) -> bool:
    """No thread of this rank is seen at work. Where only the flight recorder places it, look harder."""
    return sample.process is not None and at_rest(sample.process, main_forever=not sample.in_collective)


def _odd_ones(ends: dict[int, list[Hopeless]]) -> tuple[int, ...]:
    """Of those who met in different collectives, the ones that differ from the most others."""
    pairs = {
        frozenset((rank, other))
        for rank, verdicts in ends.items()
        for verdict in verdicts
        for other in verdict.mismatched
    }
    differs = Counter(rank for pair in pairs for rank in pair)
    most = max(differs.values())
    return tuple(sorted(rank for rank, count in differs.items() if count == most))


def _places(scene: Scene, ranks: list[int]) -> str:
    """ "rank 0 in all_reduce 12, ranks 1 and 2 in barrier 3 of group dp", bounded."""
    at: dict[str, list[int]] = {}
    for rank in ranks:
        for op in (waiting_ops(scene.samples[rank]) or ())[:1]:
            of = "" if op.group == "0" else f" of group {op.group[:40]}"
            at.setdefault(f"{op.name or 'a collective'} {op.seq}{of}", []).append(rank)
    shown = [f"{describe_ranks(found)} in {place}" for place, found in list(at.items())[:4]]
    return ", ".join(shown) + (", ..." if len(at) > 4 else "")


def _blocked(scene: Scene) -> Candidate | None:
    """A rank outside any collective can never move again by itself, and all others wait."""
    outside, waiting = [], []
    for sample in scene.living:
        page = sample.page
        if page is None:
            return None
        if page.phase is Phase.INIT or waiting_ops(sample) is not None:
            waiting.append(sample)
        elif sample.process is not None and blocked_forever(sample.process):
            outside.append(sample)
        else:
            return None
    if not outside or not any(_needs_one_of(scene, sample, outside) for sample in waiting):
        return None
    ranks = tuple(sorted(sample.rank for sample in outside))
    quiet_s = max(scene.quiet_s(rank) for rank in ranks)
    phases = sorted({s.page.phase_name for s in outside if s.page is not None})
    text = f"{describe_ranks(ranks)} {choose(ranks, 'is', 'are')} blocked for ever outside any collective"
    text += f" (phase {' and '.join(phases)}; no CPU, no I/O, silent for {quiet_s:.1f} s)"
    text += f" while {len(waiting)} rank{choose(waiting, ' waits', 's wait')}"
    return Candidate("blocked", ranks, text, need_s=2 * scene.bound_s, idle=ranks)


def _needs_one_of(scene: Scene, sample: RankSample, outside: list[RankSample]) -> bool:
    ops = waiting_ops(sample)
    if not ops:
        return True  # in process-group init, or in a collective we can't name
    world = frozenset(range(scene.world_size))
    return any(waits_for(op, other.rank, scene.samples, world) for op in ops for other in outside)


def _init_stall(scene: Scene) -> Candidate | None:
    """Every living rank is inside init_process_group, and none of them does anything."""
    living = scene.living
    if scene.config.init_stall_s <= 0 or not living:
        return None
    if not all(s.page is not None and s.page.phase is Phase.INIT for s in living):
        return None
    ranks = tuple(sorted(s.rank for s in living))
    text = (
        f"process-group init has not moved for {scene.config.init_stall_s:.0f} s on {describe_ranks(ranks)}"
    )
    return Candidate("init_stall", ranks, text, scene.config.init_stall_s, idle=ranks)


def hang_timeout(scene: Scene) -> Candidate | None:
    """No proof, but no sign of life either, for as long as the user is ready to wait.

    A program that never had anything to do with a process group, nor ever made a step, gives no signs of
    life that could be missed.
    """
    limit_s = scene.config.hang_timeout_s
    paged = [s for s in scene.living if s.page is not None]
    if limit_s <= 0 or not any(takes_part(s) for s in paged):
        return None
    quiet = [s.rank for s in paged if scene.quiet_s(s.rank) >= limit_s]
    if not quiet:
        return None
    if len(quiet) < len(paged):
        # Some still move: then one of the silent must be waited for by another of them.
        outside = [rank for rank in quiet if waiting_ops(scene.samples[rank]) is None]
        if not outside or len(outside) == len(quiet):
            return None
    ranks = who_holds_up(scene, quiet, limit_s)
    text = f"{describe_ranks(ranks)} {choose(ranks, 'has', 'have')} given no sign of life for {limit_s:.0f} s"
    text += others_wait(scene, ranks, "in a collective") + " (--hang-timeout)"
    return Candidate("hang_timeout", ranks, text, CONFIRM_S)


def takes_part(sample: RankSample) -> bool:
    """Whether this rank has begun to work with others, or to step: before that nothing can be proved."""
    page = sample.page
    return page is not None and bool(
        page.init_done or page.step or page.in_collective or page.phase is Phase.INIT
    )
