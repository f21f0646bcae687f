"""The process in which a generation's store lives, on the node that the controller has named for it.

It comes from where ranks come from, so that it is there in milliseconds, and is none of them: it lives in no
world, forks nothing, and the next generation gets another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable

from closeranks import wire
from closeranks.agent.spares import Spare, receive_one
from closeranks.errors import ZygoteError

__all__ = ["StoreProcess"]

_OPEN_TIMEOUT_S = 30.0


class StoreProcess:
    """A running store. ``lost`` is called once should it end before ``close``."""

    def __init__(self, spare: Spare, port: int, lost: Callable[[], None]) -> None:
        self.port = port
        self.pid = spare.pid
        self._spare = spare
        self._lost = lost
        asyncio.get_running_loop().add_reader(spare.pidfd, self._ended)

    @classmethod
    async def open(
        cls, spare: Spare, lost: Callable[[], None], *, environment: dict[str, str]
    ) -> StoreProcess:
        """Have ``spare`` serve a store on all addresses of this host. Raises ZygoteError where it can't."""
        order = {"entry": {"kind": "store", "target": "", "args": []}, "env": environment}
        try:
            _send(spare, order)
            reply = await receive_one(spare.socket, _OPEN_TIMEOUT_S, "the store did not open")
            if reply["type"] != "store_opened":
                raise ZygoteError(f"the store did not open: {reply.get('why')}")
        except (OSError, ZygoteError) as error:
            _end(spare)
            if isinstance(error, OSError):
                raise ZygoteError(f"the store did not open: {error.strerror}") from error
            raise
        return cls(spare, int(reply["port"]), lost)

    def _ended(self) -> None:
        self.close()
        self._lost()

    def close(self) -> None:
        """End it; more than once is nothing."""
        if self._spare.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._spare.pidfd)
            _end(self._spare)
            self._spare.pidfd = -1


def _send(spare: Spare, order: dict[str, object]) -> None:
    """The order, with /dev/null where a rank has its output, page and stacks."""
    with (
        open(os.devnull, "wb") as nothing,  # noqa: PTH123 - a device, not a path of anybody's
        os.fdopen(os.memfd_create("closeranks-order", os.MFD_CLOEXEC), "wb") as file,
    ):
        file.write(json.dumps(order).encode())
        file.flush()
        fds = [nothing.fileno()] * 4
        wire.send(spare.socket, {"type": "go"}, [*fds, file.fileno()])


def _end(spare: Spare) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(spare.pidfd, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, spare.pidfd, os.WEXITED)
    spare.close()
