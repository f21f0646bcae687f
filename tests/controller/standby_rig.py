"""Controllers as processes of their own, run again as by an engine, and nodes without ranks in this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from closeranks.agent.node_link import NodeIdentity, NodeLink
from closeranks.controller.credentials import AGENT, CONTROLLER, load, mint
from closeranks.events import RunExit

from .etcd_rig import free_ports

JOB = "20261201-042655-train-a1b2"


class Node:
    """An agent that obeys at once. ``history``: what happened, and when."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.generation: int | None = None  # that runs here
        self.newest = -1
        self.history: list[tuple[float, str, int]] = []
        self.attachments = 0
        self.finished = False
        self.link: NodeLink | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def join(self, endpoint: str, credentials: Path) -> None:
        identity = NodeIdentity(JOB, self.name, f"session-{self.name}", 1)
        self.link = NodeLink(endpoint, load(credentials), identity, self, uniform=lambda: 0.5)
        self._task = asyncio.create_task(self.link.run())

    async def leave(self) -> None:
        assert self.link is not None and self._task is not None
        await self.link.close("the test is over")
        self._task.cancel()
        await asyncio.wait([self._task])

    def say(self, what: str, **more: object) -> None:
        assert self.link is not None
        self.link.send({"type": what, **more})

    def fail(self) -> None:
        generation, self.generation = self.generation, None
        self._note("failed", generation)
        self.say("broke", generation=generation, kind="signal", reason="for the test")
        self.say("down", generation=generation)

    def succeed(self) -> None:
        self.say("succeeded", generation=self.generation)
        self._end("succeeded")

    def _note(self, what: str, generation: int | None) -> None:
        self.history.append((time.monotonic(), what, -1 if generation is None else generation))

    def _end(self, what: str) -> None:
        if self.generation is not None:
            self._note(what, self.generation)
            generation, self.generation = self.generation, None
            self.say("down", generation=generation)

    # --- what the line says

    def running(self) -> int | None:
        return self.generation

    def beat(self) -> Mapping[str, Any]:
        rows = [] if self.generation is None else [(0, 5, 40, "backward", False)]
        progress = None if self.generation is None else (5, 5, 0, 0, True)
        return {"generation": self.generation, "ranks": rows, "progress": progress}

    def attached(self) -> None:
        self.attachments += 1
        self.say("ready")

    def lease_held(self, end_s: float) -> None: ...

    def lease_over(self, why: str) -> None:
        self._end("fenced")

    def turned_away(self, reason: str) -> None:
        self.finished = True

    def obey(self, message: Mapping[str, Any]) -> None:
        generation = message.get("generation")
        match message["type"]:
            case "store_open":
                self.say("store_opened", generation=generation, address="tcp://127.0.0.1:29500")
            case "start" if generation > self.newest and self.link is not None and self.link.holds_lease:
                self.generation = self.newest = generation
                self._note("started", generation)
                self.say("started", generation=generation)
            case "start" if generation == self.generation:
                self.say("started", generation=generation)
            case "kill" | "stop":
                self.newest = max(self.newest, generation)
                self._end("killed")
                self.say("down", generation=generation)
            case "health_check":
                self.say("health", check=message["check"], ok=True, reason="")
            case "finish":
                self._end("told to finish")
                self.finished = True
                self._leaving = asyncio.create_task(self.link.close("finished"))


@dataclass
class Seat:
    """One controller's place: it is run again there when it was killed, or leads no more."""

    start: Callable[[], Any]
    running: Any = None
    codes: list[int] = field(default_factory=list)
    again: bool = True

    def run(self) -> None:
        self.running = self.start()

    @property
    def pid(self) -> int:
        return int(self.running.process.pid)

    def look(self) -> None:
        code = self.running.process.poll()
        if code is None or (self.codes and self.codes[-1] in range(RunExit.DEPOSED)):
            return
        self.codes.append(code)
        if self.again and (code < 0 or code == RunExit.DEPOSED):
            self.run()


class Cluster:
    """``async with``: two controllers, the first of which may begin the job, and nodes."""

    def __init__(
        self,
        folder: Path,
        start: Callable[..., Any],
        urls: tuple[str, str],
        *,
        nodes: str = "ab",
        flags: tuple[str, ...] = (),
    ) -> None:
        self.nodes = [Node(name) for name in nodes]
        mint(JOB, folder / "credentials")
        self._agents = folder / "credentials" / f"{AGENT}.pem"
        ports = free_ports(2)
        self._endpoint = ",".join(f"127.0.0.1:{port}" for port in ports)
        self.run_dirs = [folder / f"host{n}" / JOB for n in range(2)]

        def seat(n: int) -> Seat:
            command = [
                "controller", "--listen", f"127.0.0.1:{ports[n]}", "--credentials",
                folder / "credentials" / f"{CONTROLLER}.pem", "--run-dir", self.run_dirs[n],
                *(["--standby"] if n else []), "--", "--engine", "local", "--engine-option", "prefix=true",
                "--nnodes", str(len(nodes)), "--etcd", urls[n], *flags, "--no-python", "true",
            ]  # fmt: skip
            return Seat(lambda: start(*command))

        self.seats = [seat(n) for n in range(2)]
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Cluster:
        for seat in self.seats:
            seat.run()
        self._watching = asyncio.create_task(self._watch())
        for node in self.nodes:
            node.join(self._endpoint, self._agents)
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._watching is not None
        self._watching.cancel()
        await asyncio.wait([self._watching])
        for node in self.nodes:
            await node.leave()

    async def _watch(self) -> None:
        while True:
            for seat in self.seats:
                seat.look()
            await asyncio.sleep(0.05)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            said = "\n".join(f"--- {seat.codes}\n{seat.running.stderr[-3000:]}" for seat in self.seats)
            history = "\n".join(f"{node.name}: {node.history} {node.attachments}" for node in self.nodes)
            raise AssertionError(f"not within {timeout_s:g} s\n{history}\n{said}") from None

    async def follow(self, what: Callable[[], object]) -> None:
        """Do ``what``, and wait until every node has attached again."""
        before = [node.attachments for node in self.nodes]
        what()
        await self.until(lambda: all(n.attachments > a for n, a in zip(self.nodes, before, strict=True)))

    def running(self) -> set[int | None]:
        return {node.generation for node in self.nodes}

    async def begin(self) -> Seat:
        """Until the first world runs; who leads it."""
        await self.until(lambda: self.running() == {0})
        return self.leader()

    def leader(self) -> Seat:
        """Whom the nodes are attached to."""
        places = {node.link._lease_from for node in self.nodes if node.link is not None}
        assert len(places) == 1
        return self.seats[places.pop()]

    def events(self, what: str) -> list[tuple[float, int]]:
        return sorted((at_s, g) for node in self.nodes for at_s, did, g in node.history if did == what)

    def check_worlds(self) -> None:
        """Never two at once, and none twice on a node."""
        ends = {"fenced", "killed", "failed", "succeeded", "told to finish"}
        began: dict[int, float] = {}
        ended: dict[int, float] = {}
        for node in self.nodes:
            started = [g for _, did, g in node.history if did == "started"]
            assert started == sorted(set(started)), node.history
            for at_s, did, g in node.history:
                if did == "started":
                    began[g] = min(at_s, began.get(g, at_s))
                elif did in ends:
                    ended[g] = max(at_s, ended.get(g, at_s))
        for g in began:
            if g + 1 in began:
                assert ended[g] <= began[g + 1], (g, [node.history for node in self.nodes])

    async def finish(self) -> None:
        """The script ends well, and every controller says so."""
        for node in self.nodes:
            node.succeed()
        await self.until(lambda: all(seat.codes and seat.codes[-1] == 0 for seat in self.seats), 30.0)
        self.check_worlds()


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def wake(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
