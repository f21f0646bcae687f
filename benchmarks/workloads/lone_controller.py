"""A job's controller as ``closeranks run`` starts it, with an engine that says what it is told to.

    lone_controller.py RUN_DIR --nodes 2048 --spares 8 [--tls]

Prints what happens as lines of JSON, each with the monotonic time at which it was in the journal; takes the
engine's facts on stdin: ``gone NODE SESSION``, and ``stop``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from closeranks.agent.launch import raise_file_limit
from closeranks.cluster_events import NodeGone
from closeranks.config import BudgetConfig, ClusterConfig, HangConfig
from closeranks.controller.casebook import Casebook
from closeranks.controller.channel import ChannelServer
from closeranks.controller.cluster_job import ClusterJob
from closeranks.controller.credentials import CONTROLLER, load, mint
from closeranks.controller.service import ClusterService
from closeranks.engines.base import EngineFact, Join

TOLD = ("generation_starting", "generation_started", "first_step", "finished")


def tell(what: str, at_s: float, **more: object) -> None:
    print(json.dumps({"what": what, "s": at_s, **more}), flush=True)


class ToldJob(ClusterJob):
    """Says what is in the journal now."""

    def note(self, kind: str, data: Mapping[str, Any], *, generation: int | None = None) -> None:
        super().note(kind, data, generation=generation)
        if kind in TOLD:
            tell(kind, time.monotonic(), generation=generation)


class ToldEngine:
    """Implements engines.base.Engine: all nodes come by themselves, and no more can be had."""

    name = "told"

    def __init__(self) -> None:
        self._facts: asyncio.Queue[EngineFact | None] = asyncio.Queue()

    def read_orders(self) -> None:
        for line in os.read(0, 65536).decode().splitlines():
            order, *words = line.split()
            if order == "gone":
                tell("fact", time.monotonic())
                self._facts.put_nowait(NodeGone(words[0], "its host has lost power", words[1]))
            else:
                os._exit(0)

    def listen_address(self) -> str | None:
        return "127.0.0.1"

    def start(self, join: Join) -> None: ...

    async def place(self, count: int, reason: str, taken: frozenset[str] = frozenset()) -> int:
        return 0

    def runs_here(self) -> bool:
        return True

    async def release(self, node: str, reason: str) -> None: ...

    async def facts(self) -> AsyncIterator[EngineFact]:
        while (fact := await self._facts.get()) is not None:
            yield fact

    async def close(self) -> None:
        self._facts.put_nowait(None)

    def render(self) -> str:
        return ""

    def submit(self) -> str:
        return ""


class Quiet:
    """A console that shows what shouldn't happen, and at most so much of it."""

    shown = 0

    def tell(self, level: str, text: str) -> None:
        if level in ("warning", "error") and not text.startswith("restarting") and self.shown < 10:
            self.shown += 1
            print(f"controller: {text}", file=sys.stderr)

    def internal_error(self, error: BaseException) -> None:
        print(f"controller: {error!r}", file=sys.stderr)

    def incident(self, *_: object, **__: object) -> None: ...


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--spares", type=int, required=True)
    parser.add_argument("--tls", action="store_true")
    arguments = parser.parse_args()
    run_dir: Path = arguments.run_dir
    raise_file_limit()
    config = ClusterConfig(min_nodes=arguments.nodes, max_nodes=arguments.nodes, spares=arguments.spares)
    job = ToldJob.open(run_dir / "journal.db", config, BudgetConfig())
    engine, console = ToldEngine(), Quiet()
    casebook = Casebook(run_dir, console)
    service = ClusterService(
        job, engine, job_id=run_dir.name, console=console, casebook=casebook, hang=HangConfig()
    )
    credentials = None
    if arguments.tls:
        mint(run_dir.name, run_dir / "credentials")
        credentials = load(run_dir / "credentials" / f"{CONTROLLER}.pem")
    asyncio.get_running_loop().add_reader(0, engine.read_orders)
    async with ChannelServer("127.0.0.1", 0, credentials, service.on_peer) as server:
        tell("listening", time.monotonic(), port=server.port)
        await service.run()
        if server.turned_away:
            print(f"controller: turned away {dict(server.turned_away)}", file=sys.stderr)
    job.close()


if __name__ == "__main__":
    asyncio.run(main())
