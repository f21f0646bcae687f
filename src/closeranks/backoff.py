"""How long to wait before trying again. No I/O, no clock; chance comes in as an argument."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Backoff"]


class Backoff:
    """Exponential with full jitter: each wait is anything from 0 to a bound that grows up to ``max_s``.

    A thousand agents that lost their controller at the same moment come back spread over the bound, not in
    waves (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).

    ``uniform`` gives numbers from 0 to 1: ``random.Random(seed).random``.
    """

    def __init__(
        self,
        uniform: Callable[[], float],
        *,
        first_s: float = 0.1,
        growth_factor: float = 2.0,
        max_s: float = 5.0,
    ) -> None:
        if not (0 < first_s <= max_s and growth_factor >= 1):
            raise ValueError(f"no back-off from {first_s} s to {max_s} s, growing by {growth_factor}")
        self._uniform = uniform
        self._first_s = first_s
        self._growth_factor = growth_factor
        self._max_s = max_s
        self._bound_s = first_s

    def next_s(self) -> float:
        """Seconds to wait before the next attempt."""
        wait_s = self._uniform() * self._bound_s
        self._bound_s = min(self._max_s, self._bound_s * self._growth_factor)
        return wait_s

    def reset(self) -> None:
        """After a success: the next failure starts from the first bound again."""
        self._bound_s = self._first_s
