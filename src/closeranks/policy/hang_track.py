"""Hang detection's memory: what one look adds to what is known of each rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from closeranks.policy.hang_learn import (
    MIN_STEPS,
    WINDOW,
    floor_bound_s,
    new_intervals_s,
    p99_s,
    remember_pause,
)
from closeranks.policy.hang_model import HangState, JobSample, RankSample, Scene, Track

__all__ = ["Look", "learned_p99_s", "take_in"]

_RESUME_GRACE_S = 10.0  # a suspended job may be continued by hand, one rank after the other


def _moved(track: Track, sample: RankSample) -> bool:
    """Whether this look shows a sign of life: a tick, a counter of the flight recorder, an exit."""
    if sample.alive != (track.gone_s is None):
        return True
    if sample.page is not None and sample.page.ticks != track.ticks:
        return True
    before = track.seen.groups if track.seen is not None else ()
    return bool(before and sample.groups and before != sample.groups)


def _is_traced(track: Track, sample: RankSample, moved: bool) -> bool:
    if sample.process is not None:
        return sample.process.tracer_pid != 0 or sample.letter == "t"
    return sample.letter == "t" or (track.traced and not moved)


def _is_stopped(track: Track, sample: RankSample) -> bool:
    return sample.letter == "T" or (not sample.letter and track.stopped_s is not None)


@dataclass(frozen=True, slots=True)
class Look:
    """What this sample says about the job as a whole."""

    observed_s: float
    moved: frozenset[int]
    traced: frozenset[int]
    suspended: bool  # all living ranks are stopped: someone has suspended the job

    @property
    def frozen(self) -> bool:
        """Somebody holds the job, or a part of it, where it is: time doesn't count."""
        return self.suspended or bool(self.traced)


def _look_at(rows: list[tuple[Track, RankSample]], observed_s: float) -> Look:
    moved = frozenset([s.rank for track, s in rows if _moved(track, s)])
    traced = [s.rank for track, s in rows if s.alive and _is_traced(track, s, s.rank in moved)]
    living = stopped = 0
    for track, s in rows:
        if s.alive:
            living += 1
            stopped += s.rank not in moved and _is_stopped(track, s)
    return Look(observed_s, moved, frozenset(traced), 0 < living == stopped)


def take_in(state: HangState, sample: JobSample, observed_s: float) -> tuple[HangState, Scene, Look]:
    """Move all tracks on by one sample; what remains of the state is for the caller to move on."""
    known = {track.rank: track for track in state.tracks}
    rows = [(known.get(s.rank) or Track(s.rank), s) for s in sample.ranks]
    look = _look_at(rows, observed_s)
    worth_s = state.config.suspect_floor_s / 2
    longest, p99, stale = state.longest_s, state.p99_s, state.p99_stale
    tracks = []
    for track, s in rows:
        if s.rank in look.moved and track.quiet_s >= worth_s and p99 is not None:
            page = track.seen.page if track.seen is not None else None
            if page is not None:
                longest = remember_pause(longest, page.phase_name, track.quiet_s)
        new = _advance(track, s, look)
        stale = stale or new.intervals_s is not track.intervals_s
        tracks.append(new)
    detailed = any(s.detailed for s in sample.ranks if s.alive)
    if stale and any(track.quiet_s >= worth_s for track in tracks):
        p99, stale = learned_p99_s(tracks), False
    counted_s = 0.0 if look.frozen else observed_s
    state = replace(
        state,
        tracks=tuple(tracks),
        still_s=0.0 if look.moved else state.still_s + counted_s,
        all_stopped_s=state.all_stopped_s + observed_s if look.suspended else 0.0,
        since_detail_s=0.0 if detailed else state.since_detail_s + observed_s,
        longest_s=longest,
        p99_s=p99,
        p99_stale=stale,
    )
    scene = Scene(
        tracks={track.rank: track for track in tracks},
        samples={track.rank: track.detail or s for track, (_, s) in zip(tracks, rows, strict=True)},
        world_size=state.world_size,
        config=state.config,
        bound_s=floor_bound_s(state.config, p99),
        letters=any(s.letter != "" for s in sample.ranks if s.alive),
        detailed=detailed,
    )
    return state, scene, look


def _advance(track: Track, sample: RankSample, look: Look) -> Track:
    moved = sample.rank in look.moved
    counted_s = 0.0 if look.frozen else look.observed_s
    page = sample.page
    stopped_s, unread_s = _stopped_time(track, sample, look, moved)
    step, step_ns = track.step, track.step_ns
    intervals, since_step_s = track.intervals_s, track.since_step_s + counted_s
    if page is not None and page.step > step:
        new, step, step_ns = new_intervals_s(page, step, step_ns, since_step_s)
        intervals = (*intervals, *new)[-WINDOW:] if new else intervals
        since_step_s = 0.0
    gone_s = track.gone_s
    if not sample.alive:
        gone_s = 0.0 if gone_s is None else gone_s + counted_s
    detail = None if moved else track.detail
    if sample.detailed or (page is not None and page.rings):
        detail = _completed(sample, detail)
    return Track(
        rank=sample.rank,
        ticks=page.ticks if page is not None else track.ticks,
        quiet_s=0.0 if moved or page is None else track.quiet_s + counted_s,
        stopped_s=stopped_s,
        unread_s=unread_s,
        traced=sample.rank in look.traced,
        gone_s=gone_s,
        step=step,
        step_ns=step_ns,
        since_step_s=since_step_s,
        intervals_s=intervals,
        seen=sample,
        detail=detail,
    )


def _stopped_time(track: Track, sample: RankSample, look: Look, moved: bool) -> tuple[float | None, float]:
    """How long it has been in state T, and how long ago that was last read."""
    counted_s = 0.0 if look.frozen else look.observed_s
    if moved or sample.letter not in ("", "T"):
        return None, 0.0
    if sample.letter == "":
        return track.stopped_s, track.unread_s + (0.0 if track.stopped_s is None else counted_s)
    if look.suspended:
        return -_RESUME_GRACE_S, 0.0
    return 0.0 if track.stopped_s is None else track.stopped_s + track.unread_s + counted_s, 0.0


def _completed(now: RankSample, before: RankSample | None) -> RankSample:
    """``now``, completed by what was read earlier: nothing has moved since, so it still holds."""
    if before is None:
        return now
    page = now.page
    if page is None or (not page.rings and before.page is not None and before.page.rings):
        page = before.page
    return RankSample(
        rank=now.rank,
        alive=now.alive,
        exit=now.exit,
        page=page,
        process=now.process or before.process,
        groups=now.groups or before.groups,
        answered=before.answered if now.answered is None else now.answered,
        stack_id=now.stack_id or before.stack_id,
        where=now.where or before.where,
    )


def learned_p99_s(tracks: tuple[Track, ...] | list[Track]) -> float | None:
    """The 99th percentile of step times; None until every living rank has made enough steps to judge by."""
    living = [track for track in tracks if track.gone_s is None]
    if not living or any(track.step < MIN_STEPS or not track.intervals_s for track in living):
        return None
    return p99_s(track.intervals_s for track in living)
