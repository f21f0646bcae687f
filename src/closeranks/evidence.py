"""What is known about one incident, and the verdict drawn from it: plain data, no I/O.

The agent fills an ``Evidence`` before it kills anything; ``diagnose`` turns it into a ``Verdict``; both are
written under ``incidents/<id>/`` as ``evidence.json`` and ``verdict.json`` next to the raw files they name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from closeranks.events import ExitStatus
from closeranks.progress import Page

__all__ = [
    "Culprit",
    "ErrorRecord",
    "Evidence",
    "EvidenceLine",
    "Frame",
    "GroupStatus",
    "HostFacts",
    "ProcessFacts",
    "RankEvidence",
    "ThreadFacts",
    "Trigger",
    "Verdict",
]


@dataclass(frozen=True, slots=True)
class Frame:
    """One Python stack frame, innermost first in a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An exception that left the script, as the worker itself reported it.

    ``place`` is ``file:line`` of the innermost frame of the user's own code; ``mono_ns`` when it was raised,
    so that the first of several can be told from those that followed.
    """

    type: str
    message: str
    place: str
    step: int
    mono_ns: int
    traceback: str


@dataclass(frozen=True, slots=True)
class ThreadFacts:
    """One thread of a process as /proc shows it. ``wait``: see closeranks.policy.waits.Wait."""

    tid: int
    name: str
    state: str
    wchan: str
    syscall: str
    wait: str


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """/proc of one rank. ``state`` is the main thread's letter (R S D T t Z); CPU, I/O: with children.

    ``threads`` begins with the main one. ``child_waits``: the distinct waits of all threads of all living
    descendants; read only where every thread of the rank itself is blocked, as they tell nothing otherwise.
    ``heeds_children``: it handles SIGCHLD, and has children that may end: others than DataLoader
    workers and Python's own helpers.
    """

    state: str
    tracer_pid: int
    cpu_s: float
    io_bytes: int
    rss_bytes: int
    threads: tuple[ThreadFacts, ...] = ()
    children: int = 0
    child_waits: tuple[str, ...] = ()
    heeds_children: bool = False


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """A process group's counters from the flight recorder: it sees the collectives Python hooks can't."""

    group: str
    last_enqueued: int
    last_completed: int
    pending_op: str = ""


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """All that was captured about one rank."""

    rank: int
    pid: int
    page: Page | None = None
    exit: ExitStatus | None = None
    exit_mono_ns: int | None = None
    error: ErrorRecord | None = None
    process: ProcessFacts | None = None
    stack: tuple[Frame, ...] = ()  # the main thread's, innermost first; empty = could not be taken
    native_stack: tuple[str, ...] = ()
    answered: bool = False  # its evidence thread replied: the GIL is free and the process runs
    groups: tuple[GroupStatus, ...] = ()
    log_tail: tuple[str, ...] = ()
    node: str = ""  # "" = the evidence's own
    aborted_by: str = ""  # the last "what():" / fatal line of a native abort, from the log


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the kernel counted since the generation began."""

    oom_kills: int = 0
    oom_victims: tuple[int, ...] = ()  # pids named by the kernel log, where it can be read
    shm_free_bytes: int | None = None
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Trigger:
    """Why evidence was taken: ``kind`` is "exit", "exception", "stopped", "desync", "deadlock", "blocked",
    "early_exit", "init_stall", "hang_timeout" or "suspect"; ``ranks`` are those it was seen on; ``detail``
    is one sentence."""

    kind: str
    ranks: tuple[int, ...] = ()
    detail: str = ""
    mono_ns: int = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """One incident before its verdict. ``ranks`` is ordered by rank and holds every rank of the world."""

    incident_id: str
    generation: int
    world_size: int
    trigger: Trigger
    ranks: tuple[RankEvidence, ...]
    node: str = ""
    host: HostFacts = field(default_factory=HostFacts)
    step_p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class EvidenceLine:
    """One fact that carries the verdict: where it was seen, what it says, why it counts."""

    source: str
    line: str
    why: str


@dataclass(frozen=True, slots=True)
class Culprit:
    """What broke. ``scope`` is rank, gpu, node, nic, link, switch, disk or job."""

    scope: str
    rank: int | None = None
    node: str | None = None
    gpu: str | None = None
    link: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which rank, why, and what now. ``leaf`` is of closeranks.taxonomy; "unknown" is a valid answer.

    ``kind`` names the mechanism: rank_exit, exception, frozen_process, skip_collective, extra_collective,
    type_mismatch, size_mismatch, dtype_mismatch, wrong_order, never_enters, deadlock, subgroup_hang,
    host_block, early_exit, unanswered, out_of_memory, native_crash, init_stall, unknown. ``signature`` is
    equal for two incidents in which the same thing broke at the same place.
    """

    leaf: str
    kind: str
    culprits: tuple[Culprit, ...]
    action: str
    retry: bool
    confidence: float
    summary: str
    signature: str
    evidence: tuple[EvidenceLine, ...] = ()
    table5: str = ""
    owner: str = ""
    missing: tuple[str, ...] = ()  # what would have made an "unknown" known

    @property
    def culprit_ranks(self) -> tuple[int, ...]:
        return tuple(c.rank for c in self.culprits if c.rank is not None)
