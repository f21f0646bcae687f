"""The job's private directory: the stores of its generations, and the control socket.

On tmpfs where there is room, else among temporary files. Whoever survives of guard, keeper and agent removes
it. Where all were killed at once, the next job of the same user does: each holds a lock while it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from closeranks.errors import ConfigError
from closeranks.linux import boot_id

__all__ = ["PrivateDir", "bases", "sweep_job"]

_PREFIX = "closeranks-"
_LOCK = "lock"
_ROOM_BYTES = 4 << 20
_ROOM_FILES = 64
_MIN_AGE_S = 10.0  # a younger one may not have been locked yet
_MAX_SWEPT = 100


class PrivateDir:
    """Made for one job; the lock lasts as long as the process that made it, or one of its forks, lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.write(self._lock_fd, boot_id().encode())
        with contextlib.suppress(OSError):  # a file system without locks: nothing is swept there either
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @classmethod
    def make(cls, job_id: str) -> PrivateDir:
        """Raises ConfigError where no place can be written to."""
        for base in bases():
            _sweep(Path(base))
        for base in sorted(bases(), key=_has_room, reverse=True):  # stable: a full one is the last resort
            with contextlib.suppress(OSError):
                return cls(Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{job_id[-24:]}-", dir=base)))
        raise ConfigError(f"no place for the ranks to meet: can't write to {' nor '.join(bases())}")

    def remove(self) -> None:
        """Remove it and all in it; may be called again."""
        shutil.rmtree(self.path, ignore_errors=True)


def sweep_job(job_id: str) -> None:
    """Remove what a job that is over has left on this host: directories of its agents that were killed."""
    for base in bases():
        _sweep(Path(base), f"{_PREFIX}{job_id[-24:]}-", min_age_s=0.0)


def bases() -> list[str]:
    """Where private directories go, the best place first."""
    return [base for base in ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()) if base]


def _has_room(directory: str) -> bool:
    """Whether stores of many ranks will find their place there."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return False
    enough_files = status.f_files == 0 or status.f_favail >= _ROOM_FILES  # 0: it doesn't count them
    return enough_files and status.f_bavail * status.f_frsize >= _ROOM_BYTES


def _sweep(base: Path, prefix: str = _PREFIX, *, min_age_s: float = _MIN_AGE_S) -> None:
    """Remove what killed jobs of this user have left."""
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        found = [entry.name for entry in entries if entry.name.startswith(prefix)][:_MAX_SWEPT]
        for name in found:
            if _is_abandoned(base / name, min_age_s):
                shutil.rmtree(base / name, ignore_errors=True)


def _is_abandoned(directory: Path, min_age_s: float) -> bool:
    try:
        status = (directory / _LOCK).lstat()
        if status.st_uid != os.getuid() or time.time() - status.st_mtime < min_age_s:
            return False
        fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.read(fd, 64).strip() != boot_id().encode():  # another host's, on a shared file system
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody lives there
        return False
    finally:
        os.close(fd)
    return True
