"""A rank that is told of a planned restart: it waits at its next step, once it has saved."""

from __future__ import annotations

import threading
import time

import pytest

from closeranks.worker import hooks_state
from closeranks.worker.hooks_state import HookState


class Writer:
    """As much of a page as this needs."""

    def __init__(self) -> None:
        self.saves = 0
        self.held: list[bool] = []

    def set_held(self, held: bool) -> None:
        self.held.append(held)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> HookState:
    monkeypatch.setattr(hooks_state, "_HOLD_LOOK_S", 0.01)
    made = HookState()
    made.writer = Writer()  # type: ignore[assignment]
    return made


def waited_s(state: HookState) -> float:
    began_s = time.monotonic()
    state.wait_held()
    return time.monotonic() - began_s


def test_without_a_word_no_step_waits(state: HookState) -> None:
    state.writer.saves = 3
    assert waited_s(state) < 0.2 and state.writer.held == []


def test_what_was_saved_before_is_not_enough(state: HookState) -> None:
    state.writer.saves = 3
    state.hold(60.0)
    assert waited_s(state) < 1.0 and state.writer.held == []


def test_the_step_after_the_save_waits_and_says_so_until_the_deadline_is_over(state: HookState) -> None:
    state.hold(0.5)
    state.writer.saves = 1
    assert 0.3 < waited_s(state) < 5.0
    assert state.writer.held == [True, False]
    assert waited_s(state) < 0.2, "a restart that didn't come is forgotten"


def test_a_wait_is_seen_while_it_lasts(state: HookState) -> None:
    state.hold(3.0)
    state.writer.saves = 1
    thread = threading.Thread(target=state.wait_held, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 10.0
    while state.writer.held != [True] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert state.writer.held == [True] and thread.is_alive()
    thread.join(20.0)


def test_a_deadline_that_is_over_holds_nobody(state: HookState) -> None:
    state.hold(0.0)
    state.writer.saves = 1
    assert waited_s(state) < 0.2
