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
from typing import TYPE_CHECKING, NoReturn

from closeranks import __version__
from closeranks.agent import guard
from closeranks.agent.control_socket import CONTROL_FILE, ControlSocket
from closeranks.agent.env import free_port
from closeranks.agent.launch import as_supervisor, fill_standard_streams, finish_output, raise_file_limit
from closeranks.agent.private_dir import PrivateDir, sweep_job
from closeranks.config import RunConfig
from closeranks.controller.credentials import AGENT, CONTROLLER, load, mint
from closeranks.engines import engine_for
from closeranks.engines.base import Bundles, Engine, JobSpec, Join
from closeranks.errors import ConfigError, JournalError
from closeranks.events import Finish, RunExit, counted, signal_name
from closeranks.policy.cluster_state import Standing

if TYPE_CHECKING:
    from closeranks.agent.candidacy import Reign
    from closeranks.agent.console import Console
    from closeranks.controller.cluster_job import ClusterJob
    from closeranks.controller.service import ClusterService

__all__ = ["Seat", "job_spec", "launch_cluster", "launch_controller", "planned", "run_controller"]

_CREDENTIALS = "credentials"
_LAST_WORDS_S = 10.0
_MOST_RESTARTS, _RESTART_WINDOW_S = 100, 600.0


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a job's controller sits: the same for each controller that comes after one that was killed.

    ``listen``: an address, or the path of a Unix socket. ``credentials``: the controller's, None on a socket.
    ``private_dir``: of this host, for the control socket. ``begins``: it may begin the job, unlike a standby.
    """

    config: RunConfig
    spec: JobSpec
    private_dir: Path
    listen: str
    port: int
    credentials: Path | None
    join: Join
    begins: bool = True


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


def _join(address: str, ports: list[int], credentials: Path) -> Join:
    host = f"[{address}]" if ":" in address else address
    return Join(",".join(f"{host}:{port}" for port in ports), credentials / f"{AGENT}.pem")


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
    from closeranks.controller.runs import create_run_dir, promised_run_dir

    if not (elsewhere := planned(config, run_argv)).runs_here():
        submitted = elsewhere.submit()
        sys.stderr.write(f"closeranks: submitted to {elsewhere.name} as {submitted}\n")
        return 0
    watched = guard.hold_signals(config.signals_to_handle)
    promised = promised_run_dir(os.environ)
    run_dir = promised or create_run_dir(Path(config.runs_dir), config.job_name or config.entrypoint.name)
    spec = job_spec(config, run_argv, run_dir)
    address = engine_for(config.engine or "", spec).listen_address()
    private_dir = PrivateDir.make(run_dir.name)
    seats = _seats(config, spec, private_dir.path, address)

    def controller(seat: Seat) -> Callable[[int], int]:
        return lambda guard_pid: as_supervisor(lambda: run_controller(seat, guard_pid), "controller")

    def clean_up() -> None:
        private_dir.remove()
        sweep_job(run_dir.name)
        shutil.rmtree(run_dir / _CREDENTIALS, ignore_errors=True)
        with contextlib.suppress(OSError):
            (run_dir / CONTROL_FILE).unlink(missing_ok=True)

    first, *others = map(controller, seats)
    return guard.supervise(
        first,
        clean_up,
        watched,
        what="controller",
        others=others,
        may_restart=_restarts(_MOST_RESTARTS),
        restart_code=RunExit.DEPOSED if config.etcd.urls else None,
    )


def _seats(config: RunConfig, spec: JobSpec, private_dir: Path, address: str | None) -> list[Seat]:
    """The first controller's and its standbys'; agents know them all."""
    count = 1 + config.standbys
    directories = [private_dir / f"controller-{n}" for n in range(count)] if count > 1 else [private_dir]
    for directory in directories:
        directory.mkdir(mode=0o700, exist_ok=True)
    if address is None:
        paths = [str(directory / "channel") for directory in directories]
        join = Join(",".join(paths))
        return [
            Seat(config, spec, directory, path, 0, None, join, begins=n == 0)
            for n, (directory, path) in enumerate(zip(directories, paths, strict=True))
        ]
    credentials, ports = spec.run_dir / _CREDENTIALS, [free_port() for _ in directories]
    mint(spec.job_id, credentials)
    join = _join(address, ports, credentials)
    mine = credentials / f"{CONTROLLER}.pem"
    return [
        Seat(config, spec, directory, address, port, mine, join, begins=n == 0)
        for n, (directory, port) in enumerate(zip(directories, ports, strict=True))
    ]


def launch_controller(
    config: RunConfig,
    run_argv: tuple[str, ...],
    *,
    listen: str,
    port: int,
    credentials: Path,
    run_dir: Path,
    begins: bool = True,
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
    join = Join(f"{listen}:{port}")
    seat = Seat(config, spec, private_dir.path, listen, port, credentials, join, begins=begins)
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
    """One controller's life; returns the job's exit code, or DEPOSED. ``guard_pid``: without it, it ends."""
    from closeranks.agent.console import Console
    from closeranks.agent.logs import LogPump
    from closeranks.controller.cluster_job import ClusterJob
    from closeranks.controller.runs import JOURNAL_NAME

    raise_file_limit()
    config, spec = seat.config, seat.spec
    watch = _Watch(config, guard_pid)
    path = spec.run_dir / JOURNAL_NAME
    # With an etcd, the journal is opened by who leads.
    job = None if config.etcd.urls else ClusterJob.open(path, config.cluster, config.budget)
    if job is not None and job.ended is not None:
        job.close()
        return job.ended.exit_code
    pump = LogPump.start(config.logs, role=config.role)
    console = Console(pump.say, quiet=config.quiet, runs_hint=str(spec.run_dir))
    deposed = False
    try:
        if job is not None:
            code = (await _lead(seat, console, watch, job))[0].exit_code
        else:
            code, deposed = await _stand(seat, console, watch, path)
    finally:
        finish_output(pump)
        if job is not None:
            job.close()
    if deposed:
        _exit_at_once(seat, guard_pid)
    return code


async def _stand(seat: Seat, console: Console, watch: _Watch, path: Path) -> tuple[int, bool]:
    """Wait for our turn to lead, then lead. The exit code, and whether somebody else may lead now."""
    from closeranks.agent.candidacy import Candidacy, Reign
    from closeranks.controller.cluster_job import ClusterJob
    from closeranks.controller.journal import writer_alive
    from closeranks.controller.leadership import Ended

    config, spec = seat.config, seat.spec
    candidacy = Candidacy(
        config.etcd,
        spec.job_id,
        begins=seat.begins,
        is_first=seat.begins and not path.exists(),
        leaves_at_once=watch.guard_pid is None,
        tell=console.tell,
    )
    watch.follow(candidacy.signalled, lambda: candidacy.leave(128 + signal.SIGKILL))
    try:
        turn = await candidacy.run()
        if isinstance(turn, Ended) and watch.guard_pid is not None:
            await candidacy.await_end(config.logs.console_patience_s + _LAST_WORDS_S)
        if not isinstance(turn, Reign):
            return (_told(turn.exit_code) if isinstance(turn, Ended) else turn), False
        if turn.found is None:
            _check_unbegun(path)
        if writer_alive(path):  # of a leader that hasn't ended yet, on a file system that both see
            path = spec.run_dir / f"controller-{turn.leadership.term}" / path.name
            path.parent.mkdir(exist_ok=True)
        job = ClusterJob.lead(path, config.cluster, config.budget, turn.shared, turn.found)
        try:
            finish, deposed = await _lead(seat, console, watch, job, turn)
        finally:
            job.close()
    finally:
        candidacy.close()
    return (finish.exit_code if deposed else _told(finish.exit_code)), deposed


async def _lead(
    seat: Seat, console: Console, watch: _Watch, job: ClusterJob, reign: Reign | None = None
) -> tuple[Finish, bool]:
    """Until the job's end, or that of this reign, which is told apart."""
    from closeranks.controller.casebook import Casebook
    from closeranks.controller.channel import ChannelServer
    from closeranks.controller.service import ClusterService

    began_s = time.monotonic()
    config, spec = seat.config, seat.spec
    engine = engine_for(config.engine or "", spec)
    engine.start(seat.join)
    casebook = Casebook(spec.run_dir, console)
    service = ClusterService(
        job, engine, job_id=spec.job_id, console=console, casebook=casebook, hang=config.hang
    )
    if not job.resumed:
        _begin(seat, job, console, engine)
    credentials = load(seat.credentials) if seat.credentials is not None else None
    async with contextlib.AsyncExitStack() as stack:
        if reign is not None:
            await stack.enter_async_context(reign.running(service.depose))
        await stack.enter_async_context(ChannelServer(seat.listen, seat.port, credentials, service.on_peer))
        await stack.enter_async_context(ControlSocket(spec.run_dir, seat.private_dir, service))

        def signalled(number: int) -> None:
            # One that stands alone gets SIGTERM when its host is wanted back, not when the job is to end.
            moves = watch.guard_pid is None and number == signal.SIGTERM
            act = service.leave if moves else service.stop_requested
            act(f"{signal_name(number)} received", number)

        watch.follow(signalled, service.guard_died)
        finish = await service.run()
        _name_excluded(service, spec)
        if service.deposed:
            console.tell("warning", f"this controller leads no more: {finish.reason}")
            return finish, True
        if service.handing_over:
            return finish, False
        if reign is not None:
            await reign.shared.end(finish)
        console.finished(finish, time.monotonic() - began_s, casebook.count, spec.run_dir)
    return finish, False


def _name_excluded(service: ClusterService, spec: JobSpec) -> None:
    """For a scheduler that has the job begin again: which nodes to leave out."""
    names = [node.name for node in service.job.state.nodes.values() if node.standing is not Standing.GOOD]
    if not names:
        return
    submitted = os.environ.get("CLOSERANKS_SUBMITTED")
    for directory in {spec.run_dir, Path(submitted) if submitted else spec.run_dir}:
        with contextlib.suppress(OSError):
            (directory / "excluded-nodes").write_text("".join(f"{name}\n" for name in sorted(names)))


def _told(exit_code: int) -> int:
    """A job's exit code where DEPOSED has a meaning of its own: it would be run again for it."""
    return RunExit.INTERNAL if exit_code == RunExit.DEPOSED else exit_code


def _check_unbegun(path: Path) -> None:
    """Raises JournalError where ranks have run of which etcd knows nothing."""
    from closeranks.controller.journal import read

    if path.exists() and any(record.kind == "generation_starting" for record in read(path)):
        raise JournalError(
            f"etcd holds nothing of this job, which has begun ({path}): it has lost its data, or is another "
            "one; start the job anew"
        )


def _exit_at_once(seat: Seat, guard_pid: int | None) -> NoReturn:
    """Without the clean-up of the interpreter, in which asyncio would kill the agents that were started here:
    whoever leads next needs them."""
    if guard_pid is None:
        shutil.rmtree(seat.private_dir, ignore_errors=True)
    os._exit(RunExit.DEPOSED)


def _begin(seat: Seat, job: ClusterJob, console: Console, engine: Engine) -> None:
    config, spec = seat.config, seat.spec
    began = {
        "argv": list(config.entrypoint.argv),
        "entrypoint": asdict(config.entrypoint),
        "node": socket.gethostname(),
        "engine": engine.name,
        "nodes": [spec.min_nodes, spec.max_nodes],
        "spares": spec.spares,
        "pid": os.getpid(),
        "version": __version__,
    }
    job.note("run_started", began)
    if job.shared is not None:
        job.shared.began(began)
    for notice in config.notices:
        console.tell("info", notice)
    nodes = counted(spec.max_nodes, "node") + (f" and {counted(spec.spares, 'spare')}" if spec.spares else "")
    console.tell("info", f"{spec.job_id} · {nodes} from the {engine.name} engine · {spec.run_dir}")


class _Watch:
    """Signals, and the life of the process that the user started: whoever is in charge here is told."""

    def __init__(self, config: RunConfig, guard_pid: int | None) -> None:
        self.guard_pid = guard_pid
        self._config = config
        self._signalled: Callable[[int], None] | None = None
        self._guard_died: Callable[[], None] = lambda: None

    def follow(self, signalled: Callable[[int], None], guard_died: Callable[[], None]) -> None:
        is_first = self._signalled is None
        self._signalled, self._guard_died = signalled, guard_died
        if is_first:
            self._begin()

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        if self.guard_pid is not None:
            guard_fd = os.pidfd_open(self.guard_pid)

            def guard_died() -> None:
                loop.remove_reader(guard_fd)
                self._guard_died()

            loop.add_reader(guard_fd, guard_died)
        watched = guard.watched_signals(self._config.signals_to_handle)
        if signal.SIGINT in watched:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt out of nowhere
        for name in self._config.signals_to_handle:
            number = signal.Signals[name]
            if number != signal.SIGHUP or number in watched:
                loop.add_signal_handler(number, self._take, int(number))
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # theirs are the nodes' own
            loop.add_signal_handler(number, lambda: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)

    def _take(self, number: int) -> None:
        assert self._signalled is not None, "nobody is in charge"
        self._signalled(number)
