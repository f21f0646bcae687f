"""Does this machine hold so many ranks? A clear no beats a machine that swaps, or a fork that fails."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import NamedTuple

from closeranks.errors import ConfigError

__all__ = ["Limits", "check_ranks", "read_limits"]

# Measured with torch 2.13 on CPU, one linear layer under DDP: least that a rank takes, models come on top.
_FORKED_RANK_BYTES = 30 * 2**20
_NEW_RANK_BYTES = 210 * 2**20
_TASKS_PER_RANK = 5  # a rank's threads, and its spare
_FILES_PER_RANK = 6  # pidfds, pipes and logs in the agent
_RANKS_PER_CORE = 8


class Limits(NamedTuple):
    """What there is for ranks; None where there is no limit or it can't be read."""

    cores: int
    memory_bytes: int | None
    tasks: int | None
    files: int | None


def read_limits(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Limits:
    """The limits that hold for this process's children now."""
    memory = [_meminfo_available_bytes(proc / "meminfo")]
    tasks = [_number(proc / "sys/kernel/pid_max"), _number(proc / "sys/kernel/threads-max")]
    for directory in _own_cgroups(proc / "self/cgroup", cgroups):
        memory.append(_memory_left_bytes(directory, "memory.max", "memory.current", ""))
        memory.append(
            _memory_left_bytes(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        )
        tasks.append(_left(directory, "pids.max", "pids.current"))
    if os.geteuid() != 0:  # the kernel doesn't hold root to it
        tasks.append(_hard_limit(resource.RLIMIT_NPROC))
    return Limits(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_least(memory),
        tasks=_least(tasks),
        files=_hard_limit(resource.RLIMIT_NOFILE),
    )


def check_ranks(ranks: int, limits: Limits, *, forked: bool) -> list[str]:
    """Notices about ``ranks`` on this machine. Raises ConfigError where they clearly don't fit."""
    each_bytes = _FORKED_RANK_BYTES if forked else _NEW_RANK_BYTES
    refusals = (
        (
            limits.memory_bytes,
            each_bytes,
            f"need about {_gib(ranks * each_bytes)} of memory ({each_bytes // 2**20} MiB each, before "
            f"any model) and {_gib(limits.memory_bytes or 0)} is available",
        ),
        (
            limits.tasks,
            _TASKS_PER_RANK,
            f"need about {ranks * _TASKS_PER_RANK:,} processes and threads and {limits.tasks or 0:,} are "
            "allowed (cgroup pids.max, ulimit -u, kernel.pid_max)",
        ),
        (
            limits.files,
            _FILES_PER_RANK,
            f"need about {ranks * _FILES_PER_RANK:,} open files and {limits.files or 0:,} are allowed "
            "(ulimit -Hn)",
        ),
    )
    for limit, each, reason in refusals:
        if limit is not None and ranks * each > limit:
            raise ConfigError(
                f"{ranks:,} ranks {reason}; at most {limit // each:,} would fit: lower --nproc-per-node"
            )
    if ranks > _RANKS_PER_CORE * limits.cores:
        return [
            f"{ranks:,} ranks share {limits.cores} {'core' if limits.cores == 1 else 'cores'}: "
            "steps will be slow (hang detection goes by their own times)."
        ]
    return []


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:,.1f} GiB"


def _least(numbers: list[int | None]) -> int | None:
    return min((n for n in numbers if n is not None), default=None)


def _hard_limit(which: int) -> int | None:
    hard = resource.getrlimit(which)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def _number(path: Path) -> int | None:
    """The number in a file of the kernel's; None for "max", nothing, or no such file."""
    try:
        text = path.read_text("ascii", "replace").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and len(text) < 20 else None


def _left(directory: Path, limit: str, used: str) -> int | None:
    most = _number(directory / limit)
    # cgroup v1 writes "no limit" as a number of pages near 2**63.
    if most is None or most >= 2**60:
        return None
    return max(0, most - (_number(directory / used) or 0))


def _memory_left_bytes(directory: Path, limit: str, used: str, prefix: str) -> int | None:
    """What a memory cgroup has left; the page cache it is charged for is given up when asked for."""
    left = _left(directory, limit, used)
    if left is None:
        return None
    wanted = (f"{prefix}active_file", f"{prefix}inactive_file")
    return left + sum(number for key, number in _pairs(directory / "memory.stat") if key in wanted)


def _pairs(path: Path) -> list[tuple[str, int]]:
    """Lines of ``name number``, as in memory.stat and meminfo."""
    try:
        lines = path.read_text("ascii", "replace").splitlines()
    except OSError:
        return []
    words = [line.split() for line in lines]
    return [(w[0], int(w[1])) for w in words if len(w) > 1 and w[1].isdigit()]


def _meminfo_available_bytes(path: Path) -> int | None:
    return next((kib * 1024 for key, kib in _pairs(path) if key == "MemAvailable:"), None)


def _own_cgroups(path: Path, root: Path) -> list[Path]:
    """Directories of this process's memory and pids cgroups, from its own up to the root."""
    found: list[Path] = []
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return found
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        mounts = [root, root / "unified"] if not controllers else []
        mounts += [root / name for name in controllers.split(",") if name in ("memory", "pids")]
        for mount in mounts:
            directory = mount / own.lstrip("/")
            # In a container the path is the host's, while the mount shows our own cgroup at its root.
            found += [directory, *directory.parents[: len(Path(own).parts) - 1], mount]
    return found
