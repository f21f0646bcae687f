"""Where a verb looks for runs: as its flag says, else here, else where runs go that can't be kept here."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from closeranks.config import DEFAULT_RUNS_DIR
from closeranks.errors import ConfigError

__all__ = ["add_runs_dir", "place_of"]


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """``--runs-dir``, by the name that ``closeranks run`` has for it too."""
    parser.add_argument(
        "--runs-dir",
        "--log-dir",
        dest="runs_dir",
        default=DEFAULT_RUNS_DIR,
        metavar="DIR",
        help="where runs are kept, as the --log-dir of `closeranks run` (default: %(default)s)",
    )


def place_of(runs_dir: str, run: str) -> Path:
    """``runs_dir``; where that is the default and holds no run, the fallback if one is there, and say so.

    ``run`` as on the command line: a path needs no place.
    """
    from closeranks.controller.runs import LATEST, fallback_runs_dir

    here, fallback = Path(runs_dir), fallback_runs_dir()
    if runs_dir != DEFAULT_RUNS_DIR or _has_runs(here):
        return here
    if run != LATEST and _is_directory(run):
        return Path(run).absolute().parent
    if not (_is_directory(str(fallback)) and fallback.stat().st_uid == os.getuid() and _has_runs(fallback)):
        return here
    sys.stderr.write(f"closeranks: no runs in ./{runs_dir}; runs that had to go elsewhere: {fallback}\n")
    return fallback


def _is_directory(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # too long a name, a NUL in it: no path then
        return False


def _has_runs(directory: Path) -> bool:
    from closeranks.controller.runs import list_runs

    try:
        return bool(list_runs(directory))
    except ConfigError:  # a file, or not ours to list: told by whoever looks into it
        return False
