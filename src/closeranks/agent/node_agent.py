"""The agent of one node of many: a supervisor that takes its orders from the job's controller.

It starts each generation once, none older than one it knows, and none without a lease. What the controller
must know it says until it has been heard. Where the lease is over, everything of the job here is killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks.agent.node_incidents import NodeIncidents
from closeranks.agent.node_link import NodeIdentity, NodeLink
from closeranks.agent.node_reports import NodeReports
from closeranks.agent.store_process import StoreProcess
from closeranks.agent.supervisor import Supervisor
from closeranks.agent.world import Placement, Rank, World
from closeranks.controller.credentials import Credentials
from closeranks.errors import CloseranksError, UsageError
from closeranks.events import (
    FailureKind,
    Finish,
    GenerationStarted,
    StartGeneration,
)
from closeranks.evidence import Trigger
from closeranks.faults import parse_spec
from closeranks.plain import to_plain
from closeranks.progress import Page, Phase

__all__ = ["Attachment", "NodeAgent"]

_SAVE_LOOK_S = 0.02
_HOLD_PATIENCE_S = 2.0  # for a rank that has saved to come to its next step; scripts without steps never do
_READY_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where the controller is, and who we are to it."""

    endpoint: str
    credentials: Credentials | None
    identity: NodeIdentity
    refusals_count: bool = True


class NodeAgent(Supervisor):
    """Runs this node's part of a job. ``run()`` returns the agent's exit code, which is not the job's."""

    def __init__(self, attachment: Attachment, **kwargs: Any) -> None:
        self.link = NodeLink(
            attachment.endpoint,
            attachment.credentials,
            attachment.identity,
            self,
            uniform=random.random,
            refusals_count=attachment.refusals_count,
        )
        self.reports = NodeReports(self.link.send, self.link.beat_now)
        self._node = attachment.identity.node
        self._newest = -1  # generation that has been ordered here
        self._dead_up_to = -1  # generations up to this one never start here any more
        self._stores: dict[int, StoreProcess] = {}
        self._preparing: asyncio.Task[None] | None = None
        self._saved_before: list[int] = []
        self._lease_end_s = 0.0
        self._leaving = False
        super().__init__(controller=self.reports, **kwargs)
        self.faults.is_whole = False

    def make_incidents(self, node: str) -> NodeIncidents:
        return NodeIncidents(self, node, self.dispatch)

    # --- life ---------------------------------------------------------------------------------------

    async def run(self) -> int:
        attaching = asyncio.get_running_loop().create_task(self.link.run())
        attaching.add_done_callback(self._task_done)
        try:
            return await super().run()
        finally:
            assert self.finish is not None
            await self.link.close(self.finish.reason)
            attaching.cancel()

    async def _close(self, finish: Finish) -> None:
        for store in self._stores.values():
            store.close()
        await super()._close(finish)

    def is_unwanted(self, generation: int) -> bool:
        return super().is_unwanted(generation) or generation <= self._dead_up_to

    def cannot_start(self, generation: int, error: Exception) -> None:
        """A local error never closes the job: the controller may have another node."""
        self.notice(f"node {self._node} can't start its ranks: {error}")
        kind = FailureKind.LAUNCH.value
        self.reports.say({"type": "broke", "generation": generation, "kind": kind, "reason": str(error)})

    def stop_requested(self, reason: str, number: int) -> None:
        """A signal to an agent is about its node: somebody wants it back. The second time, now."""
        if self._leaving or not self.link.holds_lease:
            self._finish_with(Finish(128 + number, reason))
            return
        self._leaving = True
        deadline_s = self.config.cluster.leave_deadline_s
        self.console.tell("info", f"{reason}: node {self._node} leaves the job within {deadline_s:g} s")
        self.link.send({"type": "leaving", "deadline_s": deadline_s, "reason": reason})

    # --- what the line says (node_link.LinkOwner) ---------------------------------------------------

    def running(self) -> int | None:
        world = self.world
        return world.generation if world is not None and world.alive() else None

    def beat(self) -> Mapping[str, Any]:
        world = self.world
        if world is None:
            return {"generation": None, "ranks": [], "progress": None}
        pages = [world.page(rank, rings=False) for rank in world.ranks]
        rows = [
            (rank.rank, page.progress_steps, page.ticks, page.phase.name.lower(), page.in_collective)
            for rank, page in zip(world.ranks, pages, strict=True)
            if page is not None
        ]
        progress = None
        known = [page for page in pages if page is not None]
        if known and len(known) == len(pages):
            absolute = [page.absolute_step for page in known if page.absolute_step is not None]
            saver = max(known, key=lambda page: page.checkpoints)
            step = min(page.progress_steps for page in known)
            init_done = all(page.init_done for page in known)
            progress = (
                step, min(absolute, default=-1), saver.checkpoints, saver.checkpoint_step, init_done,
            )  # fmt: skip
        return {"generation": world.generation, "ranks": rows, "progress": progress}

    def attached(self) -> None:
        self.reports.say_again()
        self._spawn(self._say_ready())
        if self._leaving:
            deadline_s = self.config.cluster.leave_deadline_s
            self.link.send({"type": "leaving", "deadline_s": deadline_s, "reason": "asked to leave before"})

    async def _say_ready(self) -> None:
        while not self.slots.ready:
            await asyncio.sleep(_READY_LOOK_S)
        self.link.send({"type": "ready"})

    def lease_held(self, end_s: float) -> None:
        self._lease_end_s = end_s
        if self.world is not None:
            self.world.set_lease(int(end_s * 1e9))

    def lease_over(self, why: str) -> None:
        self._dead_up_to = self._newest
        self._close_stores()
        world = self.world
        if world is None or not world.alive():
            return
        self.console.tell("warning", f"node {self._node} is fenced: {why}; its ranks are killed")
        self._spawn(self._kill(world.generation))
        world.kill()  # before anything else gets its turn

    def turned_away(self, reason: str) -> None:
        self._finish_with(Finish(0, reason))

    def obey(self, message: Mapping[str, Any]) -> None:
        generation = message.get("generation", -1)
        match message["type"]:
            case "start":
                self._order_start(generation, message)
            case "kill":
                self._order_end(generation)
                self._spawn(self._kill(generation))
            case "stop":
                self._order_end(generation)
                self._spawn(self._stop(generation, message["signal"]))
            case "store_open":
                self._spawn(self._open_store(generation))
            case "prepare":
                last_call = message["last_call"]
                self._prepare(generation, message["deadline_s"], last_call=last_call)
            case "evidence_request":
                self._contribute(generation, message["trigger"])
            case "look":
                self._spawn(self._look(generation, closely=message["closely"]))
            case "health_check":
                self._spawn(self._check_health(message["check"]))
            case "inject":
                self._spawn(self._inject(message["id"], message["spec"]))
            case "finish":
                self._finish_with(Finish(message["exit_code"], message["reason"]))

    # --- orders -------------------------------------------------------------------------------------

    def _order_start(self, generation: int, message: Mapping[str, Any]) -> None:
        if generation <= self._newest or generation <= self._dead_up_to or not self.link.holds_lease:
            world = self.world
            if world is not None and world.generation == generation and world.alive():
                self.dispatch(GenerationStarted(generation))
            elif generation < self._newest or generation <= self._dead_up_to:
                self.reports.say({"type": "down", "generation": generation})
            return
        self._newest = generation
        self._saved_before = []
        self.reports.begin(generation)
        self.world_size = message["world_size"]
        self.placement = Placement(
            world_size=message["world_size"],
            first_rank=message["first_rank"],
            node_rank=message["node_rank"],
            node_count=message["node_count"],
            store=message["store"],
        )
        self._close_stores(before=generation)
        self._carry_out(StartGeneration(generation, message["delay_s"]))

    def _order_end(self, generation: int) -> None:
        self._dead_up_to = max(self._dead_up_to, generation)
        self._newest = max(self._newest, generation)
        self._close_stores(before=generation + 1)
        if self._preparing is not None:
            self._preparing.cancel()

    def _contribute(self, generation: int, trigger: str) -> None:
        world = self.world
        if world is None or world.generation != generation or self.incidents_here.is_reported(generation):
            return  # what is to be said of it is on its way, or there is nothing
        self._spawn(self.incidents_here.contribute(world, trigger))

    async def _look(self, generation: int, *, closely: bool) -> None:
        samples = await self.watch.look(closely=closely)
        world = self.world
        if samples and world is not None and world.generation == generation:
            plain = [to_plain(sample) for sample in samples]
            p99_s = self.watch.step_p99_s
            answer = {"type": "seen", "generation": generation, "samples": plain, "step_p99_s": p99_s}
            self.link.send(answer)

    @property
    def incidents_here(self) -> NodeIncidents:
        assert isinstance(self.incidents, NodeIncidents)
        return self.incidents

    async def _inject(self, request: str, spec: str) -> None:
        try:
            reply = await self.faults.inject(parse_spec(spec))
        except UsageError as error:
            reply = {"ok": False, "error": str(error)}
        self.link.send({"type": "injected", "id": request, "reply": reply})

    # --- the store of a generation ------------------------------------------------------------------

    async def _open_store(self, generation: int) -> None:
        if generation <= self._dead_up_to:
            self.link.send({"type": "store_lost", "generation": generation})
            return
        if generation not in self._stores:
            try:
                spare = await self.slots.extra()
                environment = {**os.environ, "CLOSERANKS_GENERATION": str(generation)}
                store = await StoreProcess.open(
                    spare, lambda: self._store_ended(generation), environment=environment
                )
            except (CloseranksError, OSError) as error:
                self.notice(f"node {self._node} can't open a store: {error}")
                self.link.send({"type": "store_lost", "generation": generation})
                return
            if generation <= self._dead_up_to:
                store.close()
                return
            self._stores[generation] = store
        host = f"[{self.link.address}]" if ":" in self.link.address else self.link.address
        address = f"tcp://{host}:{self._stores[generation].port}"
        self.link.send({"type": "store_opened", "generation": generation, "address": address})

    def _store_ended(self, generation: int) -> None:
        if self._stores.pop(generation, None) is not None:
            self.link.send({"type": "store_lost", "generation": generation})

    def _close_stores(self, *, before: int | None = None) -> None:
        for generation in [g for g in self._stores if before is None or g < before]:
            self._stores.pop(generation).close()

    # --- making way ---------------------------------------------------------------------------------

    def _prepare(self, generation: int, deadline_s: float, *, last_call: bool) -> None:
        world = self.world
        if world is None or world.generation != generation:
            return
        if self._preparing is not None:
            self._preparing.cancel()
        if not last_call or not self._saved_before:
            self._saved_before = [page.checkpoints for page in self._pages(world)]
            for rank in world.alive():
                rank.say({"type": "hold", "hold_s": deadline_s})
        work = self._await_save(world, deadline_s, last_call=last_call)
        self._preparing = asyncio.get_running_loop().create_task(work)
        self._preparing.add_done_callback(self._task_done)

    async def _await_save(self, world: World, deadline_s: float, *, last_call: bool) -> None:
        """Until those here that save have done so, and wait at their next step; then no step is lost.

        ``last_call``: others have saved. What isn't about to be saved here doesn't belong to that checkpoint.
        """
        until_s = time.monotonic() + deadline_s
        saved_s = None
        while world is self.world and world.alive() and time.monotonic() < until_s:
            pages = self._pages(world)
            rows = list(zip(pages, self._saved_before, strict=False))
            savers = [page for page, before in rows if page.checkpoints > before]
            busy = any(page.phase is Phase.CHECKPOINT for page in pages)
            saved_s = (saved_s or time.monotonic()) if savers else None
            patient = saved_s is None or time.monotonic() < saved_s + _HOLD_PATIENCE_S
            if not busy and (savers or last_call) and (all(p.held for p in savers) or not patient):
                break
            await asyncio.sleep(_SAVE_LOOK_S)
        saves = sum(page.checkpoints for page in self._pages(world)) if saved_s is not None else 0
        self.reports.say({"type": "prepared", "generation": world.generation, "saves": saves})

    @staticmethod
    def _pages(world: World) -> list[Page]:
        pages = (world.page(rank, rings=False) for rank in world.ranks)
        return [page for page in pages if page is not None]

    # --- health -------------------------------------------------------------------------------------

    async def _check_health(self, check: int) -> None:
        """What an agent can tell of its node: that workers can be made, and that files can be written."""
        problem = ""
        try:
            spare = await self.slots.extra()
            spare.close()
            probe = Path(self.run_dir) / f".health-{self._node}"
            probe.write_bytes(bytes(4096))
            probe.unlink()
        except (CloseranksError, OSError) as error:
            problem = str(error)
        reason = problem or "workers start, files can be written"
        self.link.send({"type": "health", "check": check, "ok": not problem, "reason": reason})

    # --- facts --------------------------------------------------------------------------------------

    def suspect(self, world: World, trigger: Trigger) -> None:
        """The node's own ranks have gone quiet: the controller, which is told, looks at those of all."""

    def prepare_world(self, world: World) -> None:
        world.set_lease(int(self._lease_end_s * 1e9))

    def first_step(self, world: World, seconds: float) -> None:
        self.link.beat_now()

    def rank_exited(self, world: World, rank: Rank) -> None:
        super().rank_exited(world, rank)
        if world is self.world and world.failing and not world.alive():
            self.link.beat_now()

    def _guard_died(self, guard_fd: int) -> None:
        self._close_stores()
        super()._guard_died(guard_fd)
