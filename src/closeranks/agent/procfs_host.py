"""What the kernel says about this host's memory: OOM kills since a moment, limits, room in /dev/shm."""

from __future__ import annotations

import os
import re
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from closeranks.evidence import HostFacts

__all__ = ["OomBaseline", "host_facts", "oom_baseline"]

_MAX_FILE_BYTES = 64 * 1024
_MAX_MESSAGES = 2000  # of the kernel log, at one look
_MESSAGE_BYTES = 8192  # the kernel's own bound for one record (CONSOLE_EXT_LOG_MAX)
_MAX_VICTIMS = 64
_KERNEL_RECORD = re.compile(rb"(\d+),[^;]*;(.*)", re.DOTALL)
_KILLED = re.compile(rb"[Oo]ut of memory.*[Kk]illed process (\d+) \(")
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(slots=True, weakref_slot=True)
class OomBaseline:
    """OOM kills counted up to now, and a place in the kernel log after which messages are new."""

    cgroup_kills: int | None
    host_kills: int | None
    root: Path
    kmsg_fd: int | None = None
    victims: list[int] = field(default_factory=list)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _counter(text: str, name: str) -> int | None:
    found = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def _mounts(root: Path) -> dict[str, tuple[str, Path]]:
    """ "v1" and "v2" -> (what the mount shows of the hierarchy, where it is), for the memory controller."""
    found: dict[str, tuple[str, Path]] = {}
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        where = root / fields[4].lstrip("/")
        if kind[0] == "cgroup2":
            found.setdefault("v2", (fields[3], where))
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            found.setdefault("v1", (fields[3], where))
    return found


def _cgroup_dirs(root: Path) -> tuple[str, list[Path]]:
    """This process's memory cgroup and the ones above it, nearest first, with its version; "" for none.

    In a container the paths of /proc/self/cgroup may begin above the mount: then the mount is the cgroup.
    """
    mounts = _mounts(root)
    paths: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths["v1"] = path
        elif not controllers:
            paths["v2"] = path
    for version, probe in (("v2", "memory.events"), ("v1", "memory.oom_control")):
        if version not in mounts or version not in paths:
            continue
        shown, where = mounts[version]
        path = paths[version]
        inner = path[len(shown) :] if shown != "/" and path.startswith(shown) else path
        relative = [part for part in inner.split("/") if part not in ("", ".", "..")]
        chain = [where.joinpath(*relative[:depth]) for depth in range(len(relative), -1, -1)]
        chain = [directory for directory in chain if (directory / probe).exists()]
        if chain:
            return version, chain
    return "", []


def _kills(root: Path) -> tuple[int | None, int | None]:
    version, chain = _cgroup_dirs(root)
    in_cgroup = None
    if chain:
        name = "memory.events" if version == "v2" else "memory.oom_control"
        in_cgroup = _counter(_text(chain[0] / name), "oom_kill")
    return in_cgroup, _counter(_text(root / "proc/vmstat"), "oom_kill")


def _memory_limit_bytes(root: Path) -> int | None:
    version, chain = _cgroup_dirs(root)
    name = "memory.max" if version == "v2" else "memory.limit_in_bytes"
    limits = [text for directory in chain if (text := _text(directory / name).strip()).isdigit()]
    return min((int(text) for text in limits if int(text) < _UNLIMITED_BYTES), default=None)


def _open_kmsg(root: Path) -> int | None:
    try:
        fd = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        os.close(fd)
        return None
    return fd


def _new_victims(fd: int) -> list[int]:
    """Pids named by OOM messages that the kernel wrote since the last look; never waits."""
    victims: list[int] = []
    for _ in range(_MAX_MESSAGES):
        try:
            record = os.read(fd, _MESSAGE_BYTES)
        except BrokenPipeError:
            continue  # overwritten before we came: the next read goes on with the oldest that is left
        except OSError:
            break
        if not record:
            break
        found = _KERNEL_RECORD.match(record)
        # The facility is above the low three bits; 0 is the kernel. Others come from whoever may write there.
        killed = _KILLED.search(found[2]) if found and int(found[1]) >> 3 == 0 else None
        if killed:
            victims.append(int(killed[1]))
    return victims


def oom_baseline(*, root: Path = Path("/")) -> OomBaseline:
    """Counters and place in the kernel log as of now; take one where a generation begins.

    Holds one descriptor, closed when the baseline is garbage-collected.
    """
    in_cgroup, on_host = _kills(root)
    baseline = OomBaseline(in_cgroup, on_host, root, _open_kmsg(root))
    if baseline.kmsg_fd is not None:
        weakref.finalize(baseline, os.close, baseline.kmsg_fd)
    return baseline


def host_facts(baseline: OomBaseline) -> HostFacts:
    """Kills since ``baseline``: this job's cgroup where it is counted there, else the whole host.

    Pids in the kernel log are those of the outermost pid namespace: in a container they may name others.
    """
    in_cgroup, on_host = _kills(baseline.root)
    kills = 0
    if in_cgroup is not None and baseline.cgroup_kills is not None:
        kills = in_cgroup - baseline.cgroup_kills
    elif on_host is not None and baseline.host_kills is not None:
        kills = on_host - baseline.host_kills
    if baseline.kmsg_fd is not None:
        baseline.victims.extend(_new_victims(baseline.kmsg_fd))
        del baseline.victims[:-_MAX_VICTIMS]
    try:
        shm = os.statvfs(baseline.root / "dev/shm")
        shm_free_bytes = shm.f_bavail * shm.f_frsize
    except OSError:
        shm_free_bytes = None
    return HostFacts(
        oom_kills=max(0, kills),
        oom_victims=tuple(baseline.victims),
        shm_free_bytes=shm_free_bytes,
        memory_limit_bytes=_memory_limit_bytes(baseline.root),
    )
