"""The sentences that hang detection says to people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from closeranks.policy.hang_graph import waiting_ops
from closeranks.policy.hang_model import RankSample, Scene
from closeranks.policy.waits import Wait

__all__ = ["choose", "clear_text", "describe_ranks", "others_wait", "suspicion_text", "who_holds_up"]


def describe_ranks(ranks: Iterable[int]) -> str:
    """ "rank 1", "ranks 1 and 3", "ranks 0, 1, 2, 3 and 12 more"."""
    known = sorted(ranks)
    if len(known) == 1:
        return f"rank {known[0]}"
    if len(known) > 8:
        return f"ranks {', '.join(map(str, known[:4]))} and {len(known) - 4} more"
    return f"ranks {', '.join(map(str, known[:-1]))} and {known[-1]}"


def choose(ranks: Sequence[object], one: str, many: str) -> str:
    """The form of a verb or pronoun that goes with these ranks."""
    return one if len(ranks) == 1 else many


def others_wait(scene: Scene, ranks: Sequence[int], what_for: str) -> str:
    """ " while 3 ranks wait ..."; "" if nobody else is in a collective."""
    waiting = [s.rank for s in scene.living if s.rank not in ranks and _waits(s)]
    if not waiting:
        return ""
    return f" while {len(waiting)} rank{choose(waiting, ' waits', 's wait')} {what_for}"


def _waits(sample: RankSample) -> bool:
    return waiting_ops(sample) is not None


def who_holds_up(scene: Scene, quiet: Iterable[int], bound_s: float) -> tuple[int, ...]:
    """Of a stalled job, the ranks to look at: silent ones outside any collective, else those given."""
    living = scene.living
    outside = [
        s.rank
        for s in living
        if s.page is not None and not _waits(s) and scene.quiet_s(s.rank) >= bound_s / 2
    ]
    if outside and any(_waits(s) for s in living):
        return tuple(sorted(outside))
    return tuple(sorted(quiet))


def _main_thread(sample: RankSample) -> str:
    """What its main thread is doing; "" if that wasn't looked at."""
    process = sample.process
    if process is None or not process.threads:
        return {"D": "uninterruptible (state D)", "T": "stopped (state T)"}.get(sample.letter, "")
    main = process.threads[0]
    where = f" in {main.wchan}" if main.wchan else ""
    return {
        Wait.RUNNING.value: "computing",
        Wait.TIMED.value: "in a wait with a time limit",
        Wait.FOREVER.value: "in a wait without a time limit",
        Wait.EXTERNAL.value: f"waiting for something outside{where}",
        Wait.DISK.value: f"uninterruptible{where} (state D)",
        Wait.STOPPED.value: "stopped (state T)",
    }.get(main.wait, "")


def suspicion_text(scene: Scene, ranks: tuple[int, ...]) -> str:
    """Why these ranks are suspect."""
    quiet_s = max(scene.quiet_s(rank) for rank in ranks)
    samples = [scene.samples[rank] for rank in ranks]
    text = f"{describe_ranks(ranks)} {choose(ranks, 'has', 'have')} given no sign of life for {quiet_s:.1f} s"
    facts = []
    if all(_waits(sample) for sample in samples):
        facts.append("in a collective" if len(ranks) == 1 else "all in a collective")
    elif len(ranks) == 1 and samples[0].page is not None:
        facts.append(f"phase {samples[0].page.phase_name}")
    if len(ranks) == 1 and (doing := _main_thread(samples[0])):
        facts.append(doing)
    places = {sample.where for sample in samples}
    if len(places) == 1 and (place := places.pop()):
        facts.append(place)
    if facts:
        text += f" ({', '.join(facts)})"
    return text + others_wait(scene, ranks, "in a collective")


def clear_text(ranks: tuple[int, ...]) -> str:
    """The stall is over."""
    return f"{describe_ranks(ranks)} {choose(ranks, 'is', 'are')} moving again"
