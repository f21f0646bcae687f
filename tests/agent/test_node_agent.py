"""An agent's obedience and its disobedience: each generation starts once, and none without a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from closeranks.agent import node_agent
from closeranks.agent.node_agent import Attachment, NodeAgent
from closeranks.agent.node_link import NodeIdentity
from closeranks.cli.flags import parse_run
from closeranks.errors import ZygoteError
from closeranks.events import Action, StartGeneration
from closeranks.messages import check
from closeranks.progress import Phase

START = {
    "type": "start", "node_rank": 1, "first_rank": 2, "ranks": 2, "world_size": 6, "node_count": 3,
    "store": "tcp://a:1", "delay_s": 0.0,
}  # fmt: skip


class FakeLink:
    """Attached, with a lease, until it is told otherwise. ``sent``: what went out."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.holds_lease = True
        self.address = "10.0.0.7"
        self.sent: list[Mapping[str, Any]] = []
        self.beats = 0

    def send(self, message: Mapping[str, Any]) -> bool:
        check(message)
        self.sent.append(message)
        return True

    def beat_now(self) -> None:
        self.beats += 1


class FakeRank:
    def __init__(self, number: int) -> None:
        self.rank = number
        self.told: list[Mapping[str, Any]] = []
        self.page = SimpleNamespace(
            checkpoints=0, checkpoint_step=0, held=False, phase=Phase.TRAIN, progress_steps=0, ticks=1,
            in_collective=False, absolute_step=None, init_done=True,
        )  # fmt: skip

    def say(self, message: Mapping[str, Any]) -> None:
        self.told.append(message)


class FakeWorld:
    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.ranks = [FakeRank(2), FakeRank(3)]
        self.failing = False
        self.killed = False

    def alive(self) -> list[FakeRank]:
        return [] if self.killed else self.ranks

    def page(self, rank: FakeRank, *, rings: bool = True) -> Any:
        return rank.page

    def kill(self) -> None:
        self.killed = True

    async def wait_dead(self, timeout_s: float) -> list[FakeRank]:
        return []


class FakeSlots:
    ready = True
    problem: Exception | None = None

    def speak_to(self, notice: Callable[[str], None]) -> None:
        pass

    def pids(self) -> set[int]:
        return set()

    async def extra(self) -> Any:
        if self.problem is not None:
            raise self.problem
        return SimpleNamespace(close=lambda: None)


class FakeConsole:
    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, level: str, text: str) -> None:
        self.told.append(text)

    def internal_error(self, error: BaseException) -> None:
        raise error


class Agent(NodeAgent):
    """``carried``: what it would have done to its ranks."""

    carried: list[Action]

    def _carry_out(self, action: Action) -> None:
        self.carried.append(action)
        if isinstance(action, StartGeneration):
            self.world = FakeWorld(action.generation)  # type: ignore[assignment]

    def said(self, kind: str) -> list[Mapping[str, Any]]:
        return [message for message in self.link.sent if message["type"] == kind]  # type: ignore[attr-defined]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    monkeypatch.setattr(node_agent, "NodeLink", FakeLink)

    def run(scene: Callable[[Agent], Awaitable[None]]) -> None:
        async def main() -> None:
            Agent.carried = []
            agent = Agent(
                Attachment("/c", None, NodeIdentity("job-1", "n1", "s1", 2)),
                config=parse_run(["--engine", "local", "t.py"], {}),
                run_dir=tmp_path,
                store_dir=tmp_path,
                world_size=2,
                slots=FakeSlots(),
                pump=SimpleNamespace(pid=0),
                console=FakeConsole(),
                guard_pid=1,
                node="n1",
                file_limit=1024,
            )
            agent._strays = SimpleNamespace(kill=_nothing_to_kill)  # type: ignore[assignment]
            await scene(agent)
            await settled(agent)

        asyncio.run(main())

    return run


async def _nothing_to_kill(_: object) -> list[int]:
    return []


async def settled(agent: Agent) -> None:
    async with asyncio.timeout(10):
        while agent._tasks:
            await asyncio.gather(*agent._tasks)


Play = Callable[[Callable[[Agent], Awaitable[None]]], None]


def start(agent: Agent, generation: int, **changes: Any) -> None:
    agent.obey({**START, "generation": generation, **changes})


def starts(agent: Agent) -> list[int]:
    return [action.generation for action in agent.carried if isinstance(action, StartGeneration)]


# --- starts -----------------------------------------------------------------------------------------


def test_an_order_to_start_places_the_ranks_as_it_says(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        start(agent, 4, delay_s=1.5)
        assert agent.carried == [StartGeneration(4, 1.5)]
        place = agent.placement
        assert (place.world_size, place.first_rank, place.node_rank, place.node_count) == (6, 2, 1, 3)
        assert place.store == "tcp://a:1" and agent.world_size == 6
        assert agent.running() == 4

    play(scene)


def test_each_generation_starts_once_and_none_older_than_the_newest(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        for generation in (4, 4, 3, 5, 4):
            start(agent, generation)
        assert starts(agent) == [4, 5]
        assert {message["generation"] for message in agent.said("down")} == {3, 4}
        assert [message["generation"] for message in agent.said("started")] == [4], "it was told again"

    play(scene)


def test_without_a_lease_nothing_starts_and_with_one_again_it_does(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        agent.link.holds_lease = False
        start(agent, 4)
        assert starts(agent) == []
        agent.link.holds_lease = True
        start(agent, 4)
        assert starts(agent) == [4]

    play(scene)


@pytest.mark.parametrize("order", [{"type": "kill"}, {"type": "stop", "signal": 15}])
def test_what_was_to_end_before_it_began_never_begins(play: Play, order: Mapping[str, Any]) -> None:
    async def scene(agent: Agent) -> None:
        agent.obey({**order, "generation": 4})
        await settled(agent)
        assert agent.said("down")[-1]["generation"] == 4
        start(agent, 4)
        start(agent, 3)
        assert starts(agent) == [] and agent.is_unwanted(4) and not agent.is_unwanted(5)
        start(agent, 5)
        assert starts(agent) == [5]

    play(scene)


def test_a_kill_ends_the_ranks_and_says_so(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        start(agent, 4)
        world = agent.world
        agent.obey({"type": "kill", "generation": 4})
        await settled(agent)
        assert world.killed and agent.said("down") == [{"type": "down", "generation": 4}]
        assert agent.running() is None

    play(scene)


def test_a_kill_of_an_older_generation_leaves_the_newer_alone(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        start(agent, 4)
        agent.obey({"type": "kill", "generation": 3})
        await settled(agent)
        assert not agent.world.killed and agent.said("down") == [{"type": "down", "generation": 3}]

    play(scene)


def test_ranks_that_can_t_be_started_are_told_and_end_no_job(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        start(agent, 4)
        agent.cannot_start(4, ZygoteError("no memory"))
        assert agent.finish is None
        (broke,) = agent.said("broke")
        assert (broke["generation"], broke["reason"]) == (4, "no memory")

    play(scene)


# --- the lease is over ------------------------------------------------------------------------------


def test_when_the_lease_is_over_everything_dies_at_once_and_comes_back_by_a_new_order_alone(
    play: Play,
) -> None:
    async def scene(agent: Agent) -> None:
        start(agent, 4)
        world = agent.world
        agent.lease_over("silence")
        assert world.killed, "before anything else gets its turn"
        await settled(agent)
        assert agent.is_unwanted(4)
        start(agent, 4)
        assert starts(agent) == [4]
        start(agent, 5)
        assert starts(agent) == [4, 5]
        assert any("fenced: silence" in text for text in agent.console.told)

    play(scene)


def test_a_delayed_start_does_not_outlive_the_lease(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        start(agent, 4)
        agent.world = None  # it waits for its delay
        agent.lease_over("silence")
        assert agent.is_unwanted(4)

    play(scene)


def test_without_ranks_the_end_of_a_lease_is_no_news(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        agent.lease_over("silence")
        assert agent.console.told == [] and agent.finish is None
        start(agent, 0)
        assert starts(agent) == [0]

    play(scene)


# --- leaving ----------------------------------------------------------------------------------------


def test_a_signal_is_a_wish_to_leave_and_the_second_one_an_order(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        agent.stop_requested("SIGTERM received", 15)
        (leaving,) = agent.said("leaving")
        assert leaving["deadline_s"] == agent.config.cluster.leave_deadline_s
        assert agent.finish is None
        agent.attached()
        assert len(agent.said("leaving")) == 2, "who attaches again says it again"
        agent.stop_requested("SIGTERM received", 15)
        assert agent.finish is not None and agent.finish.exit_code == 143

    play(scene)


def test_without_a_lease_there_is_nobody_to_ask(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        agent.link.holds_lease = False
        agent.stop_requested("SIGTERM received", 15)
        assert agent.finish is not None and agent.finish.exit_code == 143

    play(scene)


def test_it_ends_as_it_is_told_or_when_it_is_not_wanted(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        agent.obey({"type": "finish", "exit_code": 0, "reason": "all done"})
        agent.turned_away("too late")
        assert agent.finish is not None and (agent.finish.exit_code, agent.finish.reason) == (0, "all done")

    play(scene)


# --- what else it is asked --------------------------------------------------------------------------


def test_who_attaches_says_again_what_may_be_lost_and_that_it_is_ready(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        start(agent, 4)
        agent.dispatch(node_agent.GenerationStarted(4))
        agent.link.sent.clear()
        agent.attached()
        await settled(agent)
        assert [message["type"] for message in agent.link.sent] == ["started", "ready"]

    play(scene)


@pytest.mark.parametrize("problem", [None, ZygoteError("no memory"), OSError("no descriptors")])
def test_a_health_check_is_answered_under_its_number(play: Play, problem: Exception | None) -> None:
    async def scene(agent: Agent) -> None:
        agent.slots.problem = problem
        agent.obey({"type": "health_check", "check": 7, "reason": "it was lost"})
        await settled(agent)
        (health,) = agent.said("health")
        assert (health["check"], health["ok"]) == (7, problem is None)
        assert health["reason"] == (str(problem) if problem else "workers start, files can be written")
        assert not list(agent.run_dir.glob(".health*"))

    play(scene)


def test_a_store_of_a_generation_that_is_over_is_not_opened(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        agent.obey({"type": "kill", "generation": 4})
        agent.obey({"type": "store_open", "generation": 4})
        await settled(agent)
        assert agent.said("store_lost") == [{"type": "store_lost", "generation": 4}]

    play(scene)


def test_a_store_that_can_t_be_opened_is_said_to_be_lost(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        agent.slots.problem = ZygoteError("no memory")
        agent.obey({"type": "store_open", "generation": 4})
        await settled(agent)
        assert agent.said("store_lost") == [{"type": "store_lost", "generation": 4}]
        assert any("no memory" in text for text in agent.console.told)

    play(scene)


def test_a_fault_that_makes_no_sense_is_answered_too(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        agent.obey({"type": "inject", "id": "x1", "spec": "kil"})
        await settled(agent)
        (injected,) = agent.said("injected")
        assert injected["id"] == "x1" and not injected["reply"]["ok"]

    play(scene)


def test_a_heartbeat_tells_of_the_slowest_rank(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        assert agent.beat() == {"generation": None, "ranks": [], "progress": None}
        start(agent, 4)
        slow, quick = agent.world.ranks
        slow.page.progress_steps, quick.page.progress_steps = 3, 5
        quick.page.checkpoints, quick.page.checkpoint_step = 2, 4
        beat = agent.beat()
        assert beat["ranks"] == [(2, 3, 1, "train", False), (3, 5, 1, "train", False)]
        assert beat["progress"] == (3, -1, 2, 4, True)
        check({"type": "heartbeat", "seq": 0, "mono_ns": 0, **beat})
        slow.page = None
        assert agent.beat()["progress"] is None, "of one rank nothing is known"

    play(scene)


# --- making way -------------------------------------------------------------------------------------


async def prepared(agent: Agent, within_s: float = 10.0) -> Mapping[str, Any]:
    async with asyncio.timeout(within_s):
        while not agent.said("prepared"):
            await asyncio.sleep(0.005)
    return agent.said("prepared")[-1]


def prepare(agent: Agent, deadline_s: float = 30.0, *, last_call: bool = False) -> None:
    agent.obey({"type": "prepare", "generation": 4, "deadline_s": deadline_s, "last_call": last_call})


def test_it_is_prepared_once_what_was_saved_waits_at_its_next_step(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        start(agent, 4)
        saver, other = agent.world.ranks
        saver.page.checkpoints = 1
        prepare(agent)
        await asyncio.sleep(0.05)
        assert [rank.told for rank in (saver, other)] == [[{"type": "hold", "hold_s": 30.0}]] * 2
        saver.page.checkpoints = 2
        await asyncio.sleep(0.1)
        assert agent.said("prepared") == [], "the file may not be renamed yet"
        saver.page.held = True
        assert (await prepared(agent))["saves"] == 2

    play(scene)


def test_nobody_waits_for_long_for_a_script_without_steps(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "_HOLD_PATIENCE_S", 0.2)

    async def scene(agent: Agent) -> None:
        start(agent, 4)
        prepare(agent)
        await asyncio.sleep(0.05)
        agent.world.ranks[0].page.checkpoints = 1
        assert (await prepared(agent))["saves"] == 1

    play(scene)


def test_at_the_deadline_it_is_as_prepared_as_it_will_be(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        start(agent, 4)
        prepare(agent, 0.2)
        assert (await prepared(agent))["saves"] == 0

    play(scene)


def test_at_the_last_call_who_isn_t_saving_does_not_wait(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        start(agent, 4)
        prepare(agent)
        prepare(agent, last_call=True)
        assert (await prepared(agent))["saves"] == 0

    play(scene)


def test_at_the_last_call_a_save_that_has_begun_is_finished(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        start(agent, 4)
        page = agent.world.ranks[0].page
        prepare(agent)
        await asyncio.sleep(0.05)
        page.phase = Phase.CHECKPOINT
        prepare(agent, last_call=True)
        await asyncio.sleep(0.2)
        assert agent.said("prepared") == []
        page.phase, page.checkpoints, page.held = Phase.TRAIN, 1, True
        assert (await prepared(agent))["saves"] == 1

    play(scene)


def test_a_last_call_right_after_the_first_word_still_holds_the_ranks(play: Play) -> None:
    """Both may come in one packet."""

    async def scene(agent: Agent) -> None:
        start(agent, 4)
        rank = agent.world.ranks[0]
        rank.page.phase = Phase.CHECKPOINT
        prepare(agent)
        prepare(agent, last_call=True)
        await asyncio.sleep(0.1)
        rank.page.phase, rank.page.checkpoints, rank.page.held = Phase.TRAIN, 1, True
        assert (await prepared(agent))["saves"] == 1
        assert rank.told == [{"type": "hold", "hold_s": 30.0}]

    play(scene)


def test_an_end_ends_the_wait(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        start(agent, 4)
        prepare(agent)
        agent.obey({"type": "kill", "generation": 4})
        await settled(agent)
        await asyncio.sleep(0.1)
        assert agent.said("prepared") == []

    play(scene)


def test_another_generation_is_not_prepared(play: Play) -> None:
    async def scene(agent: Agent) -> None:
        start(agent, 5)
        prepare(agent, 0.0)
        await asyncio.sleep(0.1)
        assert agent.said("prepared") == [] and agent.world.ranks[0].told == []

    play(scene)
