"""The shell around the job's policy: what was decided is in the journal before it is acted on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from closeranks.config import BudgetConfig
from closeranks.controller.job import JobController
from closeranks.controller.journal import Journal, read
from closeranks.events import (
    Failure,
    FailureKind,
    Finish,
    GenerationDown,
    GenerationStarted,
    KillGeneration,
    RunStarted,
    StartGeneration,
    Tell,
)

KILLED = Failure(
    generation=0,
    incident_id="0001",
    kind=FailureKind.SIGNAL,
    rank=1,
    signature="SIGKILL",
    step=3,
    startup=False,
    durable_progress=True,
    exit_code=137,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    opened = Journal.create(path)
    yield opened
    opened.close()


def test_a_failure_becomes_a_kill_and_then_the_next_generation(journal: Journal) -> None:
    controller = JobController(journal, BudgetConfig())
    assert controller.handle(RunStarted()) == (StartGeneration(0),)
    assert controller.handle(GenerationStarted(0)) == ()
    kill, told = controller.handle(KILLED)
    assert kill == KillGeneration(0) and isinstance(told, Tell)
    assert controller.handle(GenerationDown(0)) == (StartGeneration(1),)


def test_each_decision_is_readable_when_handle_returns(journal: Journal, path: Path) -> None:
    controller = JobController(journal, BudgetConfig())
    controller.handle(RunStarted())
    (first,) = [record for record in read(path) if record.kind == "decided"]
    assert first.data["because"] == {"event": "RunStarted"}
    assert first.data["actions"] == [{"action": "StartGeneration", "generation": 0, "delay_s": 0.0}]
    controller.handle(GenerationStarted(0))  # nothing follows from it: nothing is written
    controller.handle(KILLED)
    decided = [record for record in read(path) if record.kind == "decided"]
    assert [record.generation for record in decided] == [None, 0]
    assert decided[1].data["because"]["signature"] == "SIGKILL"


def test_the_clock_that_is_given_is_the_one_policy_sees(journal: Journal) -> None:
    """300 restarts in 600 s are the limit: as many spread over an hour are none."""

    def finishes(pace_s: float) -> bool:
        now_s = 0.0
        controller = JobController(
            journal, BudgetConfig(max_restarts_per_window=3, window_s=60.0), clock=lambda: now_s
        )
        controller.handle(RunStarted())
        for generation in range(6):
            controller.handle(GenerationStarted(generation))
            failure = Failure(
                **{name: getattr(KILLED, name) for name in Failure.__slots__} | {"generation": generation}
            )
            controller.handle(failure)
            actions = controller.handle(GenerationDown(generation))
            if any(isinstance(action, Finish) for action in actions):
                return True
            now_s += pace_s
        return False

    assert finishes(1.0)
    assert not finishes(100.0)


def test_notes_carry_their_generation(journal: Journal, path: Path) -> None:
    controller = JobController(journal, BudgetConfig())
    controller.note("notice", {"text": "hello"}, generation=4)
    (record,) = read(path)
    assert (record.kind, record.generation, record.data["text"]) == ("notice", 4, "hello")
    assert controller.journal_problem is None
