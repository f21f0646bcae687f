"""Keep torch from deadlocking at the end of a script.

ProcessGroupGloo's destructor joins its worker threads while the Python thread that runs it holds the GIL.
A worker thread that has just finished a collective needs the GIL to let go of the tensors' Python objects.
Where the script ends within the GIL's switch interval (5 ms) after its last collective, neither can move: in
torch 2.13 a plain DDP script ends so, now and then, under any launcher. Giving the GIL away for a moment
before the group goes lets the workers finish.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["let_workers_finish", "wrap_destroy"]

_TURNS = 4
_TURN_S = 0.005


def let_workers_finish() -> None:
    """Give the GIL away a few times, 20 ms in all; does nothing where no process group was ever made."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or getattr(c10d, "_world", None) is None or not c10d._world.pg_map:
        return
    for _ in range(_TURNS):
        time.sleep(_TURN_S)


def wrap_destroy(original: Callable[..., Any]) -> Callable[..., Any]:
    """``destroy_process_group`` that lets the group's worker threads finish first."""

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        let_workers_finish()
        return original(*args, **kwargs)

    return destroy_process_group
