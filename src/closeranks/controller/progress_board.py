"""The job's progress, put together from what its nodes say: when all have begun, made a step, come so far."""

from __future__ import annotations

import time
from collections import Counter
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
        self._unheard = 0  # nodes that have said nothing yet, and those that have not begun
        self._not_begun = 0
        self._steps: Counter[int] = Counter()  # how many nodes have come so far
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
        self._unheard = self._not_begun = len(self._nodes)
        self._steps.clear()
        self._init_noted, self.first_step_s, self.step = False, None, 0

    def take(self, node: str, progress: NodeProgress) -> bool:
        """A node's newest word; returns whether with it all ranks have made their first step."""
        if progress.saves:
            self.ever_saved = True
        if progress.generation != self.generation or node not in self._nodes:
            return False
        self._count(self._nodes[node], progress)
        self._nodes[node] = progress
        if self._unheard:
            return False
        if not self._init_noted and not self._not_begun:
            self._init_noted = True
            self._note("init_done", {}, self.generation)
        self.step = min(self._steps)
        is_first = self.step > 0 and self.first_step_s is None
        if is_first:
            self.first_step_s = time.monotonic()
            self._note("first_step", {}, self.generation)
        if is_first or time.monotonic() >= self._noted_s + _NOTE_EVERY_S:
            self.write()
        return is_first

    def _count(self, before: NodeProgress | None, now: NodeProgress) -> None:
        """Thousands of nodes say something each second: none of them is reason to look at all of them."""
        self._steps[now.step] += 1
        if before is None:
            self._unheard -= 1
            self._not_begun -= now.init_done
            return
        self._steps[before.step] -= 1
        if not self._steps[before.step]:
            del self._steps[before.step]
        self._not_begun += before.init_done - now.init_done

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
