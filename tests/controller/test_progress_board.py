"""The job's progress: the slowest node's, and of none before all have spoken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from closeranks.controller import progress_board
from closeranks.controller.progress_board import ProgressBoard
from closeranks.controller.sessions import NodeProgress


class Notes(list[tuple[str, Mapping[str, Any], int]]):
    def __call__(self, kind: str, data: Mapping[str, Any], generation: int) -> None:
        self.append((kind, data, generation))

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [data for noted, data, _ in self if noted == kind]


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def board(notes: Notes) -> ProgressBoard:
    made = ProgressBoard(notes)
    made.begin(3, ["a", "b"])
    return made


def at(
    step: int, *, generation: int = 3, absolute: int = -1, saves: int = 0, saved: int = 0, begun: bool = True
):
    return NodeProgress(generation, step, absolute, saves, saved, begun)


def test_the_job_has_come_as_far_as_its_slowest_node(board: ProgressBoard) -> None:
    assert not board.take("a", at(9))
    assert board.step == 0, "nobody knows of the others yet"
    board.take("b", at(4))
    assert board.step == 4


def test_the_first_step_is_made_once_when_all_have_made_one(board: ProgressBoard, notes: Notes) -> None:
    assert not board.take("a", at(1)) and not board.take("b", at(0))
    assert notes.of("init_done") == [{}] and notes.of("first_step") == []
    assert board.take("b", at(1)) and board.first_step_s is not None
    assert not board.take("b", at(2)) and not board.take("a", at(5))
    assert notes.of("first_step") == notes.of("init_done") == [{}]


def test_before_all_have_begun_nothing_is_done(board: ProgressBoard, notes: Notes) -> None:
    board.take("a", at(0))
    board.take("b", at(0, begun=False))
    assert notes.of("init_done") == []


def test_another_generation_or_a_node_without_ranks_moves_nothing(board: ProgressBoard, notes: Notes) -> None:
    for node, progress in (("a", at(7, generation=2)), ("b", at(7, generation=4)), ("spare", at(7))):
        assert not board.take(node, progress)
    assert board.step == 0 and notes == []


def test_a_new_generation_begins_at_nothing_and_the_same_one_goes_on(board: ProgressBoard) -> None:
    for node in "ab":
        board.take(node, at(5))
    board.begin(3, ["a", "b"])
    assert board.step == 5
    board.begin(4, ["a", "c"])
    assert (board.step, board.first_step_s) == (0, None)
    assert not board.take("a", at(1, generation=4))
    assert board.take("c", at(1, generation=4))


def test_that_something_was_ever_saved_is_known_whoever_says_so(board: ProgressBoard) -> None:
    assert not board.ever_saved
    board.take("a", at(1, saves=1))
    assert board.ever_saved
    board.begin(4, ["a"])
    assert board.ever_saved, "it counts for the job"


def test_what_is_on_record_is_the_slowest_step_and_the_newest_save(
    board: ProgressBoard, notes: Notes
) -> None:
    board.take("a", at(9, absolute=109, saves=2, saved=8))
    board.take("b", at(7, absolute=107))
    assert notes.of("progress") == [{"step": 7, "absolute_step": 107, "checkpoints": 2, "checkpoint_step": 8}]
    assert {generation for _, _, generation in notes} == {3}


def test_it_is_written_once_a_second_at_most(
    board: ProgressBoard, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(progress_board.time, "monotonic", lambda: now_s)
    for step in range(1, 100):
        for node in "ab":
            board.take(node, at(step))
        now_s += 0.1
    assert 9 <= len(notes.of("progress")) <= 12


def test_of_nobody_nothing_is_written(board: ProgressBoard, notes: Notes) -> None:
    board.write()
    assert notes == []
