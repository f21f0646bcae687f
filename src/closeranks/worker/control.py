"""A worker's line to its agent. Losing it never disturbs the training: sends fail silently, reads end."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Mapping
from typing import Any

from closeranks import wire
from closeranks.errors import ProtocolError

__all__ = ["Control"]


class Control:
    """Send facts to the agent, receive its requests. Safe to use from several threads.

    In a forked child of the rank (a DataLoader worker) it goes mute: the agent must not take the child's
    words for the rank's.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send without blocking; False if the agent is gone, its queue is full, or we are a fork."""
        if os.getpid() != self._pid:
            return False
        if not self._lock.acquire(timeout=0.05):
            return False
        try:
            self._socket.setblocking(False)
            wire.send(self._socket, message)
        except (OSError, ProtocolError):
            return False
        finally:
            self._lock.release()
        return True

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next request; None once the agent has closed the line."""
        poll = select.poll()  # not select(): our descriptor lies above FD_SETSIZE on purpose
        poll.register(self._socket, select.POLLIN)
        while True:
            try:
                poll.poll()
                received = wire.receive(self._socket)
            except BlockingIOError:
                continue
            except (OSError, ValueError, ProtocolError):
                return None
            if received is None:
                return None
            message, fds = received
            for fd in fds:
                os.close(fd)
            return message
