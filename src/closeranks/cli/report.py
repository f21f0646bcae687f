"""``closeranks report``: where the time of a run went, what interrupted it, and how much of it counted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from closeranks.cli.runs_place import add_runs_dir, place_of
from closeranks.errors import CloseranksError, JournalError, RunNotFound

if TYPE_CHECKING:
    from closeranks.controller.journal import Record
    from closeranks.goodput.fold import RunSummary

__all__ = ["HELP", "configure", "main"]

HELP = "where the time of a run went: generations, incidents, causes, ETTR"

_LISTED = 20  # newest runs that --list opens
_PROGRESS = 20_000  # progress records looked at: a week has 600,000, and says no more


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument(
        "run",
        nargs="?",
        default="latest",
        metavar="RUN",
        help="a run's id, its unique beginning, its directory, or latest (the default)",
    )
    add_runs_dir(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument("--list", action="store_true", help="list the runs instead, newest first")
    parser.add_argument("--incident", metavar="ID", help="show one incident's screen instead, such as 0001")


def main(args: argparse.Namespace) -> int:
    """Exit code 0. Raises RunNotFound, JournalError or ConfigError, which end the command with 2."""
    args.runs_dir = str(place_of(args.runs_dir, args.run))
    print(_list(args) if args.list else _incident(args) if args.incident else _report(args))
    return 0


def _report(args: argparse.Namespace) -> str:
    # Imported here: `closeranks report --help` needs none of it.
    from closeranks.controller.runs import find_run
    from closeranks.goodput.report import render, to_json

    summary = _summary(find_run(args.run, args.runs_dir))
    if args.json:
        return json.dumps(to_json(summary), indent=2)
    encoding = sys.stdout.encoding or "ascii"
    text = render(
        summary,
        width=shutil.get_terminal_size((100, 24)).columns,
        colour=_wants_colour(),
        ascii_only=not _can_draw(encoding),
    )
    return _printable(text.rstrip("\n"), encoding)


def _incident(args: argparse.Namespace) -> str:
    """One incident, diagnosed again from the evidence that was kept."""
    from closeranks.controller.runs import find_run
    from closeranks.diagnose import diagnose
    from closeranks.diagnose.codec import public_verdict
    from closeranks.diagnose.load import load_incident
    from closeranks.diagnose.screen import render, to_ascii

    incidents = find_run(args.run, args.runs_dir) / "incidents"
    known = sorted(path.name for path in incidents.iterdir()) if incidents.is_dir() else []
    if args.incident.isdigit():
        args.incident = args.incident.zfill(4)  # as the report counts them
    if args.incident not in known:
        listed = ", ".join(known) or "none"
        raise RunNotFound(f"no incident {args.incident!r} in {incidents}; there are: {listed}")
    evidence = load_incident(incidents / args.incident)
    verdict = diagnose(evidence)
    if args.json:
        return json.dumps(public_verdict(verdict), indent=2)
    encoding = sys.stdout.encoding or "ascii"
    width = shutil.get_terminal_size((100, 24)).columns
    hint = str(incidents / args.incident)
    text = render(evidence, verdict, width=width, colour=_wants_colour(), run_hint=hint)
    return (text if _can_draw(encoding) else to_ascii(text)).rstrip("\n")


def _summary(run: Path) -> RunSummary:
    from closeranks.agent.ending import load_ending
    from closeranks.controller.journal import read, writer_alive
    from closeranks.controller.runs import JOURNAL_NAME
    from closeranks.goodput.ending import concluded
    from closeranks.goodput.fold import fold

    path = run / JOURNAL_NAME
    live = writer_alive(path)  # asked first: a run that ends while we read has then its last record
    damage: list[str] = []
    summary = fold(_tolerant(read(path, max_progress=_PROGRESS), damage), job=run.resolve().name, live=live)
    return concluded(dataclasses.replace(summary, notes=(*summary.notes, *damage)), load_ending(run))


def _tolerant(records: Iterable[Record], damage: list[str]) -> Iterator[Record]:
    """All records up to where the journal is damaged, if it is; half a report is better than none."""
    try:
        yield from records
    except JournalError as error:
        damage.append(f"{error}: what followed is missing here.")


def _list(args: argparse.Namespace) -> str:
    from closeranks.controller.runs import list_runs

    runs = list_runs(args.runs_dir)[::-1]
    rows = [_row(run) for run in runs[:_LISTED]]
    if args.json:
        listed = [*rows, *({"job": run.name, "path": str(run)} for run in runs[_LISTED:])]
        return json.dumps({"schema": 1, "runs": listed}, indent=2)
    if not rows:
        return _printable(f"no runs under {Path(args.runs_dir).absolute()}", sys.stdout.encoding or "ascii")
    return _printable("\n".join(_listing(rows, len(runs) - len(rows))), sys.stdout.encoding or "ascii")


def _row(run: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"job": run.name, "path": str(run)}
    try:
        summary = _summary(run)
    except CloseranksError as error:
        return {**row, "error": str(error)}
    return {
        **row,
        "outcome": summary.outcome.value,
        "exit_code": summary.exit_code,
        "elapsed_s": summary.elapsed_s,
        "incidents": len(summary.incidents) + summary.unrecorded_incidents,
        "ettr": summary.ettr,
        "ettr_max": summary.ettr_max,
    }


def _listing(rows: list[dict[str, Any]], hidden: int) -> Iterator[str]:
    from closeranks.goodput.report import duration, percent

    width = max(len(row["job"]) for row in rows)
    yield f"{'run':<{width}}  {'outcome':<11}  {'time':>8}  {'incidents':>9}  {'ETTR':>8}"
    for row in rows:
        if "error" in row:
            yield f"{row['job']:<{width}}  unreadable: {row['error']}"
            continue
        low, high = row["ettr"], row["ettr_max"]
        ettr = "" if low is None else percent(low) if low == high else f">{percent(low)}"
        yield (
            f"{row['job']:<{width}}  {row['outcome']:<11}  {duration(row['elapsed_s']):>8}  "
            f"{row['incidents']:>9,}  {ettr:>8}"
        )
    if hidden:
        yield f"and {hidden:,} older"


def _wants_colour() -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")


def _can_draw(encoding: str) -> bool:
    try:
        "█▓▒░·…".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _printable(text: str, encoding: str) -> str:
    """Without what the encoding can't say: a path of undecodable bytes, for one."""
    try:
        return text.encode(encoding, "replace").decode(encoding)
    except LookupError:
        return text.encode("ascii", "replace").decode("ascii")
