"""From settings to a running job: the run directory, the guard, the agent in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from closeranks import __version__
from closeranks.agent import guard
from closeranks.agent.control_socket import CONTROL_FILE, ControlSocket
from closeranks.agent.private_dir import PrivateDir
from closeranks.config import RunConfig
from closeranks.errors import CloseranksError, ConfigError
from closeranks.events import RunExit, counted

if TYPE_CHECKING:
    from closeranks.agent.logs import LogPump

__all__ = [
    "as_supervisor",
    "fill_standard_streams",
    "finish_output",
    "launch",
    "raise_file_limit",
    "resolve_world_size",
]

_ACCELERATOR_NODES = (
    "/dev/nvidia0",
    "/dev/nvidiactl",
    "/dev/kfd",
    "/dev/accel",
    "/dev/dri/renderD128",
    "/dev/davinci0",
)
_ASK_TORCH_TIMEOUT_S = 120.0
_ASK_TORCH = """
import sys, torch
kind = sys.argv[1]
if kind == "auto":
    print(torch.accelerator.device_count() if torch.accelerator.is_available() else torch._utils.cpu_count())
else:
    device = torch.cuda if kind == "gpu" else getattr(torch, kind)
    print(device.device_count() if device.is_available() else 0)
"""


def resolve_world_size(text: str, interpreter: str | None = None) -> int:
    """How many ranks ``--nproc-per-node`` means: a number, cpu, gpu, xpu or auto (torchrun's rules).

    Asks torch, in a process of its own, only where an accelerator might be. Raises ConfigError.
    """
    if text.isdigit():
        return int(text)
    cpus = len(os.sched_getaffinity(0))
    has_nodes = any(Path(node).exists() for node in _ACCELERATOR_NODES)
    if text == "cpu" or (text == "auto" and not has_nodes):
        return cpus
    try:
        asked = subprocess.run(
            [interpreter or sys.executable, "-c", _ASK_TORCH, text],
            capture_output=True,
            text=True,
            timeout=_ASK_TORCH_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"can't ask torch how many devices there are: {error}; give a number") from error
    if asked.returncode != 0 or not asked.stdout.strip().isdigit():
        reason = (asked.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"can't ask torch how many devices there are: {reason}; give a number")
    count = int(asked.stdout)
    if count == 0:
        raise ConfigError(f"--nproc-per-node {text}: torch sees no such device here; give a number, or cpu")
    return count


def fill_standard_streams() -> None:
    """/dev/null where one is closed (``closeranks run >&-``): else the next file opened would be it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def launch(config: RunConfig) -> int:
    """Run the job to its end; returns the exit code of ``closeranks run``."""
    fill_standard_streams()
    world_size = resolve_world_size(config.nproc_per_node, config.python)
    from closeranks.controller.runs import create_run_dir

    watched = guard.hold_signals(config.signals_to_handle)
    run_dir = create_run_dir(Path(config.runs_dir), config.job_name or config.entrypoint.name)
    private_dir = PrivateDir.make(run_dir.name)

    def agent(guard_pid: int) -> int:
        return _agent(config, run_dir, private_dir.path, world_size, guard_pid)

    def clean_up() -> None:
        private_dir.remove()
        with contextlib.suppress(OSError):
            (run_dir / CONTROL_FILE).unlink(missing_ok=True)

    return guard.supervise(agent, clean_up, watched)


def _agent(config: RunConfig, run_dir: Path, private_dir: Path, world_size: int, guard_pid: int) -> int:
    """The agent's process, from fork to exit code."""
    return as_supervisor(lambda: _run(config, run_dir, private_dir, world_size, guard_pid), "agent")


def as_supervisor(main: Callable[[], Coroutine[Any, Any, int]], what: str) -> int:
    """Run ``main`` as the process that a guard watches, and turn what it raises into a line and a code."""
    from closeranks import linux

    linux.become_subreaper()
    linux.go_first()
    try:
        return asyncio.run(main())
    except CloseranksError as error:
        sys.stderr.write(f"closeranks: error: {error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"closeranks: error: can't run the {what}: {error}\n")
        return RunExit.CANNOT_START


def raise_file_limit() -> int:
    """Ten descriptors a rank: the usual soft limit of 1,024 is low for many ranks. Returns the old one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a hard limit above the kernel's own: the soft one stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


async def _run(config: RunConfig, run_dir: Path, private_dir: Path, world_size: int, guard_pid: int) -> int:
    from closeranks.agent.slots import Slots

    began = time.monotonic()
    file_limit = raise_file_limit()
    slots = Slots(config, world_size)
    slots.open()
    # Here the zygote starts, before our own imports: torch's take the longest, and another core can do them.
    await asyncio.sleep(0)
    from closeranks.agent.console import Console
    from closeranks.agent.ending import Ending, what_is_missing
    from closeranks.agent.logs import LogPump
    from closeranks.agent.supervisor import Supervisor
    from closeranks.controller.job import JobController
    from closeranks.controller.journal import Journal
    from closeranks.controller.runs import JOURNAL_NAME

    ending = Ending(run_dir)
    journal = Journal.create(run_dir / JOURNAL_NAME)
    controller = JobController(journal, config.budget)
    node = socket.gethostname()
    controller.note(
        "run_started",
        {
            "argv": list(config.entrypoint.argv),
            "entrypoint": asdict(config.entrypoint),
            "world_size": world_size,
            "node": node,
            "pid": os.getpid(),
            "version": __version__,
        },
    )
    pump = LogPump.start(config.logs, role=config.role)
    console = Console(pump.say, quiet=config.quiet, runs_hint=str(run_dir))
    supervisor = Supervisor(
        config,
        run_dir=run_dir,
        store_dir=private_dir,
        world_size=world_size,
        slots=slots,
        controller=controller,
        pump=pump,
        console=console,
        guard_pid=guard_pid,
        node=node,
        file_limit=file_limit,
    )
    for notice in config.notices:
        console.tell("info", notice)
    console.tell("info", f"{run_dir.name} · {counted(world_size, 'rank')} on {node} · {_shown(run_dir)}")
    code = RunExit.INTERNAL
    try:
        async with ControlSocket(run_dir, private_dir, supervisor):
            code = await supervisor.run()
            console.finished(supervisor.finish, time.monotonic() - began, supervisor.incidents.count, run_dir)
    finally:
        finish_output(pump)
        journal.close()
        ending.conclude(
            supervisor.finish,
            stopped=supervisor.stop_signal is not None,
            incidents=supervisor.incidents.count,
            missing=what_is_missing(journal.backlog, journal.problem),
        )
        shutil.rmtree(private_dir, ignore_errors=True)  # the guard does so too, if it lives
    return code


class _CutShortError(Exception):
    """A signal came while output was waiting for its reader."""


def _cut_short(number: int, frame: object) -> None:
    raise _CutShortError


def finish_output(pump: LogPump) -> None:
    """All that was printed reaches a reader who is behind, unless a signal says that nobody cares."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _cut_short)
    with contextlib.suppress(_CutShortError):
        pump.close(timeout_s=5.0)


def _shown(path: Path) -> str:
    """A path as short as it can be told."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
