"""``closeranks agent``: this host becomes a node of a job whose controller is somewhere else."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from closeranks.agent import guard
from closeranks.agent.launch import (
    as_supervisor,
    fill_standard_streams,
    finish_output,
    raise_file_limit,
    resolve_world_size,
)
from closeranks.agent.private_dir import PrivateDir
from closeranks.config import RunConfig
from closeranks.errors import ConfigError
from closeranks.linux import interface_of

__all__ = ["NodePlace", "launch_node"]


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where a node finds its controller, and who it is; ``node`` and ``session`` have defaults. ``endpoint``:
    or several, with commas."""

    endpoint: str
    credentials: Path | None
    run_dir: Path
    node: str = ""
    session: str = ""
    address: str = ""
    behind_proxy: bool = False


def launch_node(config: RunConfig, place: NodePlace) -> int:
    """Be a node until the job needs it no more; returns the agent's exit code."""
    fill_standard_streams()
    place = replace(
        place, node=place.node or socket.gethostname(), session=place.session or secrets.token_hex(8)
    )
    slots = resolve_world_size(config.nproc_per_node, config.python)
    for part in ("logs", "incidents"):
        try:
            (place.run_dir / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"can't make {place.run_dir / part}: {error.strerror}; this node's logs go there"
            ) from error
    watched = guard.hold_signals(config.signals_to_handle)
    private_dir = PrivateDir.make(place.run_dir.name)

    def agent(guard_pid: int) -> int:
        return as_supervisor(lambda: _run(config, place, private_dir.path, slots, guard_pid), "agent")

    return guard.supervise(agent, private_dir.remove, watched)


async def _run(config: RunConfig, place: NodePlace, private_dir: Path, count: int, guard_pid: int) -> int:
    from closeranks.agent.slots import Slots

    file_limit = raise_file_limit()
    _use_interface(place)
    slots = Slots(config, count)
    slots.open()
    from closeranks.agent.console import Console
    from closeranks.agent.logs import LogPump
    from closeranks.agent.node_agent import Attachment, NodeAgent
    from closeranks.agent.node_link import NodeIdentity
    from closeranks.controller.credentials import load

    credentials = load(place.credentials) if place.credentials is not None else None
    identity = NodeIdentity(place.run_dir.name, place.node, place.session, count, place.address)
    pump = LogPump.start(config.logs, role=config.role)
    console = Console(pump.say, quiet=True, runs_hint=str(place.run_dir))
    agent = NodeAgent(
        Attachment(place.endpoint, credentials, identity, refusals_count=not place.behind_proxy),
        config=config,
        run_dir=place.run_dir,
        store_dir=private_dir,
        world_size=count * config.cluster.max_nodes,
        slots=slots,
        pump=pump,
        console=console,
        guard_pid=guard_pid,
        node=place.node,
        file_limit=file_limit,
    )
    try:
        return await agent.run()
    finally:
        finish_output(pump)
        shutil.rmtree(private_dir, ignore_errors=True)  # the guard does so too, if it lives


def _use_interface(place: NodePlace) -> None:
    """gloo and NCCL's sockets go over the interface that faces the job, unless the user says otherwise."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address = place.address or _facing_address(place.endpoint.partition(",")[0])
    name = interface_of(address) if address else None
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _facing_address(endpoint: str) -> str:
    """Our own address towards the controller; nothing is sent to find out."""
    if endpoint.startswith("/"):
        return ""
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    with contextlib.suppress(OSError), socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])
    return ""


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
