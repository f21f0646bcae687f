"""One generation's processes: plain children that speak as ranks do, or as they should not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from closeranks import wire
from closeranks.agent.spares import Spare
from closeranks.agent.world import Placement, Rank, World
from closeranks.events import ExitStatus

RAISED = {
    "type": "raised",
    "error": {
        "type": "KeyError", "message": "'lr'", "place": "a.py:3", "step": 7, "mono_ns": 5, "traceback": "T",
    },
}  # fmt: skip


class Listener:
    """Notes who ended and what was said, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, object]] = []

    def rank_exited(self, world: World, rank: Rank) -> None:
        self.heard.append((rank.rank, rank.exit))

    def rank_said(self, world: World, rank: Rank, message: dict[str, Any]) -> None:
        self.heard.append((rank.rank, message["type"]))


def child(source: str) -> Spare:
    """A child that runs ``source`` with its end of the line as ``sock``."""
    ours, theirs = wire.socketpair()
    with theirs:
        os.set_inheritable(theirs.fileno(), True)
        program = (
            "import os, signal, socket, sys, time\nfrom closeranks import wire\n"
            f"sock = socket.socket(fileno={theirs.fileno()})\n{source}"
        )
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", program], os.environ)
    return Spare(ours, pid)


def in_world(body: Callable[[World, Listener], Awaitable[None]], *sources: str) -> None:
    async def main() -> None:
        listener = Listener()
        spares = [child(source) for source in sources]
        world = World(3, spares, listener, Placement(len(spares)))
        loop = asyncio.get_running_loop()
        for rank in world.ranks:
            rank.socket.setblocking(False)
            loop.add_reader(rank.socket, world._hear, rank)
        try:
            await body(world, listener)
        finally:
            world.kill()
            assert await world.wait_dead(10.0) == []
            world.close()

    before = len(list(Path("/proc/self/fd").iterdir()))
    asyncio.run(main())
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "descriptors are left"


def test_each_end_is_told_once_with_its_cause() -> None:
    async def body(world: World, listener: Listener) -> None:
        assert await world.wait_dead(20.0) == []
        assert sorted(listener.heard, key=lambda item: item[0]) == [
            (0, ExitStatus(code=0)), (1, ExitStatus(code=7)), (2, ExitStatus(signal=9)),
        ]  # fmt: skip
        now_ns = time.monotonic_ns()
        assert all(0 < now_ns - (rank.exit_mono_ns or 0) < 20e9 for rank in world.ranks)
        assert world.alive() == []

    in_world(body, "sys.exit(0)", "os._exit(7)", "os.kill(os.getpid(), 9)")


def test_last_words_are_heard_before_the_end() -> None:
    async def body(world: World, listener: Listener) -> None:
        await world.wait_dead(20.0)
        assert listener.heard == [(0, "progress"), (0, "raised"), (0, ExitStatus(code=1))]
        error = world.ranks[0].error
        assert error is not None and (error.type, error.step, error.message) == ("KeyError", 7, "'lr'")

    in_world(body, f"wire.send(sock, {{'type': 'progress'}}); wire.send(sock, {RAISED!r}); os._exit(1)")


def test_a_stopped_rank_is_killed_too() -> None:
    async def body(world: World, listener: Listener) -> None:
        async with asyncio.timeout(20):
            while (0, "ready") not in listener.heard:
                await asyncio.sleep(0.01)
        os.kill(world.ranks[0].pid, signal.SIGSTOP)
        assert await world.wait_dead(0.1) == world.ranks
        world.kill()
        assert await world.wait_dead(10.0) == []
        assert world.ranks[0].exit == ExitStatus(signal=9)

    in_world(body, "wire.send(sock, {'type': 'ready'}); time.sleep(600)")


@pytest.mark.parametrize(
    "packet",
    ["b'no json'", "b'[1]'", "b'{\"type\": 3}'", "bytes(200000)"],
    ids=["text", "list", "type", "big"],
)
def test_garbage_ends_listening_and_not_the_rank(packet: str) -> None:
    async def body(world: World, listener: Listener) -> None:
        await world.wait_dead(20.0)
        # What came after it is only read once more when the rank has ended.
        assert listener.heard == [(0, "before"), (0, "after"), (0, ExitStatus(code=0))]

    lines = [
        "wire.send(sock, {'type': 'before'})",
        f"sock.send({packet})",
        "wire.send(sock, {'type': 'after'})",
    ]
    in_world(body, "\n".join([*lines, "time.sleep(0.3)", "sys.exit(0)"]))


@pytest.mark.parametrize("error", [None, 7, {}, {**RAISED["error"], "step": "x"}])
def test_an_error_that_makes_no_sense_is_none(error: object) -> None:
    async def body(world: World, listener: Listener) -> None:
        await world.wait_dead(20.0)
        assert listener.heard[0] == (0, "raised") and world.ranks[0].error is None

    in_world(body, f"wire.send(sock, {{'type': 'raised', 'error': {error!r}}})")


def test_descriptors_that_a_rank_sends_are_closed() -> None:
    async def body(world: World, listener: Listener) -> None:
        await world.wait_dead(20.0)
        assert listener.heard[:20] == [(0, "gift")] * 20

    in_world(body, "[wire.send(sock, {'type': 'gift'}, [0, 1, 2]) for _ in range(20)]")


def test_a_rank_that_does_not_listen_is_not_waited_for() -> None:
    async def body(world: World, listener: Listener) -> None:
        rank = world.ranks[0]
        said = 0
        while rank.say({"type": "modules", "padding": "x" * 10_000}):
            said += 1
            assert said < 10_000
        rank.socket.shutdown(socket.SHUT_RDWR)
        assert not rank.say({"type": "modules"})

    in_world(body, "time.sleep(600)")


def test_a_signal_to_a_rank_that_is_gone_is_nothing() -> None:
    async def body(world: World, listener: Listener) -> None:
        await world.wait_dead(20.0)
        world.ranks[0].send_signal(signal.SIGUSR1)

    in_world(body, "sys.exit(0)")


def test_a_child_that_someone_else_reaped_has_ended_all_the_same() -> None:
    async def body(world: World, listener: Listener) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(world.ranks[0].pid, 0)
        await world.wait_dead(20.0)
        assert listener.heard == [(0, ExitStatus(code=255))]

    in_world(body, "sys.exit(0)")
