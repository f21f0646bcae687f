"""What the person at the terminal sees of the agent: short lines and one screen an incident, on stderr.

Everything goes through the log pump, so that our lines and the ranks' never tear each other.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from closeranks.config import DEFAULT_RUNS_DIR
from closeranks.controller.runs import JOURNAL_NAME
from closeranks.diagnose import screen
from closeranks.diagnose.text import clean
from closeranks.events import Finish
from closeranks.evidence import Evidence, Verdict

__all__ = ["Console"]

_COLOURS = {"warning": "\x1b[33m", "error": "\x1b[31m", "info": "\x1b[36m"}


class Console:
    """Says things. ``write`` takes bytes; ``quiet`` leaves warnings, errors and incidents."""

    def __init__(self, write: Callable[[bytes], None], *, quiet: bool, runs_hint: str) -> None:
        self._write = write
        self._quiet = quiet
        self._runs_hint = runs_hint
        self._colour = os.isatty(2) and not os.environ.get("NO_COLOR")
        encoding = (sys.stderr.encoding or "ascii").lower()
        self._unicode = encoding.startswith("utf")

    def tell(self, level: str, text: str) -> None:
        """One line; ``level`` is info, warning or error."""
        if level == "info" and self._quiet:
            return
        mark = "" if level == "info" else f"{level}: "
        head = f"{_COLOURS.get(level, '')}closeranks:\x1b[0m" if self._colour else "closeranks:"
        self._write(f"{head} {mark}{text}\n".encode("utf-8", "replace"))

    def incident(
        self,
        evidence: Evidence,
        verdict: Verdict,
        directory: Path | None,
        *,
        next_generation: int | None,
        injected: bool,
        delay_s: float = 0.0,
    ) -> None:
        """The incident's screen, or one line where the script refused its command line and said so itself.

        ``directory``: its files, None where they couldn't be written; ``delay_s``:
        how long the next generation waits; ``injected``: it was asked for.
        """
        where = _shown(directory) if directory is not None else ""
        if next_generation is None and (verdict.leaf, verdict.kind) == ("app.config", "rank_exit"):
            files = f" · {where}" if where else ""
            said = f"{verdict.summary}, after a usage message of its own{files}"
            self.tell("error", clean(f"incident {evidence.incident_id}: {said}", 400))
            return
        width = shutil.get_terminal_size((100, 24)).columns if self._colour else 100
        next_step = f"generation {next_generation}" if next_generation is not None else "the job stops"
        if delay_s:
            next_step += f" in {delay_s:g} s"
        text = screen.render(
            evidence,
            verdict,
            width=max(60, min(width, 120)),
            colour=self._colour,
            next_step=f"{next_step} · injected" if injected else next_step,
            run_hint=where,
            clock=time.strftime("%H:%M:%S"),
        )
        if not self._unicode:
            text = screen.to_ascii(text)
        self._write((text.rstrip("\n") + "\n").encode("utf-8", "replace"))

    def finished(self, finish: Finish | None, elapsed_s: float, incidents: int, run_dir: Path) -> None:
        """The last line: how it ended, and where to read about it."""
        if finish is None:
            return
        level = "info" if finish.exit_code == 0 else "error"
        times = f"{incidents} incident{'s' if incidents != 1 else ''}"
        kept = (run_dir / JOURNAL_NAME).exists()
        hint = (
            f" · closeranks report {_name_for_report(run_dir)}"
            if kept and (incidents or finish.exit_code)
            else ""
        )
        self.tell(level, f"{finish.reason} · {elapsed_s:.1f} s · {times}{hint}")

    def internal_error(self, error: BaseException) -> None:
        """A bug of ours: the traceback goes to the user, who is asked to report it."""
        lines = "".join(traceback.format_exception(error))
        self.tell("error", f"this is a bug in closeranks, please report it:\n{lines}")


def _shown(path: Path) -> str:
    """A path as short as it can be told from the directory where the job was started."""
    with contextlib.suppress(OSError, ValueError):  # that directory is gone, or the path isn't under it
        return str(path.relative_to(Path.cwd()))
    return str(path)


def _name_for_report(run_dir: Path) -> str:
    """What ``closeranks report`` finds this run by, typed where the job was started."""
    shown = _shown(run_dir)
    return run_dir.name if Path(shown).parent == Path(DEFAULT_RUNS_DIR) else shlex.quote(shown)
