"""How a run ended, in a file whose room is reserved when it starts.

A disk that fills up while the job runs takes the journal's last records with it, and who reads the journal
later can't tell that from an agent that was killed. This file is as long at the start as it ever gets, and is
overwritten in place, which needs no room. Where the journal has its end, the file goes.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from closeranks.events import Finish, counted

__all__ = ["ENDING_NAME", "Ending", "load_ending", "what_is_missing"]

ENDING_NAME = "ending.json"
_SIZE_BYTES = 4096
_MAX_TEXT_CHARS = (500, 200)  # of reason and problem: as many as there is room for


class Ending:
    """The file of one run, from its start to its end. Never raises: a run goes on without it."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ENDING_NAME
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        if not self._write({"ended": False}):
            self._remove()  # no room for it: then nothing is known, rather than something wrong

    def conclude(self, finish: Finish | None, *, stopped: bool, incidents: int, missing: str) -> None:
        """The run is over. ``missing``: why the journal lacks its last records, "" where it has them all."""
        if finish is not None and missing:
            facts = {
                "ended": True,
                "exit_code": finish.exit_code,
                "stopped": stopped,
                "incidents": incidents,
            }
            for limit in _MAX_TEXT_CHARS:
                if self._write({**facts, "reason": finish.reason[:limit], "journal": missing[:limit]}):
                    break
        else:
            self._remove()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, facts: dict[str, Any]) -> bool:
        content = json.dumps(facts).encode().ljust(_SIZE_BYTES - 1) + b"\n"
        try:
            return len(content) == _SIZE_BYTES == os.pwrite(self._fd, content, 0)
        except OSError:
            return False

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def what_is_missing(backlog: int, problem: str | None) -> str:
    """What a journal that is closed has not been able to write, and why; "" where it has it all."""
    if not backlog:
        return ""
    _, bracket, rest = (problem or "").partition("(")
    why = f" ({rest.partition(')')[0]})" if bracket else ""
    return f"its last {counted(backlog, 'record')} could not be written{why}"


def load_ending(run_dir: Path) -> dict[str, Any] | None:
    """What a run left of this kind; None where there is nothing to read."""
    try:
        with (run_dir / ENDING_NAME).open("rb") as file:
            facts = json.loads(file.read(_SIZE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None
