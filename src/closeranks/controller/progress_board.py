"""The job's progress, put together from what its nodes say: when all have begun, made a step, come so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from closeranks.controller.sessions import NodeProgress

__all__ = ["ProgressBoard"]

_NOTE_EVERY_S = 1.0


class ProgressBoard:
    """Of the generation that runs. ``note(kind, data)`` puts something into the journal."""

    def __init__(self, note: Callable[[str, Mapping[str, Any], int], None]) -> None:
        self._note = note
        self._nodes: dict[str, NodeProgress | None] = {}
        self._noted_s = 0.0
        self._init_noted = False
        self.generation = -1
        self.began_s = 0.0
        self.first_step_s: float | None = None
        self.step = 0
        self.ever_saved = False

    def begin(self, generation: int, nodes: Iterable[str]) -> None:
        """These nodes have been told to start it."""
        if generation == self.generation:
            return
        self.generation, self.began_s = generation, time.monotonic()
        self._nodes = dict.fromkeys(nodes)
        self._init_noted, self.first_step_s, self.step = False, None, 0

    def take(self, node: str, progress: NodeProgress) -> bool:
        """A node's newest word; returns whether with it all ranks have made their first step."""
        if progress.saves:
            self.ever_saved = True
        if progress.generation != self.generation or node not in self._nodes:
            return False
        self._nodes[node] = progress
        known = [entry for entry in self._nodes.values() if entry is not None]
        if len(known) < len(self._nodes):
            return False
        if not self._init_noted and all(entry.init_done for entry in known):
            self._init_noted = True
            self._note("init_done", {}, self.generation)
        self.step = min(entry.step for entry in known)
        is_first = self.step > 0 and self.first_step_s is None
        if is_first:
            self.first_step_s = time.monotonic()
            self._note("first_step", {}, self.generation)
        if is_first or time.monotonic() >= self._noted_s + _NOTE_EVERY_S:
            self.write()
        return is_first

    def write(self) -> None:
        """Put on record how far it has come."""
        self._noted_s = time.monotonic()
        known = [entry for entry in self._nodes.values() if entry is not None]
        if not known:
            return
        absolute = [entry.absolute_step for entry in known if entry.absolute_step >= 0]
        saver = max(known, key=lambda entry: entry.saves)
        data = {
            "step": self.step,
            "absolute_step": min(absolute) if absolute else None,
            "checkpoints": saver.saves,
            "checkpoint_step": saver.saved_step,
        }
        self._note("progress", data, self.generation)
