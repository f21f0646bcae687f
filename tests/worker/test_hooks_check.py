"""When a step that issued too little is held, by the steps at which the others are then. The rest of the
check needs real collectives: see test_hooks.py."""

from __future__ import annotations

from typing import Any

import pytest

from closeranks.worker.hooks_check import NeighbourCheck


class Pages:
    """What the check reads of the pages: the steps of the others, and what it writes on its own."""

    local_rank, local_world_size = 0, 3
    world_position = 0

    def __init__(self) -> None:
        self.steps = {1: 0, 2: 0}
        self.held: list[tuple[int, ...]] = []

    def step_of(self, neighbour: int) -> int:
        return self.steps[neighbour]

    def hold(self, *counts: int) -> None:
        self.held.append(counts)
        self.steps = dict.fromkeys(self.steps, 1 << 30)  # as if they had come, so that the hold ends

    def is_inside(self, neighbour: int, position: int) -> bool:
        return False


class Line:
    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.said.append(message)


def after_lockstep(others: dict[int, int], *, issued: int, lockstep: int = 20) -> tuple[Pages, Line]:
    """``lockstep`` steps of two collectives, then one of ``issued``; the ``others`` are that far ahead."""
    pages, line = Pages(), Line()
    check = NeighbourCheck(pages, line, {})  # type: ignore[arg-type]
    for step in range(1, lockstep + 1):
        pages.steps = dict.fromkeys(pages.steps, step)
        check.step_done(step, 2 * step)
    pages.steps = {rank: lockstep + 1 + away for rank, away in others.items()}
    check.step_done(lockstep + 1, 2 * lockstep + issued)
    return pages, line


@pytest.mark.parametrize("away", [-2, -1, 0, 1])
def test_a_short_step_is_held_however_far_the_others_can_be_then(away: int) -> None:
    """Nothing held the ranks together in that step: the others may not have ended the one before it."""
    pages, line = after_lockstep({1: 0, 2: away}, issued=1)
    assert pages.held == [(1, 2), ()]
    assert [message["type"] for message in line.said] == ["short_step"]
    assert (line.said[0]["issued"], line.said[0]["usual"], line.said[0]["step"]) == (1, 2, 21)


@pytest.mark.parametrize("away", [-3, 2, 100])
def test_ranks_that_are_not_in_lockstep_are_left_alone(away: int) -> None:
    pages, line = after_lockstep({1: 0, 2: away}, issued=1)
    assert pages.held == [] and line.said == []


@pytest.mark.parametrize(("issued", "lockstep"), [(2, 20), (3, 20), (1, 7)])
def test_as_many_as_ever_or_more_or_too_early_to_tell(issued: int, lockstep: int) -> None:
    pages, _ = after_lockstep({1: 0, 2: 0}, issued=issued, lockstep=lockstep)
    assert pages.held == []
