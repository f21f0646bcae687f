"""Where the time of a run went: a pure fold over its journal.

Every nanosecond between the first and the last record goes into exactly one bucket, so the buckets sum to
the elapsed time. ETTR, the effective training time ratio, is productive time / elapsed time (Kokolis et
al. 2024, arXiv 2410.21680; Llama 3, arXiv 2407.21783, section 3.3.4; here without queueing, which a launcher
doesn't see).

    start-up    first record -> all ranks of the first generation have done a step
    productive  first step of a generation -> it broke, stopped or finished, less what was lost
    lost work   the part of that which had to be done again, or is in no checkpoint
    detect      it broke -> the agent knew
    evidence    -> evidence is captured and the verdict found
    kill        -> no process of the generation is left
    back-off    waiting before a new try, on purpose
    restart     -> all ranks of the next generation have done a step (loading and recompiling included)
    stopping    a stop was asked for, or nothing is left to try -> the end
    unknown     nobody was there to see it, or it can't be known whether the work was kept

How much work an end cost, the first that applies:

1. Script steps (``closeranks.step``) of both sides: the steps beyond the one at which a later generation
   resumed were done twice.
2. A checkpoint was seen in the generation: what came after the step it holds. Its time is interpolated
   between progress records, about a second apart.
3. Checkpoints were seen in earlier generations, so saves can be seen, and none in this: all of its work.
4. No checkpoint was ever seen: perhaps none was made, perhaps the script saves in a way that can't be seen.
   Lost work is None, the time goes to unknown, and ``ettr`` to ``ettr_max`` is the range of what may be true.

A run that is live has lost nothing yet. The first step of each generation counts as start-up or restart.
Time is the agent's monotonic clock, which stands still while the machine sleeps; where an agent took over
from another, the wall clock bridges the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

__all__ = ["Bucket", "Generation", "Incident", "Outcome", "RecordLike", "RunSummary", "fold"]

MAX_GENERATIONS = 10_000  # what is beyond still counts in the buckets, but has no row of its own
_MAX_POINTS = 512
_MAX_POINTS_ENDED = 64
_MAX_TEXT = 2_000
_NS = 1_000_000_000
_CLOCK_SLACK_NS = _NS  # records of several threads may be this much out of order


class RecordLike(Protocol):
    """What a fold needs of a record; closeranks.controller.journal.Record is one."""

    @property
    def kind(self) -> str: ...
    @property
    def data(self) -> Mapping[str, Any]: ...
    @property
    def generation(self) -> int | None: ...
    @property
    def wall_ns(self) -> int: ...
    @property
    def mono_ns(self) -> int: ...


class Bucket(StrEnum):
    """Each instant of a run is in exactly one."""

    START_UP = "start-up"
    PRODUCTIVE = "productive"
    LOST = "lost work"
    DETECT = "detect"
    EVIDENCE = "evidence"
    KILL = "kill"
    BACK_OFF = "back-off"
    RESTART = "restart"
    STOPPING = "stopping"
    UNKNOWN = "unknown"


class Outcome(StrEnum):
    """How a run or a generation ended."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    RUNNING = "running"
    INTERRUPTED = "interrupted"  # no final record: the agent was killed
    ENDED = "ended"  # a generation only: another one follows, and no record says why


_PHASES = (Bucket.DETECT, Bucket.EVIDENCE, Bucket.KILL, Bucket.BACK_OFF, Bucket.RESTART)


@dataclass(frozen=True, slots=True)
class Incident:
    """One interruption and what it cost. Phases follow each other; all times in seconds."""

    id: str
    generation: int
    wall_ns: int  # when it broke
    at_s: float  # the same, since the start of the run
    step: int | None  # steps of its generation done by then
    trigger: str
    detail: str
    leaf: str  # "" = no verdict was recorded
    kind: str
    culprit_ranks: tuple[int, ...]
    summary: str
    action: str
    confidence: float | None
    decision: str
    injected: str  # the fault that `closeranks inject` had put there, "" = none
    leftovers: tuple[int, ...]  # pids that couldn't be killed
    recovered: bool  # a later generation completed a step
    detect_s: float
    evidence_s: float
    kill_s: float
    backoff_s: float
    restart_s: float
    init_s: float | None  # of restart_s: until init_process_group had returned everywhere
    lost_work_s: float | None  # None: can't be known
    lost_steps: int | None

    @property
    def down_s(self) -> float:
        """From the break to the next step (or to the end, where none followed)."""
        return self.detect_s + self.evidence_s + self.kill_s + self.backoff_s + self.restart_s


@dataclass(frozen=True, slots=True)
class Generation:
    """One start of the world. Times in seconds since the start of the run."""

    number: int
    wall_ns: int
    started_s: float
    init_s: float | None
    first_step_s: float | None
    ended_s: float
    steps: int
    lost_steps: int | None
    productive_s: float
    lost_work_s: float | None
    outcome: Outcome
    incident_id: str | None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What became of a run. ``buckets_ns`` has every bucket and sums to ``elapsed_ns`` exactly."""

    job: str
    outcome: Outcome
    exit_code: int | None
    reason: str
    started_wall_ns: int | None
    elapsed_ns: int
    buckets_ns: dict[Bucket, int]
    unknown_work_ns: int  # the part of unknown in which steps were made, kept or not
    generations: tuple[Generation, ...] = ()
    incidents: tuple[Incident, ...] = ()
    generations_omitted: int = 0
    argv: tuple[str, ...] = ()
    entrypoint: str = ""
    world_size: int | None = None
    node: str = ""
    version: str = ""
    dropped_records: int = 0
    notes: tuple[str, ...] = ()

    @property
    def elapsed_s(self) -> float:
        return self.elapsed_ns / _NS

    @property
    def ettr(self) -> float | None:
        """Productive / elapsed: what is certain. None for a run of no length."""
        return self.buckets_ns[Bucket.PRODUCTIVE] / self.elapsed_ns if self.elapsed_ns else None

    @property
    def ettr_max(self) -> float | None:
        """The same if all work of unknown fate was kept."""
        kept_ns = self.buckets_ns[Bucket.PRODUCTIVE] + self.unknown_work_ns
        return kept_ns / self.elapsed_ns if self.elapsed_ns else None

    def seconds(self, bucket: Bucket) -> float:
        return self.buckets_ns[bucket] / _NS


# --- fields of records, which may be missing or odd -------------------------------------------------


def _int(data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    if isinstance(value, float) and math.isfinite(value):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _count(data: Mapping[str, Any], key: str) -> int:
    return max(0, _int(data, key) or 0)


def _ns(data: Mapping[str, Any], key: str) -> int | None:
    """A duration given in seconds."""
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return round(min(max(value, 0), 1e9) * _NS) if value == value else None


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def _ints(data: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = data.get(key)
    items = value[:1024] if isinstance(value, list) else []
    return tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool))


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}


# --- the fold ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Point:
    t_ns: int
    step: int
    absolute: int | None


@dataclass(slots=True)
class _Generation:
    number: int
    wall_ns: int
    started_ns: int
    init_ns: int | None = None
    first_step_ns: int | None = None
    ended_ns: int | None = None
    outcome: Outcome | None = None
    incident: _Incident | None = None
    points: list[_Point] = field(default_factory=list)
    steps: int = 0
    base: int | None = None  # the script's own step number at which this generation began
    checkpoints: int = 0
    checkpoint_step: int = 0
    injected: str = ""
    starting_ns: int = 0  # how much of start-up or restart is this generation's
    starting_bucket: Bucket = Bucket.START_UP
    productive_ns: int = 0
    lost_ns: int | None = 0
    lost_steps: int | None = 0

    def add_point(self, point: _Point) -> None:
        self.points.append(point)
        if len(self.points) > _MAX_POINTS:
            self.thin(_MAX_POINTS)

    def thin(self, limit: int) -> None:
        """Fewer points, the older ones first: what matters lies near the end, where checkpoints are."""
        while len(self.points) > limit:
            half = len(self.points) // 2
            self.points = self.points[:half:2] + self.points[half:]

    def time_of_step(self, step: int) -> int | None:
        return self._interpolate([(p.t_ns, p.step) for p in self.points], step)

    def time_of_absolute(self, absolute: int) -> int | None:
        assert self.first_step_ns is not None and self.base is not None
        known = [(p.t_ns, p.absolute) for p in self.points if p.absolute is not None]
        known.insert(0, (self.first_step_ns, self.base + 1))
        return self._interpolate(known, absolute)

    @staticmethod
    def _interpolate(points: list[tuple[int, int]], wanted: int) -> int | None:
        """When ``wanted`` was reached; None where it wasn't."""
        for i, (t_ns, value) in enumerate(points):
            if value >= wanted:
                if i == 0 or value == wanted:
                    return t_ns
                before_ns, before = points[i - 1]
                return before_ns + (t_ns - before_ns) * (wanted - before) // (value - before)
        return None


@dataclass(slots=True)
class _Incident:
    id: str
    generation: _Generation
    wall_ns: int
    at_ns: int
    trigger: Mapping[str, Any]
    verdict: Mapping[str, Any] = field(default_factory=dict)
    decision: str = ""
    leftovers: tuple[int, ...] = ()
    recovered: bool = False
    init_ns: int | None = None
    restart_began_ns: int | None = None
    phases: dict[Bucket, int] = field(default_factory=lambda: dict.fromkeys(_PHASES, 0))


class _Clock:
    """Record times on one axis that never runs backwards, in ns since the first record."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._offset_ns: int | None = None  # now = mono + offset
        self._wall_ns = 0
        self._mono_ns = 0

    def advance(self, record: RecordLike, *, new_agent: bool) -> int:
        behind = record.mono_ns < self._mono_ns - _CLOCK_SLACK_NS
        if self._offset_ns is None:
            self._offset_ns = -record.mono_ns
        elif new_agent or behind:  # another boot or host: its monotonic clock says nothing to ours
            now_ns = self.now_ns + max(0, record.wall_ns - self._wall_ns)
            self._offset_ns = now_ns - record.mono_ns
        self._wall_ns, self._mono_ns = record.wall_ns, record.mono_ns
        self.now_ns = max(self.now_ns, record.mono_ns + self._offset_ns)
        return self.now_ns

    def at(self, mono_ns: int) -> int:
        assert self._offset_ns is not None
        return mono_ns + self._offset_ns


class _Fold:
    def __init__(self) -> None:
        self.clock = _Clock()
        self.buckets = dict.fromkeys(Bucket, 0)
        self.mark_ns = 0  # everything before is in a bucket
        self.bucket = Bucket.START_UP  # where the time since goes
        self.backoff_until_ns = 0
        self.after_kill = False  # killed, and not yet clear whether another start follows
        self.started: Mapping[str, Any] = {}
        self.first_wall_ns: int | None = None
        self.generation: _Generation | None = None
        self.generations: list[_Generation] = []
        self.omitted = 0
        self.incidents: list[_Incident] = []
        self.incident: _Incident | None = None  # the one that is being dealt with
        self.outcome: Outcome | None = None
        self.stop_reason: str | None = None
        self.exit_code: int | None = None
        self.reason = ""
        self.dropped = 0
        self.unknown_work_ns = 0

    # --- time into buckets

    def put(self, ns: int, bucket: Bucket) -> None:
        self.buckets[bucket] += ns
        if self.incident is not None and bucket in _PHASES:
            self.incident.phases[bucket] += ns
        generation = self.generation
        if generation is not None and generation.ended_ns is None and bucket is generation.starting_bucket:
            generation.starting_ns += ns

    def close(self, t_ns: int) -> None:
        """Put the time up to ``t_ns`` where it belongs."""
        t_ns = max(t_ns, self.mark_ns)
        if self.bucket is Bucket.BACK_OFF:
            until_ns = min(max(self.backoff_until_ns, self.mark_ns), t_ns)
            self.put(until_ns - self.mark_ns, Bucket.BACK_OFF)
            self.mark_ns = until_ns
            if t_ns > until_ns and self.generation is not None:
                self.bucket = self.generation.starting_bucket
        self.put(t_ns - self.mark_ns, self.bucket)
        self.mark_ns = t_ns

    def enter(self, t_ns: int, bucket: Bucket) -> None:
        self.close(t_ns)
        self.bucket = bucket

    # --- generations

    def open_generation(self, number: int, record: RecordLike, t_ns: int) -> _Generation:
        self.end_generation(t_ns, Outcome.ENDED)
        self.after_kill = False
        bucket = Bucket.RESTART if self.generations else Bucket.START_UP
        generation = _Generation(number, record.wall_ns, t_ns, starting_bucket=bucket)
        if len(self.generations) < MAX_GENERATIONS:
            self.generations.append(generation)
        else:
            self.omitted += 1
        self.enter(t_ns, bucket)
        self.generation = generation
        return generation

    def end_generation(self, t_ns: int, outcome: Outcome) -> None:
        """Its work ends here; does nothing where it ended before."""
        generation = self.generation
        if generation is None or generation.ended_ns is not None:
            return
        self.close(t_ns)
        generation.ended_ns = t_ns
        generation.outcome = outcome
        if generation.first_step_ns is not None:
            generation.productive_ns = max(0, t_ns - generation.first_step_ns)
        generation.thin(_MAX_POINTS_ENDED)

    def named(self, record: RecordLike) -> int | None:
        number = _int(record.data, "generation")
        return record.generation if number is None else number

    def current(self, record: RecordLike, t_ns: int) -> _Generation | None:
        """The generation that a record speaks of; None for an older one, whose late words don't count."""
        number, generation = self.named(record), self.generation
        if generation is not None and (number is None or number == generation.number):
            return generation
        if generation is not None and number is not None and number < generation.number:
            return None
        return self.open_generation(0 if number is None else number, record, t_ns)

    # --- records

    def feed(self, record: RecordLike) -> None:
        again = record.kind == "run_started" and self.first_wall_ns is not None
        before_ns = self.clock.now_ns
        t_ns = self.clock.advance(record, new_agent=again)
        if self.first_wall_ns is None:
            self.first_wall_ns = record.wall_ns
        if again:
            self.taken_over(before_ns, t_ns)
        if record.kind == "run_started":
            self.started = record.data
        elif record.kind == "journal_gap":
            self.dropped += _count(record.data, "dropped")
        elif self.outcome is None:
            handler = _HANDLERS.get(record.kind)
            if handler is not None:
                handler(self, record, t_ns)

    def taken_over(self, before_ns: int, t_ns: int) -> None:
        """A new agent goes on with this journal: what lies between is nobody's knowledge."""
        self.close(before_ns)
        self.end_generation(before_ns, Outcome.INTERRUPTED)
        self.generation = self.incident = None
        self.outcome, self.exit_code, self.reason, self.stop_reason = None, None, "", None
        self.enter(before_ns, Bucket.UNKNOWN)
        self.enter(t_ns, Bucket.RESTART if self.generations else Bucket.START_UP)
        self.after_kill = False

    def generation_starting(self, record: RecordLike, t_ns: int) -> None:
        number = self.named(record)
        if self.generation is not None and number is not None and number <= self.generation.number:
            return
        if number is None:
            number = 0 if self.generation is None else self.generation.number + 1
        self.open_generation(number, record, t_ns)
        self.backoff_until_ns = t_ns + (_ns(record.data, "delay_s") or 0)
        if self.backoff_until_ns > t_ns:
            self.bucket = Bucket.BACK_OFF

    def generation_started(self, record: RecordLike, t_ns: int) -> None:
        generation = self.current(record, t_ns)
        if generation is None or generation.ended_ns is not None:
            return
        self.enter(t_ns, generation.starting_bucket)
        generation.started_ns, generation.wall_ns = t_ns, record.wall_ns

    def init_done(self, record: RecordLike, t_ns: int) -> None:
        generation = self.current(record, t_ns)
        if generation is None or generation.ended_ns is not None or generation.init_ns is not None:
            return
        generation.init_ns = t_ns
        incident = self.incident
        if incident is not None and incident.restart_began_ns is not None:
            incident.init_ns = t_ns - incident.restart_began_ns

    def first_step(self, record: RecordLike, t_ns: int) -> None:
        generation = self.current(record, t_ns)
        if generation is None or generation.ended_ns is not None or generation.first_step_ns is not None:
            return
        self.enter(t_ns, Bucket.PRODUCTIVE)
        generation.first_step_ns = t_ns
        generation.steps = max(generation.steps, 1)
        generation.add_point(_Point(t_ns, 1, None))
        if self.incident is not None:
            self.incident.recovered = True
            self.incident = None

    def progress(self, record: RecordLike, t_ns: int) -> None:
        generation = self.current(record, t_ns)
        if generation is None:
            return
        step, absolute = _count(record.data, "step"), _int(record.data, "absolute_step")
        if step >= 1:
            self.first_step(record, t_ns)
        generation.steps = max(generation.steps, step)
        generation.checkpoints = max(generation.checkpoints, _count(record.data, "checkpoints"))
        generation.checkpoint_step = max(generation.checkpoint_step, _count(record.data, "checkpoint_step"))
        if absolute is not None and generation.base is None:
            generation.base = absolute - step
        at_ns = t_ns if generation.ended_ns is None else min(t_ns, generation.ended_ns)
        generation.add_point(_Point(at_ns, step, absolute))

    def detected(self, record: RecordLike, t_ns: int) -> None:
        generation = self.current(record, t_ns)
        if generation is None or generation.ended_ns is not None:
            return
        broke = _int(record.data, "broke_mono_ns")
        if broke is None:
            broke = _int(record.data, "last_progress_mono_ns")
        broke_ns = t_ns if broke is None else min(max(self.clock.at(broke), self.mark_ns), t_ns)
        self.close(broke_ns)
        self.end_generation(broke_ns, Outcome.FAILED)
        incident = _Incident(
            id=_text(record.data, "incident_id"),
            generation=generation,
            wall_ns=record.wall_ns - (t_ns - broke_ns),
            at_ns=broke_ns,
            trigger=_mapping(record.data, "trigger"),
        )
        generation.incident = incident
        if len(self.incidents) < MAX_GENERATIONS:
            self.incidents.append(incident)
        self.incident = incident
        self.bucket = Bucket.DETECT
        self.enter(t_ns, Bucket.EVIDENCE)

    def verdict(self, record: RecordLike, t_ns: int) -> None:
        wanted = _text(record.data, "incident_id")
        incident = next((i for i in reversed(self.incidents[-16:]) if i.id == wanted), None)
        if incident is None:
            return
        incident.verdict = _mapping(record.data, "verdict")
        if incident is self.incident and self.bucket is Bucket.EVIDENCE:
            self.enter(t_ns, Bucket.KILL)

    def killed(self, record: RecordLike, t_ns: int) -> None:
        generation = self.current(record, t_ns)
        if generation is None:
            return
        if self.incident is not None and self.bucket in (Bucket.EVIDENCE, Bucket.KILL):
            took_ns = _ns(record.data, "seconds")
            if took_ns is not None:  # what came before it was still finding out and deciding
                self.bucket = Bucket.EVIDENCE
                self.enter(t_ns - took_ns, Bucket.KILL)
            self.incident.leftovers = _ints(record.data, "leftovers")
            self.enter(t_ns, Bucket.RESTART)
            self.incident.restart_began_ns = t_ns
        elif self.bucket is not Bucket.STOPPING:
            self.end_generation(t_ns, Outcome.ENDED)
            self.enter(t_ns, Bucket.RESTART)
        self.after_kill = True

    def decided(self, record: RecordLike, _t_ns: int) -> None:
        if self.incident is not None and not self.incident.decision:
            self.incident.decision = _text(record.data, "reason")

    def stop_requested(self, record: RecordLike, t_ns: int) -> None:
        if self.stop_reason is None:
            self.stop_reason = _text(record.data, "reason")
            self.enter(t_ns, Bucket.STOPPING)
            self.end_generation(t_ns, Outcome.STOPPED)

    def finished(self, record: RecordLike, t_ns: int) -> None:
        if self.after_kill:
            self.bucket = Bucket.STOPPING
        self.close(t_ns)
        self.exit_code, self.reason = _int(record.data, "exit_code"), _text(record.data, "reason")
        if self.exit_code == 0:
            self.outcome = Outcome.FINISHED
        else:
            self.outcome = Outcome.FAILED if self.stop_reason is None else Outcome.STOPPED
        self.end_generation(t_ns, self.outcome)
        if self.generation is not None and self.outcome is Outcome.FINISHED:
            self.generation.outcome = Outcome.FINISHED  # asked to stop, and got to its own end
        self.bucket = Bucket.STOPPING

    def fault_injected(self, record: RecordLike, t_ns: int) -> None:
        generation = self.current(record, t_ns)
        if generation is not None:
            generation.injected = _text(record.data, "spec") or "a fault"

    # --- the end

    def end(self, *, live: bool) -> None:
        self.close(self.clock.now_ns)
        if self.outcome is None:
            self.outcome = Outcome.RUNNING if live else Outcome.INTERRUPTED
            self.end_generation(self.clock.now_ns, self.outcome)
        self.count_losses()
        if self.outcome is Outcome.FINISHED and not any(g.steps for g in self.generations):
            self.unseen_work()

    def move(self, ns: int, source: Bucket, target: Bucket) -> None:
        self.buckets[source] -= ns
        self.buckets[target] += ns

    def unseen_work(self) -> None:
        """The script did what it had to, and no step was seen: not all of that was starting, but how much?"""
        incident: _Incident | None = None
        for generation in self.generations:
            ns, generation.starting_ns = generation.starting_ns, 0
            self.move(ns, generation.starting_bucket, Bucket.UNKNOWN)
            self.unknown_work_ns += ns
            if incident is not None:  # the one before it, which this generation's start was charged to
                incident.phases[Bucket.RESTART] -= ns
            incident = generation.incident

    def count_losses(self) -> None:
        resumed_at: int | None = None  # the lowest script step at which a later generation began
        seen_before = [False]
        for generation in self.generations:
            seen_before.append(seen_before[-1] or generation.checkpoints > 0)
        for at, generation in reversed(list(enumerate(self.generations))):
            if generation.first_step_ns is not None:
                self.count_loss(generation, resumed_at, seen_before[at])
            if generation.base is not None:
                resumed_at = generation.base if resumed_at is None else min(resumed_at, generation.base)

    def count_loss(self, generation: _Generation, resumed_at: int | None, saves_seen: bool) -> None:
        first_ns, ended_ns = generation.first_step_ns, generation.ended_ns
        assert first_ns is not None and ended_ns is not None
        from_ns: int | None
        if resumed_at is not None and generation.base is not None:
            kept = resumed_at - generation.base
            from_ns = generation.time_of_absolute(resumed_at)
        elif generation.outcome in (Outcome.FINISHED, Outcome.RUNNING):
            return
        elif generation.checkpoints > 0:
            kept = generation.checkpoint_step
            from_ns = generation.time_of_step(kept)
        elif saves_seen:
            kept, from_ns = 0, first_ns
        else:
            generation.lost_ns = generation.lost_steps = None
            self.move(generation.productive_ns, Bucket.PRODUCTIVE, Bucket.UNKNOWN)
            self.unknown_work_ns += generation.productive_ns
            generation.productive_ns = 0
            return
        lost_ns = 0 if from_ns is None else ended_ns - min(max(from_ns, first_ns), ended_ns)
        generation.lost_ns = lost_ns
        generation.lost_steps = max(0, generation.steps - max(0, kept))
        generation.productive_ns -= lost_ns
        self.move(lost_ns, Bucket.PRODUCTIVE, Bucket.LOST)


_HANDLERS = {
    "generation_starting": _Fold.generation_starting,
    "generation_started": _Fold.generation_started,
    "init_done": _Fold.init_done,
    "first_step": _Fold.first_step,
    "progress": _Fold.progress,
    "detected": _Fold.detected,
    "verdict": _Fold.verdict,
    "killed": _Fold.killed,
    "decided": _Fold.decided,
    "stop_requested": _Fold.stop_requested,
    "finished": _Fold.finished,
    "fault_injected": _Fold.fault_injected,
}


def _cut(values: object, limit: int = 64) -> tuple[str, ...]:
    items = values[:limit] if isinstance(values, list) else []
    return tuple(str(item)[:_MAX_TEXT] for item in items)


def _freeze_incident(incident: _Incident) -> Incident:
    verdict, generation = incident.verdict, incident.generation
    culprits = verdict.get("culprits")
    ranks = (
        [c.get("rank") for c in culprits[:1024] if isinstance(c, Mapping)]
        if isinstance(culprits, list)
        else []
    )
    known = tuple(rank for rank in ranks if isinstance(rank, int) and not isinstance(rank, bool))
    confidence = verdict.get("confidence")
    return Incident(
        id=incident.id,
        generation=generation.number,
        wall_ns=incident.wall_ns,
        at_s=incident.at_ns / _NS,
        step=generation.steps,
        trigger=_text(incident.trigger, "kind"),
        detail=_text(incident.trigger, "detail"),
        leaf=_text(verdict, "leaf"),
        kind=_text(verdict, "kind"),
        culprit_ranks=known if verdict else _ints(incident.trigger, "ranks"),
        summary=_text(verdict, "summary"),
        action=_text(verdict, "action"),
        confidence=float(confidence)
        if isinstance(confidence, int | float) and 0 <= confidence <= 1
        else None,
        decision=incident.decision,
        injected=generation.injected,
        leftovers=incident.leftovers,
        recovered=incident.recovered,
        detect_s=incident.phases[Bucket.DETECT] / _NS,
        evidence_s=incident.phases[Bucket.EVIDENCE] / _NS,
        kill_s=incident.phases[Bucket.KILL] / _NS,
        backoff_s=incident.phases[Bucket.BACK_OFF] / _NS,
        restart_s=incident.phases[Bucket.RESTART] / _NS,
        init_s=None if incident.init_ns is None else incident.init_ns / _NS,
        lost_work_s=None if generation.lost_ns is None else generation.lost_ns / _NS,
        lost_steps=generation.lost_steps,
    )


def _freeze_generation(generation: _Generation) -> Generation:
    assert generation.ended_ns is not None and generation.outcome is not None
    first_ns, init_ns, lost_ns = generation.first_step_ns, generation.init_ns, generation.lost_ns
    return Generation(
        number=generation.number,
        wall_ns=generation.wall_ns,
        started_s=generation.started_ns / _NS,
        init_s=None if init_ns is None else init_ns / _NS,
        first_step_s=None if first_ns is None else first_ns / _NS,
        ended_s=generation.ended_ns / _NS,
        steps=generation.steps,
        lost_steps=generation.lost_steps,
        productive_s=generation.productive_ns / _NS,
        lost_work_s=None if lost_ns is None else lost_ns / _NS,
        outcome=generation.outcome,
        incident_id=None if generation.incident is None else generation.incident.id,
    )


def fold(records: Iterable[RecordLike], *, job: str = "", live: bool = False) -> RunSummary:
    """Sum up a run. ``job`` is its id; ``live`` says that its agent still writes this journal.

    Takes records of any order and content; what is missing or makes no sense costs precision, no error.
    """
    state = _Fold()
    for record in records:
        state.feed(record)
    state.end(live=live)
    started, elapsed_ns = state.started, state.clock.now_ns
    assert sum(state.buckets.values()) == elapsed_ns, "each instant is in exactly one bucket"
    assert all(ns >= 0 for ns in state.buckets.values()), state.buckets
    assert state.outcome is not None
    entrypoint = started.get("entrypoint")
    if isinstance(entrypoint, Mapping):
        entrypoint = entrypoint.get("target")
    return RunSummary(
        job=job,
        outcome=state.outcome,
        exit_code=state.exit_code,
        reason=state.reason or state.stop_reason or "",
        started_wall_ns=state.first_wall_ns,
        elapsed_ns=elapsed_ns,
        buckets_ns=state.buckets,
        unknown_work_ns=state.unknown_work_ns,
        generations=tuple(_freeze_generation(g) for g in state.generations),
        incidents=tuple(_freeze_incident(i) for i in state.incidents),
        generations_omitted=state.omitted,
        argv=_cut(started.get("argv")),
        entrypoint=entrypoint[:_MAX_TEXT] if isinstance(entrypoint, str) else "",
        world_size=_int(started, "world_size"),
        node=_text(started, "node"),
        version=_text(started, "version"),
        dropped_records=state.dropped,
    )
