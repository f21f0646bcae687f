"""Settings of a run, typed, with their defaults and why. No I/O.

Flags are few and stable; what a component needs lives in its dataclass here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "DEFAULT_RUNS_DIR",
    "BudgetConfig",
    "ChannelConfig",
    "ClusterConfig",
    "Entrypoint",
    "EtcdConfig",
    "HangConfig",
    "LogConfig",
    "RunConfig",
    "StdStreams",
]

DEFAULT_RUNS_DIR = "closeranks-runs"  # in the directory where a run is started


@dataclass(frozen=True, slots=True)
class Entrypoint:
    """What each rank runs. ``kind`` is "script", "module" or "command" (``--no-python``)."""

    kind: str
    target: str
    args: tuple[str, ...] = ()

    @property
    def argv(self) -> tuple[str, ...]:
        return (self.target, *self.args)

    @property
    def name(self) -> str:
        """What to call a run of it: ``train`` of ``jobs/train.py`` and of ``-m jobs.train``."""
        if self.kind == "module":
            parts = [part for part in self.target.split(".") if part not in ("", "__main__")]
            return parts[-1] if parts else self.target
        base = self.target.rstrip("/").rpartition("/")[2]
        stem = base.rpartition(".")[0]
        return stem or base


@dataclass(frozen=True, slots=True)
class BudgetConfig:
    """When restarting stops being worth it. The budget is the job's, not an agent's.

    ``max_restarts``: in total; None = the user set no flag, so ``default_max_restarts`` holds.
    ``max_restarts_per_window`` in ``window_s`` bounds flapping; an explicit ``--max-restarts`` is the user's
    own bound and switches the rate off. ``no_progress_generations``: stop after so many generations in a row
    without a newer step.
    """

    max_restarts: int | None = None
    default_max_restarts: int = 1000
    max_restarts_per_window: int = 300
    window_s: float = 600.0
    no_progress_generations: int = 3
    # Instant where the last generation made progress: back-off is for what fails again at once.
    backoff_first_s: float = 0.5
    backoff_factor: float = 2.0
    backoff_max_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A job over several nodes: how many, and how long to wait for what.

    ``spares``: nodes to keep beside the world; where there are fewer, the engine is asked for more.
    ``lease_s`` is the heartbeat's period; after ``lease_misses`` of it without one the lease is over. Then an
    agent kills its ranks by itself, for which ``fence_margin_s`` leaves it the time.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    spares: int = 0
    lease_s: float = 1.0
    lease_misses: int = 2
    fence_margin_s: float = 0.5
    join_timeout_s: float = 600.0  # for the nodes of a world; as torchrun's
    last_call_s: float = 30.0  # for max_nodes, before the first world starts with fewer
    # While the controller's own host says that nobody listens there, ranks may go on for so long.
    reattach_grace_s: float = 30.0
    # A controller that has begun to listen waits so long for members to attach again. Longer than an agent
    # takes from one attempt to the end of the next (node_link), after which it is back or its lease is over.
    reattach_wait_s: float = 5.0
    request_again_s: float = 60.0  # after an engine had no node to give
    # What an agent does by itself, without ranks: open a store, kill, check. One that doesn't is broken.
    order_timeout_s: float = 60.0
    stop_timeout_s: float = 120.0  # longer than ranks may take to end by themselves, --shutdown-timeout
    # Short at first, as most nodes that get lost were only cut off; repeat offenders wait longer.
    exclusion_s: float = 30.0
    exclusion_factor: float = 4.0
    exclusion_max_s: float = 3600.0
    max_exclusions: int = 5  # a node that is excluded more often is given back for good
    forgive_s: float = 86_400.0  # so long after an exclusion, earlier ones are forgotten
    blame_window_s: float = 600.0  # twice the culprit of a hardware-like failure in this time: excluded
    grow_back: bool = True
    grow_cooldown_s: float = 600.0  # a world stays this long before it is restarted only to grow
    drain_deadline_s: float = 300.0  # for a drain without a deadline of its own
    leave_deadline_s: float = 30.0  # for a node whose agent gets SIGTERM: engines wait so long before SIGKILL
    drain_prepare_s: float = 60.0  # the part of a drain's deadline that is for finishing the step and saving

    @property
    def lease_length_s(self) -> float:
        """How long a node may be silent."""
        return self.lease_s * self.lease_misses


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """Where controllers agree on who of them leads, and keep the job's state. No ``urls``: there is but one.

    A leader that can't renew its lease decides nothing more ``margin_s`` before etcd lets ``ttl_s`` end; its
    successor waits as long again before it begins.
    """

    urls: tuple[str, ...] = ()
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None  # a file with NAME:PASSWORD
    ttl_s: float = 3.0  # etcd makes it no shorter than 1.5 of its election timeouts: 2 s by default
    margin_s: float = 0.5
    poll_s: float = 0.25  # how often a standby looks
    start_timeout_s: float = 10.0  # for a job's first controller; later ones wait for as long as it takes


@dataclass(frozen=True, slots=True)
class HangConfig:
    """Thresholds of hang detection; times in seconds of observed (not wall) time.

    Suspicion: no sign of life for max(``suspect_floor_s``, ``suspect_factor`` x p99 of that phase).
    ``hang_timeout_s`` is when a job without proof is given up: 1,800 s, torch's own default for a process
    group (torch/distributed/constants.py, default_pg_timeout), so never sooner than torch itself would.
    """

    enabled: bool = True
    suspect_floor_s: float = 1.0
    suspect_factor: float = 10.0
    startup_suspect_s: float = 30.0  # before the first step everything is slow: compile, data index, download
    hang_timeout_s: float = 1800.0
    sample_interval_s: float = 0.025
    init_stall_s: float = 10.0  # all ranks inside init_process_group and nothing moves


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    """Bounds of the channel between controller and agents. Sizes are per connection.

    Until it has proved who it is and said its first message, a connection is one of ``max_in_handshake``, for
    at most ``handshake_timeout_s``; when there are too many, the oldest makes room once it has had
    ``handshake_grace_s``. ``idle_timeout_s``: without one whole frame, so that single bytes don't count.
    """

    handshake_timeout_s: float = 5.0
    handshake_grace_s: float = 0.5  # a TLS handshake takes two round trips
    max_in_handshake: int = 64
    max_connections: int = 4096
    max_frame_bytes: int = 1 << 20
    max_first_frame_bytes: int = 64 << 10
    max_unsent_bytes: int = 4 << 20  # beyond that, a peer that doesn't read is closed
    max_unread_bytes: int = 1 << 20  # beyond that, we read no more until our own side has caught up
    max_bad_frames: int = 16
    idle_timeout_s: float = 30.0
    close_timeout_s: float = 1.0  # for what is still to be sent


@dataclass(frozen=True, slots=True)
class StdStreams:
    """Which of stdout (1) and stderr (2) a flag covers, per local rank: torchrun's ``0|1|2|3|0:1,1:2``."""

    default: int = 0
    by_local_rank: dict[int, int] = field(default_factory=dict)

    def mask(self, local_rank: int) -> int:
        if self.by_local_rank:
            return self.by_local_rank.get(local_rank, 0)
        return self.default


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Where output goes. Files are always written; ``redirects`` keeps a stream off the console."""

    redirects: StdStreams = field(default_factory=StdStreams)
    tee: StdStreams = field(default_factory=StdStreams)
    console_ranks: frozenset[int] | None = None  # --local-ranks-filter; None = all
    stdout_filters: tuple[str, ...] = ()  # --duplicate-stdout-filters
    stderr_filters: tuple[str, ...] = ()
    # Per rank, stream and generation: the first bytes are kept, then the newest ones, in this much together.
    max_file_bytes: int = 256 * 1024 * 1024
    console_buffer_bytes: int = 8 * 1024 * 1024
    console_patience_s: float = 60.0  # at the end, a reader that is behind gets so long to take the rest
    prefix_template: str | None = None  # TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything ``closeranks run`` needs; made by cli.run from flags and environment."""

    entrypoint: Entrypoint
    nproc_per_node: str = "1"  # a number, or auto, cpu, gpu, xpu: resolved where torch is
    run_id: str = "none"  # --rdzv-id, as scripts see it in TORCHELASTIC_RUN_ID
    role: str = "default"
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    local_addr: str | None = None
    runs_dir: str = DEFAULT_RUNS_DIR
    job_name: str | None = None
    zygote: bool = True
    preload: tuple[str, ...] = ()
    signals_to_handle: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    shutdown_timeout_s: float = 30.0
    numa_binding: str | None = None
    virtual_local_rank: bool = False
    python: str | None = None  # PYTHON_EXEC: the ranks' interpreter; None = the one that runs closeranks
    event_log_handler: str = "null"
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    hang: HangConfig = field(default_factory=HangConfig)
    logs: LogConfig = field(default_factory=LogConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    engine: str | None = None  # where nodes come from; None: this machine alone, without a controller
    engine_options: tuple[str, ...] = ()  # NAME=VALUE, for the engine
    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    standbys: int = 0  # controllers beside the first, on this host
    inject: tuple[str, ...] = ()  # fault specs, see closeranks.faults
    notices: tuple[str, ...] = ()  # flags that were taken and have no effect here, one sentence each
    quiet: bool = False
