"""What an agent says, and says again: each fact once, in order, and nothing of older generations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.node_reports import NodeReports
from closeranks.events import (
    AllRanksSucceeded,
    Event,
    Failure,
    FailureKind,
    GenerationDown,
    GenerationStarted,
    Progress,
    RestartPlanned,
    RunStarted,
    StopRequested,
)
from closeranks.messages import check

BROKEN = Failure(
    generation=1,
    incident_id="g0001",
    kind=FailureKind.LAUNCH,
    rank=None,
    signature="no descriptors",
    step=0,
    startup=True,
    durable_progress=False,
    exit_code=1,
)


class Line:
    """What went out, while it is ``up``."""

    def __init__(self) -> None:
        self.up = True
        self.sent: list[Mapping[str, Any]] = []
        self.beats = 0
        self.reports = NodeReports(self.send, self.beat_now)
        self.reports.begin(1)

    def send(self, message: Mapping[str, Any]) -> bool:
        check(message)
        if self.up:
            self.sent.append(message)
        return self.up

    def beat_now(self) -> None:
        self.beats += 1

    def again(self) -> list[tuple[str, int]]:
        """What is said once the line is there again."""
        self.up, self.sent = True, []
        self.reports.say_again()
        return [(message["type"], message["generation"]) for message in self.sent]


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (GenerationStarted(1), {"type": "started", "generation": 1}),
        (GenerationDown(1), {"type": "down", "generation": 1}),
        (AllRanksSucceeded(1), {"type": "succeeded", "generation": 1}),
        (BROKEN, {"type": "broke", "generation": 1, "kind": "launch", "reason": "no descriptors"}),
    ],
)
def test_a_fact_goes_out_as_a_message_and_nothing_is_decided_here(
    line: Line, event: Event, said: Mapping[str, Any]
) -> None:
    assert line.reports.handle(event) == ()
    assert line.sent == [said]


@pytest.mark.parametrize(
    "event", [RunStarted(), Progress(1, 5), StopRequested("x", 15), RestartPlanned(1, "drain")]
)
def test_what_the_controller_knows_itself_is_not_said(line: Line, event: Event) -> None:
    assert line.reports.handle(event) == () and line.sent == []


def test_facts_are_said_again_in_their_order(line: Line) -> None:
    line.up = False
    for event in (GenerationStarted(1), AllRanksSucceeded(1), GenerationDown(1)):
        line.reports.handle(event)
    assert line.sent == []
    expected = [("started", 1), ("succeeded", 1), ("down", 1)]
    assert line.again() == expected
    assert line.again() == expected, "each time: nobody knows what was lost"


def test_a_fact_that_is_said_twice_is_kept_once_with_its_newest_words(line: Line) -> None:
    for reason in ("first", "second"):
        line.reports.say({"type": "broke", "generation": 1, "kind": "launch", "reason": reason})
    line.reports.handle(GenerationDown(1))
    line.again()
    assert [message.get("reason") for message in line.sent] == ["second", None]


def test_of_an_older_generation_nothing_is_said_again(line: Line) -> None:
    line.reports.handle(GenerationStarted(1))
    line.reports.begin(2)
    assert line.again() == []
    line.reports.handle(GenerationStarted(2))
    line.reports.handle(GenerationDown(1))
    assert line.sent[-1] == {"type": "down", "generation": 1}, "it is said, as it was asked for"
    assert line.again() == [("started", 2)]


def test_an_older_generation_begins_nothing(line: Line) -> None:
    line.reports.begin(5)
    line.reports.handle(GenerationStarted(5))
    for older in (5, 4, -1):
        line.reports.begin(older)
    assert line.again() == [("started", 5)]


@pytest.mark.parametrize("kind", ["init_done", "first_step"])
def test_milestones_are_told_by_a_heartbeat_at_once(line: Line, kind: str) -> None:
    line.reports.note(kind, {}, generation=1)
    assert line.beats == 1 and line.sent == []


def test_what_happens_to_ranks_goes_into_the_controller_s_journal_and_the_rest_does_not(line: Line) -> None:
    line.reports.note("rank_exited", {"rank": 1, "codes": (1, 2)}, generation=1)
    line.reports.note("generation_started", {}, generation=1)
    line.reports.note("decided", {}, generation=1)
    data = {"rank": 1, "codes": [1, 2]}
    assert line.sent == [{"type": "event", "kind": "rank_exited", "generation": 1, "data": data}]
    assert line.again() == []


FACTS = st.tuples(
    st.sampled_from(["started", "down", "succeeded", "begin"]), st.integers(0, 4), st.booleans()
)


@given(st.lists(FACTS))
def test_what_is_said_again_is_of_one_generation_and_each_kind_once(
    facts: list[tuple[str, int, bool]],
) -> None:
    line, newest, said = Line(), 1, []
    for what, generation, up in facts:
        line.up = up
        if what == "begin":
            line.reports.begin(generation)
            said = [] if generation > newest else said
            newest = max(newest, generation)
            continue
        line.reports.say({"type": what, "generation": generation})
        if generation == newest:
            said = [kind for kind in said if kind != what] + [what]
    assert line.again() == [(kind, newest) for kind in said]
