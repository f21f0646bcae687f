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
from closeranks.policy.hang_learn import floor_bound_s, suspect_bound_s
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
from closeranks.policy.hang_track import Look, learned_p99_s, take_in

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
    return learned_p99_s(state.tracks)


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
    state, scene, look = take_in(state, sample, observed_s)
    state, acted = _prove(state, scene, look)
    if acted is not None:
        return replace(state, acted=True), acted
    return _suspect(state, scene, look.moved)


# --- proof ------------------------------------------------------------------------------------------


def _prove(state: HangState, scene: Scene, look: Look) -> tuple[HangState, Finding | None]:
    mismatch = desync(scene)
    if mismatch is not None and state.desync_seen and not look.traced:
        return state, _act(mismatch)
    if state.desync_seen != (mismatch is not None):
        # One look later at the earliest: it brings the details that tell whether somebody debugs this job.
        state = replace(state, desync_seen=mismatch is not None)
    if look.frozen:
        return replace(state, held=()), None
    # Proofs need everybody to stand still; the time limit is for one rank, whatever the others do.
    over_time = hang_timeout(scene)
    now = [] if look.moved else candidates(scene)
    now += [over_time] if over_time is not None else []
    judged = evaluated(scene) | {"hang_timeout"}
    held = [_aged(old, look) for old in state.held if old.kind not in judged and not look.moved]
    for candidate in now:
        kept = _hold(candidate, state.held, scene, look)
        if kept is None:
            continue
        if candidate.ready and kept.held_s >= candidate.need_s:
            return replace(state, held=()), _act(candidate)
        held.append(kept)
    return (replace(state, held=tuple(held)) if held or state.held else state), None


def _aged(held: Held, look: Look) -> Held:
    return replace(held, held_s=held.held_s + look.observed_s)


def _hold(candidate: Candidate, held: tuple[Held, ...], scene: Scene, look: Look) -> Held | None:
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
            older = _aged(old, look)
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
    return quiet_s > suspect_bound_s(state.config, state.p99_s, state.longest_s, sample.page)


def _told(
    state: HangState, stalled: tuple[int, ...], ranks: tuple[int, ...], text: str
) -> tuple[HangState, Finding]:
    state = replace(state, stalled=stalled, stalled_left=frozenset(stalled))
    return state, Finding("suspect", Trigger("suspect", ranks, text))
