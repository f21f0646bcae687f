"""Injected faults on their way to where they happen: inside a rank at a step, or from outside at a time.

Each fires once in the job's life: a worker marks its page before it acts, so that the mark survives the act,
and the next generation isn't given the fault again. One that was injected into the running job belongs to the
generation that ran then, and is dropped, aloud, if that ends first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from closeranks.agent.authority import Authority
from closeranks.agent.world import Rank, World
from closeranks.errors import UsageError
from closeranks.faults import (
    MAX_FAULTS,
    TAMPER_KINDS,
    FaultSpec,
    carried_out_by_worker,
    format_spec,
    parse_spec,
)

__all__ = ["FaultDelivery"]

_FIRE_TIMEOUT_S = 2.0  # who injects a fault that is due now waits so long to hear that it has happened
_LAST_REPLY_S = 0.1  # for the answer to reach whoever asked for the agent's own death
_FROM_OUTSIDE = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class _Owner(Protocol):
    """What this needs of the supervisor."""

    @property
    def controller(self) -> Authority: ...

    @property
    def world(self) -> World | None: ...

    def notice(self, text: str) -> None: ...


@dataclass(slots=True)
class _Fault:
    number: int
    spec: FaultSpec
    rank: int
    generation: int | None = None  # the one in which it fired
    over: bool = False  # fired, or dropped
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def fired(self) -> bool:
        return self.generation is not None


class FaultDelivery:
    """The job's injected faults. Up to 64: each has one bit in the progress page.

    Every node of a job knows all of them, and carries out those of the ranks that it has.
    """

    def __init__(self, specs: Sequence[str], world_size: int, owner: _Owner) -> None:
        self._owner = owner
        self._world_size = world_size
        self._faults: list[_Fault] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._were_here: set[int] = set()  # ranks
        self.is_whole = True  # all ranks of the job are on this node
        for text in specs:
            spec = parse_spec(text)
            if spec.rank is not None and spec.rank >= world_size:
                raise UsageError(
                    f"--inject {text}: there is no rank {spec.rank}: ranks are 0 to {world_size - 1}"
                )
            self._plan(spec)

    def _plan(self, spec: FaultSpec) -> _Fault:
        rank = spec.rank if spec.rank is not None else random.randrange(self._world_size)
        fault = _Fault(len(self._faults), spec, min(rank, self._world_size - 1))
        self._faults.append(fault)
        return fault

    def orders(self, generation: int, rank: int) -> list[dict[str, Any]]:
        """What goes into a rank's ``go`` message: faults that it carries out itself."""
        return [
            {"id": fault.number, "spec": format_spec(fault.spec)}
            for fault in self._faults
            if fault.rank == rank
            and not fault.over
            and carried_out_by_worker(fault.spec)
            and _due(fault, generation)
        ]

    def begin(self, world: World) -> None:
        """A generation runs: start the clocks of what is due in it."""
        self._cancel()
        self._were_here |= {rank.rank for rank in world.ranks}
        for fault in self._faults:
            if world.rank(fault.rank) is None:
                continue
            if not fault.over and not carried_out_by_worker(fault.spec) and _due(fault, world.generation):
                self._start_clock(fault)

    def _start_clock(self, fault: _Fault) -> None:
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(fault.spec.after_s or 0.0, self._act, fault))

    async def inject(self, spec: FaultSpec) -> dict[str, Any]:
        """Arm a fault in the generation that runs. Returns what came of it, for whoever asked.

        What is due now is waited for, briefly: ``fired`` says whether it has happened, ``waits_for`` what it
        needs if not.
        """
        world = self._owner.world
        if world is None or not world.alive():
            return {"ok": False, "error": "no rank runs at the moment; try again once the job has started"}
        if len(self._faults) >= MAX_FAULTS:
            return {
                "ok": False,
                "error": f"{MAX_FAULTS} faults were injected already; that is the limit of a run",
            }
        if spec.rank is not None and spec.rank >= self._world_size:
            return {
                "ok": False,
                "error": f"there is no rank {spec.rank}: ranks are 0 to {self._world_size - 1}",
            }
        fault = self._plan(replace(spec, generation=world.generation))
        rank = world.rank(fault.rank)
        if rank is None:
            fault.over = True
            return {"ok": False, "error": f"rank {fault.rank} is on another node"}
        if carried_out_by_worker(fault.spec):
            if not rank.say({"type": "fault", "id": fault.number, "spec": format_spec(fault.spec)}):
                fault.over = True
                return {"ok": False, "error": f"rank {fault.rank} doesn't take requests at the moment"}
        else:
            self._start_clock(fault)
        if spec.step is None and not spec.after_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(fault.done.wait(), _FIRE_TIMEOUT_S)
        return {
            "ok": True,
            "rank": fault.rank,
            "generation": world.generation,
            "spec": format_spec(spec),
            "fired": fault.fired,
            "waits_for": "" if fault.fired else _waits_for(spec),
        }

    def fired_in(self, generation: int) -> tuple[str, ...]:
        """The faults, as they were written, that have fired in that generation."""
        return tuple(format_spec(fault.spec) for fault in self._faults if fault.generation == generation)

    def _act(self, fault: _Fault) -> None:
        world = self._owner.world
        if fault.over or world is None:
            return
        self._has_fired(world.generation, fault, None)
        if fault.spec.kind == "agent-kill":
            asyncio.get_running_loop().call_later(_LAST_REPLY_S, os.kill, os.getpid(), signal.SIGKILL)
        elif (rank := world.rank(fault.rank)) is not None:
            rank.send_signal(_FROM_OUTSIDE[fault.spec.kind])

    def fired(self, world: World, rank: Rank, message: dict[str, Any]) -> None:
        """A rank says that it is about to carry out a fault."""
        number = message.get("id")
        if isinstance(number, int) and 0 <= number < len(self._faults):
            fault = self._faults[number]
            if not fault.over:
                self._has_fired(world.generation, fault, message.get("step"))
            if fault.spec.kind == "agent-kill":
                os.kill(os.getpid(), signal.SIGKILL)

    def collect(self, world: World) -> None:
        """A generation is over. Read from the pages which faults have fired: a rank may be dead before its
        message is heard. What was for this generation alone and has not happened never will.
        """
        for rank in world.ranks:
            page = world.page(rank, rings=False)
            for fault in self._faults:
                if page is not None and page.faults_fired >> fault.number & 1 and not fault.over:
                    self._has_fired(world.generation, fault, page.step)
        ours = [fault for fault in self._faults if world.rank(fault.rank) is not None]
        self._drop([fault for fault in ours if fault.spec.generation == world.generation])

    def _drop(self, faults: Sequence[_Fault]) -> None:
        for fault in faults:
            if not fault.over:
                fault.over = True
                text = f"injected fault did not happen before the ranks ended: {format_spec(fault.spec)}"
                if fault.spec.kind in TAMPER_KINDS:
                    text += " (it takes a collective on the default group, called from Python)"
                self._owner.notice(text)

    def _has_fired(self, generation: int, fault: _Fault, step: Any) -> None:
        fault.generation, fault.over = generation, True
        fault.done.set()
        data = {"spec": format_spec(fault.spec), "rank": fault.rank, "generation": generation, "step": step}
        self._owner.controller.note("fault_injected", data, generation=generation)

    def _tells_all(self) -> bool:
        """Where no rank ever ran; but a node of many that had none knows nothing of the others' faults."""
        return self.is_whole and not self._were_here

    def _cancel(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    def close(self) -> None:
        """The job is over: stop the clocks, and say what was planned for nothing."""
        self._cancel()
        self._drop([fault for fault in self._faults if fault.rank in self._were_here or self._tells_all()])


def _waits_for(spec: FaultSpec) -> str:
    if spec.step is not None:
        return f"{spec.step} completed steps of this generation"
    if spec.after_s:
        return f"{spec.after_s:g} s to pass"
    if spec.kind in TAMPER_KINDS:
        return "the rank's next collective on the default group from Python"
    return "the rank's next sign of progress"


def _due(fault: _Fault, generation: int) -> bool:
    return fault.spec.generation is None or fault.spec.generation == generation
