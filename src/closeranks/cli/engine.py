"""``closeranks engine render [flags of run] script``: what would be handed to the cluster, to be read."""

from __future__ import annotations

import os

from closeranks.errors import UsageError

__all__ = ["HELP", "RAW", "main"]

HELP = "engine render: what closeranks run would hand to a cluster"
RAW = True
_PAGE = """\
usage: closeranks engine render --engine NAME [flags of closeranks run] script.py [arguments]

Print exactly what closeranks run would hand to the engine's scheduler: a batch
script, manifests, or the agents' command lines. Nothing is started, and no secret
is in it.

example: closeranks engine render --engine kubernetes --nnodes 4 --spares 1 \\
             --engine-option image=ghcr.io/me/train:1 train.py > job.yaml
"""


def main(argv: list[str]) -> int:
    """Print it; returns 0. Raises UsageError as ``closeranks run`` would."""
    if argv[:1] in (["-h"], ["--help"]):
        print(_PAGE, end="")
        return 0
    if argv[:1] != ["render"]:
        given = " ".join(["closeranks engine", *argv])[:100]
        raise UsageError(f"there is no '{given}'; use closeranks engine render")
    if argv[1:2] in (["-h"], ["--help"], []):
        print(_PAGE, end="")
        return 0
    from closeranks.agent.launch_cluster import planned
    from closeranks.cli import flags

    config = flags.parse_run(argv[1:], os.environ)
    if config.engine is None:
        raise UsageError("say with --engine for which engine: there are local, slurm and kubernetes")
    print(planned(config, tuple(argv[1:])).render(), end="")
    return 0
