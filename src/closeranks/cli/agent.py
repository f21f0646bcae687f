"""``closeranks agent``: what an engine runs on each host to make it a node of a job. Not typed by people."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from closeranks.errors import UsageError

__all__ = ["HELP", "configure", "main"]

HELP = "make this host a node of a job (engines call this)"


def configure(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = (
        "example: closeranks agent --controller 10.0.0.1:4711 --credentials agent.pem "
        "--run-dir runs/JOB -- --nproc-per-node 8 train.py"
    )
    parser.add_argument(
        "--controller", required=True, metavar="ENDPOINT",
        help="HOST:PORT, or the path of a Unix socket; commas between a controller and its standbys",
    )  # fmt: skip
    parser.add_argument("--credentials", type=Path, metavar="FILE", help="the agents' credentials")
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="the job's run directory")
    parser.add_argument(
        "--node", default=os.environ.get("CLOSERANKS_NODE", ""), metavar="NAME",
        help="this node's name (default: CLOSERANKS_NODE, else the host's name)",
    )  # fmt: skip
    parser.add_argument(
        "--session", default=os.environ.get("CLOSERANKS_SESSION", ""), metavar="ID",
        help="under which id the engine knows this agent (default: CLOSERANKS_SESSION, else a random one)",
    )  # fmt: skip
    parser.add_argument(
        "--address",
        default="",
        help="where other nodes reach this one (default: what faces the controller)",
    )
    parser.add_argument(
        "--behind-proxy", action="store_true",
        help="the controller is reached through a proxy or Service, whose refusals prove nothing",
    )  # fmt: skip
    parser.add_argument("run", nargs="+", metavar="RUN", help="what follows closeranks run, after --")


def main(args: argparse.Namespace) -> int:
    """Be a node until the job needs it no more; returns the agent's exit code."""
    from closeranks.agent.launch_node import NodePlace, launch_node
    from closeranks.agent.node_link import split_endpoint
    from closeranks.cli import flags

    try:
        for endpoint in args.controller.split(","):
            split_endpoint(endpoint)
    except ValueError as error:
        raise UsageError(f"--controller: {error}") from None
    config = flags.parse_run(args.run, os.environ)
    place = NodePlace(
        endpoint=args.controller,
        credentials=args.credentials,
        run_dir=args.run_dir.absolute(),
        node=args.node,
        session=args.session,
        address=args.address,
        behind_proxy=args.behind_proxy,
    )
    return launch_node(config, place)
