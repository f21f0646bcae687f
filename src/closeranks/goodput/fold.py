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
from typing import Any

from closeranks.goodput.summary import (
    NS,
    PHASES,
    Bucket,
    Generation,
    Incident,
    Outcome,
    RecordLike,
    RunSummary,
)
from closeranks.goodput.work import Loss, Work, loss_of

__all__ = ["Bucket", "Generation", "Incident", "Outcome", "RecordLike", "RunSummary", "fold"]

MAX_GENERATIONS = 10_000  # what is beyond still counts in the buckets, but has no row of its own
_MAX_TEXT = 2_000
_INT64_MAX = 2**63 - 1
_CLOCK_SLACK_NS = NS  # records of several threads may be this much out of order


# --- fields of records, which may be missing or odd -------------------------------------------------


def _int(data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    if isinstance(value, float) and math.isfinite(value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return max(-_INT64_MAX, min(_INT64_MAX, value))


def _count(data: Mapping[str, Any], key: str) -> int:
    return max(0, _int(data, key) or 0)


def _ns(data: Mapping[str, Any], key: str) -> int | None:
    """A duration given in seconds."""
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return round(min(max(value, 0), 1e9) * NS) if value == value else None


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
class _Generation:
    number: int
    wall_ns: int
    started_ns: int
    starting_bucket: Bucket
    init_ns: int | None = None
    outcome: Outcome | None = None
    incident: _Incident | None = None
    injected: str = ""
    starting_ns: int = 0  # how much of start-up or restart is this generation's
    work: Work = field(default_factory=Work)
    loss: Loss = field(default_factory=lambda: Loss(0, 0))

    @property
    def ended(self) -> bool:
        return self.work.ended_ns is not None


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
    phases: dict[Bucket, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))


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
        if self.incident is not None and bucket in PHASES:
            self.incident.phases[bucket] += ns
        generation = self.generation
        if generation is not None and not generation.ended and bucket is generation.starting_bucket:
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
        if generation is None or generation.ended:
            return
        self.close(t_ns)
        generation.outcome = outcome
        generation.work.end(t_ns)

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
        if generation is None or generation.ended or generation.work.first_step_ns is not None:
            return
        self.enter(t_ns, generation.starting_bucket)
        generation.started_ns, generation.wall_ns = t_ns, record.wall_ns

    def init_done(self, record: RecordLike, t_ns: int) -> None:
        generation = self.current(record, t_ns)
        if generation is None or generation.ended or generation.init_ns is not None:
            return
        generation.init_ns = t_ns
        incident = self.incident
        if incident is not None and incident.restart_began_ns is not None:
            incident.init_ns = t_ns - incident.restart_began_ns

    def first_step(self, record: RecordLike, t_ns: int) -> None:
        generation = self.current(record, t_ns)
        if generation is None or generation.ended or generation.work.first_step_ns is not None:
            return
        self.enter(t_ns, Bucket.PRODUCTIVE)
        generation.work.begin(t_ns)
        if self.incident is not None:
            self.incident.recovered = True
            self.incident = None

    def progress(self, record: RecordLike, t_ns: int) -> None:
        generation = self.current(record, t_ns)
        if generation is None:
            return
        step = _count(record.data, "step")
        if step >= 1:
            self.first_step(record, t_ns)
        generation.work.progress(t_ns, step, _int(record.data, "absolute_step"))
        generation.work.checkpoint(_count(record.data, "checkpoints"), _count(record.data, "checkpoint_step"))

    def detected(self, record: RecordLike, t_ns: int) -> None:
        generation = self.current(record, t_ns)
        if generation is None or generation.ended:
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
        # Capture comes first and is in a hurry: the record may be written after it.
        knew = _int(record.data, "detected_mono_ns")
        knew_ns = t_ns if knew is None else min(max(self.clock.at(knew), broke_ns), t_ns)
        self.bucket = Bucket.DETECT
        self.enter(knew_ns, Bucket.EVIDENCE)
        self.close(t_ns)

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
        generation = self.generation
        if generation is not None and generation.outcome is Outcome.STOPPED and self.exit_code == 0:
            generation.outcome = Outcome.FINISHED  # asked to stop, it still got to its own end
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
        if self.outcome is Outcome.FINISHED and not any(g.work.steps for g in self.generations):
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
        saves_seen = [False]
        for generation in self.generations:
            saves_seen.append(saves_seen[-1] or generation.work.checkpoints > 0)
        resumed_at: int | None = None
        for at, generation in reversed(list(enumerate(self.generations))):
            work, outcome = generation.work, generation.outcome
            assert outcome is not None
            generation.loss = loss_of(work, outcome, resumed_at=resumed_at, saves_seen=saves_seen[at])
            if generation.loss.ns is None:
                self.move(work.ns, Bucket.PRODUCTIVE, Bucket.UNKNOWN)
                self.unknown_work_ns += work.ns
            else:
                self.move(generation.loss.ns, Bucket.PRODUCTIVE, Bucket.LOST)
            if work.base is not None:
                resumed_at = work.base if resumed_at is None else min(resumed_at, work.base)


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


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / NS


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
        at_s=incident.at_ns / NS,
        step=generation.work.steps,
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
        detect_s=incident.phases[Bucket.DETECT] / NS,
        evidence_s=incident.phases[Bucket.EVIDENCE] / NS,
        kill_s=incident.phases[Bucket.KILL] / NS,
        backoff_s=incident.phases[Bucket.BACK_OFF] / NS,
        restart_s=incident.phases[Bucket.RESTART] / NS,
        init_s=_seconds(incident.init_ns),
        lost_work_s=_seconds(generation.loss.ns),
        lost_steps=generation.loss.steps,
    )


def _freeze_generation(generation: _Generation) -> Generation:
    work, loss = generation.work, generation.loss
    assert work.ended_ns is not None and generation.outcome is not None
    return Generation(
        number=generation.number,
        wall_ns=generation.wall_ns,
        started_s=generation.started_ns / NS,
        init_s=_seconds(generation.init_ns),
        first_step_s=_seconds(work.first_step_ns),
        ended_s=work.ended_ns / NS,
        steps=work.steps,
        lost_steps=loss.steps,
        productive_s=0.0 if loss.ns is None else (work.ns - loss.ns) / NS,
        lost_work_s=_seconds(loss.ns),
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
