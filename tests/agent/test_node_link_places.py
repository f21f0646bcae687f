"""A line to several controllers: who of them is asked next, and what a refusal proves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from closeranks.agent.node_link import NodeIdentity, NodeLink
from closeranks.controller.channel import ChannelServer
from closeranks.controller.peer import Peer

JOB = "20261201-042655-train-a1b2"


class Owner:
    """Has ranks that run, until it is told that its lease is over."""

    def __init__(self) -> None:
        self.attachments = 0
        self.fenced: list[str] = []
        self.orders: list[Mapping[str, Any]] = []

    def running(self) -> int | None:
        return None if self.fenced else 0

    def beat(self) -> Mapping[str, Any]:
        return {"generation": None, "ranks": [], "progress": None}

    def attached(self) -> None:
        self.attachments += 1

    def obey(self, message: Mapping[str, Any]) -> None:
        self.orders.append(message)

    def lease_held(self, end_s: float) -> None: ...

    def lease_over(self, why: str) -> None:
        self.fenced.append(why)

    def turned_away(self, reason: str) -> None: ...


class Controller:
    """Lets everybody in, and answers heartbeats while it isn't ``mute``."""

    def __init__(self, path: Path, *, term: int | None, grace_s: float = 3.0, lease_s: float = 1.0) -> None:
        self.mute = False
        self.hellos = 0
        self.peers: list[Peer] = []
        self._welcome = {"lease_s": lease_s, "beat_s": 0.1, "grace_s": grace_s, "term": term}
        self._server = ChannelServer(str(path), 0, None, self._serve)

    async def __aenter__(self) -> Controller:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._server.__aexit__(*exception)

    async def _serve(self, peer: Peer) -> None:
        while (message := await peer.receive()) is not None:
            if message["type"] == "hello":
                self.hellos += 1
                self.peers.append(peer)
                peer.send({"type": "welcome", **self._welcome})
            elif message["type"] == "heartbeat" and not self.mute:
                peer.send({"type": "heartbeat_ack", "seq": message["seq"]})


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def attached(owner: Owner, *paths: Path, **options: Any) -> tuple[NodeLink, asyncio.Task[None]]:
    endpoint = ",".join(map(str, paths))
    link = NodeLink(endpoint, None, NodeIdentity(JOB, "a", "s1", 1), owner, uniform=lambda: 0.5, **options)
    running = asyncio.create_task(link.run())
    await until(lambda: owner.attachments == 1)
    return link, running


async def ended(link: NodeLink, running: asyncio.Task[None]) -> None:
    await link.close("the test is over")
    running.cancel()
    await asyncio.wait([running])


def test_ranks_outlive_whom_their_lease_is_from_and_find_the_next(tmp_path):
    async def main() -> None:
        owner = Owner()
        a, b = tmp_path / "a", tmp_path / "b"
        async with Controller(b, term=None) as first:
            link, running = await attached(owner, a, b)
        assert first.hellos == 1
        await asyncio.sleep(1.6)  # longer than the lease
        assert not owner.fenced and link.holds_lease
        async with Controller(a, term=7) as second:
            await until(lambda: second.hellos == 1 and owner.attachments == 2)
            await asyncio.sleep(0.3)
            assert not owner.fenced and link.holds_lease
            await ended(link, running)

    asyncio.run(main())


def test_the_grace_counts_from_the_last_answer(tmp_path):
    async def main() -> None:
        owner, clock = Owner(), asyncio.get_running_loop().time
        async with Controller(tmp_path / "a", term=1, grace_s=2.0) as first:
            link, running = await attached(owner, tmp_path / "a", tmp_path / "b")
            first.mute = True
            muted_s = clock()
            await asyncio.sleep(0.6)
        await until(lambda: bool(owner.fenced))
        assert 1.7 < clock() - muted_s < 2.3
        await ended(link, running)

    asyncio.run(main())


def test_a_refusal_of_another_one_proves_nothing(tmp_path):
    """The leader is silent, its standby isn't there: ranks end with their lease."""

    async def main() -> None:
        owner, clock = Owner(), asyncio.get_running_loop().time
        async with Controller(tmp_path / "a", term=1, grace_s=30.0, lease_s=2.0) as first:
            link, running = await attached(owner, tmp_path / "a", tmp_path / "b")
            first.mute = True
            first._welcome = {"lease_s": 0.0, "beat_s": 0.1, "grace_s": 30.0, "term": 1}
            muted_s = clock()
            await until(lambda: bool(owner.fenced))
            assert clock() - muted_s < 2.5
            await ended(link, running)

    asyncio.run(main())


def test_where_refusals_prove_nothing_the_lease_is_all_there_is(tmp_path):
    async def main() -> None:
        owner, clock = Owner(), asyncio.get_running_loop().time
        async with Controller(tmp_path / "a", term=1, grace_s=30.0):
            link, running = await attached(owner, tmp_path / "a", tmp_path / "b", refusals_count=False)
        gone_s = clock()
        await until(lambda: bool(owner.fenced))
        assert clock() - gone_s < 1.5
        await ended(link, running)

    asyncio.run(main())


def test_a_silent_one_is_left_for_the_next(tmp_path):
    async def main() -> None:
        owner = Owner()
        async with (
            Controller(tmp_path / "a", term=1, lease_s=4.0) as first,
            Controller(tmp_path / "b", term=2) as second,
        ):
            link, running = await attached(owner, tmp_path / "a", tmp_path / "b")
            assert second.hellos == 0
            first.mute = True
            await until(lambda: second.hellos == 1, 3.5)
            assert not owner.fenced
            await ended(link, running)

    asyncio.run(main())


def test_one_of_an_older_term_is_not_listened_to(tmp_path):
    async def main() -> None:
        owner = Owner()
        async with Controller(tmp_path / "a", term=4) as old, Controller(tmp_path / "b", term=9) as new:
            link, running = await attached(owner, tmp_path / "b", tmp_path / "a")
            new.peers[-1].close("back soon")
            await new._server.__aexit__(None, None, None)
            await until(lambda: old.hellos >= 1)
            await asyncio.sleep(0.2)
            assert owner.attachments == 1
            assert not link.send({"type": "ready"})
            async with Controller(tmp_path / "b", term=9) as again:
                await until(lambda: again.hellos == 1 and owner.attachments == 2)
                await ended(link, running)
            new._server = ChannelServer(str(tmp_path / "c"), 0, None, new._serve)
            await new.__aenter__()

    asyncio.run(main())
