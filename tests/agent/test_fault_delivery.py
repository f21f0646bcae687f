"""Injected faults on their way: real clocks and real processes, a world without training in it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from closeranks.agent import faults
from closeranks.agent.faults import FaultDelivery
from closeranks.errors import UsageError
from closeranks.faults import parse_spec


@dataclass
class FakeRank:
    """A rank that notes what it is told; ``process`` takes its signals."""

    rank: int
    process: subprocess.Popen[bytes] | None = None
    deaf: bool = False
    said: list[dict[str, Any]] = field(default_factory=list)

    def say(self, message: dict[str, Any]) -> bool:
        if not self.deaf:
            self.said.append(message)
        return not self.deaf

    def send_signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)


@dataclass
class FakeWorld:
    generation: int
    ranks: list[FakeRank]
    fired_bits: dict[int, int] = field(default_factory=dict)

    def alive(self) -> list[FakeRank]:
        return self.ranks

    def rank(self, number: int) -> FakeRank | None:
        return self.ranks[number] if number < len(self.ranks) else None

    def page(self, rank: FakeRank, *, rings: bool = True) -> Any:
        return SimpleNamespace(faults_fired=self.fired_bits.get(rank.rank, 0), step=7)


@dataclass
class Owner:
    """What the supervisor is to the faults: the world, a journal, the terminal."""

    world: Any
    noted: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def controller(self) -> Any:
        return SimpleNamespace(
            note=lambda kind, data, *, generation: self.noted.append({"kind": kind, **data})
        )

    def notice(self, text: str) -> None:
        self.notices.append(text)


@pytest.fixture
def owner() -> Iterator[Owner]:
    sleeping = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    yield Owner(FakeWorld(0, [FakeRank(n, process) for n, process in enumerate(sleeping)]))
    for process in sleeping:
        process.kill()
        process.wait()


def in_loop(body: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await body()

    return asyncio.run(main())


def test_a_planned_fault_goes_to_its_rank_in_its_generation_only(owner: Owner) -> None:
    delivery = FaultDelivery(
        ["skip:rank=1,step=5", "segv:rank=0,generation=2", "exit:rank=1,gen=any"], 2, owner
    )
    specs = {
        (generation, rank): [order["spec"] for order in delivery.orders(generation, rank)]
        for generation in (0, 1, 2)
        for rank in (0, 1)
    }
    everywhere = "exit:rank=1,generation=any"
    assert specs == {
        (0, 0): [], (0, 1): ["skip:rank=1,step=5", everywhere],
        (1, 0): [], (1, 1): [everywhere],
        (2, 0): ["segv:rank=0,generation=2"], (2, 1): [everywhere],
    }  # fmt: skip


def test_a_rank_that_is_not_there_is_refused_at_the_start_and_later(owner: Owner) -> None:
    with pytest.raises(UsageError, match=r"there is no rank 2: ranks are 0 to 1"):
        FaultDelivery(["kill:rank=2"], 2, owner)
    delivery = FaultDelivery([], 2, owner)
    answer = in_loop(lambda: delivery.inject(parse_spec("kill:rank=5")))
    assert answer == {"ok": False, "error": "there is no rank 5: ranks are 0 to 1"}


def test_a_kill_from_outside_is_done_when_it_is_answered(owner: Owner) -> None:
    delivery = FaultDelivery([], 2, owner)
    answer = in_loop(lambda: delivery.inject(parse_spec("kill:rank=1")))
    assert answer["ok"] and answer["fired"] and answer["waits_for"] == ""
    assert (answer["rank"], answer["generation"], answer["spec"]) == (1, 0, "kill:rank=1")
    assert owner.world.ranks[1].process.wait(5) == -9
    assert owner.world.ranks[0].process.poll() is None
    assert [note["kind"] for note in owner.noted] == ["fault_injected"]
    assert delivery.fired_in(0) == ("kill:rank=1",) and delivery.fired_in(1) == ()


def test_a_fault_that_a_rank_carries_out_is_answered_when_it_says_so(owner: Owner) -> None:
    delivery = FaultDelivery([], 2, owner)

    async def body() -> dict[str, Any]:
        asking = asyncio.ensure_future(delivery.inject(parse_spec("exception:rank=0")))
        while not owner.world.ranks[0].said:
            await asyncio.sleep(0.001)
        (told,) = owner.world.ranks[0].said
        assert told["type"] == "fault" and told["spec"] == "exception:rank=0"
        delivery.fired(owner.world, owner.world.ranks[0], {"id": told["id"], "step": 12})
        return await asking

    began = time.monotonic()
    answer = in_loop(body)
    assert answer["fired"] and time.monotonic() - began < faults._FIRE_TIMEOUT_S
    assert owner.noted[0]["step"] == 12


@pytest.mark.parametrize(
    ("spec", "waits_for"),
    [
        ("kill:rank=0,step=500", "500 completed steps of this generation"),
        ("kill:rank=0,after=90s", "90 s to pass"),
        ("skip:rank=0", "the rank's next collective on the default group from Python"),
        ("exception:rank=0", "the rank's next sign of progress"),
    ],
)
def test_what_is_not_due_says_what_it_waits_for(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, spec: str, waits_for: str
) -> None:
    monkeypatch.setattr(faults, "_FIRE_TIMEOUT_S", 0.05)
    delivery = FaultDelivery([], 2, owner)
    answer = in_loop(lambda: delivery.inject(parse_spec(spec)))
    assert (answer["ok"], answer["fired"], answer["waits_for"]) == (True, False, waits_for)


def test_a_rank_that_takes_no_requests_is_said(owner: Owner) -> None:
    owner.world.ranks[0].deaf = True
    delivery = FaultDelivery([], 2, owner)
    answer = in_loop(lambda: delivery.inject(parse_spec("exception:rank=0")))
    assert not answer["ok"] and "rank 0 doesn't take requests" in answer["error"]
    delivery.close()
    assert owner.notices == [], "what was refused is not missed"


def test_a_live_fault_ends_with_its_generation_aloud(owner: Owner) -> None:
    delivery = FaultDelivery([], 2, owner)
    in_loop(lambda: delivery.inject(parse_spec("exception:rank=0,step=500")))
    delivery.collect(owner.world)
    assert owner.notices == [
        "injected fault did not happen before the ranks ended: exception:rank=0,step=500"
    ]
    assert delivery.orders(1, 0) == []
    delivery.close()
    assert len(owner.notices) == 1


def test_the_mark_of_a_rank_that_died_of_it_is_found_on_its_page(owner: Owner) -> None:
    delivery = FaultDelivery(["kill:rank=1,step=7", "exception:rank=0,step=9"], 2, owner)
    delivery.collect(replace(owner.world, fired_bits={1: 0b01}))
    assert [(note["spec"], note["step"]) for note in owner.noted] == [("kill:rank=1,step=7", 7)]
    assert owner.notices == ["injected fault did not happen before the ranks ended: exception:rank=0,step=9"]
    assert delivery.orders(0, 1) == [], "it would come again after the restart it caused"


def test_a_plan_for_a_generation_that_never_came_is_told_at_the_end(owner: Owner) -> None:
    delivery = FaultDelivery(["kill:rank=1,generation=3"], 2, owner)
    delivery.collect(owner.world)
    assert owner.notices == []
    delivery.close()
    assert owner.notices == ["injected fault did not happen before the ranks ended: kill:rank=1,generation=3"]


def test_there_are_at_most_as_many_as_the_page_has_bits(owner: Owner) -> None:
    delivery = FaultDelivery(["leak:rank=0,step=9"] * 64, 2, owner)
    answer = in_loop(lambda: delivery.inject(parse_spec("kill:rank=0")))
    assert not answer["ok"] and "64 faults were injected already" in answer["error"]


@pytest.mark.parametrize("number", [-1, 64, "0", None, 2.0])
def test_nonsense_from_a_rank_is_nothing(owner: Owner, number: object) -> None:
    delivery = FaultDelivery(["kill:rank=1,step=7"], 2, owner)
    delivery.fired(owner.world, owner.world.ranks[0], {"id": number})
    assert owner.noted == []


def test_nothing_runs(owner: Owner) -> None:
    owner.world = None
    answer = in_loop(lambda: FaultDelivery([], 2, owner).inject(parse_spec("kill")))
    assert not answer["ok"] and "no rank runs" in answer["error"]
