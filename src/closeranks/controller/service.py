"""The controller: the asyncio shell around policy.cluster. It hears agents, keeps time, passes orders on.

Facts come from agents' connections, from the engine, from people and from the clock; every one goes through
``dispatch``. Nothing here decides about nodes or generations.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, assert_never

from closeranks.cluster_events import (
    CheckHealth,
    ClusterAction,
    ClusterEvent,
    DrainReady,
    DrainRequested,
    KillNode,
    NodeAttached,
    NodeDown,
    NodeFailed,
    NodeHealth,
    NodeHeartbeat,
    NodeLeft,
    NodeReady,
    NodesRequested,
    NodeStarted,
    NodeSucceeded,
    OpenStore,
    PrepareDrain,
    ReleaseNode,
    RequestDenied,
    RequestNode,
    StartNode,
    StopNode,
    StoreLost,
    StoreOpened,
    Tick,
)
from closeranks.config import HangConfig
from closeranks.controller.casebook import Casebook
from closeranks.controller.cluster_job import ClusterJob
from closeranks.controller.joint_watch import JointWatch
from closeranks.controller.peer import Peer
from closeranks.controller.progress_board import ProgressBoard
from closeranks.controller.requests import Requests
from closeranks.controller.sessions import Session, Sessions
from closeranks.engines.base import Engine
from closeranks.events import (
    Failure,
    FailureKind,
    Finish,
    Progress,
    RunExit,
    RunStarted,
    StopRequested,
    Tell,
)
from closeranks.messages import NODE_EVENTS
from closeranks.policy.cluster_state import Link, Stage, World

__all__ = ["ClusterService", "ServiceConsole"]

_TICKS_PER_LEASE = 8
_GOODBYE_S = 10.0  # for agents to kill their ranks and leave, at the end
_SMALL = 256  # nodes; below that heartbeats come twice as often as the lease needs
_LAST_CALL_S = 10.0  # to finish a save that has begun elsewhere


class ServiceConsole(Protocol):
    """What people see of the controller."""

    def tell(self, level: str, text: str) -> None: ...

    def internal_error(self, error: BaseException) -> None: ...


class ClusterService:
    """Runs one job over its nodes. ``run()`` returns how it ended."""

    def __init__(
        self,
        job: ClusterJob,
        engine: Engine,
        *,
        job_id: str,
        console: ServiceConsole,
        casebook: Casebook,
        hang: HangConfig,
    ) -> None:
        self.job = job
        self.engine = engine
        self.console = console
        self.sessions = Sessions()
        self.casebook = casebook
        self.board = ProgressBoard(lambda kind, data, g: job.note(kind, data, generation=g))
        self.finish: Finish | None = None
        self.deposed = False
        self._job_id = job_id
        self._finished = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.handing_over = False
        self._last_call = -1  # the generation of which a part has been saved for its planned end
        self._told = (-1, 0)  # the generation and step of which policy knows
        self.requests = Requests(self)
        self.joint_watch = JointWatch(self, hang)
        casebook.attach(self)

    # --- life ---------------------------------------------------------------------------------------

    async def run(self) -> Finish:
        """From the first order to the last goodbye. Agents may attach from now on."""
        self.spawn(self._follow_engine())
        self.spawn(self._tick())
        world = self.job.state.world
        if self.job.state.finished:
            await self._end_again()
        elif self.job.resumed:
            if world is not None:
                self.board.begin(world.generation, world.members)
                self.board.ever_saved = True  # what went before isn't known: better to wait for a save
            self.console.tell("warning", "a new controller goes on with this job; its agents attach again")
        else:
            self.dispatch(RunStarted())
            config = self.job.state.config
            count = config.max_nodes + config.spares
            self.dispatch(NodesRequested(count))
            self.carry_out((RequestNode(count, "the job begins"),))
        await self._finished.wait()
        assert self.finish is not None
        if self.deposed:
            self._let_go(self.finish)
        else:
            await self._close(self.finish)
        return self.finish

    async def _end_again(self) -> None:
        """The controller before this one died between deciding the end and telling everybody."""
        self.finish = self.job.decided_end or Finish(RunExit.INTERNAL, "the job had ended")
        self._finished.set()
        await asyncio.sleep(self.job.state.config.reattach_wait_s)  # whoever attaches is told

    def depose(self, reason: str) -> None:
        """Another controller may lead the job: from now on nothing is decided or answered here."""
        if self.finish is None:
            self.deposed = True
            self.finish = Finish(RunExit.DEPOSED, reason)
            self._finished.set()

    def _let_go(self, finish: Finish) -> None:
        """Agents find the next leader, and the engine's own processes are not ours to end."""
        for session in self.sessions:
            session.peer.abort(finish.reason)
        self.casebook.close()
        self.joint_watch.close()
        for task in self._tasks:
            task.cancel()
        self.job.note("deposed", {"reason": finish.reason})

    def _leads(self) -> bool:
        """Asked before an agent is given time: this process may have slept since it last looked."""
        shared = self.job.shared
        if shared is not None and not shared.leadership.is_held:
            self.depose(shared.leadership.lost_because)
        return not self.deposed

    async def _close(self, finish: Finish) -> None:
        self.casebook.close()
        self.joint_watch.close()
        if self.handing_over:
            return
        for session in self.sessions:
            session.send({"type": "finish", "exit_code": 0, "reason": finish.reason})
        deadline_s = asyncio.get_running_loop().time() + _GOODBYE_S
        while len(self.sessions) and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(0.01)
        await self.engine.close()
        for task in self._tasks:
            task.cancel()
        self.job.note("finished", {"exit_code": finish.exit_code, "reason": finish.reason})

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.console.internal_error(error)

    async def _tick(self) -> None:
        config = self.job.state.config
        while self.finish is None:
            await asyncio.sleep(config.lease_length_s / _TICKS_PER_LEASE)
            for _ in range(3):  # what has arrived by now is taken first
                await asyncio.sleep(0)
            self.dispatch(Tick())

    # --- facts and actions --------------------------------------------------------------------------

    def dispatch(self, event: ClusterEvent) -> None:
        """Tell policy a fact, and do what it says."""
        self.carry_out(self._decide(event))

    def _decide(self, event: ClusterEvent) -> tuple[ClusterAction, ...]:
        if self.finish is not None:
            return ()
        before = self.job.state.world
        actions = self.job.handle(event)
        after = self.job.state.world
        if after is not before:
            self._world_changed(before, after, event, actions)
        return actions

    def _world_changed(
        self,
        before: World | None,
        after: World | None,
        event: ClusterEvent,
        actions: tuple[ClusterAction, ...],
    ) -> None:
        if after is None:
            return
        if before is None or before.generation != after.generation:
            starts = [action for action in actions if isinstance(action, StartNode)]
            note = {"delay_s": starts[0].delay_s if starts else 0.0, "nodes": sorted(after.members)}
            self.job.note("generation_starting", note, generation=after.generation)
            self.board.begin(after.generation, after.members)
            self.casebook.begin(after)
            return
        news = isinstance(event, NodeStarted | NodeAttached)
        if news and _is_started(after) and not _is_started(before):
            self.job.note("generation_started", {}, generation=after.generation)
        if before.stage is Stage.RUNNING and after.stage is not Stage.RUNNING:
            self.board.write()
            self.casebook.ended(before, after, event)
        if before.stage is not Stage.ENDED and after.stage is Stage.ENDED:
            self.casebook.down(after)

    def carry_out(self, actions: tuple[ClusterAction, ...]) -> None:
        """At once; where other controllers may take over, once they would know of it."""
        shared = self.job.shared
        if shared is not None and actions:
            shared.then(lambda: self._carry_out_all(actions))
        else:
            self._carry_out_all(actions)

    def _carry_out_all(self, actions: tuple[ClusterAction, ...]) -> None:
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: ClusterAction) -> None:
        match action:
            case OpenStore(node, generation):
                self.sessions.send(node, {"type": "store_open", "generation": generation})
            case StartNode():
                self.sessions.send(action.node, _start_message(action))
            case KillNode(node, generation):
                self.sessions.send(node, {"type": "kill", "generation": generation})
            case StopNode(node, generation, number):
                self.sessions.send(node, {"type": "stop", "generation": generation, "signal": number})
            case PrepareDrain(node, generation, deadline_s):
                self._prepare(node, generation, deadline_s)
            case CheckHealth(node, reason, check):
                self.sessions.send(node, {"type": "health_check", "check": check, "reason": reason})
            case RequestNode(count, reason):
                self.spawn(self._place(count, reason))
            case ReleaseNode(node, reason):
                code = RunExit.DRAINED  # the job goes on without it: not a success, to those who count them
                self.sessions.send(
                    node, {"type": "finish", "exit_code": code, "reason": f"released: {reason}"}
                )
                self.spawn(self.engine.release(node, reason))
            case Finish():
                self.finish = action
                self._finished.set()
            case Tell(level, text):
                self.job.note("notice", {"level": level, "text": text})
                self.console.tell(level, text)
            case _:
                assert_never(action)

    def _prepare(self, node: str, generation: int, deadline_s: float) -> None:
        """Where nothing was ever seen to be saved, there is nothing to wait for."""
        if self.board.ever_saved:
            self._say_prepare(node, generation, deadline_s, last_call=self._last_call == generation)
        else:
            asyncio.get_running_loop().call_soon(self.dispatch, DrainReady(node, generation))

    def _say_prepare(self, node: str, generation: int, deadline_s: float, *, last_call: bool) -> None:
        message = {"generation": generation, "deadline_s": deadline_s, "last_call": last_call}
        self.sessions.send(node, {"type": "prepare", **message})

    # --- the engine ---------------------------------------------------------------------------------

    async def _place(self, count: int, reason: str) -> None:
        nodes = self.job.state.nodes.values()
        taken = frozenset(node.name for node in nodes if node.link in (Link.ATTACHED, Link.AWAITED))
        placed = await self.engine.place(count, reason, taken)
        if placed < count:
            self.job.note("notice", {"level": "info", "text": f"{placed} of {count} nodes can be had"})
            self.dispatch(RequestDenied(count - placed))

    async def _follow_engine(self) -> None:
        async for fact in self.engine.facts():
            self.dispatch(fact)

    # --- agents -------------------------------------------------------------------------------------

    async def on_peer(self, peer: Peer) -> None:
        """One connection of an agent, from its hello to its end."""
        hello = await peer.receive()
        if hello is None or hello["type"] != "hello":
            return
        session = self._admit(hello, peer)
        if session is None:
            return
        try:
            while (message := await peer.receive()) is not None and self.sessions.is_current(session):
                self._heard(session, message)
        finally:
            if self.sessions.is_current(session):
                self.sessions.remove(session)
                self.casebook.silent(session.node)

    def _admit(self, hello: Mapping[str, Any], peer: Peer) -> Session | None:
        if not self._leads():
            return None
        node, session_id = hello["node"], hello["session"]
        if self.finish is not None and not self.deposed and not self.handing_over:
            reason = f"the job is over: {self.finish.reason}"
            peer.send({"type": "refused", "reason": reason, "for_good": True})
            return None
        if hello["job"] != self._job_id:
            peer.send({"type": "refused", "reason": "this is another job's controller", "for_good": True})
            return None
        event = NodeAttached(node, session_id, hello["slots"], hello["address"], hello.get("running"))
        actions = self._decide(event)
        if not self.job.holds_lease(node, session_id):
            self.carry_out(actions)
            for_good = self._is_done_with(node, session_id)
            reason = "the job needs this agent no more" if for_good else "not now: try again"
            peer.send({"type": "refused", "reason": reason, "for_good": for_good})
            return None
        session = Session.of(hello, peer)
        self.sessions.add(session)
        config = self.job.state.config
        nodes = max(len(self.job.state.nodes), config.max_nodes)
        beat_s = config.lease_s / 2 if nodes < _SMALL else config.lease_s
        grace_s = config.reattach_grace_s
        term = self.job.shared.leadership.term if self.job.shared is not None else None
        lease_s = config.lease_length_s
        welcome = {"lease_s": lease_s, "beat_s": beat_s, "grace_s": grace_s, "term": term}
        peer.send({"type": "welcome", **welcome})
        self.carry_out(actions)
        return session

    def _is_done_with(self, node: str, session_id: str) -> bool:
        if self.finish is not None:
            return True
        known = self.job.state.nodes.get(node)
        return known is not None and known.link is Link.LEFT and known.session == session_id

    def _heard(self, session: Session, message: Mapping[str, Any]) -> None:
        kind = message["type"]
        if kind == "heartbeat":
            self._heartbeat(session, message)
            return
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, session, message)

    def _heartbeat(self, session: Session, message: Mapping[str, Any]) -> None:
        node = session.node
        if not self._leads():
            return
        self.dispatch(NodeHeartbeat(node, session.session))
        if not self.job.holds_lease(node, session.session):
            session.peer.close("its lease is over")
            return
        session.send({"type": "heartbeat_ack", "seq": message["seq"]})
        session.heard(message)
        progress = session.progress
        if progress is None:
            return
        if self.board.take(node, progress):
            self.casebook.show()
            took_s = (self.board.first_step_s or 0.0) - self.board.began_s
            what = "running" if progress.generation == 0 else "running again"
            text = f"{what}: generation {progress.generation}, first step after {took_s:.2f} s"
            self.console.tell("info", text)
        come = (self.board.generation, self.board.step)
        if self.board.step and come != self._told:
            self._told = come
            self.dispatch(Progress(*come))

    def _broke(self, session: Session, message: Mapping[str, Any]) -> None:
        """A generation that can't go on, and no evidence of why."""
        kinds = {kind.value: kind for kind in FailureKind}
        world = self.job.state.world
        if world is None or world.generation != message["generation"] or world.stage is not Stage.RUNNING:
            return
        if session.node not in world.members:
            return
        failure = Failure(
            generation=world.generation,
            incident_id=self.casebook.incident_id(world.generation),
            kind=kinds.get(message["kind"], FailureKind.LAUNCH),
            rank=None,
            signature=f"node {session.node}: {message['reason']}",
            step=self.board.step,
            startup=self.board.step == 0,
            durable_progress=False,
            exit_code=1,
        )
        self.casebook.without_evidence(session.node, failure)
        self.dispatch(NodeFailed(session.node, failure, (session.node,)))

    def _prepared(self, session: Session, message: Mapping[str, Any]) -> None:
        """The first that has saved makes it the last call for all: a checkpoint may have many parts."""
        world, generation = self.job.state.world, message["generation"]
        if world is None or world.generation != generation:
            return
        if message["saves"] and self._last_call != generation:
            self._last_call = generation
            for member in world.members.values():
                if not member.saved and member.node != session.node:
                    self._say_prepare(member.node, generation, _LAST_CALL_S, last_call=True)
        self.dispatch(DrainReady(session.node, generation))

    def _event(self, session: Session, message: Mapping[str, Any]) -> None:
        if message["kind"] not in NODE_EVENTS:  # the journal is ours, and holds what we go on from
            return
        kind = f"node_{message['kind']}" if message["kind"] == "killed" else message["kind"]
        data = {**message["data"], "node": session.node}
        if kind == "notice" and isinstance(data.get("text"), str):
            data["text"] = f"{data['text']}"[:2000]
        generation = message.get("generation")
        if kind == "suspected":  # by one node; what it means all of them together show
            kind = "node_suspected"
            self.joint_watch.suspected(generation if generation is not None else -1)
        elif kind == "suspicion_cleared":
            kind = "node_suspicion_cleared"
        self.job.note(kind, data, generation=generation)

    def _injected(self, _session: Session, message: Mapping[str, Any]) -> None:
        self.requests.injected(message["id"], message["reply"])

    # --- people -------------------------------------------------------------------------------------

    def stop_requested(self, reason: str, number: int) -> None:
        """Someone wants the whole job to end."""
        self.job.note("stop_requested", {"reason": reason})
        self.console.tell("info", f"{reason}: stopping the ranks (again to kill them at once)")
        self.dispatch(StopRequested(reason, number))

    def leave(self, reason: str, number: int) -> None:
        """This controller is to make way for another one; the job goes on meanwhile."""
        self.job.note(
            "notice", {"level": "warning", "text": f"{reason}: the controller ends, the job does not"}
        )
        self.handing_over = True
        self.finish = self.finish or Finish(128 + number, reason)
        self._finished.set()

    def guard_died(self) -> None:
        """The process the user started is gone: nobody is left to answer to."""
        self.job.note("notice", {"level": "error", "text": "the launcher was killed: stopping"})
        self.finish = self.finish or Finish(128 + signal.SIGKILL, "the launcher was killed")
        self._finished.set()

    def notice(self, text: str) -> None:
        self.job.note("notice", {"level": "warning", "text": text})
        self.console.tell("warning", text)

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A request on the control socket."""
        return await self.requests.answer(request)


def _is_started(world: World) -> bool:
    """From the end: that is where the members are whose word comes last."""
    return all(member.started for member in reversed(world.members.values()))


def _start_message(order: StartNode) -> dict[str, Any]:
    return {
        "type": "start", "generation": order.generation, "node_rank": order.node_rank,
        "first_rank": order.first_rank, "ranks": order.ranks, "world_size": order.world_size,
        "node_count": order.node_count, "store": order.store, "delay_s": order.delay_s,
    }  # fmt: skip


_Handler = Callable[[ClusterService, Session, Mapping[str, Any]], None]


def _fact(make: Callable[[Session, Mapping[str, Any]], ClusterEvent]) -> _Handler:
    return lambda service, session, message: service.dispatch(make(session, message))


_HANDLERS: dict[str, _Handler] = {
    "ready": _fact(lambda s, _: NodeReady(s.node, s.session)),
    "started": _fact(lambda s, m: NodeStarted(s.node, m["generation"])),
    "down": _fact(lambda s, m: NodeDown(s.node, m["generation"])),
    "succeeded": _fact(lambda s, m: NodeSucceeded(s.node, m["generation"])),
    "store_opened": _fact(lambda s, m: StoreOpened(s.node, m["generation"], m["address"])),
    "store_lost": _fact(lambda s, m: StoreLost(s.node, m["generation"])),
    "leaving": _fact(lambda s, m: DrainRequested(s.node, m["deadline_s"], m["reason"])),
    "health": _fact(lambda s, m: NodeHealth(s.node, m["ok"], m["reason"], m["check"])),
    "goodbye": _fact(lambda s, m: NodeLeft(s.node, s.session, m["reason"])),
    "failed": lambda service, session, message: service.casebook.reported(session, message),
    "evidence": lambda service, session, message: service.casebook.reported(session, message),
    "broke": ClusterService._broke,
    "prepared": ClusterService._prepared,
    "injected": ClusterService._injected,
    "seen": lambda service, session, message: service.joint_watch.take(session, message),
    "event": ClusterService._event,
}
