"""``closeranks drain``: take a node out of a running job without losing work."""

from __future__ import annotations

import argparse
import json

from closeranks.cli.inject import ask
from closeranks.cli.runs_place import add_runs_dir, place_of
from closeranks.errors import UsageError

__all__ = ["HELP", "configure", "main"]

HELP = "take a node out of a running job: save, swap in a spare, release the node"


def configure(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.description = (
        "Take a node out of a running job. The ranks finish their step and save; a spare takes the node's "
        "place, and the node is released. Without a spare the job goes on until the deadline leaves just "
        "enough time to save."
    )
    parser.epilog = "example: closeranks drain node3 --deadline 600 --reason 'firmware update'"
    parser.add_argument("node", metavar="NODE", help="the node, by the name the job has for it")
    parser.add_argument(
        "--deadline", type=float, metavar="S", help="the node must be free within S seconds (default 300)"
    )
    parser.add_argument("--reason", default="asked for", help="for the record and for whoever asks")
    parser.add_argument(
        "--run", default="latest", help="the job: id, prefix or directory (default: the latest)"
    )
    add_runs_dir(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def main(args: argparse.Namespace) -> int:
    """Run the verb; 0 when the drain has begun, 2 when there is no such node."""
    from closeranks.controller.runs import find_run

    if args.deadline is not None and not 0 <= args.deadline <= 30 * 86_400:
        raise UsageError("--deadline: want seconds from now, 0 or more, at most 30 days")
    request = {"type": "drain", "node": args.node, "reason": args.reason, "deadline_s": args.deadline}
    answer = ask(find_run(args.run, place_of(args.runs_dir, args.run)), request)
    if args.json:
        print(json.dumps(answer))
    elif answer.get("ok"):
        spares = answer.get("spares")
        can = f"{spares} spare can" if spares == 1 else f"{spares} spares can"
        then = f"{can} take its place" if spares else "there is no spare to take its place"
        if not answer.get("seated"):
            then = "it was a spare, and is released at once"
        print(f"node {args.node} drains within {answer.get('deadline_s'):g} s; {then}")
    if not answer.get("ok") and not args.json:
        error = str(answer.get("error", "the job refused"))
        if error.startswith("unknown request"):
            error = "this job runs on one machine alone; stop it with a signal to closeranks run"
        raise UsageError(error)
    return 0 if answer.get("ok") else 2
