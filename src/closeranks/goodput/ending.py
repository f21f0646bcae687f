"""What is known of a run's end where its journal lacks it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from closeranks.goodput.summary import Generation, Outcome, RunSummary

__all__ = ["concluded"]

_MAX_TEXT = 500


def concluded(summary: RunSummary, ending: Mapping[str, Any] | None) -> RunSummary:
    """``summary``, and what ``ending`` (the run's ending.json, None: there is none) adds to it."""
    if summary.outcome is not Outcome.INTERRUPTED or ending is None:
        return summary
    code = ending.get("exit_code")
    if ending.get("ended") is not True or not isinstance(code, int):
        return replace(summary, killed=True)
    outcome = Outcome.FINISHED if code == 0 else Outcome.FAILED
    if code != 0 and ending.get("stopped") is True:
        outcome = Outcome.STOPPED
    counted = ending.get("incidents")
    unrecorded = max(0, counted - len(summary.incidents)) if isinstance(counted, int) else 0
    note = (
        f"The journal is incomplete: {_text(ending, 'journal') or 'its last records could not be written'}."
    )
    if unrecorded:
        plural = unrecorded != 1
        note += f" {unrecorded:,} incident{'s are' if plural else ' is'} missing here."
    return replace(
        summary,
        outcome=outcome,
        exit_code=code,
        reason=_text(ending, "reason"),
        generations=_ended(summary.generations, Outcome.ENDED if unrecorded else outcome),
        unrecorded_incidents=unrecorded,
        notes=(*summary.notes, f"{note} Times end at its last record."),
    )


def _ended(generations: tuple[Generation, ...], outcome: Outcome) -> tuple[Generation, ...]:
    """The last one wasn't interrupted, after all."""
    if not generations or generations[-1].outcome is not Outcome.INTERRUPTED:
        return generations
    return (*generations[:-1], replace(generations[-1], outcome=outcome))


def _text(ending: Mapping[str, Any], key: str) -> str:
    value = ending.get(key)
    return value[:_MAX_TEXT] if isinstance(value, str) else ""
