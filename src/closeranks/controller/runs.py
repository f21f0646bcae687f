"""Run directories: ``<runs>/<job id>/``, one a job, with ``<runs>/latest`` pointing at the newest.

A job id is ``20261201-042655-train-a1b2``: UTC time of the start (so that names sort by time, also over a
change of the clocks), the script's name, and four random hex digits for jobs of the same second.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import secrets
import time
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from closeranks.config import DEFAULT_RUNS_DIR
from closeranks.errors import ConfigError, RunNotFound

__all__ = [
    "JOURNAL_NAME",
    "LATEST",
    "create_run_dir",
    "fallback_runs_dir",
    "find_run",
    "job_id",
    "list_runs",
    "place_of_runs",
    "promised_run_dir",
]

LATEST = "latest"
JOURNAL_NAME = "journal.db"
MAX_NAME_CHARS = 40

_ID = re.compile(r"\d{8}-\d{6}-[A-Za-z0-9._-]{1,60}")
_SUBDIRECTORIES = ("incidents", "logs")
_ATTEMPTS = 20
_MAX_NAMED = 4


def job_id(job_name: str | None, *, wall_s: float) -> str:
    """An id for a job of that name (a script's path will do); ``wall_s``: seconds since the epoch."""
    name = (job_name or "").rstrip("/").rpartition("/")[2].removesuffix(".py")
    name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode("ascii")
    name = re.sub(r"[^A-Za-z0-9._]+", "-", name)[:MAX_NAME_CHARS].strip("-._") or "job"
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(wall_s))}-{name}-{secrets.token_hex(2)}"


def fallback_runs_dir() -> Path:
    """Where runs go when the directory that was meant can't be written to."""
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"{DEFAULT_RUNS_DIR}-{os.getuid()}"


def create_run_dir(runs_dir: Path | str, job_name: str | None) -> Path:
    """Make ``<runs_dir>/<job id>/`` with its subdirectories, point ``latest`` at it, and return it, absolute.

    Raises ConfigError, with what to do, where that can't be done.
    """
    runs = Path(runs_dir).absolute()
    try:
        runs.mkdir(parents=True, exist_ok=True)
        run = _make_unique(runs, job_name)
        for name in _SUBDIRECTORIES:
            (run / name).mkdir()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"can't make a run directory under {runs}: {why}. Name a place that can be written with "
            "--log-dir DIR; a run keeps its journal, logs and evidence there."
        ) from error
    _point_latest(runs, run.name)
    return run


def promised_run_dir(environ: Mapping[str, str]) -> Path | None:
    """The run directory that was named when the job was submitted, made; None: it wasn't submitted.

    A job that its scheduler has begin again gets one beside it, as the generations begin again, too. Raises
    ConfigError as ``create_run_dir`` does.
    """
    promised = environ.get("CLOSERANKS_SUBMITTED")
    if not promised:
        return None
    run = Path(promised)
    for attempt in range(1, _ATTEMPTS):
        if not (run / JOURNAL_NAME).exists():
            break
        run = Path(f"{promised}-again{attempt}")
    try:
        for name in _SUBDIRECTORIES:
            (run / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"can't make the run directory {run}: {error.strerror}. It was named when the job was submitted, "
            "with --log-dir; it has to be on a file system that all nodes share"
        ) from error
    _point_latest(run.parent, run.name)
    return run


def _make_unique(runs: Path, job_name: str | None) -> Path:
    for attempt in range(_ATTEMPTS):
        run = runs / job_id(job_name, wall_s=time.time())
        try:
            run.mkdir()
        except FileExistsError:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return run
    raise AssertionError("unreachable")


def _point_latest(runs: Path, target: str) -> None:
    """Swap the link in one step, so that a reader never finds none. Without links, names sort by time."""
    draft = runs / f".{LATEST}-{target}"
    with contextlib.suppress(OSError):  # a file system without links, or a directory called "latest"
        draft.symlink_to(target, target_is_directory=True)
        draft.replace(runs / LATEST)
    with contextlib.suppress(OSError):
        draft.unlink(missing_ok=True)


def list_runs(runs_dir: Path | str) -> list[Path]:
    """The run directories under ``runs_dir``, oldest first; [] where there is no such directory.

    Raises ConfigError when it can't be listed.
    """
    try:
        with os.scandir(runs_dir) as entries:
            names = [e.name for e in entries if _ID.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"can't list runs under {runs_dir}: {why}. Name their place with --runs-dir DIR."
        ) from error
    return [Path(runs_dir) / name for name in sorted(names)]


def place_of_runs(runs_dir: Path | str) -> Path:
    """``runs_dir``; where the default one doesn't exist, the place for runs that can't be kept there."""
    fallback = fallback_runs_dir()
    here = Path(runs_dir)
    if str(here) != DEFAULT_RUNS_DIR or here.exists() or not fallback.is_dir():
        return here
    return fallback if fallback.stat().st_uid == os.getuid() else here


def find_run(text: str, runs_dir: Path | str) -> Path:
    """The run directory that ``text`` means: a path, an id, the unique beginning of one, or "latest".

    Where ``runs_dir`` is the default and holds no runs, those in ``fallback_runs_dir()`` are meant. Raises
    RunNotFound, with the nearest names, when none or several answer to it.
    """
    runs = list_runs(runs_dir)
    if not runs:
        runs_dir = place_of_runs(runs_dir)
        runs = list_runs(runs_dir)
    if text in ("", LATEST):
        return _latest(Path(runs_dir), runs)
    by_name = {run.name: run for run in runs}
    if text in by_name:
        return by_name[text]
    found = _as_path(text)
    if found is not None:
        return found
    matches = [run for run in runs if run.name.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RunNotFound(
            f"{text!r} may be any of {len(matches)} runs: {_named(matches)}. Give more of the name."
        )
    raise RunNotFound(f"no run {text!r} under {Path(runs_dir).absolute()}{_hint(text, runs)}")


def _latest(runs_dir: Path, runs: list[Path]) -> Path:
    link = runs_dir / LATEST
    if link.is_symlink() and link.is_dir():
        return link.resolve()
    if runs:
        return runs[-1]
    raise RunNotFound(
        f"no runs under {runs_dir.absolute()}: `closeranks run` keeps them in the directory where it is "
        "started; name another with --runs-dir DIR"
    )


def _as_path(text: str) -> Path | None:
    path = Path(text)
    try:
        if path.is_dir():
            if (path / JOURNAL_NAME).exists():
                return path
            if "/" in text or list_runs(path):
                what = "holds runs, but is none itself" if list_runs(path) else f"holds no {JOURNAL_NAME}"
                raise RunNotFound(f"{path} {what}: use --runs-dir for a directory of runs")
        if path.name == JOURNAL_NAME and path.is_file():
            return path.parent
    except (OSError, ValueError):  # too long a name, a NUL in it: no path then
        return None
    return None


def _named(runs: list[Path]) -> str:
    more = f" and {len(runs) - _MAX_NAMED} more" if len(runs) > _MAX_NAMED else ""
    return ", ".join(run.name for run in reversed(runs[-_MAX_NAMED:])) + more


def _hint(text: str, runs: list[Path]) -> str:
    if not runs:
        return ": there are none at all; name their place with --runs-dir DIR"
    wanted = text.lower()
    near = [run for run in runs if wanted and wanted in run.name.lower()]
    if not near:
        # Of each name the part between time and random digits as well: that is what people remember.
        keys = {run.name: run for run in runs} | {run.name[16:-5]: run for run in runs}
        near = [keys[key] for key in difflib.get_close_matches(text[:100], keys, n=_MAX_NAMED, cutoff=0.6)]
    if near:
        return f"; did you mean {_named(near)}?"
    return f"; the newest are {_named(runs)}"
