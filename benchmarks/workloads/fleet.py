"""Many agents in one process: real connections and messages, no ranks. Every order is obeyed at once.

    fleet.py HOST:PORT JOB --agents 2056 --ranks 8 [--credentials FILE]

They attach as fast as they can, with the time limit and the back-off of real agents, and beat as they are
told. Orders on stdin: ``fail NODE``, ``vanish NODE``, ``report``, ``stop``. Prints lines
of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import closeranks.controller.connect as connecting
from closeranks import __version__
from closeranks.agent.launch import raise_file_limit
from closeranks.agent.node_link import split_endpoint
from closeranks.backoff import Backoff
from closeranks.controller.credentials import Credentials, load
from closeranks.controller.peer import Peer
from closeranks.diagnose.codec import to_json
from closeranks.events import ExitStatus
from closeranks.evidence import Evidence, Frame, ProcessFacts, RankEvidence, ThreadFacts, Trigger
from closeranks.linux import boot_id
from closeranks.plain import to_plain

CONNECT_TIMEOUT_S = 2.0  # these three as in agent.node_link
RETRY_FIRST_S, RETRY_MAX_S = 0.05, 1.0
STACK_FRAMES = 10
AT_ONCE = 128  # agents that connect: they share one core, and real ones would not run into time limits for it

# Each agent would do this once, on a host of its own.
connecting.client_context = functools.cache(connecting.client_context)


def tell(what: str, **more: object) -> None:
    print(json.dumps({"what": what, **more}), flush=True)


@functools.cache
def waiting_rank() -> dict[str, Any]:
    """What an agent captures of a rank that waits. Made once, as all agents of a job make theirs at once."""
    stack = tuple(
        Frame(f"/srv/job/lib/python3.11/site-packages/model/part{n}.py", 10 * n, f"forward{n}")
        for n in range(STACK_FRAMES)
    )
    main = ThreadFacts(1, "python", "S", "futex_wait_queue", "202", "futex")
    process = ProcessFacts("S", 0, 12.5, 4096, 1 << 30, (main,))
    plain: dict[str, Any] = to_plain(RankEvidence(0, 1000, process=process, stack=stack, answered=True))
    return plain


class Agent:
    """One node of the job."""

    def __init__(self, fleet: Fleet, node: str) -> None:
        self.fleet = fleet
        self.node = node
        self.session = f"{node}-{random.getrandbits(64):016x}"
        self.peer: Peer | None = None
        self.generation: int | None = None  # that runs here
        self.first_rank = 0
        self.step = 0
        self.seq = 0
        self.sent_s = 0.0
        self.gone = False
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        fleet = self.fleet
        backoff = Backoff(random.random, first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        while not self.gone:
            fleet.attempts += 1
            async with fleet.turns:
                found = await connecting.connect(*fleet.where, fleet.credentials, timeout_s=CONNECT_TIMEOUT_S)
            if found.peer is not None:
                await self._attach(found.peer)
            if not self.gone:
                await asyncio.sleep(backoff.next_s())

    async def _attach(self, peer: Peer) -> None:
        self.peer = peer
        peer.send(
            {
                "type": "hello", "job": self.fleet.job, "node": self.node, "session": self.session,
                "slots": self.fleet.ranks, "address": "127.0.0.1", "running": self.generation,
                "version": __version__, "boot": boot_id(),
            }
        )  # fmt: skip
        while (message := await peer.receive()) is not None:
            match message["type"]:
                case "heartbeat_ack":
                    self.fleet.answered(self, message["seq"])
                case "welcome":
                    self.fleet.attached()
                    peer.send({"type": "ready"})
                    self._beat(message["beat_s"])
                case "refused" if message["for_good"]:
                    self.gone = True
                case kind:
                    self._obey(peer, kind, message)
        if self._timer is not None:
            self._timer.cancel()
        peer.close()

    def _beat(self, beat_s: float) -> None:
        if self.gone or self.peer is None:
            return
        self._timer = asyncio.get_running_loop().call_later(beat_s, self._beat, beat_s)
        self.seq += 1
        self.sent_s = time.monotonic()
        rows, progress = [], None
        if self.generation is not None:
            self.step += 1
            rows = [
                (self.first_rank + n, self.step, 40 * self.step, "backward", False)
                for n in range(self.fleet.ranks)
            ]
            progress = (self.step, self.step, 0, 0, True)
        self.peer.send(
            {
                "type": "heartbeat", "seq": self.seq, "mono_ns": time.monotonic_ns(),
                "generation": self.generation, "ranks": rows, "progress": progress,
            }
        )  # fmt: skip

    def _obey(self, peer: Peer, kind: str, order: Mapping[str, Any]) -> None:
        generation = order.get("generation")
        match kind:
            case "start":
                self.generation, self.first_rank, self.step = generation, order["first_rank"], 0
                peer.send({"type": "started", "generation": generation})
            case "kill" | "stop":
                self.generation = None
                peer.send({"type": "down", "generation": generation})
            case "store_open":
                address = {"generation": generation, "address": "127.0.0.1:29500"}
                peer.send({"type": "store_opened", **address})
            case "evidence_request":
                peer.send(self._evidence("evidence", order["generation"], order["trigger"]))
            case "prepare":
                peer.send({"type": "prepared", "generation": generation, "saves": 1})
            case "health_check":
                peer.send({"type": "health", "check": order["check"], "ok": True, "reason": ""})
            case "finish":
                self.gone = True
                peer.send({"type": "goodbye", "reason": order["reason"]})
                peer.close()

    def _evidence(self, kind: str, generation: int, trigger: str) -> dict[str, Any]:
        """Ranks that wait in a collective; in a failure, the first one was killed."""
        ranks = [{**waiting_rank(), "rank": self.first_rank + n} for n in range(self.fleet.ranks)]
        culprits: tuple[int, ...] = ()
        if kind == "failed":
            killed = RankEvidence(
                self.first_rank, 1000, exit=ExitStatus(signal=9), exit_mono_ns=time.monotonic_ns()
            )
            ranks[0], culprits = to_plain(killed), (self.first_rank,)
        evidence = Evidence(
            f"g{generation:04d}", generation, self.fleet.ranks,
            Trigger(trigger, culprits, "", time.monotonic_ns()), (), self.node,
        )  # fmt: skip
        return {
            "type": kind, "generation": generation, "durable": False,
            "evidence": {**to_json(evidence), "ranks": ranks}, "texts": {},
        }  # fmt: skip

    def fail(self) -> None:
        """One of its ranks is killed."""
        if self.peer is not None and self.generation is not None:
            message = self._evidence("failed", self.generation, "exit")
            tell("fact", s=time.monotonic())
            self.peer.send(message)

    def vanish(self) -> None:
        self.gone = True
        if self.peer is not None:
            self.peer.abort("its host has lost power")


class Fleet:
    def __init__(
        self, endpoint: str, job: str, agents: int, ranks: int, credentials: Credentials | None
    ) -> None:
        self.where = split_endpoint(endpoint)
        self.job = job
        self.ranks = ranks
        self.credentials = credentials
        self.attempts = 0
        self.turns = asyncio.Semaphore(AT_ONCE)
        self.slowest_answer_s = 0.0
        self._attached = 0
        self._agents = {f"node{n:04d}": Agent(self, f"node{n:04d}") for n in range(agents)}
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        loop.add_reader(0, self._read_orders, over)
        tell("connecting", s=time.monotonic())
        self._tasks = [loop.create_task(agent.run()) for agent in self._agents.values()]
        await over.wait()

    def attached(self) -> None:
        self._attached += 1
        if self._attached == len(self._agents):
            tell("attached", s=time.monotonic(), attempts=self.attempts)

    def answered(self, agent: Agent, seq: int) -> None:
        if seq == agent.seq:
            self.slowest_answer_s = max(self.slowest_answer_s, time.monotonic() - agent.sent_s)

    def _read_orders(self, over: asyncio.Event) -> None:
        for line in os.read(0, 65536).decode().splitlines() or ["stop"]:
            order, *words = line.split()
            match order:
                case "fail":
                    self._agents[words[0]].fail()
                case "vanish":
                    agent = self._agents[words[0]]
                    agent.vanish()
                    tell("vanished", session=agent.session)
                case "report":
                    tell("report", slowest_answer_s=self.slowest_answer_s, attempts=self.attempts)
                    self.slowest_answer_s = 0.0
                case _:
                    over.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("endpoint")
    parser.add_argument("job")
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--credentials", type=Path)
    arguments = parser.parse_args()
    raise_file_limit()
    credentials = load(arguments.credentials) if arguments.credentials else None
    fleet = Fleet(arguments.endpoint, arguments.job, arguments.agents, arguments.ranks, credentials)
    asyncio.run(fleet.run())


if __name__ == "__main__":
    main()
