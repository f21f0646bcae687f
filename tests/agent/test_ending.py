"""How a run ended, known where the journal lost it."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.agent.ending import ENDING_NAME, Ending, load_ending, what_is_missing
from closeranks.events import Finish

DONE = Finish(0, "all ranks finished")


def test_it_says_that_nothing_has_ended_until_something_has(tmp_path: Path) -> None:
    Ending(tmp_path)
    assert load_ending(tmp_path) == {"ended": False}


def test_it_goes_where_the_journal_has_its_end(tmp_path: Path) -> None:
    Ending(tmp_path).conclude(DONE, stopped=False, incidents=0, missing="")
    assert list(tmp_path.iterdir()) == []
    Ending(tmp_path).conclude(None, stopped=False, incidents=0, missing="its end")
    assert list(tmp_path.iterdir()) == [], "an internal error: not killed, and how it ended isn't known"


@pytest.mark.parametrize("reason", ["all ranks finished", "é" * 10_000, '\\"' * 10_000])
def test_it_is_as_long_at_the_start_as_at_the_end(tmp_path: Path, reason: str) -> None:
    ending = Ending(tmp_path)
    size = (tmp_path / ENDING_NAME).stat().st_size
    ending.conclude(Finish(7, reason), stopped=True, incidents=3, missing=reason)
    facts = load_ending(tmp_path)
    assert (tmp_path / ENDING_NAME).stat().st_size == size == 4096
    assert facts is not None
    assert (facts["ended"], facts["exit_code"], facts["stopped"], facts["incidents"]) == (True, 7, True, 3)
    assert reason.startswith(facts["reason"]) and facts["reason"]


def test_no_room_and_no_directory_are_no_trouble(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    Ending(gone).conclude(DONE, stopped=False, incidents=0, missing="its end")
    assert load_ending(gone) is None
    (tmp_path / ENDING_NAME).write_bytes(b"\0" * 4096)
    assert load_ending(tmp_path) is None


def test_what_a_journal_lacks_is_told_with_its_reason() -> None:
    assert what_is_missing(0, None) == ""
    full = "/a/journal.db can't be written (database or disk is full); 15 records wait in memory"
    assert what_is_missing(15, full) == "its last 15 records could not be written (database or disk is full)"
    assert what_is_missing(1, None) == "its last 1 record could not be written"
