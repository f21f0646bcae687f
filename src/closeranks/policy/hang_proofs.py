"""The proofs that a job can't go on, each a function of what is known of all ranks at one moment. Pure.

A proof here is a statement about this look alone. closeranks.policy.hang sees to it that it goes on to hold,
that nobody gives a sign of life meanwhile, and that nobody is being debugged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from closeranks.config import HangConfig
from closeranks.policy.hang_graph import Hopeless, hopeless, needs_all, waiting_ops
from closeranks.policy.hang_model import CONFIRM_S, Candidate, RankSample, Track
from closeranks.policy.waits import Wait, blocked_forever
from closeranks.progress import Phase

__all__ = ["Scene", "candidates", "describe_ranks", "suspicion_text", "who_holds_up"]


@dataclass(frozen=True, slots=True)
class Scene:
    """What the proofs look at. ``whole``: every rank of the job is in the sample (one node)."""

    tracks: Mapping[int, Track]
    samples: Mapping[int, RankSample]  # with details of earlier looks that still hold
    world_size: int
    config: HangConfig
    bound_s: float
    letters: bool  # state letters were read in this very sample
    detailed: bool  # details were gathered for this very sample

    @property
    def whole(self) -> bool:
        return len(self.samples) == self.world_size

    @property
    def living(self) -> list[RankSample]:
        return [sample for sample in self.samples.values() if sample.alive]

    def quiet_s(self, rank: int) -> float:
        return self.tracks[rank].quiet_s


def describe_ranks(ranks: Iterable[int]) -> str:
    """ "rank 1", "ranks 1 and 3", "ranks 0, 1, 2, 3 and 12 more"."""
    known = sorted(ranks)
    if len(known) == 1:
        return f"rank {known[0]}"
    if len(known) > 8:
        return f"ranks {', '.join(map(str, known[:4]))} and {len(known) - 4} more"
    return f"ranks {', '.join(map(str, known[:-1]))} and {known[-1]}"


def _count(number: int, verb: str = "wait") -> str:
    return f"{number} rank{'s' if number != 1 else ''} {verb}{'s' if number == 1 else ''}"


def _verb(ranks: Iterable[int], one: str, many: str) -> str:
    return one if len(tuple(ranks)) == 1 else many


def _wait_text(sample: RankSample) -> str:
    """What its main thread is doing, for people; "" if that wasn't looked at."""
    process = sample.process
    if process is None or not process.threads:
        return {"D": "uninterruptible, state D", "T": "stopped, state T"}.get(sample.letter, "")
    main = process.threads[0]
    where = f" in {main.wchan}" if main.wchan else ""
    return {
        Wait.RUNNING.value: "computing",
        Wait.TIMED.value: "in a wait with a time limit",
        Wait.FOREVER.value: "in a wait without a time limit",
        Wait.EXTERNAL.value: f"waiting for something outside{where}",
        Wait.DISK.value: f"uninterruptible{where}, state D",
        Wait.STOPPED.value: "stopped, state T",
    }.get(main.wait, "")


def who_holds_up(scene: Scene, quiet: Iterable[int], bound_s: float) -> tuple[int, ...]:
    """Of a stalled job, the ranks to look at: silent ones outside any collective, else those given."""
    waiting = [sample for sample in scene.living if sample.in_collective]
    outside = [
        sample.rank
        for sample in scene.living
        if sample.page is not None and not sample.in_collective and scene.quiet_s(sample.rank) >= bound_s / 2
    ]
    return tuple(outside) if outside and waiting else tuple(sorted(quiet))


def suspicion_text(scene: Scene, ranks: tuple[int, ...]) -> str:
    """One sentence on why these ranks are suspect."""
    quiet_s = max(scene.quiet_s(rank) for rank in ranks)
    first = scene.samples[ranks[0]]
    phase = first.page.phase_name if first.page is not None else "unknown"
    facts = f"phase {phase}" if len(ranks) == 1 else ""
    if len(ranks) == 1 and (wait := _wait_text(first)):
        facts += f"; {wait}"
    others = [sample.rank for sample in scene.living if sample.in_collective and sample.rank not in ranks]
    inside = all(scene.samples[rank].in_collective for rank in ranks)
    if len(ranks) > 1 and inside:
        facts = "all of them in a collective"
    text = f"{describe_ranks(ranks)} {_verb(ranks, 'has', 'have')} given no sign of life for {quiet_s:.1f} s"
    text += f" ({facts})" if facts else ""
    return text + (f" while {_count(len(others))} in a collective" if others else "")


def _stopped(scene: Scene) -> Candidate | None:
    """Somebody is in state T and nobody traces it; were all of them, someone would have suspended the job."""
    living = scene.living
    stopped = [s.rank for s in living if s.letter == "T" and scene.tracks[s.rank].stopped_s is not None]
    if not stopped or len(stopped) == len(living):
        return None
    stopped_s = max(scene.tracks[rank].stopped_s or 0.0 for rank in stopped)
    waiting = sum(1 for s in living if s.in_collective and s.rank not in stopped)
    tail = f" while {_count(waiting)} for it" if waiting else ""
    tail = tail if len(stopped) == 1 else tail.replace("for it", "for them")
    return Candidate(
        "stopped",
        tuple(stopped),
        f"{describe_ranks(stopped)} {_verb(stopped, 'has', 'have')} been stopped (state T) "
        f"for {stopped_s:.1f} s{tail}",
        need_s=CONFIRM_S,
        ready=stopped_s >= scene.bound_s,
    )


def _verdicts(
    scene: Scene, ranks: Iterable[int], ops_of: Mapping[int, tuple[object, ...] | None]
) -> dict[int, list[Hopeless]] | None:
    """Why each of these ranks can't get out of what it is in; None if one of them may."""
    world = frozenset(range(scene.world_size))
    found: dict[int, list[Hopeless]] = {}
    for rank in ranks:
        ops = waiting_ops(scene.samples[rank])
        verdicts = [hopeless(rank, op, scene.samples, world) for op in ops or ()]
        if not verdicts or any(verdict is None for verdict in verdicts):
            return None
        found[rank] = [verdict for verdict in verdicts if verdict is not None]
    return found


