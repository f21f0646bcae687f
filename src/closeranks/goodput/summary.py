"""What became of a run: the result of ``closeranks.goodput.fold``, plain and immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

__all__ = ["Bucket", "Generation", "Incident", "NS", "Outcome", "PHASES", "RecordLike", "RunSummary"]

NS = 1_000_000_000


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
    INTERRUPTED = "interrupted"  # no final record: the agent was killed, or couldn't write any more
    ENDED = "ended"  # a generation only: another one follows, and no record says why


# What an incident is charged with, in order.
PHASES = (Bucket.DETECT, Bucket.EVIDENCE, Bucket.KILL, Bucket.BACK_OFF, Bucket.RESTART)


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
    unrecorded_incidents: int = 0  # known to have been, and not in the journal
    killed: bool = False  # interrupted, and not for want of room for the last records
    notes: tuple[str, ...] = ()

    @property
    def elapsed_s(self) -> float:
        return self.elapsed_ns / NS

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
        return self.buckets_ns[bucket] / NS
