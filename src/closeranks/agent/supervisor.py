"""The agent of one node: sees what happens to its ranks, and carries out what policy decides.

Everything waits on descriptors (pidfds, sockets, signals) in one asyncio loop; nothing polls for deaths.
The way of a fault: pidfd or progress page -> evidence -> verdict -> policy -> kill -> ``go`` to the spares.
What isn't needed for the next step (files, screens) is done after that ``go``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from closeranks.agent.authority import Authority
from closeranks.agent.console import Console
from closeranks.agent.faults import FaultDelivery
from closeranks.agent.incidents import Incidents, now_trigger
from closeranks.agent.logs import LogPump
from closeranks.agent.processes import Strays
from closeranks.agent.signals import Signals
from closeranks.agent.slots import Slots
from closeranks.agent.starter import Starter
from closeranks.agent.watch import Watch
from closeranks.agent.world import Placement, Rank, World
from closeranks.config import RunConfig
from closeranks.diagnose.text import fold_ranks
from closeranks.errors import CloseranksError, UsageError
from closeranks.events import (
    Action,
    AllRanksSucceeded,
    Event,
    Finish,
    GenerationDown,
    GenerationStarted,
    KillGeneration,
    RunExit,
    RunStarted,
    StartGeneration,
    StopGracefully,
    StopRequested,
    Tell,
    signal_name,
)
from closeranks.evidence import Trigger
from closeranks.faults import parse_spec

__all__ = ["Supervisor"]

_DEAD_TIMEOUT_S = 5.0  # SIGKILL acts in milliseconds; what is left after this is stuck in the kernel
_SHOW_AFTER_S = 0.25  # an incident's files and screen wait for the next first step, at most so long
_RAISED_GRACE_S = 5.0  # a rank that has raised may finish its own exit (atexit, flushes) for this long


class Supervisor:
    """Runs one job on this node. ``run()`` returns the exit code of the job."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_dir: Path,
        store_dir: Path,
        world_size: int,
        slots: Slots,
        controller: Authority,
        pump: LogPump,
        console: Console,
        guard_pid: int,
        node: str,
        file_limit: int,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.world_size = world_size
        self.placement = Placement(world_size)  # of the ranks that are started next
        self.controller = controller
        self.console = console
        self.pump = pump
        self.file_limit = file_limit  # the soft one that the user has, and ranks get; ours is higher
        self.world: World | None = None
        self.finish: Finish | None = None
        self.ordered = StartGeneration(-1)  # the newest order to start; its time may be still to come
        self.stop_signal: int | None = None
        self._guard_pid = guard_pid
        self._finished = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._strays = Strays()
        self.slots = slots
        slots.speak_to(self.notice)
        self.faults = FaultDelivery(config.inject, world_size, self)
        self.watch = Watch(self)
        self.incidents = self.make_incidents(node)
        self._starter = Starter(self, store_dir)
        self._signals = Signals(self, self.stop_requested)
        self._journal_told = False

    def make_incidents(self, node: str) -> Incidents:
        return Incidents(self, node, self.dispatch)

    # --- life ---------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Start, survive, finish. Never raises for what a script or a node can do."""
        loop = asyncio.get_running_loop()
        guard_fd = os.pidfd_open(self._guard_pid)
        loop.add_reader(guard_fd, self._guard_died, guard_fd)
        loop.add_reader(self.pump.fileno(), self._pump_said)
        self._signals.listen()
        self.dispatch(RunStarted())
        await self._finished.wait()
        assert self.finish is not None
        await self._close(self.finish)
        loop.remove_reader(guard_fd)
        os.close(guard_fd)
        return self.finish.exit_code

    async def _close(self, finish: Finish) -> None:
        self.watch.stop()
        self.faults.close()
        if self.world is not None:
            self.world.kill()
            await self.world.wait_dead(_DEAD_TIMEOUT_S)
        self.slots.close()
        for task in self._tasks:
            task.cancel()
        await self._strays.finish({self.pump.pid or 0})
        self.incidents.show()
        self.check_journal()
        self.controller.note("finished", {"exit_code": finish.exit_code, "reason": finish.reason})
        self._starter.discard_world()
        asyncio.get_running_loop().remove_reader(self.pump.fileno())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, CloseranksError):
            self.console.tell("error", str(error))
            self._finish_with(Finish(error.exit_code, str(error)))
        elif error is not None:
            self.console.internal_error(error)
            self._finish_with(Finish(RunExit.INTERNAL, f"internal error: {error!r}"))

    def _finish_with(self, finish: Finish) -> None:
        if self.finish is None:
            self.finish = finish
            self._finished.set()

    # --- deciding -----------------------------------------------------------------------------------

    def dispatch(self, event: Event) -> None:
        """Tell policy a fact, and do what it says."""
        for action in self.controller.handle(event):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case StartGeneration():
                self.ordered = action
                self._spawn(self._start(action.generation, action.delay_s))
            case KillGeneration():
                self._spawn(self._kill(action.generation))
            case StopGracefully():
                self._spawn(self._stop(action.generation, action.signal))
            case Finish():
                self._finish_with(action)
            case Tell():
                self.console.tell(action.level, action.text)

    def notice(self, text: str) -> None:
        """Something the user should know and nobody has to act on."""
        self.controller.note("notice", {"level": "warning", "text": text})
        self.console.tell("warning", text)

    def check_journal(self) -> None:
        """Say it once when the journal can't be written any more, and again if that comes back."""
        problem = self.controller.journal_problem
        if problem is not None and not self._journal_told:
            self.console.tell("warning", f"{problem}; training goes on, and faults are still survived")
        self._journal_told = problem is not None

    # --- actions ------------------------------------------------------------------------------------

    async def _start(self, generation: int, delay_s: float) -> None:
        if delay_s > 0:
            self.incidents.show()  # there is time for it now
            await asyncio.sleep(delay_s)
        try:
            world = await self._starter.start(generation, delay_s, self.placement)
        except (CloseranksError, OSError) as error:  # no workers, no descriptors, no memory
            self.cannot_start(generation, error)
            return
        if world is None:
            self.dispatch(GenerationDown(generation))
            return
        self.dispatch(GenerationStarted(generation))
        self.watch.begin(world)
        self.incidents.begin()
        self.faults.begin(world)
        await asyncio.sleep(_SHOW_AFTER_S)  # until then every core is the ranks'
        self.incidents.show()

    def cannot_start(self, generation: int, error: Exception) -> None:
        self._finish_with(Finish(RunExit.CANNOT_START, f"can't start the ranks: {error}"))

    def prepare_world(self, world: World) -> None:
        """Its ranks are about to be told to go."""

    def is_unwanted(self, generation: int) -> bool:
        """Whether this generation is not to start any more."""
        return self.stop_signal is not None or self.finish is not None

    async def _kill(self, generation: int) -> None:
        world = self.world
        if world is None or world.generation != generation:
            self.dispatch(GenerationDown(generation))
            return
        began = time.monotonic()
        world.failing = True
        self.watch.end(world)
        world.kill()
        left = await world.wait_dead(_DEAD_TIMEOUT_S)
        strays = await self._strays.kill(
            self.slots.pids() | {self.pump.pid or 0} | {rank.pid for rank in left}
        )
        stuck = [rank.pid for rank in left] + strays
        if stuck:
            self.notice(
                "can't kill what is stuck in the kernel (state D), and leave it behind: pid "
                f"{', '.join(map(str, stuck))}; look at the storage or device that it waits for "
                "(cat /proc/PID/stack)"
            )
        seconds = time.monotonic() - began
        self.controller.note("killed", {"seconds": seconds, "leftovers": stuck}, generation=generation)
        self.dispatch(GenerationDown(generation))

    async def _stop(self, generation: int, number: int) -> None:
        """Every rank gets the signal and the whole grace; what is left then is killed."""
        world = self.world
        if world is None or world.generation != generation:
            self.dispatch(GenerationDown(generation))
            return
        world.failing = True
        self.watch.end(world)
        for rank in world.alive():
            rank.send_signal(number)
            rank.send_signal(signal.SIGCONT)  # a stopped rank can handle it only when it runs
        left = await world.wait_dead(self.config.shutdown_timeout_s)
        if left and world is self.world:
            names = fold_ranks(rank.rank for rank in left)
            grace_s = self.config.shutdown_timeout_s
            self.notice(f"{names} did not end within {grace_s:g} s of {signal_name(number)}: killed")
        if all(rank.exit is not None and rank.exit.ok for rank in world.ranks):
            self.dispatch(AllRanksSucceeded(generation))
        else:
            await self._kill(generation)

    # --- facts --------------------------------------------------------------------------------------

    def rank_exited(self, world: World, rank: Rank) -> None:
        """A pidfd said so."""
        status = rank.exit
        assert status is not None
        note = {"rank": rank.rank, "pid": rank.pid, "code": status.code, "signal": status.signal}
        self.controller.note("rank_exited", note, generation=world.generation)
        if world is not self.world or world.failing or self.finish is not None:
            return
        if not status.ok:
            detail = f"rank {rank.rank} {status.describe()}"
            self.fail(Trigger("exit", (rank.rank,), detail, rank.exit_mono_ns or 0))
        elif not world.alive():
            world.failing = True
            self.watch.end(world)
            self.dispatch(AllRanksSucceeded(world.generation))

    def rank_said(self, world: World, rank: Rank, message: dict[str, Any]) -> None:
        """A rank's own words."""
        kind = message["type"]
        if kind == "fault_fired":
            self.faults.fired(world, rank, message)
        elif kind == "hooks_off" and world is self.world:
            self.watch.blind(f"rank {rank.rank} can't report its progress ({message.get('why')})")
        elif kind == "modules":
            names = [name for name in message.get("names", ()) if isinstance(name, str)]
            self._spawn(self.slots.learn(names))
        elif world is not self.world or world.failing:
            return
        elif kind == "raised" and rank.error is not None:
            asyncio.get_running_loop().call_later(_RAISED_GRACE_S, self._raised_long_ago, world, rank)
        elif kind == "short_step" and "proved_by" in message:
            issued, usual = message.get("issued"), message.get("usual")
            detail = f"rank {rank.rank} ended a step after {issued} of its usual {usual} collectives"
            self.fail(now_trigger("desync", (rank.rank,), detail))
        elif kind == "desync":
            detail = f"rank {rank.rank} is about to issue another collective than its neighbour"
            self.fail(now_trigger("desync", (rank.rank,), detail))

    def _raised_long_ago(self, world: World, rank: Rank) -> None:
        if world is self.world and not world.failing and rank.alive:
            detail = f"rank {rank.rank} raised an exception and then did not exit"
            self.fail(now_trigger("exception", (rank.rank,), detail))

    def fail(self, trigger: Trigger) -> None:
        """This generation can't go on: one incident, whatever else still happens to it."""
        world = self.world
        if world is None or world.failing or self.stop_signal is not None or self.finish is not None:
            return
        world.failing = True
        self._spawn(self.incidents.handle(world, trigger))

    # --- what the watch reports ---------------------------------------------------------------------

    def first_step(self, world: World, seconds: float) -> None:
        """Every rank has completed a step of this generation."""
        self.incidents.show()
        what = "running" if world.generation == 0 else "running again"
        self.console.tell("info", f"{what}: generation {world.generation}, first step after {seconds:.2f} s")

    def suspect(self, world: World, trigger: Trigger) -> None:
        """Something has gone quiet: tell the user and keep a picture of it; nothing is killed."""
        kept = self.incidents.picture(world, trigger)
        where = f" (evidence: {kept})" if kept else ""
        self.console.tell("warning", f"suspicious: {trigger.detail}; watching, nothing is killed{where}")

    # --- questions and ends -------------------------------------------------------------------------

    def log_path(self, generation: int, rank: int, suffix: str) -> Path:
        """Where this rank's output of that generation goes; ``suffix`` is out or err."""
        return self.run_dir / "logs" / str(generation) / f"{rank}.{suffix}"

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """A request on the control socket."""
        kind = request.get("type")
        if kind == "status":
            return {"ok": True, **self.status()}
        if kind == "inject":
            try:
                return await self.faults.inject(parse_spec(str(request.get("spec", ""))))
            except UsageError as error:
                return {"ok": False, "error": str(error)}
        return {"ok": False, "error": f"unknown request {kind!r}"}

    def status(self) -> dict[str, Any]:
        """For ``closeranks inject`` and whoever asks on the control socket."""
        world = self.world
        return {
            "generation": world.generation if world is not None else None,
            "world_size": self.world_size,
            "pids": [rank.pid for rank in world.ranks] if world is not None else [],
            "workers": self.slots.kind,
            "incidents": self.incidents.count,
        }

    def stop_requested(self, reason: str, number: int) -> None:
        """A signal of ``--signals-to-handle`` came."""
        self.stop_signal = number
        self.controller.note("stop_requested", {"reason": reason})
        self.console.tell("info", f"{reason}: stopping the ranks (again to kill them at once)")
        self.dispatch(StopRequested(reason, number))

    def _guard_died(self, guard_fd: int) -> None:
        """The process the user started is gone: nobody is left to answer to, and nothing may outlive it."""
        asyncio.get_running_loop().remove_reader(guard_fd)
        if self.world is not None:
            self.world.kill()
        self.controller.note("notice", {"level": "error", "text": "the launcher was killed: stopping"})
        self._finish_with(Finish(128 + signal.SIGKILL, "the launcher was killed"))

    def _pump_said(self) -> None:
        for message in self.pump.handle_readable():
            if message["type"] == "disk":
                where, error = message.get("path"), message.get("error")
                self.notice(f"logs can't be written ({error}): {where}; training goes on")
            elif message["type"] == "died":
                try:
                    self.pump.restart()
                except CloseranksError as error:
                    self._finish_with(Finish(RunExit.INTERNAL, str(error)))
