"""An agent's line to its controller, over a real channel: who holds a lease, until when, and who says so."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from closeranks.agent.node_link import NodeIdentity, NodeLink, split_endpoint
from closeranks.controller.channel import ChannelServer
from closeranks.controller.peer import Peer
from closeranks.linux import boot_id

SOON_S = 20.0
ME = NodeIdentity("job-1", "node-a", "s1", 4, "10.0.0.7")
KILL = {"type": "kill", "generation": 3}


class Clock:
    """The link's: it moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Owner:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.generation: int | None = None
        self.attachments = 0
        self.orders: list[Mapping[str, Any]] = []
        self.ends: list[str] = []
        self.reasons: list[str] = []

    def running(self) -> int | None:
        return self.generation

    def beat(self) -> Mapping[str, Any]:
        return {"generation": self.generation, "ranks": [[0, 1, 2, "train", False]], "progress": None}

    def attached(self) -> None:
        self.attachments += 1

    def obey(self, message: Mapping[str, Any]) -> None:
        self.orders.append(message)

    def lease_held(self, end_s: float) -> None:
        self.held_until_s = end_s

    def lease_over(self, why: str) -> None:
        self.ends.append(why)

    def turned_away(self, reason: str) -> None:
        self.reasons.append(reason)


class Controller:
    """Answers as it is set to. ``welcomes``: lets agents in; ``answers``: heartbeats."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.welcome = {"type": "welcome", "lease_s": 1.0, "beat_s": 0.02, "grace_s": 30.0}
        self.welcomes = True
        self.answers = True
        self.refusals: list[Mapping[str, Any]] = []
        self.hellos: list[Mapping[str, Any]] = []
        self.heard: list[Mapping[str, Any]] = []
        self.ended = 0
        self.peer: Peer | None = None
        self._server: ChannelServer | None = None

    async def start(self) -> None:
        self._server = ChannelServer(self.path, 0, None, self._on_peer)
        await self._server.__aenter__()

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.__aexit__(None, None, None)

    async def _on_peer(self, peer: Peer) -> None:
        self.peer = peer
        while (message := await peer.receive()) is not None:
            if message["type"] == "hello":
                self.hellos.append(message)
                if self.refusals:
                    peer.send(self.refusals.pop(0))
                    return
                if self.welcomes:
                    peer.send(self.welcome)
                continue
            self.heard.append(message)
            if message["type"] == "heartbeat" and self.answers:
                peer.send({"type": "heartbeat_ack", "seq": message["seq"]})
        self.ended += 1

    def let_in(self) -> None:
        assert self.peer is not None
        self.peer.send(self.welcome)

    def count(self, kind: str) -> int:
        return sum(message["type"] == kind for message in self.heard)


class Rig:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.clock, self.owner = Clock(), Owner()
        self.controller = Controller(folder / "channel")
        self.link = NodeLink(
            self.controller.path, None, ME, self.owner, uniform=lambda: 0.5, clock=self.clock, **options
        )
        self.running: asyncio.Task[None] | None = None

    async def attach(self) -> None:
        await self.controller.start()
        self.run()
        await soon(lambda: self.owner.attachments == 1)

    def run(self) -> None:
        self.running = asyncio.get_running_loop().create_task(self.link.run())

    async def answered_from(self, at_s: float) -> None:
        """Until a heartbeat of then or later has been answered."""
        await soon(lambda: self.link._lease_end_s >= at_s + self.controller.welcome["lease_s"])

    async def let_the_link_look(self) -> None:
        """It looks for the end of its lease twenty times in one."""
        await asyncio.sleep(0.3)

    async def close(self) -> None:
        await self.link.close("the test ends")
        if self.running is not None:
            self.running.cancel()
            await asyncio.wait([self.running])
        await self.controller.stop()


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.005)


def play(folder: Path, scene: Callable[[Rig], Awaitable[None]], **options: Any) -> Rig:
    """A scene, after which neither a task nor a descriptor may be left."""

    async def main() -> Rig:
        rig = Rig(folder, **options)
        files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, not files
        try:
            await scene(rig)
        finally:
            await rig.close()
        await soon(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208
        return rig

    return asyncio.run(main())


# --- attach -----------------------------------------------------------------------------------------


def test_it_says_who_it_is_and_beats_with_what_its_owner_tells(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        rig.owner.generation = 3
        await rig.attach()
        await soon(lambda: rig.controller.count("heartbeat") >= 3)

    controller = play(tmp_path, scene).controller
    (hello,) = controller.hellos
    said = {name: hello[name] for name in ("job", "node", "session", "slots", "address", "running", "boot")}
    assert said == {
        "job": "job-1", "node": "node-a", "session": "s1", "slots": 4, "address": "10.0.0.7", "running": 3,
        "boot": boot_id(),
    }  # fmt: skip
    beats = [message for message in controller.heard if message["type"] == "heartbeat"]
    assert [beat["seq"] for beat in beats[:3]] == [1, 2, 3]
    assert beats[0]["generation"] == 3 and beats[0]["ranks"] == [[0, 1, 2, "train", False]]
    assert beats[0]["mono_ns"] <= beats[1]["mono_ns"]


def test_orders_are_passed_on_and_facts_go_out(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        assert not rig.link.send({"type": "ready"}), "there is no line yet"
        await rig.attach()
        assert rig.link.send({"type": "ready"})
        rig.controller.peer.send(KILL)
        await soon(lambda: rig.owner.orders == [KILL] and rig.controller.count("ready") == 1)

    play(tmp_path, scene)


def test_nobody_is_obeyed_who_has_not_let_us_in(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        rig.controller.welcomes = False
        await rig.controller.start()
        rig.run()
        await soon(lambda: len(rig.controller.hellos) == 1)
        rig.controller.peer.send(KILL)
        rig.controller.let_in()
        await soon(lambda: rig.owner.attachments == 1)
        assert rig.owner.orders == []

    play(tmp_path, scene)


def test_what_can_t_wait_is_told_before_the_next_beat_is_due(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        rig.controller.welcome["beat_s"] = 600.0
        await rig.attach()
        await soon(lambda: rig.controller.count("heartbeat") == 1)
        rig.link.beat_now()
        await soon(lambda: rig.controller.count("heartbeat") == 2)

    play(tmp_path, scene)


def test_it_comes_back_to_a_controller_that_has_been_restarted(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.attach()
        await rig.controller.stop()
        rig.owner.generation = 5
        await rig.controller.start()
        await soon(lambda: rig.owner.attachments == 2)
        assert [hello["running"] for hello in rig.controller.hellos] == [None, 5]
        await rig.answered_from(rig.clock.now_s)
        assert rig.owner.ends == []

    play(tmp_path, scene)


def test_it_waits_for_a_controller_that_is_not_there_yet(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        rig.run()
        await asyncio.sleep(0.2)
        await rig.controller.start()
        await soon(lambda: rig.owner.attachments == 1)

    assert play(tmp_path, scene).owner.ends == [], "there was no lease that could end"


# --- turned away, and goodbye -----------------------------------------------------------------------


def test_who_is_refused_for_good_is_told_why(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        rig.controller.refusals = [{"type": "refused", "reason": "not yours", "for_good": True}]
        await rig.controller.start()
        rig.run()
        await soon(lambda: rig.owner.reasons == ["not yours"])

    assert play(tmp_path, scene).owner.attachments == 0


def test_who_is_refused_for_now_tries_again(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        rig.controller.refusals = [{"type": "refused", "reason": "not now", "for_good": False}] * 2
        await rig.attach()

    rig = play(tmp_path, scene)
    assert rig.owner.reasons == [] and len(rig.controller.hellos) == 3


def test_it_says_goodbye_and_why(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.attach()
        await rig.link.close("the job needs it no more")
        await soon(lambda: rig.controller.ended == 1)
        assert rig.running is not None
        await asyncio.wait_for(rig.running, SOON_S)

    last = play(tmp_path, scene).controller.heard[-1]
    assert last == {"type": "goodbye", "reason": "the job needs it no more"}


def test_it_can_be_closed_where_nobody_ever_listened(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        rig.run()
        await asyncio.sleep(0.1)
        await rig.link.close("never mind")
        assert rig.running is not None
        await asyncio.wait_for(rig.running, SOON_S)

    play(tmp_path, scene)


# --- the lease --------------------------------------------------------------------------------------


def test_there_is_no_lease_before_the_welcome(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        rig.controller.welcomes = False
        await rig.controller.start()
        rig.run()
        await soon(lambda: len(rig.controller.hellos) == 1)
        assert not rig.link.holds_lease
        rig.controller.let_in()
        await soon(lambda: rig.link.holds_lease)

    play(tmp_path, scene)


def test_the_lease_counts_from_when_the_hello_was_sent_not_from_when_it_was_answered(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        rig.controller.welcomes = rig.controller.answers = False
        await rig.controller.start()
        rig.run()
        await soon(lambda: len(rig.controller.hellos) == 1)
        rig.clock.now_s += 0.75
        rig.controller.let_in()
        await soon(lambda: rig.owner.attachments == 1)
        rig.clock.now_s += 0.2
        assert rig.link.holds_lease
        rig.clock.now_s += 0.1
        assert not rig.link.holds_lease

    play(tmp_path, scene)


def test_the_lease_counts_from_when_the_answered_heartbeat_was_sent(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        rig.controller.answers = False
        rig.controller.welcome["beat_s"] = 600.0
        await rig.attach()
        rig.clock.now_s += 0.5
        rig.link.beat_now()
        await soon(lambda: rig.controller.count("heartbeat") == 2)
        rig.clock.now_s += 0.4
        rig.controller.peer.send({"type": "heartbeat_ack", "seq": 2})
        await rig.answered_from(1000.5)
        assert rig.link._lease_end_s == 1001.5, "not 1001.9, when the answer came"

    play(tmp_path, scene)


@pytest.mark.parametrize("seq", [0, 7, 2**62])
def test_an_answer_to_what_was_never_sent_renews_nothing(tmp_path: Path, seq: int) -> None:
    async def scene(rig: Rig) -> None:
        rig.controller.answers = False
        rig.controller.welcome["beat_s"] = 600.0
        await rig.attach()
        rig.clock.now_s += 0.5
        rig.controller.peer.send({"type": "heartbeat_ack", "seq": seq})
        rig.controller.peer.send(KILL)
        await soon(lambda: rig.owner.orders == [KILL])
        assert rig.link._lease_end_s == 1001.0

    play(tmp_path, scene)


def test_answers_keep_the_lease_for_as_long_as_they_come(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.attach()
        for _ in range(8):
            rig.clock.now_s += 0.6
            await rig.answered_from(rig.clock.now_s)
            await asyncio.sleep(0.05)

    assert play(tmp_path, scene).owner.ends == []


def test_where_answers_stop_the_lease_ends_once_and_not_too_soon(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.attach()
        await rig.answered_from(rig.clock.now_s)
        rig.controller.answers = False
        rig.clock.now_s += 0.99
        await rig.let_the_link_look()
        assert rig.link.holds_lease and rig.owner.ends == []
        rig.clock.now_s += 0.01
        await soon(lambda: len(rig.owner.ends) == 1)
        rig.clock.now_s += 100.0
        await rig.let_the_link_look()
        assert not rig.link.holds_lease and len(rig.owner.ends) == 1

    play(tmp_path, scene)


def test_a_lease_that_was_renewed_can_end_again(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.attach()
        for count in (1, 2):
            await rig.let_the_link_look()
            rig.controller.answers = False
            rig.clock.now_s += 5.0
            await soon(lambda count=count: len(rig.owner.ends) == count)
            rig.controller.answers = True
            await soon(lambda: rig.link.holds_lease)

    assert len(play(tmp_path, scene).owner.ends) == 2


def test_a_lease_that_begins_and_ends_between_two_looks_is_told_to_be_over(tmp_path: Path) -> None:
    """As where the process is stopped just after it was let in, with an order to start taken."""

    async def scene(rig: Rig) -> None:
        rig.controller.answers = False
        rig.controller.welcome["lease_s"] = 10.0  # it looks every half second
        await rig.attach()
        await asyncio.sleep(1.0)
        rig.clock.now_s += 50.0
        await soon(lambda: len(rig.owner.ends) == 1)
        rig.link.beat_now()
        before = rig.controller.count("heartbeat")
        await soon(lambda: rig.controller.count("heartbeat") > before)
        rig.controller.peer.send({"type": "heartbeat_ack", "seq": rig.controller.heard[-1]["seq"]})
        await soon(lambda: rig.link.holds_lease)
        rig.clock.now_s += 50.0  # before it has looked again
        await asyncio.sleep(1.0)
        assert len(rig.owner.ends) == 2

    play(tmp_path, scene)


# --- the controller is gone, and its host says so ---------------------------------------------------


def test_while_nobody_listens_ranks_go_on_for_the_grace_and_no_longer(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.attach()
        await rig.controller.stop()
        await soon(lambda: rig.link._alone_until_s is not None)
        rig.clock.now_s += 29.0
        await rig.let_the_link_look()
        assert rig.link.holds_lease and rig.owner.ends == []
        rig.clock.now_s += 1.0
        await soon(lambda: len(rig.owner.ends) == 1)
        assert not rig.link.holds_lease

    play(tmp_path, scene)


def test_behind_a_proxy_a_refusal_proves_nothing(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.attach()
        await rig.controller.stop()
        await asyncio.sleep(0.2)
        rig.clock.now_s += 1.0
        await soon(lambda: len(rig.owner.ends) == 1)

    play(tmp_path, scene, refusals_count=False)


def test_silence_is_no_refusal(tmp_path: Path) -> None:
    """Somebody is there, and may decide: it lets nobody in."""

    async def scene(rig: Rig) -> None:
        await rig.attach()
        await rig.controller.stop()
        rig.controller.welcomes = False
        await rig.controller.start()
        await soon(lambda: len(rig.controller.hellos) == 2)
        rig.clock.now_s += 31.0
        await soon(lambda: len(rig.owner.ends) == 1)

    play(tmp_path, scene)


def test_the_grace_lasts_until_the_controller_that_came_back_has_let_us_in(tmp_path: Path) -> None:
    """It may take its time with thousands of agents, and counts nobody as lost for as long as the grace."""

    async def scene(rig: Rig) -> None:
        await rig.attach()
        await rig.controller.stop()
        await soon(lambda: rig.link._alone_until_s is not None)
        rig.clock.now_s += 10.0
        rig.controller.welcomes = False
        await rig.controller.start()
        await soon(lambda: len(rig.controller.hellos) == 2)
        await rig.let_the_link_look()
        rig.controller.let_in()
        await soon(lambda: rig.owner.attachments == 2)
        assert rig.owner.ends == []

    play(tmp_path, scene)


def test_a_refusal_gives_no_lease_back_that_was_over(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.attach()
        await rig.let_the_link_look()
        rig.controller.answers = False
        rig.clock.now_s += 5.0
        await soon(lambda: len(rig.owner.ends) == 1)
        await rig.controller.stop()
        await asyncio.sleep(0.3)
        assert not rig.link.holds_lease

    play(tmp_path, scene)


# --- endpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "where"),
    [
        ("10.0.0.1:4711", ("10.0.0.1", 4711)),
        ("[fe80::1]:1", ("fe80::1", 1)),
        ("head.example.org:65535", ("head.example.org", 65535)),
        ("/run/job/channel", ("/run/job/channel", 0)),
        ("/odd:1", ("/odd:1", 0)),
    ],
)
def test_an_endpoint_is_a_host_and_a_port_or_a_path(endpoint: str, where: tuple[str, int]) -> None:
    assert split_endpoint(endpoint) == where


@pytest.mark.parametrize(
    "endpoint", ["", "host", "host:", ":1", "host:0", "host:65536", "host:-1", "h:1.5", "rel/a"]
)
def test_anything_else_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="neither HOST:PORT nor"):
        split_endpoint(endpoint)
