"""The flags of ``closeranks run`` as data: parser, notices, help page and the reference page read this.

A row says what torchrun does with a flag and what happens here. ``docs/reference/torchrun-flags.md`` holds
the same table, and a test holds this one, the page and the installed torch's own parser together.
"""

from __future__ import annotations

from typing import NamedTuple

from closeranks.cli import flags_values as values

__all__ = ["COMPATIBILITY", "ENVIRONMENT", "FAULTS", "FLAGS", "GROUPS", "LOGS", "NODES", "RUN", "Flag"]

RUN = "What runs"
LOGS = "Logs"
FAULTS = "Faults and hangs"
NODES = "Several nodes"
COMPATIBILITY = "torchrun compatibility"
GROUPS = (RUN, NODES, LOGS, FAULTS, COMPATIBILITY)

_ONE_MACHINE = "on one machine the workers meet in a store of their own"


class Flag(NamedTuple):
    """One flag.

    ``name`` is torchrun's (and argparse's) destination. ``metavar`` "" makes it a switch, whose value is
    ``switched``. ``field`` is where in RunConfig its value goes ("" = nowhere by itself). ``torchrun`` is
    its meaning there, "" for a flag of ours; ``here`` what it does here. ``no_effect`` says why it does
    nothing here; those who give it are told.
    ``pet``: the environment's ``PET_<NAME>`` stands in for it, as in torchrun; then ``variable`` does.
    """

    name: str
    group: str
    here: str = ""
    metavar: str = ""
    torchrun: str = ""
    field: str = ""
    read: values.Reader = values.text
    short: str = ""
    switched: bool = True
    repeatable: bool = False
    no_effect: str = ""
    pet: bool = False
    variable: str = ""

    @property
    def long(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every option string, the short one first."""
        both = (self.long, "--" + self.name) if "_" in self.name else (self.long,)
        return (self.short, *both) if self.short else both

    @property
    def effect(self) -> str:
        """What it does here, in a phrase."""
        return self.here or f"no effect: {self.no_effect}"

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables that stand in for the flag; the first one that is set counts."""
        pet = (f"PET_{self.name.upper()}",) if self.pet else ()
        return (*pet, self.variable) if self.variable else pet

    @property
    def is_switch(self) -> bool:
        return not self.metavar


FLAGS: tuple[Flag, ...] = (
    # --- what runs ---
    Flag(
        "nproc_per_node",
        RUN,
        metavar="N",
        read=values.nproc,
        field="nproc_per_node",
        torchrun="workers on each node: a number, auto, cpu, gpu or xpu",
        here="ranks to start: a number, or auto, cpu, gpu, xpu (default 1)",
        pet=True,
    ),
    Flag(
        "module",
        RUN,
        short="-m",
        torchrun="the script is a module's name, run as python -m does",
        here="the target is a module, run as python -m does",
        pet=True,
    ),
    Flag(
        "no_python",
        RUN,
        torchrun="the script is a program, run without Python",
        here="the target is a program, run without Python; nothing looks inside it, so hangs are seen "
        "from outside alone",
        pet=True,
    ),
    Flag(
        "max_restarts",
        RUN,
        metavar="N",
        read=values.int_at_least_0,
        field="budget.max_restarts",
        torchrun="restarts before the job fails, for each agent (default 0)",
        here="restarts before the job fails, for the whole job (default: 1000, bounded by rate and by "
        "progress; torchrun's default is 0)",
        pet=True,
    ),
    Flag(
        "preload",
        RUN,
        metavar="MODULE",
        read=values.module_names,
        field="preload",
        repeatable=True,
        here="import this too before ranks are forked, so that restarts don't pay for it (repeatable, or "
        "with commas)",
    ),
    Flag(
        "no_zygote",
        RUN,
        field="zygote",
        switched=False,
        here="start every rank as a new interpreter; slower, for scripts that a fork doesn't suit",
    ),
    Flag(
        "job_name",
        RUN,
        metavar="NAME",
        read=values.job_name,
        field="job_name",
        here="name of the run's directory (default: made from the script's name and the time)",
    ),
    Flag("quiet", RUN, field="quiet", here="say only warnings, errors and incidents; ranks' output is shown"),
    Flag("help", RUN, short="-h", torchrun="show the flags and exit", here="show this page and exit"),
    # --- several nodes ---
    Flag(
        "nnodes",
        NODES,
        metavar="MIN[:MAX]",
        read=values.nodes,
        torchrun="number of nodes, or its range",
        here="nodes of the job, or the range within which it may shrink and grow again; more than one "
        "takes an --engine",
        pet=True,
    ),
    Flag(
        "spares",
        NODES,
        metavar="N",
        read=values.int_at_least_0,
        field="cluster.spares",
        here="warm nodes beside those that train; one takes the place of a node that is lost (default 0)",
    ),
    Flag(
        "engine",
        NODES,
        metavar="NAME",
        field="engine",
        here="where nodes come from: local (all on this host, or hosts that a command reaches), slurm or "
        "kubernetes; without it the job runs on this host alone",
        variable="CLOSERANKS_ENGINE",
    ),
    Flag(
        "engine_option",
        NODES,
        metavar="NAME=VALUE",
        read=values.engine_option,
        field="engine_options",
        repeatable=True,
        here="a setting of the engine's own",
    ),
    Flag(
        "lease",
        NODES,
        metavar="SECONDS",
        read=values.positive_seconds,
        field="cluster.lease_s",
        here="a node that is silent for twice as long is lost (default 1)",
    ),
    Flag(
        "etcd",
        NODES,
        metavar="URLS",
        read=values.urls,
        field="etcd.urls",
        here="where the job's controllers agree on who leads, and keep its state: http(s)://HOST:PORT, "
        "commas between several",
    ),
    Flag(
        "etcd_ca",
        NODES,
        metavar="FILE",
        read=values.path,
        field="etcd.ca",
        here="who vouches for etcd (default: whom this system trusts)",
    ),
    Flag(
        "etcd_cert",
        NODES,
        metavar="FILE",
        read=values.path,
        field="etcd.cert",
        here="our certificate for etcd, where it asks for one",
    ),
    Flag("etcd_key", NODES, metavar="FILE", read=values.path, field="etcd.key", here="and its key"),
    Flag(
        "etcd_user",
        NODES,
        metavar="FILE",
        read=values.path,
        field="etcd.user",
        here="a file with NAME:PASSWORD, where etcd asks for that",
    ),
    Flag(
        "standbys",
        NODES,
        metavar="N",
        read=values.int_at_least_0,
        field="standbys",
        here="further controllers on this host, to try out with --etcd how one takes over (default 0)",
    ),
    # --- logs ---
    Flag(
        "log_dir",
        LOGS,
        metavar="DIR",
        read=values.name,
        field="runs_dir",
        torchrun="directory for log files",
        here="directory for runs: logs, journal, incidents (default closeranks-runs)",
        pet=True,
    ),
    Flag(
        "redirects",
        LOGS,
        short="-r",
        metavar="WHICH",
        read=values.std_streams,
        field="logs.redirects",
        torchrun="streams that go to a file instead of the console: 0 none, 1 stdout, 2 stderr, 3 both, or "
        "RANK:WHICH,...",
        here="streams kept off the console: 0 none, 1 stdout, 2 stderr, 3 both, or RANK:WHICH,... "
        "(files are always written)",
        pet=True,
    ),
    Flag(
        "tee",
        LOGS,
        short="-t",
        metavar="WHICH",
        read=values.std_streams,
        field="logs.tee",
        torchrun="streams that go to a file and to the console, format as --redirects",
        here="streams on the console with a prefix for their rank, format as --redirects (files are always "
        "written)",
        pet=True,
    ),
    Flag(
        "local_ranks_filter",
        LOGS,
        metavar="RANKS",
        read=values.local_ranks,
        field="logs.console_ranks",
        torchrun="ranks shown on the console, such as 0,1",
        here="ranks shown on the console, such as 0,1 (default: all)",
        pet=True,
    ),
    Flag(
        "duplicate_stdout_filters",
        LOGS,
        metavar="TEXTS",
        read=values.comma_list,
        field="logs.stdout_filters",
        torchrun="lines of stdout that hold one of these also go to filtered_stdout.log",
        here="lines of stdout that hold one of these also go to filtered_stdout.log (commas between; ,, is "
        "a comma)",
        pet=True,
    ),
    Flag(
        "duplicate_stderr_filters",
        LOGS,
        metavar="TEXTS",
        read=values.comma_list,
        field="logs.stderr_filters",
        torchrun="the same for stderr and filtered_stderr.log",
        here="the same for stderr and filtered_stderr.log",
        pet=True,
    ),
    # --- faults and hangs ---
    Flag(
        "hang_timeout",
        FAULTS,
        metavar="SECONDS",
        read=values.off_or_seconds,
        field="hang.hang_timeout_s",
        here="restart after so long without progress, even without proof of a hang (default 1800; 0 = never)",
    ),
    Flag(
        "hang_detection",
        FAULTS,
        metavar="on|off",
        read=values.on_off,
        field="hang.enabled",
        here="off: only deaths restart the job; nothing is suspected, measured or timed (default on)",
    ),
    Flag(
        "inject",
        FAULTS,
        metavar="FAULT",
        read=values.fault,
        field="inject",
        repeatable=True,
        here="make a fault happen, such as kill:rank=1,step=20 (repeatable); see closeranks inject --help",
    ),
    Flag(
        "signals_to_handle",
        FAULTS,
        metavar="SIGNALS",
        read=values.signal_names,
        field="signals_to_handle",
        torchrun="signals passed on to the workers (default SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
        here="signals passed on to the ranks (default SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
        pet=True,
    ),
    Flag(
        "shutdown_timeout",
        FAULTS,
        metavar="SECONDS",
        read=values.int_at_least_0,
        field="shutdown_timeout_s",
        torchrun="grace for all workers together at a stop (default 30)",
        here="grace of each rank at a planned stop (default 30); what fails is killed at once",
        variable="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        pet=True,
    ),
    # --- torchrun compatibility ---
    Flag(
        "node_rank",
        COMPATIBILITY,
        metavar="0",
        read=values.node_rank,
        torchrun="rank of this node for the static rendezvous",
        here="0 alone: there is one machine",
        pet=True,
    ),
    Flag(
        "standalone",
        COMPATIBILITY,
        torchrun="rendezvous on this machine, under a new id",
        here="already so; the run's id is a new one, as in torchrun",
        pet=True,
    ),
    Flag(
        "rdzv_id",
        COMPATIBILITY,
        metavar="ID",
        field="run_id",
        torchrun="id of the job, TORCHELASTIC_RUN_ID in the script",
        here="TORCHELASTIC_RUN_ID in the script (default: a new id, as torchrun has on one machine)",
        pet=True,
    ),
    Flag(
        "rdzv_backend",
        COMPATIBILITY,
        metavar="NAME",
        torchrun="how nodes find each other: static, c10d, etcd, etcd-v2",
        no_effect=_ONE_MACHINE,
        pet=True,
    ),
    Flag(
        "rdzv_endpoint",
        COMPATIBILITY,
        metavar="HOST:PORT",
        torchrun="where nodes find each other",
        no_effect=_ONE_MACHINE,
        pet=True,
    ),
    Flag(
        "rdzv_conf",
        COMPATIBILITY,
        metavar="KEY=VALUE,...",
        read=values.key_values,
        torchrun="further settings of the rendezvous",
        no_effect=_ONE_MACHINE,
        pet=True,
    ),
    Flag(
        "master_addr",
        COMPATIBILITY,
        metavar="ADDRESS",
        read=values.address,
        field="master_addr",
        torchrun="address of node 0 for the static rendezvous, MASTER_ADDR in the script",
        here="MASTER_ADDR in the script (default 127.0.0.1)",
        pet=True,
    ),
    Flag(
        "master_port",
        COMPATIBILITY,
        metavar="PORT",
        read=values.port,
        field="master_port",
        torchrun="port on node 0 for the static rendezvous, MASTER_PORT in the script (default 29500)",
        here="MASTER_PORT in the script (default: a free one)",
        pet=True,
    ),
    Flag(
        "local_addr",
        COMPATIBILITY,
        metavar="ADDRESS",
        read=values.address,
        field="local_addr",
        torchrun="address of this node; MASTER_ADDR in the script unless --master-addr decides it",
        here="MASTER_ADDR in the script unless --master-addr is given",
        pet=True,
    ),
    Flag(
        "role",
        COMPATIBILITY,
        metavar="NAME",
        field="role",
        torchrun="name of the workers' role, ROLE_NAME in the script",
        here="ROLE_NAME in the script (default: default)",
        pet=True,
    ),
    Flag(
        "run_path",
        COMPATIBILITY,
        torchrun="run the script with runpy.run_path in a process of multiprocessing; beats --no-python",
        here="the target is a script, whatever --no-python and --module say; it runs as scripts always do",
        pet=True,
    ),
    Flag(
        "numa_binding",
        COMPATIBILITY,
        metavar="MODE",
        read=values.choice("node", "socket", "exclusive", "core-complex"),
        field="numa_binding",
        torchrun="bind workers to CPUs near their GPU: node, socket, exclusive or core-complex",
        here="bind ranks to CPUs near their GPU: node, socket, exclusive or core-complex",
    ),
    Flag(
        "virtual_local_rank",
        COMPATIBILITY,
        field="virtual_local_rank",
        torchrun="LOCAL_RANK is 0 in every worker, and CUDA_VISIBLE_DEVICES holds its GPU alone",
        here="LOCAL_RANK is 0 in every rank, and CUDA_VISIBLE_DEVICES holds its GPU alone",
        pet=True,
    ),
    Flag(
        "monitor_interval",
        COMPATIBILITY,
        metavar="SECONDS",
        read=values.float_at_least_0,
        torchrun="how often the agent looks whether its workers live",
        no_effect="a death is seen at once, nothing is polled",
        pet=True,
    ),
    Flag(
        "start_method",
        COMPATIBILITY,
        metavar="METHOD",
        read=values.choice("spawn", "fork", "forkserver"),
        torchrun="how multiprocessing starts function entry points: spawn, fork or forkserver",
        no_effect="ranks are forked from a warm process, or with --no-zygote are new interpreters",
        pet=True,
    ),
    Flag(
        "event_log_handler",
        COMPATIBILITY,
        metavar="NAME",
        field="event_log_handler",
        torchrun="handler for the agent's events",
        no_effect="every event is in the run's journal, see closeranks report",
        pet=True,
    ),
    Flag(
        "logs_specs",
        COMPATIBILITY,
        metavar="NAME",
        torchrun="entry point that replaces the handling of logs",
        no_effect="logs go to the run's directory",
    ),
)

# What only the environment sets; ``name`` serves messages, no option carries it.
ENVIRONMENT: tuple[Flag, ...] = (
    Flag(
        "python_exec",
        RUN,
        metavar="PATH",
        read=values.name,
        field="python",
        torchrun="interpreter of the workers",
        here="interpreter of the ranks (default: the one that runs closeranks)",
        variable="PYTHON_EXEC",
    ),
    Flag(
        "log_line_prefix_template",
        LOGS,
        metavar="TEMPLATE",
        field="logs.prefix_template",
        torchrun="prefix of lines on the console, with ${role_name}, ${rank} and ${local_rank}",
        here="prefix of lines on the console, with ${role_name}, ${rank} and ${local_rank}",
        variable="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    ),
)
