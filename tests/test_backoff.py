"""Waits that grow, spread and stay bounded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.backoff import Backoff


def test_the_bound_doubles_up_to_the_last() -> None:
    backoff = Backoff(lambda: 1.0, first_s=0.1, max_s=1.0)
    assert [round(backoff.next_s(), 3) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    backoff.reset()
    assert backoff.next_s() == 0.1


@settings(print_blob=True, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3000))
def test_every_wait_is_within_its_bound(seed: int, attempts: int) -> None:
    backoff = Backoff(random.Random(seed).random, first_s=0.5, growth_factor=10.0, max_s=30.0)
    waits = [backoff.next_s() for _ in range(attempts)]
    assert all(0 <= wait <= min(30.0, 0.5 * 10.0 ** min(n, 2)) for n, wait in enumerate(waits))


def test_equal_seeds_wait_alike_and_others_spread() -> None:
    def waits(seed: int) -> list[float]:
        backoff = Backoff(random.Random(seed).random)
        return [backoff.next_s() for _ in range(10)]

    assert waits(1) == waits(1)
    last = sorted(waits(seed)[-1] for seed in range(1000))
    assert last[100] < 1.0 and last[900] > 4.0  # of 5 s: not in one wave


@pytest.mark.parametrize("bounds", [(0.0, 2.0, 5.0), (6.0, 2.0, 5.0), (1.0, 0.5, 5.0)])
def test_bounds_that_make_no_sense_are_refused(bounds: tuple[float, float, float]) -> None:
    first_s, growth_factor, max_s = bounds
    with pytest.raises(ValueError, match="no back-off"):
        Backoff(random.random, first_s=first_s, growth_factor=growth_factor, max_s=max_s)
