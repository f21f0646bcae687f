"""``closeranks run``: from the command line to a run that has begun."""

from __future__ import annotations

import os

from closeranks.cli.flags_scan import scan
from closeranks.cli.flags_table import FLAGS

__all__ = ["HELP", "RAW", "main"]

HELP = "run a training script on every rank, and keep it running"
# The script's arguments are not ours to parse: this verb reads its own command line.
RAW = True


def main(argv: list[str]) -> int:
    """Run ``argv`` (flags, script, its arguments); returns the exit code. Raises CloseranksError."""
    given, _ = scan(argv, FLAGS)
    if any(g.flag.name == "help" for g in given):
        from closeranks.cli.flags_help import help_page

        print(help_page(), end="")
        return 0
    from closeranks.cli import flags, preflight

    config = preflight.checked(flags.parse_run(argv, os.environ))
    if config.engine is not None:
        from closeranks.agent.launch_cluster import launch_cluster

        return launch_cluster(config, tuple(argv))
    from closeranks.agent.launch import launch

    return launch(config)
