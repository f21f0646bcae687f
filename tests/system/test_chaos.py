"""A job over many nodes under random faults. One seed here; more with ``python tests/chaos/rounds.py``."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "chaos"))

from rounds import BrokenPromise, Chaos, check


@pytest.mark.torch
@pytest.mark.slow
def test_whatever_happens_each_step_is_made_in_one_world(tmp_path: Path) -> None:
    seed, rounds = 7, 8
    log = io.StringIO()
    chaos = Chaos(tmp_path, random.Random(seed), log)
    try:
        chaos.start(0.01)
        chaos.run(rounds)
    except BrokenPromise as error:
        output = (tmp_path / "output").read_text(errors="replace")[-3000:]
        replay = f"python tests/chaos/rounds.py --rounds {rounds} --seed {seed}"
        pytest.fail(f"{error}; replay with: {replay}\n{log.getvalue()}\n{output}")
    finally:
        chaos.kill()
    assert check(tmp_path)["generations"] > 1
