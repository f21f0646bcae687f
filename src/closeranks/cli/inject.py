"""``closeranks inject``: break something in a running job on purpose, and see what comes of it."""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path
from typing import Any

from closeranks.cli.runs_place import add_runs_dir, place_of
from closeranks.errors import RunNotFound, UsageError
from closeranks.faults import KINDS, format_spec, parse_spec

__all__ = ["HELP", "ask", "configure", "main"]

HELP = "break a rank of a running job on purpose"
_CONTROL_FILE = "control.json"
_TIMEOUT_S = 10.0
_MAX_REPLY_BYTES = 1 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    kinds = "\n".join(f"  {name:<12} {kind.description}" for name, kind in KINDS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = f"Break something in a running job of yours.\n\nfaults:\n{kinds}"
    parser.epilog = (
        "examples:\n"
        "  closeranks inject kill --rank 1\n"
        "  closeranks inject stop --rank 2 --at-step 500\n"
        "  closeranks inject slow --rank 0 --param ms=50 --param for=20\n"
        "  closeranks run --inject kill:rank=1,step=50 train.py    (planned from the start)"
    )
    parser.add_argument(
        "fault", metavar="FAULT", help="one of the faults below, or a whole spec: kill:rank=1,step=5"
    )
    parser.add_argument("--rank", type=int, help="the rank to break (default: one at random)")
    when = parser.add_mutually_exclusive_group()
    when.add_argument(
        "--at-step", type=int, metavar="N", help="when it has completed N steps of its generation"
    )
    when.add_argument("--after", type=float, metavar="S", help="S seconds from now (default: now)")
    parser.add_argument(
        "--param", action="append", default=[], metavar="NAME=VALUE", help="a fault's own setting"
    )
    parser.add_argument(
        "--run", default="latest", help="the job: id, prefix or directory (default: the latest)"
    )
    add_runs_dir(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def ask(run_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Send one request to a running job. Raises RunNotFound if it isn't running."""
    try:
        where = json.loads((run_dir / _CONTROL_FILE).read_text())["socket"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_TIMEOUT_S)
            sock.connect(str(where))
            sock.sendall(json.dumps(request).encode() + b"\n")
            with sock.makefile("rb") as reply:
                answer = json.loads(reply.readline(_MAX_REPLY_BYTES))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunNotFound(
            f"no job is running in {run_dir}; start one with `closeranks run`, or name it with --run"
        ) from error
    if not isinstance(answer, dict):
        raise RunNotFound(f"the job in {run_dir} gave no sensible answer")
    return answer


def _spec(args: argparse.Namespace) -> str:
    """The fault as one spec text, checked."""
    settings = [] if args.rank is None else [f"rank={args.rank}"]
    if args.at_step is not None:
        settings.append(f"step={args.at_step}")
    if args.after is not None:
        settings.append(f"after={args.after:g}")
    settings.extend(args.param)
    text = args.fault
    if settings:
        text += ("," if ":" in text else ":") + ",".join(settings)
    spec = parse_spec(text)
    if spec.generation != 0:
        raise UsageError(
            "a fault for a running job belongs to its present generation; leave out generation=, or plan "
            "the fault from the start with closeranks run --inject"
        )
    return format_spec(spec)


def main(args: argparse.Namespace) -> int:
    """Run the verb; 0 when the fault has happened or is on its way, 2 when it can't be."""
    from closeranks.controller.runs import find_run

    spec = _spec(args)
    answer = ask(find_run(args.run, place_of(args.runs_dir, args.run)), {"type": "inject", "spec": spec})
    if args.json:
        print(json.dumps(answer))
    elif answer.get("ok"):
        state = "done" if answer.get("fired") else "on its way"
        waits = f"; it waits for {answer['waits_for']}" if answer.get("waits_for") else ""
        print(
            f"{state}: {answer.get('spec', spec)} (rank {answer.get('rank')}, "
            f"generation {answer.get('generation')}){waits}"
        )
    if not answer.get("ok") and not args.json:
        raise UsageError(str(answer.get("error", "the job refused")))
    return 0 if answer.get("ok") else 2
