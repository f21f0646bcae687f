"""Looking after processes that aren't ranks: what they left behind, and orphans that became ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

from closeranks.agent import procfs

__all__ = ["CLEANER_GRACE_S", "Strays", "is_cleaner", "reap_zombies"]

_ROUNDS = 20
_PAUSE_S = 0.005
# After the last process that uses them is dead, Python's needs milliseconds and torch's about two seconds
# (torch/lib/libshm/manager.cpp polls for as long before it looks for clients that have gone).
CLEANER_GRACE_S = 4.0
_OUR_NAMES = ("cr-spare", "cr-zygote")


def _is_tool(pid: int) -> bool:
    """Whether the agent itself has started this process, to be waited for where it was started.

    Workers, the log pump and all that ranks start are in sessions of their own.
    """
    try:
        return os.getsid(pid) == os.getsid(0)
    except ProcessLookupError:
        return False


def reap_zombies(own: set[int]) -> int:
    """Reap dead orphans that were left to us, but not processes in ``own``; returns how many there were."""
    reaped = 0
    me = os.getpid()
    for pid, parent in procfs.parents().items():
        if parent == me and pid not in own and procfs.state_of(pid) == "Z" and not _is_tool(pid):
            with contextlib.suppress(ChildProcessError):
                reaped += os.waitpid(pid, os.WNOHANG)[0] == pid
    return reaped


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _name(pid: int) -> str:
    return _read(f"/proc/{pid}/comm").decode("utf-8", "replace").rstrip("\n")


def is_cleaner(pid: int) -> bool:
    """Whether this process removes shared memory that a dead rank has left, and then ends by itself.

    Python's resource tracker and torch's shared-memory manager do; killed with their rank, they would leave
    its segments in /dev/shm for ever.
    """
    if _name(pid).startswith("torch_shm_manag"):
        return True
    return b"from multiprocessing.resource_tracker import main" in _read(f"/proc/{pid}/cmdline")


def _parents_below() -> dict[int, int]:
    """pid -> parent of each process below this one.

    By the kernel's lists of children, which cost nothing where there is nothing: a look at all processes of a
    large host takes tens of milliseconds. While a child ends, a sibling may be missing from a list.
    """
    found: dict[int, int] = {}
    queue = [os.getpid()]
    for parent in queue:
        try:
            tasks = os.listdir(f"/proc/{parent}/task")  # noqa: PTH208 - as procfs does
        except OSError:
            continue
        for task in tasks:
            children = [int(pid) for pid in _read(f"/proc/{parent}/task/{task}/children").split()]
            found.update(dict.fromkeys(children, parent))
            queue += children
    return found


def _has_children_lists() -> bool:
    """Whether this kernel was built with CONFIG_PROC_CHILDREN."""
    return Path(f"/proc/self/task/{os.getpid()}/children").exists()


class Strays:
    """What ranks leave behind. Orphans are ours, as the agent is a subreaper."""

    def __init__(self) -> None:
        self._cleaners: dict[int, float] = {}  # pid -> when it was first seen without its rank

    async def kill(self, keep: set[int]) -> list[int]:
        """SIGKILL our descendants, except those in ``keep`` with all below them, and waiting workers.

        To be called when no rank lives. Cleaners get time to do their work, without being waited for.
        Returns the pids that would not die. Bounded in rounds.
        """
        return await self._kill(keep, spare_waiting=True)

    async def finish(self, keep: set[int]) -> list[int]:
        """As ``kill``, at the end of the job: waiting workers too, and cleaners once they had their time."""
        await self._kill(keep, spare_waiting=False)
        deadline = time.monotonic() + CLEANER_GRACE_S
        while self._living_cleaners() and time.monotonic() < deadline:
            await asyncio.sleep(_PAUSE_S)
        self._cleaners = dict.fromkeys(self._cleaners, -CLEANER_GRACE_S)
        return await self._kill(keep, spare_waiting=False)

    def _living_cleaners(self) -> list[int]:
        for pid in self._cleaners:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return [pid for pid in self._cleaners if procfs.state_of(pid) not in (None, "Z")]

    async def _kill(self, keep: set[int], *, spare_waiting: bool) -> list[int]:
        strays: list[int] = []
        for _ in range(_ROUNDS):
            strays = self._find(keep, spare_waiting=spare_waiting)
            if not strays:
                return []
            for pid in strays:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            await asyncio.sleep(_PAUSE_S)
        return strays

    def _find(self, keep: set[int], *, spare_waiting: bool) -> list[int]:
        # At the end of the job nothing may be missed, and time doesn't matter.
        quick = spare_waiting and _has_children_lists()
        parents = _parents_below() if quick else procfs.parents()
        kept = set(keep)
        kept.update(pid for root in keep for pid in procfs.descendants(root, parents))
        strays = [pid for pid in procfs.descendants(os.getpid(), parents) if pid not in kept]
        strays = [pid for pid in strays if not _is_tool(pid)]
        if spare_waiting:
            strays = [pid for pid in strays if _name(pid) not in _OUR_NAMES]
        now = time.monotonic()
        self._cleaners = {
            pid: self._cleaners.get(pid, now)
            for pid in strays
            if procfs.state_of(pid) != "Z" and is_cleaner(pid)
        }
        return [pid for pid in strays if now - self._cleaners.get(pid, -CLEANER_GRACE_S) >= CLEANER_GRACE_S]
