"""``closeranks run`` over many nodes: a controller in its own process, and an engine that brings agents.

    guard ── keeper ── controller ── the engine's own (agents on this host, srun, ...)

When the controller is killed, the keeper starts it again, and what it had started lives on: agents find their
way back to it, and ranks notice nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from closeranks import __version__
from closeranks.agent import guard
from closeranks.agent.control_socket import CONTROL_FILE, ControlSocket
from closeranks.agent.env import free_port
from closeranks.agent.launch import as_supervisor, fill_standard_streams, finish_output, raise_file_limit
from closeranks.agent.private_dir import PrivateDir
from closeranks.config import RunConfig
from closeranks.controller.credentials import AGENT, CONTROLLER, load, mint
from closeranks.engines import engine_for
from closeranks.engines.base import Bundles, Engine, JobSpec, Join
from closeranks.errors import ConfigError
from closeranks.events import counted, signal_name

if TYPE_CHECKING:
    from closeranks.agent.console import Console
    from closeranks.controller.cluster_job import ClusterJob
    from closeranks.controller.service import ClusterService

__all__ = ["Seat", "job_spec", "launch_cluster", "launch_controller", "planned", "run_controller"]

_CREDENTIALS = "credentials"
_MOST_RESTARTS, _RESTART_WINDOW_S = 100, 600.0


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a job's controller sits: the same for each controller that comes after one that was killed.

    ``listen``: an address, or the path of a Unix socket. ``credentials``: the controller's, None on a socket.
    ``private_dir``: of this host, for the control socket.
    """

    config: RunConfig
    spec: JobSpec
    private_dir: Path
    listen: str
    port: int
    credentials: Path | None
    join: Join


def job_spec(config: RunConfig, run_argv: tuple[str, ...], run_dir: Path) -> JobSpec:
    """What the engine has to know."""
    options = dict(option.partition("=")[::2] for option in config.engine_options)
    cluster = config.cluster
    return JobSpec(
        job_id=run_dir.name,
        run_dir=run_dir,
        min_nodes=cluster.min_nodes,
        max_nodes=cluster.max_nodes,
        spares=cluster.spares,
        run_argv=run_argv,
        python=sys.executable,
        options=options,
    )


def _join(address: str, port: int, credentials: Path) -> Join:
    host = f"[{address}]" if ":" in address else address
    return Join(f"{host}:{port}", credentials / f"{AGENT}.pem")


def planned(config: RunConfig, run_argv: tuple[str, ...]) -> Engine:
    """The engine of a job that doesn't exist yet: to ask it, to render, or to submit."""
    from closeranks.controller.runs import job_id

    name = config.job_name or Path(config.entrypoint.target).stem
    run_dir = Path(config.runs_dir).absolute() / job_id(name, wall_s=time.time())
    spec = job_spec(config, run_argv, run_dir)

    def bundles() -> Bundles:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "credentials"
            mint(spec.job_id, made)
            controller, agent = ((made / f"{role}.pem").read_text() for role in (CONTROLLER, AGENT))
            return Bundles(controller, agent)

    return engine_for(config.engine or "", spec, bundles=bundles)


def launch_cluster(config: RunConfig, run_argv: tuple[str, ...]) -> int:
    """Run the job to its end; returns the exit code of ``closeranks run``."""
    fill_standard_streams()
    from closeranks.controller.runs import create_run_dir

    if not (elsewhere := planned(config, run_argv)).runs_here():
        submitted = elsewhere.submit()
        sys.stderr.write(f"closeranks: submitted to {elsewhere.name} as {submitted}\n")
        return 0
    watched = guard.hold_signals(config.signals_to_handle)
    run_dir = create_run_dir(Path(config.runs_dir), config.job_name or config.entrypoint.name)
    spec = job_spec(config, run_argv, run_dir)
    address = engine_for(config.engine or "", spec).listen_address()
    private_dir = PrivateDir.make(run_dir.name)
    if address is None:
        path = str(private_dir.path / "channel")
        seat = Seat(config, spec, private_dir.path, path, 0, None, Join(path))
    else:
        credentials, port = run_dir / _CREDENTIALS, free_port()
        mint(run_dir.name, credentials)
        join = _join(address, port, credentials)
        mine = credentials / f"{CONTROLLER}.pem"
        seat = Seat(config, spec, private_dir.path, address, port, mine, join)

    def controller(guard_pid: int) -> int:
        return as_supervisor(lambda: run_controller(seat, guard_pid), "controller")

    def clean_up() -> None:
        private_dir.remove()
        shutil.rmtree(run_dir / _CREDENTIALS, ignore_errors=True)
        with contextlib.suppress(OSError):
            (run_dir / CONTROL_FILE).unlink(missing_ok=True)

    return guard.supervise(
        controller, clean_up, watched, what="controller", may_restart=_restarts(_MOST_RESTARTS)
    )


def launch_controller(
    config: RunConfig, run_argv: tuple[str, ...], *, listen: str, port: int, credentials: Path, run_dir: Path
) -> int:
    """A controller that stands alone: whoever started it starts it again. Returns the job's exit code."""
    fill_standard_streams()
    try:
        for part in ("logs", "incidents"):
            (run_dir / part).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"can't make {error.filename}: {error.strerror}; name another --run-dir") from error
    private_dir = PrivateDir.make(run_dir.name)
    spec = job_spec(config, run_argv, run_dir)
    seat = Seat(config, spec, private_dir.path, listen, port, credentials, Join(f"{listen}:{port}"))
    try:
        return as_supervisor(lambda: run_controller(seat, None), "controller")
    finally:
        private_dir.remove()


def _restarts(most: int) -> Callable[[], bool]:
    """Whether a controller that was killed is started again: not where something kills it again and again."""
    recent_s: list[float] = []

    def may_restart() -> bool:
        now_s = time.monotonic()
        recent_s[:] = [at_s for at_s in recent_s if now_s - at_s < _RESTART_WINDOW_S]
        recent_s.append(now_s)
        return len(recent_s) <= most

    return may_restart


async def run_controller(seat: Seat, guard_pid: int | None) -> int:
    """One controller's life; returns the job's exit code. ``guard_pid``: without that process it ends."""
    from closeranks.agent.console import Console
    from closeranks.agent.logs import LogPump
    from closeranks.controller.casebook import Casebook
    from closeranks.controller.channel import ChannelServer
    from closeranks.controller.cluster_job import ClusterJob
    from closeranks.controller.runs import JOURNAL_NAME
    from closeranks.controller.service import ClusterService

    began_s = time.monotonic()
    raise_file_limit()
    config, spec = seat.config, seat.spec
    job = ClusterJob.open(spec.run_dir / JOURNAL_NAME, config.cluster, config.budget)
    if job.ended is not None:
        job.close()
        return job.ended.exit_code
    pump = LogPump.start(config.logs, role=config.role)
    console = Console(pump.say, quiet=config.quiet, runs_hint=str(spec.run_dir))
    engine = engine_for(config.engine or "", spec)
    engine.start(seat.join)
    casebook = Casebook(spec.run_dir, console)
    service = ClusterService(
        job, engine, job_id=spec.job_id, console=console, casebook=casebook, hang=config.hang
    )
    if not job.resumed:
        _begin(seat, job, console, engine)
    credentials = load(seat.credentials) if seat.credentials is not None else None
    try:
        async with (
            ChannelServer(seat.listen, seat.port, credentials, service.on_peer),
            ControlSocket(spec.run_dir, seat.private_dir, service),
        ):
            _watch(service, config, guard_pid)
            finish = await service.run()
            console.finished(finish, time.monotonic() - began_s, casebook.count, spec.run_dir)
    finally:
        finish_output(pump)
        job.close()
    return finish.exit_code


def _begin(seat: Seat, job: ClusterJob, console: Console, engine: Engine) -> None:
    config, spec = seat.config, seat.spec
    job.note(
        "run_started",
        {
            "argv": list(config.entrypoint.argv),
            "entrypoint": asdict(config.entrypoint),
            "node": socket.gethostname(),
            "engine": engine.name,
            "nodes": [spec.min_nodes, spec.max_nodes],
            "spares": spec.spares,
            "pid": os.getpid(),
            "version": __version__,
        },
    )
    for notice in config.notices:
        console.tell("info", notice)
    nodes = counted(spec.max_nodes, "node") + (f" and {counted(spec.spares, 'spare')}" if spec.spares else "")
    console.tell("info", f"{spec.job_id} · {nodes} from the {engine.name} engine · {spec.run_dir}")


def _watch(service: ClusterService, config: RunConfig, guard_pid: int | None) -> None:
    """Signals, and the life of the process that the user started."""
    loop = asyncio.get_running_loop()
    if guard_pid is not None:
        guard_fd = os.pidfd_open(guard_pid)

        def guard_died() -> None:
            loop.remove_reader(guard_fd)
            service.guard_died()

        loop.add_reader(guard_fd, guard_died)
    watched = guard.watched_signals(config.signals_to_handle)
    if signal.SIGINT in watched:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt out of nowhere
    for name in config.signals_to_handle:
        number = signal.Signals[name]
        if number != signal.SIGHUP or number in watched:
            told = f"{signal_name(number)} received"
            # One that stands alone gets SIGTERM when its host is wanted back, not when the job is to end.
            moves = guard_pid is None and number == signal.SIGTERM
            act = service.leave if moves else service.stop_requested
            loop.add_signal_handler(number, act, told, int(number))
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # theirs are the nodes' own
        loop.add_signal_handler(number, lambda: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
