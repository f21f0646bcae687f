"""The guard: the process the user starts. It outlives the agent just long enough to leave nothing behind.

    guard (subreaper) ── agent (subreaper) ── zygote, log pump, ranks ── their children

Ranks die with the agent by the kernel's parent-death signal. What ranks have started (DataLoader workers,
daemons) has no such tie: when the agent is killed those orphans are adopted by the guard, which kills them.
When the guard is killed, the agent notices and does the same. Signals to the guard go on to the agent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from closeranks import linux
from closeranks.agent import procfs
from closeranks.events import signal_name

__all__ = ["kill_descendants", "supervise"]

_FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_PUMP_GRACE_S = 0.4  # the log pump ends by itself once every writer is dead; give it that long to drain
_KILL_ROUNDS = 50
_KILL_PAUSE_S = 0.01


def kill_descendants(*, spare_pids: frozenset[int] = frozenset()) -> list[int]:
    """SIGKILL everything below this process and reap it; returns the pids that would not die (D state).

    Bounded: at most ``_KILL_ROUNDS`` rounds of 10 ms. A process forked while we look is found in the next
    round, because orphans are ours by then.
    """
    left: list[int] = []
    for _ in range(_KILL_ROUNDS):
        left = [pid for pid in procfs.descendants(os.getpid()) if pid not in spare_pids]
        if not left:
            return []
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reap(left)
        time.sleep(_KILL_PAUSE_S)
    return left


def reap(pids: list[int]) -> None:
    """Collect those of ``pids`` that are our children and dead, without waiting."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue


def _is_pump(pid: int) -> bool:
    try:
        return b"closeranks.agent.log_pump" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _clean_up(agent_pid: int, status: int) -> int:
    """After the agent's end: nothing may be left. Returns the exit code to leave with."""
    if os.WIFEXITED(status):
        kill_descendants()
        return os.WEXITSTATUS(status)
    number = os.WTERMSIG(status)
    pumps = frozenset(pid for pid in procfs.descendants(os.getpid()) if _is_pump(pid))
    kill_descendants(spare_pids=pumps)
    deadline = time.monotonic() + _PUMP_GRACE_S
    while procfs.descendants(os.getpid()) and time.monotonic() < deadline:
        reap(list(pumps))
        time.sleep(_KILL_PAUSE_S)
    left = kill_descendants()
    told = f"; still there, stuck in the kernel: {left}" if left else ""
    sys.stderr.write(
        f"closeranks: error: the agent (pid {agent_pid}) was killed by {signal_name(number)}; every rank was "
        f"stopped with it{told}. Start the same command again to resume from the last checkpoint.\n"
    )
    return 128 + number


def supervise(agent: Callable[[int], int]) -> int:
    """Fork; run ``agent(guard_pid)`` in the child and guard it from the parent. Returns the exit code.

    In the child this never returns: it leaves through ``os._exit``.
    """
    watched = {getattr(signal, name) for name in _FORWARDED} | {signal.SIGCHLD}
    linux.become_subreaper()
    guard_pid = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    sys.stdout.flush()
    sys.stderr.flush()
    agent_pid = os.fork()
    if agent_pid == 0:
        code = 1
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
            code = agent(guard_pid)
        except BaseException:  # the fork must never return into the caller's frames
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    while True:
        info = signal.sigwaitinfo(watched)
        if info.si_signo != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent_pid, info.si_signo)
            continue
        done, status = os.waitpid(agent_pid, os.WNOHANG)
        if done == agent_pid:
            return _clean_up(agent_pid, status)
