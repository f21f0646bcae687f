"""The way of a fault through the agent: evidence, verdict, the fact for policy, and then files and screen.

What the restart doesn't need waits until the next generation has been told to go.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from closeranks.agent import procfs_host
from closeranks.agent.capture import BLOCKED, CRASH, HANG, Captured, capture
from closeranks.agent.world import World
from closeranks.controller.incident_files import write_incident
from closeranks.diagnose import codec, diagnose
from closeranks.diagnose.outcome import detected_note, failure_of, kind_of_trigger
from closeranks.events import Event, Failure, FailureKind, StartGeneration
from closeranks.evidence import Evidence, Trigger, Verdict

if TYPE_CHECKING:
    from closeranks.agent.supervisor import Supervisor

__all__ = ["Incidents", "now_trigger"]

_MAX_PICTURES = 100  # of suspicions that came to nothing; each is a few hundred KB
_DRAIN_S = 0.02  # for a dying rank's last words to get from its pipe to its log
_PATIENT = frozenset({"blocked", "hang_timeout", "init_stall"})


class Incidents:
    """Numbers, handles and shows the incidents of one job."""

    def __init__(self, owner: Supervisor, node: str, dispatch: Callable[[Event], None]) -> None:
        self._owner = owner
        self._node = node
        self._dispatch = dispatch
        self._pictures = 0
        self._picturing: asyncio.Task[None] | None = None
        self._shown: list[tuple[Captured, Verdict]] = []
        self._oom_baseline = procfs_host.oom_baseline()
        self.count = 0

    def begin(self) -> None:
        """A generation starts: what the kernel has counted so far belongs to older ones."""
        self._oom_baseline = procfs_host.oom_baseline()

    async def handle(self, world: World, trigger: Trigger) -> None:
        """From the first sign to the Failure that policy decides on."""
        self.count += 1
        incident_id = self._id_of(world)
        try:
            captured = await self._capture(world, trigger, incident_id)
            self._conclude(world, captured)
        except Exception as error:  # a bug in here must not cost the job its restart
            self._owner.console.internal_error(error)
            self._owner.watch.end(world)
            self._dispatch(_unexplained(world, trigger, incident_id))

    def _id_of(self, world: World) -> str:
        return f"{self.count:04d}"

    def _conclude(self, world: World, captured: Captured) -> None:
        """The verdict, and the fact for policy."""
        verdict = diagnose(captured.evidence)
        durable = self._owner.watch.durable_progress(world)
        self._owner.watch.end(world)
        self._note_detected(world, captured.evidence, verdict)
        note = {"incident_id": captured.evidence.incident_id, "seconds": captured.took_s}
        self._owner.controller.note("evidence", note, generation=world.generation)
        self._shown.append((captured, verdict))
        self._dispatch(failure_of(captured.evidence, verdict, durable_progress=durable))

    def _note_detected(self, world: World, evidence: Evidence, verdict: Verdict) -> None:
        note = detected_note(evidence, verdict)
        self._owner.controller.note("detected", note, generation=world.generation)

    async def _capture(self, world: World, trigger: Trigger, incident_id: str) -> Captured:
        """Evidence of this world now; quick for a death, thorough for a hang."""
        quick = trigger.kind in ("exit", "exception")
        if quick and not _killed_from_outside(world):
            self._owner.pump.drain(world.generation, _DRAIN_S)
        return await capture(
            world,
            trigger,
            incident_id=incident_id,
            budget=CRASH if quick else BLOCKED if trigger.kind in _PATIENT else HANG,
            directory=self._owner.run_dir / "incidents" / incident_id,
            log_paths={
                rank.rank: self._owner.log_path(world.generation, rank.rank, "err") for rank in world.ranks
            },
            node=self._node,
            host=procfs_host.host_facts(self._oom_baseline),
            step_p99_s=self._owner.watch.step_p99_s,
        )

    def picture(self, world: World, trigger: Trigger) -> str:
        """Keep what a suspicion looked like, in the background; nothing is killed for it.

        Returns the directory's name in the run directory, or "" where no more are kept.
        """
        self._pictures += 1
        if self._pictures > _MAX_PICTURES or self._picturing is not None:
            return ""
        name = f"suspicion-{self._pictures:03d}"
        self._picturing = asyncio.get_running_loop().create_task(self._picture(world, trigger, name))
        self._picturing.add_done_callback(self._pictured)
        return f"incidents/{name}"

    def _pictured(self, task: asyncio.Task[None]) -> None:
        self._picturing = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._owner.console.internal_error(error)

    def forget_world(self) -> None:
        """The world is about to be closed: a picture of it can't be finished."""
        if self._picturing is not None:
            self._picturing.cancel()

    async def _picture(self, world: World, trigger: Trigger, name: str) -> None:
        captured = await self._capture(world, trigger, name)
        directory = self._owner.run_dir / "incidents" / name
        problem = write_incident(
            directory, captured.evidence, diagnose(captured.evidence), captured.stacks, captured.native
        )
        if problem:
            self._owner.notice(problem)

    def show(self) -> None:
        """Files and screens of what has been handled since the last call, and is decided on."""
        waiting, self._shown = self._shown, []
        for captured, verdict in waiting:
            generation = captured.evidence.generation
            ordered, world = self._owner.ordered, self._owner.world
            if world is not None and world.generation > generation:
                self._show(captured, verdict, StartGeneration(generation + 1))
            elif self._owner.finish is not None:
                self._show(captured, verdict, None)
            elif ordered.generation > generation:
                self._show(captured, verdict, ordered)
            else:  # it is still being killed; what follows, then, is ordered next
                self._shown.append((captured, verdict))

    def _show(self, captured: Captured, verdict: Verdict, following: StartGeneration | None) -> None:
        evidence = captured.evidence
        directory = self._owner.run_dir / "incidents" / evidence.incident_id
        if following is None:
            verdict = replace(verdict, action="no restart")
        problem = write_incident(directory, evidence, verdict, captured.stacks, captured.native)
        if problem:
            self._owner.notice(problem)
        public = {"incident_id": evidence.incident_id, "verdict": codec.public_verdict(verdict)}
        self._owner.controller.note("verdict", public, generation=evidence.generation)
        self._owner.console.incident(
            evidence,
            verdict,
            None if problem else directory,
            next_generation=following.generation if following is not None else None,
            delay_s=following.delay_s if following is not None else 0.0,
            injected=bool(self._owner.faults.fired_in(evidence.generation)),
        )


def _unexplained(world: World, trigger: Trigger, incident_id: str) -> Failure:
    """What policy is told when evidence or diagnosis failed: that it broke, and no more."""
    return Failure(
        generation=world.generation,
        incident_id=incident_id,
        kind=kind_of_trigger(trigger.kind) or FailureKind.SIGNAL,
        rank=next(iter(trigger.ranks), None),
        signature=f"unexplained:{trigger.kind}",
        step=max((page.progress_steps for rank in world.ranks if (page := world.page(rank))), default=0),
        startup=False,
        durable_progress=False,
        exit_code=1,
    )


def _killed_from_outside(world: World) -> bool:
    """Whether all that has ended so far was SIGKILLed: such a rank has no last words to wait for."""
    return all(rank.exit is None or rank.exit.signal == signal.SIGKILL for rank in world.ranks)


def now_trigger(kind: str, ranks: tuple[int, ...], detail: str) -> Trigger:
    """A trigger that was seen just now."""
    return Trigger(kind, ranks, detail, time.monotonic_ns())
