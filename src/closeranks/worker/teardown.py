"""Keep torch from deadlocking at the end of a script.

ProcessGroupGloo's destructor joins its worker threads while the Python thread that runs it holds the GIL.
A worker thread that has just finished a collective needs the GIL to let go of the tensors' Python objects.
Where the script ends within the GIL's switch interval (5 ms) after its last collective, neither can move: in
torch 2.13 a plain DDP script ends so, now and then, under any launcher, as DDP's reducer drops the last
reference to the group. So we keep one, until the script is over: a group that dies by a Python reference
does so without the GIL (torch binds it with ``intrusive_ptr_no_gil_destructor_class_``).
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
_MOST_KEPT = 64  # groups; a script that makes and destroys them in a loop must not run out of sockets
_kept: list[Any] = []


def _groups() -> list[Any]:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    return list(world.pg_map) if world is not None else []


def let_workers_finish() -> None:
    """The script is over: let go of what was kept, and give the workers of what still lives the GIL."""
    groups = _groups() or list(_kept)
    _kept.clear()
    if groups:
        del groups
        for _ in range(_TURNS):
            time.sleep(_TURN_S)


def wrap_destroy(original: Callable[..., Any]) -> Callable[..., Any]:
    """``destroy_process_group`` that keeps a reference to what it destroys."""

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        _kept.extend(_groups())
        del _kept[:-_MOST_KEPT]
        return original(*args, **kwargs)

    return destroy_process_group
