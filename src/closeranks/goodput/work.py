"""How much work of a generation was lost: what is known about its steps, and the rules that use it."""

from __future__ import annotations

from dataclasses import dataclass, field

from closeranks.goodput.summary import Outcome

__all__ = ["Loss", "Point", "Work", "loss_of"]

MAX_POINTS = 512
MAX_POINTS_ENDED = 64


@dataclass(frozen=True, slots=True)
class Point:
    """Progress at one time: ``step`` in this generation, ``absolute`` as the script itself counts."""

    t_ns: int
    step: int
    absolute: int | None


@dataclass(frozen=True, slots=True)
class Loss:
    """Work that was lost; both None where it can't be known."""

    ns: int | None
    steps: int | None


@dataclass(slots=True)
class Work:
    """The steps of one generation, from its first to its end."""

    first_step_ns: int | None = None
    ended_ns: int | None = None
    steps: int = 0
    base: int | None = None  # the script's own step number at which this generation began
    checkpoints: int = 0
    checkpoint_step: int = 0
    points: list[Point] = field(default_factory=list)

    @property
    def ns(self) -> int:
        """From the first step to the end."""
        if self.first_step_ns is None or self.ended_ns is None:
            return 0
        return max(0, self.ended_ns - self.first_step_ns)

    def begin(self, t_ns: int) -> None:
        self.first_step_ns = t_ns
        self.steps = max(self.steps, 1)
        self.add(Point(t_ns, 1, None))

    def end(self, t_ns: int) -> None:
        self.ended_ns = t_ns
        # What was looked at after the break had happened before it.
        self.points = [Point(min(p.t_ns, t_ns), p.step, p.absolute) for p in self.points]
        self._thin(MAX_POINTS_ENDED)

    def progress(self, t_ns: int, step: int, absolute: int | None) -> None:
        """A report that comes after the end (the last look at the pages) is about the time before it."""
        self.steps = max(self.steps, step)
        if absolute is not None and self.base is None:
            self.base = absolute - step
        self.add(Point(t_ns if self.ended_ns is None else min(t_ns, self.ended_ns), step, absolute))

    def checkpoint(self, count: int, step: int) -> None:
        self.checkpoints = max(self.checkpoints, count)
        self.checkpoint_step = max(self.checkpoint_step, step)

    def add(self, point: Point) -> None:
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            self._thin(MAX_POINTS)

    def _thin(self, limit: int) -> None:
        """Fewer points, the older ones first: what matters lies near the end, where checkpoints are."""
        while len(self.points) > limit:
            half = len(self.points) // 2
            self.points = self.points[:half:2] + self.points[half:]

    def time_of_step(self, step: int) -> int | None:
        """When that step was done; None where it wasn't."""
        return _interpolate([(p.t_ns, p.step) for p in self.points], step)

    def time_of_absolute(self, absolute: int) -> int | None:
        assert self.first_step_ns is not None and self.base is not None
        known = [(p.t_ns, p.absolute) for p in self.points if p.absolute is not None]
        return _interpolate([(self.first_step_ns, self.base + 1), *known], absolute)


def _interpolate(points: list[tuple[int, int]], wanted: int) -> int | None:
    """When ``wanted`` was reached, between the points around it; None where it wasn't."""
    for i, (t_ns, value) in enumerate(points):
        if value >= wanted:
            if i == 0 or value == wanted:
                return t_ns
            before_ns, before = points[i - 1]
            return before_ns + (t_ns - before_ns) * (wanted - before) // (value - before)
    return None


def loss_of(work: Work, outcome: Outcome, *, resumed_at: int | None, saves_seen: bool) -> Loss:
    """What the end of this generation cost; the rules are told in closeranks.goodput.fold.

    ``resumed_at``: the lowest script step at which a later generation began; ``saves_seen``: an earlier
    generation saved a checkpoint.
    """
    first_ns, ended_ns = work.first_step_ns, work.ended_ns
    if first_ns is None or ended_ns is None:
        return Loss(0, 0)
    if resumed_at is not None and work.base is not None:
        kept, from_ns = resumed_at - work.base, work.time_of_absolute(resumed_at)
    elif outcome in (Outcome.FINISHED, Outcome.RUNNING):
        return Loss(0, 0)
    elif work.checkpoints > 0:
        kept, from_ns = work.checkpoint_step, work.time_of_step(work.checkpoint_step)
    elif saves_seen:
        kept, from_ns = 0, first_ns
    else:
        return Loss(None, None)
    steps = max(0, work.steps - max(0, kept))
    return Loss(0 if from_ns is None else ended_ns - min(max(from_ns, first_ns), ended_ns), steps)
