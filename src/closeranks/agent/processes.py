"""Looking after processes that aren't ranks: what they left behind, and orphans that became ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from closeranks.agent import procfs

__all__ = ["kill_strays", "reap_zombies"]

_STRAY_ROUNDS = 20
_STRAY_PAUSE_S = 0.005


def reap_zombies(own: set[int]) -> int:
    """Reap dead orphans that were left to us, but not processes in ``own``; returns how many there were."""
    reaped = 0
    me = os.getpid()
    for pid, parent in procfs.parents().items():
        if parent == me and pid not in own and procfs.state_of(pid) == "Z":
            with contextlib.suppress(ChildProcessError):
                reaped += os.waitpid(pid, os.WNOHANG)[0] == pid
    return reaped


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").rstrip("\n")
    except OSError:
        return ""


async def kill_strays(keep: set[int], *, spare_waiting: bool = True) -> list[int]:
    """SIGKILL what ranks left behind: our descendants, except below the processes in ``keep``.

    Orphans are ours, as we are the subreaper. ``spare_waiting`` keeps workers that are just being forked and
    whose pids nobody knows yet. Returns the pids that would not die. Bounded in rounds.
    """
    me = os.getpid()
    strays: list[int] = []
    for _ in range(_STRAY_ROUNDS):
        parents = procfs.parents()
        kept = set(keep)
        kept.update(pid for root in keep for pid in procfs.descendants(root, parents))
        strays = [pid for pid in procfs.descendants(me, parents) if pid not in kept]
        if spare_waiting:
            strays = [pid for pid in strays if _name(pid) not in ("cr-spare", "cr-zygote")]
        if not strays:
            return []
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        await asyncio.sleep(_STRAY_PAUSE_S)
    return strays
