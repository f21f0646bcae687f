"""Who decides about a job: a policy of our own on one machine, the controller of many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from closeranks.events import Action, Event

__all__ = ["Authority"]


class Authority(Protocol):
    """Takes facts. What it decides comes back at once, or some time later as orders."""

    def note(self, kind: str, data: Mapping[str, Any], *, generation: int | None = None) -> None:
        """Put a fact on record that needs no decision."""

    def handle(self, event: Event) -> tuple[Action, ...]:
        """Take a fact; returns what to do about it now."""

    @property
    def journal_problem(self) -> str | None:
        """Why facts can't be put on record at present, or None."""
