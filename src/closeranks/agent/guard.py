"""The guard: the process the user starts. It outlives the agent just long enough to leave nothing behind.

    guard ── keeper ── agent ── zygote, log pump, ranks ── their children

All three adopt orphans (subreapers). Ranks die with the agent by the kernel's parent-death signal. What
ranks have started (DataLoader workers, daemons) has no such tie: when the agent is killed those orphans are
adopted by the keeper, which kills them; when the guard is killed, the agent notices and does the same. The
keeper is a second guard in a session of its own, so that a SIGKILL to the user's process group, or to guard
and agent at once, finds it alive. Signals to the guard go on to the agent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from closeranks import linux
from closeranks.agent import procfs
from closeranks.agent.processes import CLEANER_GRACE_S, is_cleaner
from closeranks.events import signal_name

__all__ = ["hold_signals", "kill_descendants", "supervise", "watched_signals"]

_FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_LAST_LINES_S = 0.5  # for the log pump, which ends by itself once every writer is dead
_PARENT_DIED = signal.SIGRTMIN + 10
_END_GRACE_S = 10.0  # for an agent whose guard was killed
_LONG_S = 3600.0  # sigtimedwait takes no infinity
_KILL_ROUNDS = 50
_KILL_PAUSE_S = 0.01


def watched_signals(names: Iterable[str]) -> set[int]:
    """What the guard passes on: ``names`` and the usual ones, but no SIGHUP or SIGINT that is ignored."""
    wanted: set[int] = {signal.Signals[name] for name in (*_FORWARDED, *names)}
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) == signal.SIG_IGN:
            wanted.discard(number)
    return wanted | {signal.SIGCHLD}


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


def _is_log_pump(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"closeranks.agent.log_pump" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _finish(pids: frozenset[int], timeout_s: float) -> None:
    """Wait for processes that have work to do when all others are dead, and then end by themselves."""
    deadline = time.monotonic() + timeout_s
    while pids & set(procfs.descendants(os.getpid())) and time.monotonic() < deadline:
        reap(list(pids))
        time.sleep(_KILL_PAUSE_S)


def _bury(what: str, killed_pid: int, number: int) -> int:
    """After the violent end of agent or keeper: nothing may be left. Returns the exit code to leave with."""
    below = procfs.descendants(os.getpid())
    pumps = frozenset(pid for pid in below if _is_log_pump(pid))
    cleaners = frozenset(pid for pid in below if is_cleaner(pid))
    kill_descendants(spare_pids=pumps | cleaners)
    _finish(pumps, _LAST_LINES_S)
    _finish(cleaners, CLEANER_GRACE_S)
    left = kill_descendants()
    told = f"; still there, stuck in the kernel: {left}" if left else ""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(
            f"closeranks: error: the {what} (pid {killed_pid}) was killed by {signal_name(number)}; "
            f"every rank was stopped with it{told}. Start the same command again to resume from the last "
            "checkpoint.\n"
        )
        sys.stderr.flush()
    return 128 + number


def _fork(child: Callable[[], int]) -> int:
    """Fork, and run ``child`` there to its exit code; returns its pid. The child never returns from here."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = child()
    except BaseException:  # the fork must never return into the caller's frames
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _guard(
    what: str,
    children: Sequence[Callable[[], int]],
    clean_up: Callable[[], None],
    watched: set[int],
    may_restart: Callable[[], bool] = lambda: False,
    restart_code: int | None = None,
) -> int:
    """Run each of ``children`` in a fork, pass signals on to them, clear away what they leave. Returns the
    exit code of the first that ends.

    ``what`` they are, for people: the agent, or the keeper. ``may_restart`` is asked when one was killed, or
    ended with ``restart_code``: then it is run anew, and what it had started lives on.

    ``_PARENT_DIED`` among these signals means: they should end by themselves now, and are killed if not.
    """
    linux.become_subreaper()
    pids = {_fork(child): child for child in children}
    kill_at_s = float("inf")
    while True:
        left_s = min(max(0.0, kill_at_s - time.monotonic()), _LONG_S)
        info = signal.sigtimedwait(watched, left_s)
        number = info.si_signo if info is not None else None
        if number == _PARENT_DIED:
            kill_at_s = time.monotonic() + _END_GRACE_S
        for pid, child in tuple(pids.items()):
            with contextlib.suppress(ProcessLookupError):
                if time.monotonic() >= kill_at_s:
                    os.kill(pid, signal.SIGKILL)
                elif number == _PARENT_DIED:
                    os.kill(pid, signal.SIGCONT)  # it can't see that while somebody has stopped it
                elif number is not None and number != signal.SIGCHLD:
                    os.kill(pid, number)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done != pid:
                continue
            exit_code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
            is_to_restart = exit_code is None or exit_code == restart_code
            if is_to_restart and kill_at_s == float("inf") and may_restart():
                del pids[pid]
                pids[_fork(child)] = child
                continue
            if exit_code is not None:
                kill_descendants()
            else:
                exit_code = _bury(what, pid, os.WTERMSIG(status))
            clean_up()
            return exit_code


def hold_signals(names: Collection[str]) -> set[int]:
    """From now on signals wait for the guard: what is made before it runs is not left behind.

    A shell without job control (a script, CI) starts what is in its background with SIGINT ignored. Nobody
    has asked for that, so it is undone, for agent and ranks too: who sends SIGINT to this pid wants the job
    to stop. nohup is asked for, and its ignored SIGHUP stays; so does SIGINT where ``names`` leaves it out.
    """
    if signal.SIGINT.name in names and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    watched = watched_signals(names)
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    return watched


def supervise(
    agent: Callable[[int], int],
    clean_up: Callable[[], None],
    watched: set[int],
    *,
    what: str = "agent",
    others: Sequence[Callable[[int], int]] = (),
    may_restart: Callable[[], bool] = lambda: False,
    restart_code: int | None = None,
) -> int:
    """Run ``agent(guard_pid)`` in a process of its own and guard it. Returns the exit code; with ``others``
    that run beside it, of the first that ends.

    ``watched`` is what ``hold_signals`` returned: the agent starts with these blocked, and unblocks them when
    it can handle them. ``clean_up`` removes what the agent may have left in the file system; it may be called
    more than once.
    """
    guard_pid = os.getpid()

    def keeper() -> int:
        os.setsid()
        linux.set_title("closeranks: keeper", "cr-keeper")
        signal.pthread_sigmask(signal.SIG_BLOCK, {_PARENT_DIED})
        linux.die_with_parent(_PARENT_DIED)
        if os.getppid() != guard_pid:  # it died before that call
            return 128 + signal.SIGKILL
        children = [functools.partial(named, one) for one in (agent, *others)]
        return _guard(what, children, clean_up, watched | {_PARENT_DIED}, may_restart, restart_code)

    def named(one: Callable[[int], int]) -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {_PARENT_DIED})
        linux.set_title(f"closeranks: {what}", f"cr-{what}")
        return one(guard_pid)

    return _guard("keeper", [keeper], clean_up, watched)
