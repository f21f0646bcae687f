"""``closeranks controller``: a job's controller by itself, where an engine places it apart from agents."""

from __future__ import annotations

import argparse
import ipaddress
import os
from pathlib import Path

from closeranks.errors import UsageError

__all__ = ["HELP", "configure", "main"]

HELP = "be a job's controller, apart from its nodes (engines call this)"


def configure(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = (
        "Whoever started it is to start it again when it is killed: with the same --run-dir it goes on. "
        "With --etcd among the flags of the run it may have standbys, each with a --run-dir of its own, by "
        "the same name; one that leads no more ends with 96, and is to be started again. "
        "example: closeranks controller --listen 0.0.0.0:4711 --credentials controller.pem "
        "--run-dir /runs/JOB -- --engine kubernetes --nnodes 4 train.py"
    )
    parser.add_argument(
        "--listen", required=True, metavar="ADDRESS:PORT", help="where agents find it; a numeric address"
    )
    parser.add_argument(
        "--credentials", type=Path, required=True, metavar="FILE", help="the controller's credentials"
    )
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="the job's run directory")
    parser.add_argument(
        "--standby", action="store_true",
        help="never begin the job: wait, and lead it when its controller does so no more",
    )  # fmt: skip
    parser.add_argument("run", nargs="+", metavar="RUN", help="what follows closeranks run, after --")


def main(args: argparse.Namespace) -> int:
    """Control the job to its end; returns the job's exit code."""
    from closeranks.agent.launch_cluster import launch_controller
    from closeranks.agent.node_link import split_endpoint
    from closeranks.cli import flags

    try:
        host, port = split_endpoint(args.listen)
        ipaddress.ip_address(host)
    except ValueError:
        raise UsageError(
            f"--listen {args.listen[:100]!r}: want a numeric ADDRESS:PORT, 0.0.0.0:4711, say"
        ) from None
    config = flags.parse_run(args.run, os.environ)
    if config.engine is None:
        raise UsageError("a controller needs nodes: say with --engine, after --, where they come from")
    if args.standby and not config.etcd.urls:
        raise UsageError("a standby needs --etcd, after --, to know when it is to lead")
    return launch_controller(
        config,
        tuple(args.run),
        listen=host,
        port=port,
        credentials=args.credentials,
        run_dir=args.run_dir.absolute(),
        begins=not args.standby,
    )
