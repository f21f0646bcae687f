"""Hang detection: from looks at all ranks to suspicion and proof. Pure: ``observe(state, sample)``.

Two levels. *Suspect*: a rank has given no sign of life for longer than anything seen in this job would
explain; tell the user, kill nothing. *Act*: end the generation, at once when progress is proved impossible
(closeranks.policy.hang_proofs), else only after ``hang_timeout_s``. A slow job is never killed: every doubt
is decided for it, and time counts only as far as it was observed with nobody stopped by hand or debugged.

The caller looks every ``sample_interval_s``, reads what ``wants_state`` and ``wants_detail`` ask for, and
passes it on. Both are empty while all is well, so that a healthy job costs a look at its page headers.
"""

from __future__ import annotations

import math
from dataclasses import replace

from closeranks.config import HangConfig
from closeranks.evidence import Trigger
from closeranks.policy.hang_learn import (
    MIN_STEPS,
    WINDOW,
    floor_bound_s,
    new_intervals_s,
    p99_s,
    remember_pause,
    suspect_bound_s,
)
from closeranks.policy.hang_model import (
    Candidate,
    Finding,
    HangState,
    Held,
    JobSample,
    Mark,
    RankSample,
    Scene,
    Track,
)
from closeranks.policy.hang_proofs import candidates, desync, evaluated, hang_timeout, takes_part
from closeranks.policy.hang_text import clear_text, describe_ranks, suspicion_text, who_holds_up

__all__ = [
    "Finding",
    "HangState",
    "JobSample",
    "RankSample",
    "initial",
    "observe",
    "step_p99_s",
    "wants_detail",
    "wants_state",
]

_STATE_AFTER_S = 0.1  # a rank silent for so long has its state letter read: one small file
_SLOW_DETAIL_AFTER_S = 30.0  # who is silent for so long is looked into once a second, not ten times
_DETAIL_EVERY_S = 0.1
_SLOW_DETAIL_EVERY_S = 1.0
_TRACER_KNOWN_S = 1.0  # so long before the time limit ranks are looked into even while others move
# What a blocked rank may use: its service threads poll, and our own questions make it write stack dumps.
_IDLE_CPU_S, _IDLE_CPU_SHARE = 0.05, 0.1
_IDLE_IO_BYTES, _IDLE_IO_BYTES_PER_S = 64 * 1024, 256 * 1024


def initial(world_size: int, config: HangConfig) -> HangState:
    """The state at the start of a generation. Nothing is carried over from the one before."""
    assert world_size >= 1, world_size
    return HangState(world_size, config)


def step_p99_s(state: HangState) -> float | None:
    """The 99th percentile of step times seen lately, in seconds; None before all ranks made three steps."""
    return _learned_p99_s(state.tracks)


def wants_state(state: HangState) -> frozenset[int]:
    """Ranks whose state letter the next sample should hold."""
    if not state.config.enabled or state.acted:
        return frozenset()
    return frozenset(
        track.rank
        for track in state.tracks
        if track.gone_s is None
        and (track.ticks is None or track.quiet_s >= _STATE_AFTER_S or track.stopped_s is not None)
    )


def wants_detail(state: HangState) -> frozenset[int]:
    """Ranks for which the next sample should hold rings, process, groups and stack; empty: nothing.

    All ranks or none, those that exited included (their rings): a proof is about all of them.
    """
    if not state.config.enabled or state.acted:
        return frozenset()
    still = state.still_s >= floor_bound_s(state.config, state.p99_s) / 2 and any(
        track.seen is not None and takes_part(track.seen) for track in state.tracks
    )
    if not (still or state.desync_seen or any(_needs_look(track, state.config) for track in state.tracks)):
        return frozenset()
    every_s = _DETAIL_EVERY_S if state.still_s < _SLOW_DETAIL_AFTER_S else _SLOW_DETAIL_EVERY_S
    if state.since_detail_s < every_s:
        return frozenset()
    return frozenset(track.rank for track in state.tracks)


def _needs_look(track: Track, config: HangConfig) -> bool:
    """A debugger may be there, which must be known before anything is done, and in time."""
    over_time = 0 < config.hang_timeout_s - _TRACER_KNOWN_S <= track.quiet_s
    return track.gone_s is None and (track.traced or over_time)


def observe(state: HangState, sample: JobSample) -> tuple[HangState, Finding | None]:
    """Take in one look. At most one finding comes of it; after "act" there are no more."""
    if not state.config.enabled or state.acted:
        return state, None
    observed_s = sample.observed_s if math.isfinite(sample.observed_s) and sample.observed_s > 0 else 0.0
    state, scene, moved, frozen = _take_in(state, sample, observed_s)
    state, acted = _prove(state, scene, moved, frozen, observed_s)
    if acted is not None:
        return replace(state, acted=True), acted
    return _suspect(state, scene, moved)


# --- taking in --------------------------------------------------------------------------------------


def _moved(track: Track, sample: RankSample) -> bool:
    """Whether this look shows a sign of life: a tick, a counter of the flight recorder, an exit."""
    if sample.alive != (track.gone_s is None):
        return True
    if sample.page is not None and sample.page.ticks != track.ticks:
        return True
    before = track.seen.groups if track.seen is not None else ()
    return bool(before and sample.groups and before != sample.groups)


def _is_traced(track: Track, sample: RankSample, moved: bool) -> bool:
    if not sample.alive:
        return False
    if sample.process is not None:
        return sample.process.tracer_pid != 0 or sample.letter == "t"
    return sample.letter == "t" or (track.traced and not moved)


def _is_stopped(track: Track, sample: RankSample) -> bool:
    return sample.letter == "T" or (not sample.letter and track.stopped_s is not None)


def _take_in(
    state: HangState, sample: JobSample, observed_s: float
) -> tuple[HangState, Scene, frozenset[int], bool]:
    known = {track.rank: track for track in state.tracks}
    rows = [(known.get(s.rank) or Track(s.rank), s) for s in sample.ranks]
    moved = frozenset(s.rank for track, s in rows if _moved(track, s))
    traced = frozenset(s.rank for track, s in rows if _is_traced(track, s, s.rank in moved))
    living = [(track, s) for track, s in rows if s.alive]
    stopped = [s.rank for track, s in living if s.rank not in moved and _is_stopped(track, s)]
    suspended = bool(living) and len(stopped) == len(living)
    frozen = suspended or bool(traced)
    p99 = state.p99_s
    longest = state.longest_s
    tracks, stale = [], state.p99_stale
    for track, s in rows:
        if s.rank in moved and p99 is not None and not track.tainted and track.seen is not None:
            page = track.seen.page
            if page is not None and track.quiet_s >= state.config.suspect_floor_s / 2:
                longest = remember_pause(longest, page.phase_name, track.quiet_s)
        new = _advance(track, s, observed_s, s.rank in moved, frozen, suspended, bool(stopped))
        stale = stale or new.intervals_s is not track.intervals_s
        tracks.append(replace(new, traced=s.rank in traced))
    detailed = any(s.detailed for s in sample.ranks if s.alive)
    if stale and any(track.quiet_s >= state.config.suspect_floor_s / 2 for track in tracks):
        p99, stale = _learned_p99_s(tracks), False
    state = replace(
        state,
        tracks=tuple(tracks),
        still_s=0.0 if moved else state.still_s + (0.0 if frozen else observed_s),
        all_stopped_s=state.all_stopped_s + observed_s if suspended else 0.0,
        since_detail_s=0.0 if detailed else state.since_detail_s + observed_s,
        longest_s=longest,
        p99_s=p99,
        p99_stale=stale,
    )
    scene = Scene(
        tracks={track.rank: track for track in tracks},
        samples={track.rank: track.seen for track in tracks if track.seen is not None},
        world_size=state.world_size,
        config=state.config,
        bound_s=floor_bound_s(state.config, p99),
        letters=any(s.letter for s in sample.ranks if s.alive),
        detailed=detailed,
    )
    return state, scene, moved, frozen


def _advance(
    track: Track,
    sample: RankSample,
    observed_s: float,
    moved: bool,
    frozen: bool,
    suspended: bool,
    any_stopped: bool,
) -> Track:
    counted_s = 0.0 if frozen else observed_s
    page = sample.page
    stopped_s, unread_s = track.stopped_s, track.unread_s
    if moved or sample.letter not in ("", "T"):
        stopped_s, unread_s = None, 0.0
    elif sample.letter == "T":
        stopped_s = 0.0 if stopped_s is None or suspended else stopped_s + unread_s + counted_s
        unread_s = 0.0
    elif stopped_s is not None:
        unread_s += counted_s
    step, step_ns = track.step, track.step_ns
    intervals, since_step_s = track.intervals_s, track.since_step_s + counted_s
    if frozen:
        step_ns = 0  # the step under way takes as long as somebody likes: not to be learned from
    if page is not None and page.step > step:
        new, step, step_ns = new_intervals_s(page, step, step_ns, since_step_s)
        intervals = (*intervals, *new)[-WINDOW:] if new else intervals
        since_step_s = 0.0
    gone_s = track.gone_s
    if not sample.alive:
        gone_s = 0.0 if gone_s is None else gone_s + counted_s
    return Track(
        rank=sample.rank,
        ticks=page.ticks if page is not None else track.ticks,
        quiet_s=0.0 if moved or page is None else track.quiet_s + counted_s,
        stopped_s=stopped_s,
        unread_s=unread_s,
        tainted=(track.tainted and not moved) or frozen or any_stopped,
        gone_s=gone_s,
        step=step,
        step_ns=step_ns,
        since_step_s=since_step_s,
        intervals_s=intervals,
        seen=sample if moved else _merged(track.seen, sample),
    )


def _merged(before: RankSample | None, now: RankSample) -> RankSample:
    """``now``, completed by what was read earlier: nothing has moved since, so it still holds."""
    if before is None:
        return now
    page = now.page
    if page is not None and before.page is not None and before.page.rings and not page.rings:
        old = before.page
        page = replace(page, steps=old.steps, collectives=old.collectives, groups=old.groups, rings=True)
    elif page is None:
        page = before.page
    return replace(
        now,
        page=page,
        process=now.process or before.process,
        groups=now.groups or before.groups,
        answered=before.answered if now.answered is None else now.answered,
        stack_id=now.stack_id or before.stack_id,
    )


def _learned_p99_s(tracks: tuple[Track, ...] | list[Track]) -> float | None:
    """None until every living rank has made enough steps to judge by."""
    living = [track for track in tracks if track.gone_s is None]
    if not living or any(track.step < MIN_STEPS or not track.intervals_s for track in living):
        return None
    return p99_s(track.intervals_s for track in living)


# --- proof ------------------------------------------------------------------------------------------


def _prove(
    state: HangState, scene: Scene, moved: frozenset[int], frozen: bool, observed_s: float
) -> tuple[HangState, Finding | None]:
    traced = any(track.traced for track in state.tracks)
    mismatch = desync(scene)
    if mismatch is not None and state.desync_seen and not traced:
        return state, _act(mismatch)
    # One look later at the earliest: it brings the details that tell whether somebody debugs this job.
    state = replace(state, desync_seen=mismatch is not None)
    if frozen:
        return replace(state, held=()), None
    # Proofs need everybody to stand still; the time limit is for one rank, whatever the others do.
    now = [] if moved else candidates(scene)
    over_time = hang_timeout(scene)
    judged = evaluated(scene) | {"hang_timeout"}
    held = [] if moved else [_aged(old, observed_s) for old in state.held if old.kind not in judged]
    for candidate in [*now, over_time] if over_time is not None else now:
        kept = _hold(candidate, state.held, scene, observed_s)
        if kept is None:
            continue
        if candidate.ready and kept.held_s >= candidate.need_s:
            return replace(state, held=()), _act(candidate)
        held.append(kept)
    return replace(state, held=tuple(held)), None


def _aged(held: Held, observed_s: float) -> Held:
    return replace(held, held_s=held.held_s + observed_s)


def _hold(candidate: Candidate, held: tuple[Held, ...], scene: Scene, observed_s: float) -> Held | None:
    """How long this candidate has been holding; None if what it rests on can't be seen."""
    marks = []
    for rank in candidate.idle:
        sample = scene.samples[rank]
        if sample.process is None:
            return None
        marks.append(Mark(rank, sample.process.cpu_s, sample.process.io_bytes, sample.stack_id))
    fresh = Held(candidate.kind, candidate.ranks, 0.0, tuple(marks))
    for old in held:
        if (old.kind, old.ranks) == (candidate.kind, candidate.ranks):
            older = _aged(old, observed_s)
            return older if _still_idle(older, fresh) else fresh
    return fresh


def _still_idle(old: Held, now: Held) -> bool:
    """Whether the marked ranks have done nothing since, but answer our questions."""
    for before, after in zip(old.marks, now.marks, strict=True):
        if after.cpu_s - before.cpu_s > _IDLE_CPU_S + _IDLE_CPU_SHARE * old.held_s:
            return False
        if after.io_bytes - before.io_bytes > _IDLE_IO_BYTES + _IDLE_IO_BYTES_PER_S * old.held_s:
            return False
        if before.stack_id and after.stack_id and before.stack_id != after.stack_id:
            return False
    return True


def _act(candidate: Candidate) -> Finding:
    return Finding("act", Trigger(candidate.kind, candidate.ranks, candidate.detail))


# --- suspicion --------------------------------------------------------------------------------------


def _suspect(state: HangState, scene: Scene, moved: frozenset[int]) -> tuple[HangState, Finding | None]:
    if state.stalled:
        gone = {track.rank for track in state.tracks if track.gone_s is not None}
        left = state.stalled_left - moved - gone
        if left:
            return replace(state, stalled_left=left), None
        ranks = tuple(rank for rank in state.stalled if rank not in gone)
        state = replace(state, stalled=(), stalled_left=frozenset())
        if not ranks:
            return state, None
        return state, Finding("clear", Trigger("suspect", ranks, clear_text(ranks)))
    if state.all_stopped_s >= scene.bound_s:
        ranks = tuple(sorted(s.rank for s in scene.living))
        text = (
            f"{describe_ranks(ranks)} {'is' if len(ranks) == 1 else 'are all'} stopped (state T): suspended"
        )
        return _told(state, ranks, ranks, f"{text} from outside, so nothing is done about it")
    over = [s.rank for s in scene.living if s.page is not None and _over_bound(state, scene, s)]
    if not over:
        return state, None
    ranks = who_holds_up(scene, over, scene.bound_s)
    return _told(state, tuple(sorted({*over, *ranks})), ranks, suspicion_text(scene, ranks))


def _over_bound(state: HangState, scene: Scene, sample: RankSample) -> bool:
    assert sample.page is not None
    quiet_s = scene.quiet_s(sample.rank)
    if quiet_s < state.config.suspect_floor_s:
        return False
    return quiet_s > suspect_bound_s(state.config, state.p99_s, state.longest_s, sample.page.phase_name)


def _told(
    state: HangState, stalled: tuple[int, ...], ranks: tuple[int, ...], text: str
) -> tuple[HangState, Finding]:
    state = replace(state, stalled=stalled, stalled_left=frozenset(stalled))
    return state, Finding("suspect", Trigger("suspect", ranks, text))
