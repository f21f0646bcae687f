"""Signals to the agent: some stop the job, some are the script's own business."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from closeranks.agent import guard, procfs
from closeranks.events import counted, signal_name

if TYPE_CHECKING:
    from closeranks.agent.supervisor import Supervisor

__all__ = ["Signals"]

_SAME_SIGNAL_S = 0.2  # Ctrl-C reaches guard and agent: one press, two signals
_PASSED_ON = ("SIGUSR1", "SIGUSR2")


class Signals:
    """Listens for the signals of ``--signals-to-handle``, and passes SIGUSR1/2 on."""

    def __init__(self, owner: Supervisor, stop: Callable[[str, int], None]) -> None:
        self._owner = owner
        self._stop = stop
        self._stopping = frozenset(owner.config.signals_to_handle)
        self._last = (0, -1.0)

    def listen(self) -> None:
        """Begin; what came since the start has waited. Signals that nobody asked to handle kill the agent."""
        loop = asyncio.get_running_loop()
        watched = guard.watched_signals(self._stopping)
        if signal.SIGINT in watched:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt out of nowhere
        for name in {*self._stopping, *_PASSED_ON}:
            number = signal.Signals[name]
            if number != signal.SIGHUP or number in watched:
                loop.add_signal_handler(number, self._received, int(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)

    def _received(self, number: int) -> None:
        now = time.monotonic()
        last, when = self._last
        self._last = (number, now)
        if last == number and now - when < _SAME_SIGNAL_S:
            return
        name = signal_name(number)
        if name in self._stopping:
            self._stop(f"{name} received", number)
        else:
            self._pass_on(number, name)

    def _pass_on(self, number: int, name: str) -> None:
        """SIGUSR1/2 are a script's own business (Slurm's --signal), and would kill one without a handler."""
        world = self._owner.world
        handlers = [rank for rank in world.alive() if procfs.catches(rank.pid, number)] if world else []
        for rank in handlers:
            rank.send_signal(number)
        if handlers:
            self._owner.console.tell("info", f"{name} passed on to {counted(len(handlers), 'rank')}")
        else:
            text = f"{name} ignored: no rank has a handler for it, and it would kill them"
            self._owner.console.tell("warning", text)
