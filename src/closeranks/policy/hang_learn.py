"""How long a healthy rank of this job stays silent: learned from its own steps and pauses. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from closeranks.config import HangConfig
from closeranks.progress import Page, Phase

__all__ = ["floor_bound_s", "new_intervals_s", "p99_s", "remember_pause", "suspect_bound_s"]

WINDOW = 512  # step intervals kept per rank
MIN_STEPS = 3
_MAX_PHASES = 32  # user phases have free names; more of them than this aren't learned
_PAUSE_FACTOR = 1.5
_STEPLESS = frozenset({Phase.WAITING, Phase.START, Phase.INIT, Phase.EXIT})


def new_intervals_s(
    page: Page, last_step: int, last_step_ns: int, observed_s: float
) -> tuple[list[float], int, int]:
    """Lengths of the steps completed since ``last_step``, and the newest step with its time.

    From the page's ring where the sample has it, else the mean of what the header shows. ``observed_s`` is
    how long that took as observed: no interval is longer, whatever the page says (a page may hold garbage,
    and a machine that was paused has a jump in its clock).
    """
    intervals: list[float] = []
    step, step_ns = last_step, last_step_ns
    for record in page.steps:
        if record.step <= step:
            continue
        if record.step == step + 1 and step_ns:
            intervals.append((record.mono_ns - step_ns) / 1e9)
        step, step_ns = record.step, record.mono_ns
    if page.step > step:
        if step and step_ns:
            intervals.append((page.step_ns - step_ns) / 1e9 / (page.step - step))
        step, step_ns = page.step, page.step_ns
    return [min(value, observed_s) for value in intervals[-WINDOW:] if value > 0], step, step_ns


def p99_s(windows: Iterable[tuple[float, ...]]) -> float | None:
    """The largest of the ranks' 99th percentiles (nearest rank); None if no step is known.

    A rank at a time: pooled, one pause of all eight ranks would be 8 of 512 and count as usual.
    """
    found = [sorted(window)[math.ceil(len(window) * 0.99) - 1] for window in windows if window]
    return max(found, default=None)


def floor_bound_s(config: HangConfig, p99: float | None) -> float:
    """How long silence must last before a proof is acted on."""
    if p99 is None:
        return config.suspect_floor_s
    return max(config.suspect_floor_s, config.suspect_factor * p99)


def suspect_bound_s(
    config: HangConfig, p99: float | None, longest_s: tuple[tuple[str, float], ...], page: Page
) -> float:
    """How long silence in the page's phase may last before it is suspect.

    Step times say nothing before they are known (``p99`` None), nor in phases that steps aren't made in.
    """
    if p99 is None or page.phase in _STEPLESS:
        return max(config.startup_suspect_s, floor_bound_s(config, p99))
    return max(floor_bound_s(config, p99), _PAUSE_FACTOR * dict(longest_s).get(page.phase_name, 0.0))


def remember_pause(
    longest_s: tuple[tuple[str, float], ...], phase: str, pause_s: float
) -> tuple[tuple[str, float], ...]:
    """Note a silence that ended by itself; the longest of each phase counts."""
    known = dict(longest_s)
    if pause_s <= known.get(phase, 0.0) or (phase not in known and len(known) >= _MAX_PHASES):
        return longest_s
    known[phase] = pause_s
    return tuple(known.items())
