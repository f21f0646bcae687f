"""The job's decisions: facts in, actions out, both in the journal before anyone acts on them.

A thin shell around ``policy.job.decide``: it adds the clock and the journal, and nothing else.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from closeranks.config import BudgetConfig
from closeranks.controller.journal import Journal
from closeranks.events import Action, Event
from closeranks.policy import job as policy

__all__ = ["JobController"]


class JobController:
    """One job's policy state and journal."""

    def __init__(
        self, journal: Journal, budget: BudgetConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._journal = journal
        self._state = policy.initial(budget)
        self._clock = clock

    def note(self, kind: str, data: Mapping[str, Any], *, generation: int | None = None) -> None:
        """Put a fact into the journal that needs no decision."""
        self._journal.append(
            kind, data, generation=generation, wall_ns=time.time_ns(), mono_ns=time.monotonic_ns()
        )

    def handle(self, event: Event) -> tuple[Action, ...]:
        """Decide what follows from ``event``; the decision is in the journal when this returns."""
        self._state, actions = policy.decide(self._state, event, self._clock())
        if actions:
            decided = [{"action": type(action).__name__, **dataclasses.asdict(action)} for action in actions]
            because = {"event": type(event).__name__, **dataclasses.asdict(event)}
            self.note(
                "decided", {"because": because, "actions": decided}, generation=because.get("generation")
            )
        return actions

    @property
    def journal_problem(self) -> str | None:
        """Why the journal can't be written at present, or None."""
        return self._journal.problem
