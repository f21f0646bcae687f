"""What each rank finds in its environment: torchrun's variables, and a few of ours.

Reference: torch 2.13, torch/distributed/elastic/agent/server/local_elastic_agent.py (``worker_env``).
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping

from closeranks.config import RunConfig

__all__ = ["base_environment", "free_port", "rank_environment"]

_EPHEMERAL_FIRST = 32768  # Linux's default ip_local_port_range starts here; gloo and clients take from it


def base_environment(config: RunConfig, local_world_size: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the zygote, and so of every rank before its own variables are added.

    As torchrun does, OMP_NUM_THREADS becomes 1 for several ranks on a node unless the user set it. The
    flight recorder and gloo's interface are set only where the user hasn't.
    """
    environment = dict(environ)
    if local_world_size > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(config.signals_to_handle)
    # Counters and the last collectives of each group, read at suspicion. (ProcessGroup ring buffer, entries.)
    environment.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    # gloo finds its interface by resolving the host's name; on one machine no name server may matter.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if config.zygote and environment.get("OMP_NUM_THREADS") != "1":
        # OpenBLAS starts a thread pool while numpy is imported, and a zygote must stay single-threaded.
        environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    return environment


def free_port() -> int:
    """A TCP port nobody listens on, below the ephemeral range, so that no outgoing connection takes it."""
    for _ in range(64):
        port = random.randrange(20000, _EPHEMERAL_FIRST)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(
    config: RunConfig,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    node_rank: int,
    node_count: int,
    generation: int,
    master_port: int,
    run_id: str,
    run_dir: str,
    error_file: str,
) -> dict[str, str]:
    """The variables of one rank in one generation."""
    most = config.budget.max_restarts
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(node_count),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": config.role,
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": config.master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": str(generation),
        "TORCHELASTIC_MAX_RESTARTS": str(config.budget.default_max_restarts if most is None else most),
        "TORCHELASTIC_RUN_ID": run_id,
        # Workers meet in a store of their own (worker/store.py); a TCPStore a script makes is its own too.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "CLOSERANKS_RUN_DIR": run_dir,
        "CLOSERANKS_GENERATION": str(generation),
    }
    if config.virtual_local_rank:
        variables["LOCAL_RANK"] = "0"
        visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        device = visible[local_rank] if local_rank < len(visible) else str(local_rank)
        variables["CUDA_VISIBLE_DEVICES"] = device
    return variables
