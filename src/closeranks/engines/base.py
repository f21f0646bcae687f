"""Where agents come from: the interface between a job's controller and whoever owns the nodes.

An engine places agents on nodes and takes nodes back; it decides nothing. It may know more than anybody else
about a node's fate, and says so as facts. Whatever it can't do, it says so and leaves undone: agents that
come by other ways are as welcome as its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from closeranks.cluster_events import EngineDrains, NodeGone

__all__ = ["Bundles", "Engine", "EngineFact", "JobSpec", "Join", "agent_command", "controller_command"]

EngineFact = NodeGone | EngineDrains


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What an engine has to know about a job.

    ``run_argv``: what was typed after ``closeranks run``, which agents and controller read, too.
    ``options``: the engine's own settings, as given with ``--engine-option NAME=VALUE``.
    """

    job_id: str
    run_dir: Path
    min_nodes: int
    max_nodes: int
    spares: int
    run_argv: tuple[str, ...]
    python: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_nodes(self) -> int:
        """How many nodes to begin with."""
        return self.max_nodes + self.spares


@dataclass(frozen=True, slots=True)
class Join:
    """How an agent finds its controller and trusts it: an endpoint (``host:port``, or the path of a Unix
    socket; with commas those of a controller and its standbys) and the file with the agents' credentials,
    which is a secret; None on a Unix socket."""

    endpoint: str
    credentials: Path | None = None


@dataclass(frozen=True, slots=True)
class Bundles:
    """The credentials of both roles, as controller.credentials makes them. In no repr."""

    controller: str = field(repr=False)
    agent: str = field(repr=False)


class Engine(Protocol):
    """Places the agents of one job. Nothing here raises for what a cluster can do; ``place`` tells how many
    agents are on their way, ``render`` and ``submit`` raise CloseranksError with what to do."""

    @property
    def name(self) -> str: ...

    def runs_here(self) -> bool:
        """Whether the controller can run in this very process; else the job is to be submitted."""

    def listen_address(self) -> str | None:
        """The numeric address of this host that agents can reach; None: they are all on this host, and a Unix
        socket will do."""

    def start(self, join: Join) -> None:
        """From now on agents can be placed. Called once, before anything else but ``listen_address``."""

    async def place(self, count: int, reason: str, taken: frozenset[str] = frozenset()) -> int:
        """Bring ``count`` more agents up, on nodes that have none; returns how many are on their way.

        ``taken``: nodes that have an agent, which an engine that was started anew doesn't know by itself.
        """

    async def release(self, node: str, reason: str) -> None:
        """The job needs this node no more. Its agent has been told to end, or can't be reached."""

    def facts(self) -> AsyncIterator[EngineFact]:
        """What the engine finds out about nodes, as it does, until ``close``."""

    async def close(self) -> None:
        """End all that this engine has started, within seconds; more than once is nothing."""

    def render(self) -> str:
        """Exactly what ``submit`` hands to the scheduler, for people to read and change."""

    def submit(self) -> str:
        """Hand the job to the scheduler; returns its name there."""


def agent_command(
    spec: JobSpec, join: Join, *, node: str | None = None, session: str | None = None
) -> list[str]:
    """The command line that makes a host a node of this job. Names no secret, only the file that holds one.

    Without ``node`` the agent goes by its host's name. ``session``: an id under which the engine will know
    this very agent, should it say later that it is gone.
    """
    command = [spec.python, "-m", "closeranks", "agent", "--controller", join.endpoint]
    if join.credentials is not None:
        command += ["--credentials", str(join.credentials)]
    if node is not None:
        command += ["--node", node]
    if session is not None:
        command += ["--session", session]
    return [*command, "--run-dir", str(spec.run_dir), "--", *spec.run_argv]


def controller_command(spec: JobSpec, *, listen: str, credentials: Path) -> list[str]:
    """The command line of a controller that stands alone, where an engine places it apart from agents."""
    return [
        spec.python, "-m", "closeranks", "controller", "--listen", listen, "--credentials", str(credentials),
        "--run-dir", str(spec.run_dir), "--", *spec.run_argv,
    ]  # fmt: skip
