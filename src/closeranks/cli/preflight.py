"""What can be known to fail is said before anything starts: the target, ports, limits, disks.

Looking changes nothing, but for the directory of runs, which is made last.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from closeranks.cli import preflight_entrypoint, preflight_limits, preflight_port
from closeranks.controller.runs import fallback_runs_dir
from closeranks.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from closeranks.config import RunConfig

__all__ = ["checked", "shm_notice", "usable_runs_dir"]

_SHM = Path("/dev/shm")
_SHM_WANTED_BYTES = 64 * 1024 * 1024
# What a run writes before its first log line (journal, config): a disk without room for it is full.
_PROBE_BYTES = 256 * 1024


def checked(config: RunConfig) -> RunConfig:
    """``config`` as it can be run: with further notices, and perhaps another ``runs_dir``.

    Raises UsageError or ConfigError where the run would be over before its first step.
    """
    if config.python is None:
        preflight_entrypoint.check_modules(config.preload)
    else:
        preflight_entrypoint.check_interpreter(config.python)
    preflight_entrypoint.check(config.entrypoint, own_python=config.python is None)
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current directory no longer exists; change to one that does") from None
    notices = list(config.notices)
    if config.nproc_per_node.isdigit():
        limits = preflight_limits.read_limits()
        notices += preflight_limits.check_ranks(int(config.nproc_per_node), limits, forked=config.zygote)
    if config.master_port is not None:
        preflight_port.check(config.master_port)
    shm = shm_notice(_SHM)
    runs_dir, moved = usable_runs_dir(config.runs_dir)
    notices += [text for text in (shm, moved) if text]
    return replace(config, runs_dir=runs_dir, notices=tuple(notices))


def shm_notice(directory: Path) -> str:
    """A sentence if ``directory``, where DataLoader workers hand over batches, is too small; else ""."""
    enlarge = (
        "DataLoader workers may die with a bus error; "
        "give the container more (docker run --shm-size=8g, or an emptyDir of medium Memory in Kubernetes)"
    )
    try:
        status = os.statvfs(directory)
    except OSError:
        return f"{directory} can't be used: {enlarge}."
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes >= _SHM_WANTED_BYTES:
        return ""
    return f"{directory} has {free_bytes / 2**20:.0f} MiB free: {enlarge}."


def usable_runs_dir(wanted: str) -> tuple[str, str]:
    """``wanted``, made and found writable, and ""; else a private directory under TMPDIR and the notice.

    Raises ConfigError if neither can be written to.
    """
    problem = _why_unwritable(Path(wanted))
    if not problem:
        return wanted, ""
    fallback = fallback_runs_dir()
    second = _why_unwritable(fallback, 0o700) or _why_not_ours(fallback)
    if second:
        raise ConfigError(
            f"no place for logs and the journal: {wanted}: {problem}; {fallback}: {second}. "
            "Name a writable directory with --log-dir"
        )
    return str(fallback), f"{wanted} can't be written to ({problem}); this run goes to {fallback} instead."


def _why_unwritable(directory: Path, mode: int = 0o777) -> str:
    try:
        directory.mkdir(mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
    except (FileExistsError, NotADirectoryError):
        return "not a directory"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def _why_not_ours(directory: Path) -> str:
    """Under a directory that all may write to, someone else could have made it, or a link in its place."""
    with contextlib.suppress(OSError):
        status = directory.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            return ""
    return "belongs to someone else"
