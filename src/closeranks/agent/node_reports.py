"""What a node's agent reports to the controller, and says again where it may not have been heard.

Facts about the newest generation are kept until the next one begins: a connection that breaks may have lost
any of them, and the controller takes each as often as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from closeranks.events import (
    Action,
    AllRanksSucceeded,
    Event,
    Failure,
    GenerationDown,
    GenerationStarted,
    Progress,
    RestartPlanned,
    RunStarted,
    StopRequested,
)
from closeranks.messages import NODE_EVENTS
from closeranks.plain import to_plain

__all__ = ["NodeReports"]

_AT_ONCE = frozenset({"init_done", "first_step"})  # told by the next heartbeat, which then comes now


class NodeReports:
    """The agent's authority: facts go out as messages, decisions come in as orders (see NodeAgent).

    ``send`` returns whether the message went out; ``beat_now`` has the next heartbeat sent at once.
    """

    journal_problem: str | None = None  # the journal is the controller's

    def __init__(self, send: Callable[[Mapping[str, Any]], bool], beat_now: Callable[[], None]) -> None:
        self._send = send
        self._beat_now = beat_now
        self._generation = -1
        self._facts: list[Mapping[str, Any]] = []

    def begin(self, generation: int) -> None:
        """What was to be said of older generations is of no interest any more."""
        if generation > self._generation:
            self._generation = generation
            self._facts = []

    def say(self, message: Mapping[str, Any]) -> None:
        """Report a fact of a generation, now and whenever the line has been down."""
        if message["generation"] == self._generation:
            self._facts = [fact for fact in self._facts if fact["type"] != message["type"]]
            self._facts.append(message)
        self._send(message)

    def say_again(self) -> None:
        for fact in self._facts:
            self._send(fact)

    def note(self, kind: str, data: Mapping[str, Any], *, generation: int | None = None) -> None:
        if kind in _AT_ONCE:
            self._beat_now()
        elif kind in NODE_EVENTS:
            self._send({"type": "event", "kind": kind, "generation": generation, "data": to_plain(data)})

    def handle(self, event: Event) -> tuple[Action, ...]:
        match event:
            case GenerationStarted(generation):
                self.say({"type": "started", "generation": generation})
            case GenerationDown(generation):
                self.say({"type": "down", "generation": generation})
            case AllRanksSucceeded(generation):
                self.say({"type": "succeeded", "generation": generation})
            case Failure():
                self.say(
                    {
                        "type": "broke",
                        "generation": event.generation,
                        "kind": event.kind.value,
                        "reason": event.signature,
                    }
                )
            case Progress() | RunStarted() | StopRequested() | RestartPlanned():
                pass
        return ()
