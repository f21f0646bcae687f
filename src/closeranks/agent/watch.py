"""The agent's look at the progress pages: first steps, progress, and what has gone quiet.

Forty looks a second at a few hundred bytes a rank; /proc, stacks and flight recorders are read only for
ranks that the hang policy asks about. The policy decides; this gathers, and keeps observed time: a look
that comes late (a suspended laptop, a starved agent) counts for no more than ``_MAX_OBSERVED_S``.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from closeranks.agent import procfs
from closeranks.agent.capture import ask_flight_recorder, group_statuses, take_stacks
from closeranks.agent.processes import reap_zombies
from closeranks.agent.world import Rank, World
from closeranks.diagnose.stacks import parse_faulthandler, user_frame
from closeranks.diagnose.text import clean, place
from closeranks.events import Progress
from closeranks.evidence import Frame, GroupStatus, ProcessFacts, Trigger
from closeranks.policy import hang
from closeranks.progress import Page

if TYPE_CHECKING:
    from closeranks.agent.supervisor import Supervisor

__all__ = ["Watch"]

_MAX_OBSERVED_S = 0.25
_DETAIL_EVERY_S = 0.12
_DETAIL_TIMEOUT_S = 0.1
# A signal to a quiet rank no more often than this, and less and less often: it interrupts system calls.
_STACK_FIRST_S, _STACK_FACTOR, _STACK_MOST_S = 0.5, 1.5, 10.0
_PROGRESS_EVERY_S = 1.0
_REFILL_AFTER_S = 1.0  # a world that hasn't made a step by then is slow: spares may be made meanwhile
_JANITOR_EVERY_S = 5.0


@dataclass(slots=True)
class _Detail:
    """What was gathered about one quiet rank, and at which tick count."""

    ticks: int
    process: ProcessFacts | None
    groups: tuple[GroupStatus, ...]
    answered: bool
    stack_id: str
    where: str


@dataclass(slots=True)
class _Seen:
    """What is known of the running generation."""

    world: World
    began_s: float
    init_done: bool = False
    first_step: bool = False
    last_step: int = 0
    last_checkpoints: int = 0
    next_progress_s: float = 0.0
    last_look_s: float = 0.0
    details: dict[int, _Detail] = field(default_factory=dict)
    gathering: asyncio.Task[None] | None = None
    gathered_s: float = 0.0
    stacked_s: float = 0.0
    stack_ids: dict[int, str] = field(default_factory=dict)
    places: dict[int, tuple[int, str]] = field(default_factory=dict)  # rank -> at which tick, where
    stack_every_s: float = _STACK_FIRST_S


class Watch:
    """Watches the supervisor's current world."""

    def __init__(self, owner: Supervisor) -> None:
        self._owner = owner
        self._config = owner.config.hang
        self._seen: _Seen | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._state: hang.HangState | None = None
        self._best_absolute = -1
        self._janitor_s = 0.0
        self._learned = False

    @property
    def step_p99_s(self) -> float | None:
        """The 99th percentile of the steps seen lately, in seconds; None before any is known."""
        return hang.step_p99_s(self._state) if self._state is not None else None

    def begin(self, world: World) -> None:
        """A generation was told to go."""
        now = time.monotonic()
        self._seen = _Seen(world, now, next_progress_s=now + _PROGRESS_EVERY_S, last_look_s=now)
        self._state = hang.initial(world.placement.world_size, self._config)
        self._schedule()

    def end(self, world: World) -> None:
        """This generation is over, one way or the other: note how far it came, look no more."""
        seen = self._seen
        if seen is None or seen.world is not world:
            return
        self._look_for_progress(seen, [world.page(rank, rings=False) for rank in world.ranks])
        self._note_progress(seen)
        self._owner.faults.collect(world)
        self.stop()

    def blind(self, why: str) -> None:
        """A rank's hooks are off: its silence means nothing, so this generation isn't judged by silence."""
        self._state = None
        self._owner.notice(f"hang detection is off for this generation: {why}")

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._seen is not None and self._seen.gathering is not None:
            self._seen.gathering.cancel()
        self._seen = None

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._config.sample_interval_s, self._look)

    # --- one look -----------------------------------------------------------------------------------

    def _look(self) -> None:
        seen = self._seen
        if seen is None:
            return
        now = time.monotonic()
        observed_s = min(now - seen.last_look_s, _MAX_OBSERVED_S)
        seen.last_look_s = now
        world = seen.world
        asked = hang.wants_detail(self._state) if self._state is not None else frozenset[int]()
        pages = [world.page(rank, rings=self._needs_rings(seen, rank, asked)) for rank in world.ranks]
        self._look_for_progress(seen, pages)
        if now >= seen.next_progress_s:
            seen.next_progress_s = now + _PROGRESS_EVERY_S
            self._note_progress(seen)
        if not seen.first_step and now - seen.began_s > _REFILL_AFTER_S:
            self._owner.slots.refill()
        if now >= self._janitor_s:
            self._janitor_s = now + _JANITOR_EVERY_S
            self._reap_orphans(world)
            self._owner.check_journal()
        self._look_for_hangs(seen, pages, observed_s, asked)
        if self._seen is seen:
            self._schedule()

    def _needs_rings(self, seen: _Seen, rank: Rank, asked: frozenset[int]) -> bool:
        """Rings cost a little: they are read for suspects, and of the others every eighth look."""
        if rank.rank in asked or rank.rank in seen.details:
            return True
        return int(seen.last_look_s / self._config.sample_interval_s) % 8 == rank.rank % 8

    def _look_for_progress(self, seen: _Seen, pages: list[Page | None]) -> None:
        known = [page for page in pages if page is not None]
        generation = seen.world.generation
        if len(known) < len(pages):
            return
        if not seen.init_done and all(page.init_done for page in known):
            seen.init_done = True
            self._owner.controller.note("init_done", {}, generation=generation)
        step = min(page.progress_steps for page in known)
        if step > seen.last_step:
            seen.last_step = step
            if not seen.first_step:
                self._first_step(seen)

    def _first_step(self, seen: _Seen) -> None:
        seen.first_step = True
        world = seen.world
        self._owner.controller.note("first_step", {}, generation=world.generation)
        self._owner.first_step(world, time.monotonic() - seen.began_s)
        if not self._learned and world.ranks[0].alive:
            self._learned = True
            world.ranks[0].say({"type": "modules"})
        self._owner.slots.refill()

    def _note_progress(self, seen: _Seen) -> None:
        pages = [
            page for rank in seen.world.ranks if (page := seen.world.page(rank, rings=False)) is not None
        ]
        if not pages:
            return
        absolute = [page.absolute_step for page in pages if page.absolute_step is not None]
        checkpoints = max(pages, key=lambda page: page.checkpoints)
        step = min(page.progress_steps for page in pages)
        data = {
            "step": step,
            "absolute_step": min(absolute) if absolute else None,
            "checkpoints": checkpoints.checkpoints,
            "checkpoint_step": checkpoints.checkpoint_step,
        }
        self._owner.controller.note("progress", data, generation=seen.world.generation)
        if step:
            self._owner.dispatch(Progress(seen.world.generation, step))

    def durable_progress(self, world: World) -> bool:
        """Whether this generation left something that a restart builds on (see events.Failure)."""
        pages = [page for rank in world.ranks if (page := world.page(rank, rings=False)) is not None]
        absolute = max((page.absolute_step for page in pages if page.absolute_step is not None), default=-1)
        farther = absolute > self._best_absolute
        self._best_absolute = max(absolute, self._best_absolute)
        return farther or any(page.checkpoints and page.checkpoint_step >= 1 for page in pages)

    def _reap_orphans(self, world: World) -> None:
        """Zombies of processes that ranks left to us; ranks themselves are reaped by their pidfds."""
        own = {rank.pid for rank in world.ranks} | self._owner.slots.pids()
        reap_zombies(own)

    # --- hangs --------------------------------------------------------------------------------------

    def _look_for_hangs(
        self, seen: _Seen, pages: list[Page | None], observed_s: float, asked: frozenset[int]
    ) -> None:
        if self._state is None or not self._config.enabled:
            return
        fresh = seen.details
        seen.details = {}
        letters = hang.wants_state(self._state)
        samples = tuple(
            _sample(rank, page, fresh.get(rank.rank), letter=rank.rank in letters)
            for rank, page in zip(seen.world.ranks, pages, strict=True)
        )
        self._state, finding = hang.observe(self._state, hang.JobSample(observed_s, samples))
        if finding is not None:
            self._found(seen, finding)
        now = seen.last_look_s
        if asked and seen.gathering is None and now - seen.gathered_s > _DETAIL_EVERY_S:
            seen.gathering = asyncio.get_running_loop().create_task(self._gather(seen, asked))
            seen.gathering.add_done_callback(self._gathered)

    async def look(self, *, closely: bool) -> tuple[hang.RankSample, ...]:
        """Every rank as it is now, for whoever judges all nodes together; ``closely``: with all details."""
        seen = self._seen
        if seen is None:
            return ()
        world = seen.world
        if closely:
            await self._gather(seen, frozenset(rank.rank for rank in world.ranks))
        if self._seen is not seen:
            return ()
        return tuple(
            _sample(
                rank, world.page(rank, rings=closely), seen.details.get(rank.rank) if closely else None,
                letter=True,
            )
            for rank in world.ranks
        )  # fmt: skip

    def _found(self, seen: _Seen, finding: hang.Finding) -> None:
        trigger = finding.trigger
        data = {"trigger": {"kind": trigger.kind, "ranks": list(trigger.ranks), "detail": trigger.detail}}
        generation = seen.world.generation
        if finding.level == "act":
            now_ns = time.monotonic_ns()
            self._owner.fail(Trigger(trigger.kind, trigger.ranks, trigger.detail, now_ns))
        elif finding.level == "suspect":
            seen.stack_every_s = _STACK_FIRST_S
            self._owner.controller.note("suspected", data, generation=generation)
            self._owner.suspect(seen.world, trigger)
        else:
            self._owner.controller.note("suspicion_cleared", data, generation=generation)
            self._owner.console.tell("info", f"all clear: {trigger.detail}")

    async def _gather(self, seen: _Seen, asked: frozenset[int]) -> None:
        """Details of the ranks the policy asked about; they go into the next look."""
        world = seen.world
        ranks = [rank for rank in world.ranks if rank.rank in asked and rank.alive]
        ticks = {rank.rank: page.ticks if (page := world.page(rank, rings=False)) else 0 for rank in ranks}
        table = procfs.ProcessTable.take()
        facts = {rank.rank: procfs.read_process(rank.pid, table=table) for rank in ranks}
        jobs: list[Any] = [ask_flight_recorder(ranks, None, _DETAIL_TIMEOUT_S)]
        if time.monotonic() - seen.stacked_s > seen.stack_every_s:
            seen.stack_every_s = min(seen.stack_every_s * _STACK_FACTOR, _STACK_MOST_S)
            seen.stacked_s = time.monotonic()
            jobs.append(take_stacks(ranks, _DETAIL_TIMEOUT_S))
        results = await asyncio.gather(*jobs)
        if len(results) > 1:
            for number, text in results[1].items():
                frames = parse_faulthandler(text)
                seen.stack_ids[number] = _stack_id(frames)
                seen.places[number] = (ticks[number], _place(frames))
        for rank in ranks:
            reply = (rank.replies or {}).get("flight_recorder")
            seen.details[rank.rank] = _Detail(
                ticks[rank.rank],
                facts[rank.rank],
                group_statuses(reply),
                reply is not None,
                seen.stack_ids.get(rank.rank, ""),
                _place_at(seen, rank.rank, ticks[rank.rank]),
            )

    def _gathered(self, task: asyncio.Task[None]) -> None:
        """However it went: without this, one error would end hang detection without a word."""
        seen = self._seen
        if seen is not None and seen.gathering is task:
            seen.gathering = None
            seen.gathered_s = time.monotonic()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._owner.console.internal_error(error)
            self.blind("its evidence could not be gathered")


def _stack_id(frames: tuple[Frame, ...]) -> str:
    """A name for where the main thread is; our own evidence thread moves with each question."""
    places = "\n".join(f"{frame.file}:{frame.line}:{frame.function}" for frame in frames)
    return hashlib.blake2b(places.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _place(frames: tuple[Frame, ...]) -> str:
    """``train.py:57 main``: the innermost frame of the user's own code; "" for none."""
    frame = user_frame(frames)
    return (
        f"{place(frame.file, frame.line)} {clean(frame.function, 60)}".rstrip() if frame is not None else ""
    )


def _place_at(seen: _Seen, rank: int, ticks: int) -> str:
    """Where the rank is, if it hasn't moved since its stack was taken."""
    taken_at, where = seen.places.get(rank, (-1, ""))
    return where if taken_at == ticks else ""


def _sample(rank: Rank, page: Page | None, detail: _Detail | None, *, letter: bool) -> hang.RankSample:
    if detail is not None and (page is None or detail.ticks != page.ticks):
        detail = None  # it moved since: what was gathered describes the past
    return hang.RankSample(
        rank=rank.rank,
        alive=rank.alive,
        exit=rank.exit,
        page=page,
        process=detail.process if detail else None,
        groups=detail.groups if detail else (),
        answered=detail.answered if detail else None,
        stack_id=detail.stack_id if detail else "",
        where=detail.where if detail else "",
        state=(procfs.state_of(rank.pid) or "") if rank.alive and letter else "",
    )
