"""Hangs that no node can see alone: while something is suspicious, all ranks are judged together.

A node proves what its own ranks can prove, such as one of them being stopped. That everybody waits for a rank
on another node, or that two nodes are in different collectives, takes a look at all of them. Nothing is asked
while all is well; the policy is the one that judges a single machine (policy.hang).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from closeranks.config import HangConfig
from closeranks.controller.sessions import Session
from closeranks.evidence import Trigger
from closeranks.plain import PlainError, from_plain
from closeranks.policy import hang
from closeranks.policy.cluster_state import Stage, World

if TYPE_CHECKING:
    from closeranks.controller.service import ClusterService

__all__ = ["JointWatch"]

_LOOK_EVERY_S = 0.2
_LOOK_EVERY_MANY_S = 1.0
_MANY_RANKS = 256
_ANSWER_S = 1.0
_MAX_OBSERVED_S = 1.5  # a look that comes later than that was held up, and counts for no more
_CALM_LOOKS = 10  # without silence: then it was nothing


class JointWatch:
    """Of one job. ``suspected`` begins a watch, if none is under way."""

    def __init__(self, owner: ClusterService, config: HangConfig) -> None:
        self._owner = owner
        self._config = config
        self._task: asyncio.Task[None] | None = None
        self._answers: dict[str, tuple[hang.RankSample, ...]] = {}
        self._complete = asyncio.Event()
        self._generation = -1
        self._p99_s = 0.0

    def suspected(self, generation: int) -> None:
        """A node's ranks have gone quiet."""
        world = self._world(generation)
        if world is None or not self._config.enabled or self._task is not None:
            return
        self._task = asyncio.get_running_loop().create_task(self._watch(world))
        self._task.add_done_callback(self._ended)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def take(self, session: Session, message: Mapping[str, Any]) -> None:
        """A node's answer. What makes no sense is as good as none: then nothing is proved."""
        if message["generation"] != self._generation:
            return
        try:
            kind = tuple[hang.RankSample, ...]
            self._answers[session.node] = from_plain(kind, list(message["samples"]), "samples")
        except (PlainError, TypeError, ValueError) as error:
            self._owner.notice(f"what node {session.node} says of its ranks can't be read: {error}")
            return
        self._p99_s = max(self._p99_s, message.get("step_p99_s") or 0.0)
        world = self._world(self._generation)
        if world is not None and set(world.members) <= set(self._answers):
            self._complete.set()

    def _world(self, generation: int) -> World | None:
        world = self._owner.job.state.world
        running = world is not None and world.stage is Stage.RUNNING and world.generation == generation
        return world if running else None

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._owner.console.internal_error(error)

    async def _watch(self, world: World) -> None:
        self._generation, self._p99_s = world.generation, 0.0
        size = sum(member.ranks for member in world.members.values())
        every_s = _LOOK_EVERY_S if size <= _MANY_RANKS else _LOOK_EVERY_MANY_S
        state: hang.HangState | None = None
        calm, last_s = 0, time.monotonic()
        while self._world(world.generation) is not None and calm < _CALM_LOOKS:
            closely = state is None or bool(hang.wants_detail(state))
            samples = await self._look(world, closely=closely)
            now_s = time.monotonic()
            observed_s, last_s = min(now_s - last_s, _MAX_OBSERVED_S), now_s
            if len(samples) == size:
                state = state or hang.initial(size, self._raised())
                state, finding = hang.observe(state, hang.JobSample(observed_s, samples))
                if finding is not None and self._found(world.generation, finding):
                    return
                calm = calm + 1 if state.still_s == 0.0 and not state.stalled else 0
            await asyncio.sleep(every_s)

    def _raised(self) -> HangConfig:
        """The patience that the nodes have learned: this watch sees too little to learn it by itself."""
        floor_s = max(self._config.suspect_floor_s, self._config.suspect_factor * self._p99_s)
        return replace(self._config, suspect_floor_s=floor_s)

    async def _look(self, world: World, *, closely: bool) -> tuple[hang.RankSample, ...]:
        self._answers, self._complete = {}, asyncio.Event()
        request = {"type": "look", "generation": world.generation, "closely": closely}
        for node in world.members:
            self._owner.sessions.send(node, request)
        try:
            await asyncio.wait_for(self._complete.wait(), _ANSWER_S)
        except TimeoutError:
            return ()
        found = (sample for samples in self._answers.values() for sample in samples)
        return tuple(sorted(found, key=lambda sample: sample.rank))

    def _found(self, generation: int, finding: hang.Finding) -> bool:
        """Returns whether that was it."""
        trigger = finding.trigger
        data = {"trigger": {"kind": trigger.kind, "ranks": list(trigger.ranks), "detail": trigger.detail}}
        if finding.level == "act":
            now_ns = time.monotonic_ns()
            self._owner.casebook.accuse(Trigger(trigger.kind, trigger.ranks, trigger.detail, now_ns))
            return True
        if finding.level == "suspect":
            self._owner.job.note("suspected", data, generation=generation)
            text = f"suspicious: {trigger.detail}; watching, nothing is killed"
            self._owner.console.tell("warning", text)
            return False
        self._owner.job.note("suspicion_cleared", data, generation=generation)
        self._owner.console.tell("info", f"all clear: {trigger.detail}")
        return True
