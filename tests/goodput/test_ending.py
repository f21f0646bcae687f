"""What a run's ending.json adds to a journal without an end."""

from __future__ import annotations

from closeranks.goodput.ending import concluded
from closeranks.goodput.report import render, to_json
from closeranks.goodput.summary import Outcome

from .timeline import Timeline

ENDED = {
    "ended": True,
    "exit_code": 0,
    "reason": "all ranks finished",
    "incidents": 2,
    "journal": "it is full",
}


def cut_short(timeline: Timeline) -> Timeline:
    return timeline.start().generation(0, 0, 0, 1, 2).progress(50, 0, 5)


def test_an_end_that_the_journal_lacks_is_known(timeline: Timeline) -> None:
    summary = concluded(cut_short(timeline).fold(), ENDED)
    assert (summary.outcome, summary.exit_code, summary.unrecorded_incidents) == (Outcome.FINISHED, 0, 2)
    text = " ".join(render(summary, width=100, colour=False).split())
    assert "The journal is incomplete: it is full. 2 incidents are missing here." in text
    assert "2 interruptions" in text and "nterrupted" not in text
    assert to_json(summary)["unrecorded_incidents"] == 2


def test_a_failure_and_a_stop_are_told_apart(timeline: Timeline) -> None:
    summary = cut_short(timeline).fold()
    assert concluded(summary, {**ENDED, "exit_code": 3}).outcome is Outcome.FAILED
    assert concluded(summary, {**ENDED, "exit_code": 143, "stopped": True}).outcome is Outcome.STOPPED


def test_an_agent_that_said_nothing_was_killed_and_without_the_file_nobody_knows(timeline: Timeline) -> None:
    summary = cut_short(timeline).fold()
    killed = render(concluded(summary, {"ended": False}), width=100, colour=False)
    assert "the agent was killed, or the machine went down" in killed
    unknown = render(concluded(summary, None), width=100, colour=False)
    assert "the agent was killed, or its last records could not be written" in " ".join(unknown.split())


def test_a_journal_with_an_end_has_the_last_word(timeline: Timeline) -> None:
    summary = cut_short(timeline)(60, "finished", exit_code=3, reason="so").fold()
    assert concluded(summary, ENDED) == summary


def test_a_file_that_makes_no_sense_is_no_trouble(timeline: Timeline) -> None:
    summary = cut_short(timeline).fold()
    for ending in ({}, {"ended": "yes"}, {"ended": True, "exit_code": "0"}):
        assert concluded(summary, ending).outcome is Outcome.INTERRUPTED
    odd = concluded(summary, {"ended": True, "exit_code": 0, "incidents": "2", "journal": 7})
    assert odd.outcome is Outcome.FINISHED and odd.unrecorded_incidents == 0
