"""A whole controller in this process, over a real channel and a real journal, with agents that do as they are
told by a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from closeranks.config import BudgetConfig, ClusterConfig, HangConfig
from closeranks.controller.casebook import Casebook
from closeranks.controller.channel import ChannelServer
from closeranks.controller.cluster_job import ClusterJob
from closeranks.controller.connect import connect
from closeranks.controller.journal import Record, read
from closeranks.controller.peer import Peer
from closeranks.controller.service import ClusterService
from closeranks.diagnose.codec import to_json
from closeranks.engines.base import EngineFact, Join
from closeranks.events import ExitStatus, Finish
from closeranks.evidence import ErrorRecord, Evidence, RankEvidence, Trigger, Verdict

SOON_S = 20.0
JOB = "job-1"
BEAT_S = 0.2
RANKS = 2  # of each node
THREE = ClusterConfig(min_nodes=3, max_nodes=3, spares=1)
LOST = ErrorRecord("RuntimeError", "Connection closed by peer [10.0.0.2]:1", "train.py:5", 3, 70, "")


async def soon(condition: Callable[[], object], within_s: float = SOON_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


# --- what agents tell of their ranks ----------------------------------------------------------------


def killed(rank: int, number: int = 9, at_ns: int = 50) -> RankEvidence:
    return RankEvidence(rank, 100 + rank, exit=ExitStatus(signal=number), exit_mono_ns=at_ns)


def victim(rank: int) -> RankEvidence:
    """It has lost a peer, and says so."""
    return RankEvidence(rank, 100 + rank, exit=ExitStatus(code=1), exit_mono_ns=80, error=LOST)


def living(rank: int) -> RankEvidence:
    return RankEvidence(rank, 100 + rank, answered=True)


def report(kind: str, generation: int, *ranks: RankEvidence, texts: Mapping[str, Any] | None = None) -> dict:
    """``failed``, or ``evidence`` that was asked for."""
    ended = tuple(item.rank for item in ranks if item.exit is not None)
    trigger = Trigger("exit", ended, "", 100) if kind == "failed" else Trigger("exit", (), "", 200)
    found = Evidence("", generation, 6, trigger, ranks)
    plain = to_json(found)
    return {"type": kind, "generation": generation, "durable": True, "evidence": plain, "texts": texts or {}}


# --- who takes part ---------------------------------------------------------------------------------


class FakeEngine:
    name = "fake"

    def __init__(self) -> None:
        self.placed: list[tuple[int, str]] = []
        self.released: list[str] = []
        self.closed = 0
        self.tell: asyncio.Queue[EngineFact] = asyncio.Queue()

    def listen_address(self) -> str | None:
        return None

    def start(self, join: Join) -> None:
        pass

    async def place(self, count: int, reason: str, taken: frozenset[str] = frozenset()) -> int:
        self.placed.append((count, reason))
        return count

    async def release(self, node: str, reason: str) -> None:
        self.released.append(node)

    async def facts(self) -> AsyncIterator[EngineFact]:
        while True:
            yield await self.tell.get()

    async def close(self) -> None:
        self.closed += 1

    def render(self) -> str:
        return ""

    def submit(self) -> str:
        return ""


class FakeConsole:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.bugs: list[BaseException] = []
        self.incidents: list[tuple[Evidence, Verdict, int | None]] = []

    def tell(self, level: str, text: str) -> None:
        self.told.append(text)

    def internal_error(self, error: BaseException) -> None:
        self.bugs.append(error)

    def incident(
        self,
        evidence: Evidence,
        verdict: Verdict,
        directory: Path,
        *,
        next_generation: int | None,
        injected: bool,
    ) -> None:
        self.incidents.append((evidence, verdict, next_generation))


class FakeAgent:
    """Does what it is told but for ``ignores``, and beats while ``beats``. ``got``: all it was told."""

    def __init__(self, path: str, node: str, session: str = "s1", *, job: str = JOB) -> None:
        self.path, self.node, self.session, self.job = path, node, session, job
        self.got: list[dict[str, Any]] = []
        self.ignores: set[str] = {"evidence_request", "inject", "prepare"}
        self.beats = True
        self.running: int | None = None
        self.progress: tuple[int, int, int, int, bool] | None = None
        self.first_rank = 0
        self.peer: Peer | None = None
        self.closed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def attach(self) -> dict[str, Any]:
        """Returns the controller's first word."""
        found = await connect(self.path, 0, None)
        assert found.peer is not None, found.detail
        self.peer = peer = found.peer
        self.closed.clear()
        peer.send(
            {
                "type": "hello", "job": self.job, "node": self.node, "session": self.session, "slots": RANKS,
                "address": f"{self.node}.example", "running": self.running, "version": "1", "boot": "",
            }
        )  # fmt: skip
        first = await asyncio.wait_for(peer.receive(), SOON_S)
        assert first is not None, peer.closed_because
        if first["type"] == "welcome":
            create = asyncio.get_running_loop().create_task
            self._tasks += [create(self._listen(peer)), create(self._beat(peer))]
        return first

    def say(self, what: str, /, **fields: Any) -> None:
        assert self.peer is not None
        assert self.peer.send({"type": what, **fields}), self.peer.closed_because

    def send(self, message: Mapping[str, Any]) -> None:
        assert self.peer is not None and self.peer.send(message)

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.got if message["type"] == kind]

    async def hears(self, kind: str, count: int = 1, within_s: float = SOON_S) -> dict[str, Any]:
        await soon(lambda: len(self.told(kind)) >= count, within_s)
        return self.told(kind)[count - 1]

    async def break_off(self) -> None:
        """As a network does: without a word."""
        assert self.peer is not None
        self.peer.abort("cut")
        await self.peer.wait_closed()

    async def _listen(self, peer: Peer) -> None:
        while (message := await peer.receive()) is not None:
            self.got.append(message)
            if message["type"] not in self.ignores:
                self._obey(message)
        if peer is self.peer:
            self.closed.set()

    def _obey(self, message: Mapping[str, Any]) -> None:
        generation = message.get("generation")
        match message["type"]:
            case "store_open":
                self.say("store_opened", generation=generation, address=f"tcp://{self.node}:{generation}")
            case "start":
                self.running, self.first_rank = generation, message["first_rank"]
                self.say("started", generation=generation)
            case "kill" | "stop":
                self.running, self.progress = None, None
                self.say("down", generation=generation)
            case "health_check":
                self.say("health", check=message["check"], ok=True, reason="fine")
            case "finish":
                self.say("goodbye", reason="told to")
                assert self.peer is not None
                self.peer.close("told to")

    async def _beat(self, peer: Peer) -> None:
        seq = 0
        while not peer.closed_because:
            if self.beats:
                seq += 1
                self.beat(seq)
            await asyncio.sleep(BEAT_S)

    def beat(self, seq: int = 0) -> None:
        assert self.peer is not None
        beat = {"seq": seq, "mono_ns": 0, "generation": self.running, "ranks": [], "progress": self.progress}
        self.peer.send({"type": "heartbeat", **beat})

    async def close(self) -> None:
        if self.peer is not None:
            self.peer.abort("the test ends")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Rig:
    """One job; its controller can be killed and started again."""

    def __init__(self, folder: Path, config: ClusterConfig = THREE) -> None:
        self.folder, self.config = folder, config
        self.console = FakeConsole()
        self.engine = FakeEngine()
        self.agents: dict[str, FakeAgent] = {}
        self.others: list[FakeAgent] = []
        self.ended: asyncio.Task[Finish] | None = None

    @property
    def path(self) -> str:
        return str(self.folder / "channel")

    async def start(self) -> None:
        self.engine = FakeEngine()
        self.job = ClusterJob.open(self.folder / "journal.db", self.config, BudgetConfig())
        self.casebook = Casebook(self.folder, self.console)
        self.service = ClusterService(
            self.job,
            self.engine,
            job_id=JOB,
            console=self.console,
            casebook=self.casebook,
            hang=HangConfig(),
        )
        self.server = ChannelServer(self.path, 0, None, self.service.on_peer)
        await self.server.__aenter__()
        self.ended = asyncio.get_running_loop().create_task(self.service.run())
        await asyncio.sleep(0)

    async def kill_controller(self) -> None:
        """It ends without a word to anybody; what it wrote is in the journal."""
        assert self.ended is not None
        self.ended.cancel()
        for task in tuple(self.service._tasks):
            task.cancel()
        await asyncio.wait([self.ended])
        await self.server.__aexit__(None, None, None)
        self.job.close()

    def agent(self, node: str, session: str = "s1", **options: Any) -> FakeAgent:
        """Another one, beside those in ``agents``."""
        made = FakeAgent(self.path, node, session, **options)
        self.others.append(made)
        return made

    async def attach(self, nodes: str) -> None:
        """One letter each. Attached, and known to be ready."""
        for node in nodes:
            self.agents[node] = self.agents.get(node) or FakeAgent(self.path, node)
            first = await self.agents[node].attach()
            assert first["type"] == "welcome", first
            self.agents[node].say("ready")
        await soon(lambda: all(self.job.state.nodes[node].ready for node in nodes))

    async def all_run(self, generation: int, nodes: str) -> None:
        """Until all of these nodes have started that generation."""
        for node in nodes:
            await soon(lambda node=node: self.agents[node].running == generation)
        await soon(lambda: self.world.generation == generation)
        await soon(lambda: all(member.started for member in self.world.members.values()))

    async def step(self, nodes: str, step: int, *, saves: int = 0) -> None:
        """These nodes' ranks come to a step."""
        for node in nodes:
            self.agents[node].progress = (step, step, saves, step if saves else 0, True)
        await soon(lambda: self.service.board.step == step)

    @property
    def world(self):
        assert self.job.state.world is not None
        return self.job.state.world

    def records(self, kind: str) -> list[Record]:
        self.job._journal.flush(SOON_S)
        return [record for record in read(self.folder / "journal.db") if record.kind == kind]

    async def shown(self, count: int = 1) -> tuple[Evidence, Verdict, int | None]:
        await soon(lambda: len(self.console.incidents) >= count)
        assert len(self.console.incidents) == count
        return self.console.incidents[-1]

    async def close(self) -> None:
        for agent in (*self.agents.values(), *self.others):
            await agent.close()
        if self.ended is not None and not self.ended.done():
            await self.kill_controller()
        elif self.ended is not None:
            await self.server.__aexit__(None, None, None)
            self.job.close()


def play(folder: Path, scene: Callable[[Rig], Awaitable[None]], config: ClusterConfig = THREE) -> Rig:
    """A scene after which no bug was met."""

    async def main() -> Rig:
        rig = Rig(folder, config)
        await rig.start()
        try:
            await scene(rig)
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await rig.close()
        assert rig.console.bugs == []
        return rig

    return asyncio.run(main())
