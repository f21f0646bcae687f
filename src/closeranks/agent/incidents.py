"""The way of a fault through the agent: evidence, verdict, the fact for policy, and then files and screen.

What the restart doesn't need waits until the next generation has been told to go.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from closeranks.agent import procfs_host
from closeranks.agent.capture import BLOCKED, CRASH, HANG, Captured, capture
from closeranks.agent.world import World
from closeranks.diagnose import codec, diagnose
from closeranks.events import Event, Failure, FailureKind
from closeranks.evidence import Evidence, Trigger, Verdict

if TYPE_CHECKING:
    from closeranks.agent.supervisor import Supervisor

__all__ = ["Incidents", "failure_of", "write_incident"]

_MAX_PICTURES = 100  # of suspicions that came to nothing; each is a few hundred KB
_DRAIN_S = 0.02  # for a dying rank's last words to get from its pipe to its log
_KINDS = {
    "stopped": FailureKind.STOPPED,
    "desync": FailureKind.DESYNC,
    "deadlock": FailureKind.DEADLOCK,
    "blocked": FailureKind.DEADLOCK,
    "early_exit": FailureKind.EARLY_EXIT,
    "init_stall": FailureKind.INIT_STALL,
    "hang_timeout": FailureKind.HANG_TIMEOUT,
}
_PATIENT = frozenset({"blocked", "hang_timeout", "init_stall"})
_DESYNCS = frozenset(
    {"skip_collective", "extra_collective", "type_mismatch", "size_mismatch", "dtype_mismatch", "wrong_order"}
)
_OWN_SIGNALS = frozenset(
    {4, 6, 7, 8, 11}
)  # SIGILL SIGABRT SIGBUS SIGFPE SIGSEGV: raised by the process itself


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
        incident_id = f"{self.count:04d}"
        try:
            captured = await self._capture(world, trigger, incident_id)
            verdict = diagnose(captured.evidence)
        except Exception as error:  # a bug in here must not cost the job its restart
            self._owner.console.internal_error(error)
            self._owner.watch.end(world)
            self._dispatch(_unexplained(world, trigger, incident_id))
            return
        durable = self._owner.watch.durable_progress(world)
        self._owner.watch.end(world)
        self._note_detected(world, captured.evidence, verdict)
        note = {"incident_id": incident_id, "seconds": captured.took_s}
        self._owner.controller.note("evidence", note, generation=world.generation)
        self._shown.append((captured, verdict))
        self._dispatch(failure_of(captured.evidence, verdict, durable_progress=durable))

    def _note_detected(self, world: World, evidence: Evidence, verdict: Verdict) -> None:
        trigger = evidence.trigger
        exits = [item.exit_mono_ns for item in evidence.ranks if item.exit_mono_ns is not None]
        steps = [item.page.step_ns for item in evidence.ranks if item.page is not None]
        note = {
            "incident_id": evidence.incident_id,
            "trigger": {"kind": trigger.kind, "ranks": list(trigger.ranks), "detail": trigger.detail},
            "last_progress_mono_ns": max(steps, default=0),
            "broke_mono_ns": _broke_ns(evidence, verdict) or min(exits, default=trigger.mono_ns),
            "detected_mono_ns": trigger.mono_ns,
        }
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
        problem = write_incident(directory, captured, diagnose(captured.evidence))
        if problem:
            self._owner.notice(problem)

    def show(self) -> None:
        """Files and screens of what has been handled since the last call."""
        shown, self._shown = self._shown, []
        for captured, verdict in shown:
            evidence = captured.evidence
            directory = self._owner.run_dir / "incidents" / evidence.incident_id
            world = self._owner.world
            follows = (
                world.generation if world is not None and world.generation > evidence.generation else None
            )
            if follows is None:
                verdict = replace(verdict, action="no restart")
            problem = write_incident(directory, captured, verdict)
            if problem:
                self._owner.notice(problem)
            public = {"incident_id": evidence.incident_id, "verdict": codec.public_verdict(verdict)}
            self._owner.controller.note("verdict", public, generation=evidence.generation)
            injected = bool(self._owner.faults.fired_in(evidence.generation))
            self._owner.console.incident(
                evidence, verdict, directory, next_generation=follows, injected=injected
            )


def _unexplained(world: World, trigger: Trigger, incident_id: str) -> Failure:
    """What policy is told when evidence or diagnosis failed: that it broke, and no more."""
    return Failure(
        generation=world.generation,
        incident_id=incident_id,
        kind=_KINDS.get(trigger.kind, FailureKind.SIGNAL),
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


def _broke_ns(evidence: Evidence, verdict: Verdict) -> int | None:
    """When the culprit broke: its exception, its death, or its last sign of life; None without a culprit."""
    for item in evidence.ranks:
        if item.rank in verdict.culprit_ranks:
            if item.error is not None:
                return item.error.mono_ns
            if item.exit_mono_ns is not None:
                return item.exit_mono_ns
            return item.page.tick_ns if item.page is not None else None
    return None


def write_incident(directory: Path, captured: Captured, verdict: Verdict) -> str:
    """Write the incident's files; returns "" or what went wrong (a full disk must not stop the restart)."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / "evidence.json", json.dumps(codec.to_json(captured.evidence), indent=1))
        _write(directory / "verdict.json", json.dumps(codec.public_verdict(verdict), indent=1))
        for suffix, texts in (("txt", captured.stacks), ("native.txt", captured.native)):
            for rank, text in texts.items():
                (directory / "stacks").mkdir(exist_ok=True)
                _write(directory / "stacks" / f"{rank}.{suffix}", text)
        for item in captured.evidence.ranks:
            if item.log_tail:
                (directory / "logs").mkdir(exist_ok=True)
                _write(directory / "logs" / f"{item.rank}.err", "\n".join(item.log_tail) + "\n")
    except OSError as error:
        return f"can't write {error.filename or directory}: {error.strerror}"
    return ""


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a reader never sees half a file."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text, "utf-8", "surrogateescape")
    partial.replace(path)


def _kind(evidence: Evidence, verdict: Verdict) -> FailureKind:
    by_trigger = _KINDS.get(evidence.trigger.kind)
    if by_trigger is not None:
        return by_trigger
    if verdict.kind in _DESYNCS:
        return FailureKind.DESYNC
    if verdict.kind == "out_of_memory":
        return FailureKind.OUT_OF_MEMORY
    broke = next((item for item in evidence.ranks if item.rank in verdict.culprit_ranks), None)
    if broke is None:
        broke = next((item for item in evidence.ranks if item.exit is not None and not item.exit.ok), None)
    if broke is None:
        return FailureKind.EXIT_CODE
    if broke.error is not None:
        return FailureKind.EXCEPTION
    if broke.exit is not None and broke.exit.signal is not None:
        return FailureKind.CRASH if broke.exit.signal in _OWN_SIGNALS else FailureKind.SIGNAL
    return FailureKind.EXIT_CODE


def failure_of(evidence: Evidence, verdict: Verdict, *, durable_progress: bool) -> Failure:
    """The fact that policy decides on, from an incident's evidence and verdict."""
    number = next(iter(verdict.culprit_ranks), None)
    broke = next((item for item in evidence.ranks if item.rank == number), None)
    step = min((item.page.progress_steps for item in evidence.ranks if item.page is not None), default=0)
    if broke is not None and broke.page is not None:
        step = broke.page.progress_steps
    codes = [item.exit.shell_code for item in evidence.ranks if item.exit is not None and not item.exit.ok]
    code = codes[0] if codes else 1
    if broke is not None and broke.exit is not None and not broke.exit.ok:
        code = broke.exit.shell_code
    return Failure(
        generation=evidence.generation,
        incident_id=evidence.incident_id,
        kind=_kind(evidence, verdict),
        rank=number,
        signature=verdict.signature,
        step=step,
        startup=step == 0,
        durable_progress=durable_progress,
        exit_code=code,
    )


def now_trigger(kind: str, ranks: tuple[int, ...], detail: str) -> Trigger:
    """A trigger that was seen just now."""
    return Trigger(kind, ranks, detail, time.monotonic_ns())
