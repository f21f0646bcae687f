"""What hang detection takes in, remembers and says: plain immutable data. See closeranks.policy.hang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from closeranks.config import HangConfig
from closeranks.events import ExitStatus
from closeranks.evidence import GroupStatus, ProcessFacts, Trigger
from closeranks.progress import Page

__all__ = [
    "CONFIRM_S",
    "Candidate",
    "Finding",
    "HangState",
    "Held",
    "JobSample",
    "Mark",
    "RankSample",
    "Scene",
    "Track",
]

CONFIRM_S = 0.1  # a proof must hold on two looks this far apart (observed seconds), nobody moving between


@dataclass(frozen=True, slots=True)
class RankSample:
    """One rank at one look.

    ``page``: the header is enough while all is well; ranks of ``wants_detail`` need the rings too, exited
    ones included. ``process``, ``groups`` (flight recorder), ``answered`` (did its evidence thread reply)
    and ``stack_id`` (a hash of the main thread's stack, "" unknown) are for ranks of ``wants_detail``, as is
    ``where``: the script's innermost frame, "train.py:57 main".
    ``state`` is the main thread's letter, for ranks of ``wants_state``; "" = not read.
    """

    rank: int
    alive: bool = True
    exit: ExitStatus | None = None
    page: Page | None = None
    process: ProcessFacts | None = None
    groups: tuple[GroupStatus, ...] = ()
    answered: bool | None = None
    stack_id: str = ""
    state: str = ""
    where: str = ""

    @property
    def letter(self) -> str:
        return self.state or (self.process.state if self.process is not None else "")

    @property
    def in_collective(self) -> bool:
        return self.page is not None and self.page.in_collective

    @property
    def detailed(self) -> bool:
        return self.process is not None or bool(self.groups) or self.answered is not None


@dataclass(frozen=True, slots=True)
class JobSample:
    """All ranks of this node at one look.

    ``observed_s``: seconds that were really observed since the last sample. The caller caps a late look, so
    that a suspended laptop, a frozen agent or a jump of the clock adds next to nothing.
    """

    observed_s: float
    ranks: tuple[RankSample, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """``level``: "suspect" (tell, kill nothing), "act" (end this generation) or "clear" (moving again)."""

    level: str
    trigger: Trigger


@dataclass(slots=True)
class Track:
    """What is remembered of one rank. Never changed once made (frozen, it would take three times as long).

    ``quiet_s``: observed time since its last sign of life. ``stopped_s``: how long it has been seen in state
    T, None if it isn't. ``seen``: the newest sample. ``detail``: what earlier ones said of it beyond that,
    None if it has moved since.
    """

    rank: int
    ticks: int | None = None
    quiet_s: float = 0.0
    stopped_s: float | None = None
    unread_s: float = 0.0  # since the state letter was last read
    traced: bool = False
    gone_s: float | None = None
    step: int = 0
    step_ns: int = 0
    since_step_s: float = 0.0
    intervals_s: tuple[float, ...] = ()
    seen: RankSample | None = None
    detail: RankSample | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A proof that holds on this sample; it must go on holding for ``need_s`` before anyone acts on it.

    ``idle``: ranks that may use no CPU and do no I/O meanwhile, their stacks unchanged. ``ready``: whatever
    else the proof waits for has come about.
    """

    kind: str
    ranks: tuple[int, ...]
    detail: str
    need_s: float
    ready: bool = True
    idle: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a rank's counters stood when its proof began."""

    rank: int
    cpu_s: float
    io_bytes: int
    stack_id: str


@dataclass(frozen=True, slots=True)
class Held:
    """A candidate that has been holding for ``held_s`` of observed time."""

    kind: str
    ranks: tuple[int, ...]
    held_s: float
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class HangState:
    """Everything hang detection knows. Made by ``initial``, moved on by ``observe``; holds no clock."""

    world_size: int
    config: HangConfig
    tracks: tuple[Track, ...] = ()
    still_s: float = 0.0  # since anybody's last sign of life
    all_stopped_s: float = 0.0
    since_detail_s: float = 1e9
    longest_s: tuple[tuple[str, float], ...] = ()  # phase -> longest silence that ended by itself
    p99_s: float | None = None
    p99_stale: bool = False
    stalled: tuple[int, ...] = ()  # told to be suspect
    stalled_left: frozenset[int] = frozenset()  # of those, not moved since
    desync_seen: bool = False
    held: tuple[Held, ...] = ()
    acted: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """One moment, as the proofs look at it.

    ``samples``: of each rank the newest with details, where it hasn't moved since, else the newest.
    ``letters``, ``detailed``: state letters, or details, were read in this very sample.
    """

    tracks: Mapping[int, Track]
    samples: Mapping[int, RankSample]
    world_size: int
    config: HangConfig
    bound_s: float
    letters: bool
    detailed: bool

    @property
    def whole(self) -> bool:
        """Whether every rank of the job is here; those of other nodes are not."""
        return len(self.samples) == self.world_size

    @property
    def living(self) -> list[RankSample]:
        return [sample for sample in self.samples.values() if sample.alive]

    def quiet_s(self, rank: int) -> float:
        return self.tracks[rank].quiet_s
