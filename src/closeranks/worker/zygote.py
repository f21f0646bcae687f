"""The zygote: a process that has imported torch once, and forks workers in milliseconds.

Run as a file, not with ``-m``: the script's directory and the current one stay off ``sys.path`` while torch
is imported. It is single-threaded and touches no CUDA, socket thread, store or resolver: a child forked
while another thread holds a lock would wait on that lock for ever. It checks that before each fork, and
says so instead of forking when it isn't true.

Workers are forked twice, so that the agent (the nearest subreaper) adopts and reaps them, and the kernel's
parent-death signal ties them to the agent's life.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 - PYTHON_EXEC names any
        sys.exit("closeranks: ranks need Python 3.11 or newer, and %s is %s" % (sys.executable, sys.version))  # noqa: UP031
    _here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    if sys.path and sys.path[0] == _here:
        del sys.path[0]  # our own folder's names (store, page, ...) must not hide anybody's modules
    # The interpreter that PYTHON_EXEC names may have no closeranks of its own.
    sys.path.append(os.path.dirname(os.path.dirname(_here)))  # noqa: PTH120

import contextlib
import gc
import importlib
import socket
import time
from typing import Any

from closeranks import linux, wire
from closeranks.worker import bootstrap

if __name__ == "__main__":
    sys.path.pop()  # nothing else is to be found there

__all__ = ["import_all", "main", "open_channel", "prepare_hooks", "why_unsafe"]

_ADOPTION_TIMEOUT_S = 5.0
# Imports make millions of objects and next to no garbage: looking for it costs time and finds nothing.
_NO_COLLECTION = (1 << 30, 10, 10)
# What a module may raise while it is imported. Anything else ends the zygote; the agent then starts its
# workers with exec, without what the user wanted preloaded, and says why.
IMPORT_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    SystemError,
    SystemExit,
    TypeError,
    ValueError,
)


def import_all(names: list[str]) -> list[dict[str, str]]:
    """Import each module; returns what failed as ``{"module", "error"}``: worth a notice, never fatal.

    The current directory stays what it was, as scripts are named relative to it.
    """
    failed: list[dict[str, str]] = []
    thresholds = gc.get_threshold()
    gc.set_threshold(*_NO_COLLECTION)
    here = bootstrap.out_of_the_way(os.open(".", os.O_PATH | os.O_DIRECTORY))
    for name in names:
        if any(name.startswith(f"{failure['module']}.") for failure in failed):
            continue
        try:
            importlib.import_module(name)
        except IMPORT_ERRORS as error:
            failed.append({"module": name, "error": f"{type(error).__name__}: {error}"[:500]})
    if gc.get_threshold() == _NO_COLLECTION:  # else a module wants it otherwise
        gc.set_threshold(*thresholds)
    with contextlib.suppress(OSError):  # a module may have closed all descriptors, or taken away the right
        os.fchdir(here)
        os.close(here)
    return failed


def prepare_hooks() -> None:
    """Have in place what a rank needs besides its order: no rank that is told to go waits for an import."""
    if "torch.distributed.distributed_c10d" in sys.modules:
        from closeranks.worker import hooks

        hooks.prepare()
        importlib.import_module("closeranks.worker.store")


def open_channel(number: str) -> socket.socket:
    """The agent's socket, out of the way of modules that close the descriptors they find."""
    return socket.socket(fileno=bootstrap.out_of_the_way(int(number)))


def why_unsafe() -> str:
    """Why forking this process would be unsafe; "" if it is safe."""
    threads = os.listdir("/proc/self/task")  # noqa: PTH208
    if len(threads) > 1:
        return (
            f"it has {len(threads)} threads after its imports: a lock they hold would stay locked in a fork"
        )
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return "CUDA is initialised after its imports, and a CUDA context does not survive a fork"
    return ""


def _wait_for_adoption(agent_pid: int) -> None:
    """Only the agent's death may kill us, not our short-lived parent's; so wait until it is our parent."""
    deadline = time.monotonic() + _ADOPTION_TIMEOUT_S
    while os.getppid() != agent_pid:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0002)
    linux.die_with_parent()
    if os.getppid() != agent_pid:  # it died between the two calls: the signal was missed
        os._exit(1)


def _become_worker(agent_pid: int, zygote: socket.socket, fd: int, others: list[int]) -> bootstrap.Order:
    zygote.close()
    for other in others:
        os.close(other)
    linux.set_title("closeranks: spare", "cr-spare")
    os.setsid()
    _wait_for_adoption(agent_pid)
    order = bootstrap.wait_for_order(socket.socket(fileno=fd))
    if order is None:
        os._exit(0)
    return order


def _fork_workers(agent_pid: int, zygote: socket.socket, fds: list[int]) -> bootstrap.Order | None:
    """Fork one worker a descriptor. Returns None in the zygote; in a worker, the order to carry out."""
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        for fd in fds:
            os.close(fd)
        return None
    for fd in fds:
        if os.fork() == 0:
            return _become_worker(agent_pid, zygote, fd, [other for other in fds if other != fd])
    os._exit(0)


def _tell(zygote: socket.socket, message: dict[str, Any]) -> None:
    """Send to the agent; where it has closed the line our work is over."""
    try:
        wire.send(zygote, message)
    except ConnectionError:
        os._exit(0)


def _next_request(zygote: socket.socket) -> tuple[dict[str, Any], list[int]]:
    try:
        received = wire.receive(zygote)
    except ConnectionError:
        received = None
    if received is None:
        os._exit(0)
    return received


def _serve(zygote: socket.socket, agent_pid: int) -> bootstrap.Order:
    """Answer the agent's requests. Returns only in a worker that was told to go."""
    while True:
        message, fds = _next_request(zygote)
        reply: dict[str, Any] = {"type": "forked", "request": message.get("request")}
        if message["type"] == "import":
            reply = {"type": "imported", "failed": import_all(message["modules"])}
        reason = why_unsafe()
        if reason:
            _tell(zygote, {"type": "unsafe", "reason": reason})
            for fd in fds:
                os.close(fd)
            continue
        if message["type"] == "fork":
            order = _fork_workers(agent_pid, zygote, fds)
            if order is not None:
                return order
        _tell(zygote, reply)


def main(argv: list[str]) -> None:
    """``zygote.py CHANNEL_FD AGENT_PID MODULES ...``: import, then serve. The rest makes room for titles."""
    linux.die_with_parent()
    bootstrap.unblock_signals()
    sock = open_channel(argv[1])
    agent_pid = int(argv[2])
    if os.getppid() != agent_pid:
        os._exit(1)
    linux.set_title("closeranks: zygote", "cr-zygote")
    bootstrap.ignore_user_signals()
    began = time.monotonic()
    failed = import_all([name for name in argv[3].split(",") if name])
    torch = sys.modules.get("torch")
    prepare_hooks()
    gc.freeze()  # objects that live for ever needn't be visited, and copied, by each child's collector
    _tell(
        sock,
        {
            "type": "ready",
            "torch": getattr(torch, "__version__", None) and str(torch.__version__),  # type: ignore[union-attr]
            "import_s": time.monotonic() - began,
            "failed": failed,
            "unsafe": why_unsafe(),
        },
    )
    order = _serve(sock, agent_pid)
    bootstrap.run(order)


if __name__ == "__main__":
    main(sys.argv)
