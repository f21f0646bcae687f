"""What sets an incident off."""

from __future__ import annotations

from closeranks.agent.incidents import now_trigger


def test_a_trigger_is_dated_when_it_is_seen() -> None:
    first = now_trigger("desync", (1,), "x")
    assert 0 < first.mono_ns <= now_trigger("desync", (1,), "x").mono_ns
