"""From a waiting spare to an unmodified script that runs as ``__main__``.

A spare has the interpreter and torch ready. The agent's one ``go`` message brings what differs between
ranks and generations: environment, standard streams, progress page, store. What the script then sees is
what ``python -u script.py`` under torchrun would show it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import json
import mmap
import os
import resource
import signal
import socket
import sys
import time
import traceback
import types
from dataclasses import dataclass
from typing import Any, NoReturn

from closeranks import linux, wire
from closeranks.progress import PAGE_BYTES, Phase
from closeranks.worker import teardown
from closeranks.worker.control import Control

__all__ = [
    "Order",
    "exec_command",
    "ignore_user_signals",
    "out_of_the_way",
    "run",
    "serve_store",
    "unblock_signals",
    "wait_for_order",
]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120
_USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_ignored: set[signal.Signals] = set()
_ORDER_FDS = 4  # stdout, stderr, pages, stacks; a fifth holds the order, if it isn't in the message itself


@dataclass(slots=True)
class Order:
    """The ``go`` message and what came with it."""

    message: dict[str, Any]
    socket: socket.socket
    stdout_fd: int
    stderr_fd: int
    pages_fd: int
    stacks_fd: int


def wait_for_order(sock: socket.socket) -> Order | None:
    """Say hello and wait for ``go``; None if the agent closes the line: this spare isn't needed."""
    try:
        wire.send(sock, {"type": "hello", "pid": os.getpid()})
        received = wire.receive(sock)
    except ConnectionError:  # closed before we got here
        return None
    if received is None:
        return None
    message, fds = received
    if message["type"] == "go" and len(fds) == _ORDER_FDS + 1:
        with os.fdopen(fds.pop(), "rb") as file:
            file.seek(0)  # its writer has left it at its end
            message = json.load(file)
    elif message["type"] != "go" or len(fds) != _ORDER_FDS:
        return None
    return Order(message, sock, *fds)


def unblock_signals() -> None:
    """The agent starts us while it holds its own signals back, and a script has to hear them."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def ignore_user_signals() -> None:
    """Until the script runs: sent to all processes of a job (Slurm's ``--signal``), they would kill us.

    They are for scripts that handle them, and the agent passes them on to those.
    """
    for number in _USER_SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)
            _ignored.add(number)


def _take_signals() -> None:
    """Give the script these signals as a new interpreter would have them."""
    for number in _ignored:
        if signal.getsignal(number) == signal.SIG_IGN:  # and not a handler of a preloaded module's
            signal.signal(number, signal.SIG_DFL)


def out_of_the_way(fd: int) -> int:
    """Move ``fd`` near the top of the table, where a script's own files won't land, and close the original.

    A script that closes its descriptors and opens others must not find them to be our channel.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = min(soft, 4096) if soft > 0 else 4096
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(3, ceiling - 24))
    except OSError:
        return fd
    os.close(fd)
    return high


def _map_pages(fd: int, size_bytes: int) -> mmap.mmap:
    """Map the pages and keep no descriptor of them; ``fd`` is closed.

    mmap keeps a duplicate, at the lowest free number, and closes that number when it is freed. A script that
    has closed it meanwhile (daemons close all they find) would lose a file of its own then.
    """
    duplicate = os.dup(fd)  # the number that mmap's will have
    os.close(duplicate)
    pages = mmap.mmap(fd, size_bytes)
    os.close(fd)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pages))  # never freed, so the number is never closed again
    os.close(duplicate)
    return pages


def _take_limits(order: Order) -> None:
    """The agent needs more descriptors than a script may count on: give the rank the user's own limit."""
    soft = order.message.get("file_limit")
    if soft is not None:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _take_streams(order: Order) -> None:
    os.dup2(order.stdout_fd, 1)
    os.dup2(order.stderr_fd, 2)
    os.close(order.stdout_fd)
    os.close(order.stderr_fd)


def _reseed() -> None:
    """Give each rank its own entropy, as a fresh interpreter has it.

    ``random`` reseeds itself after a fork; torch's and numpy's global generators don't.
    """
    torch_random = sys.modules.get("torch.random")
    if torch_random is not None:
        torch_random.default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _install_stack_dump(fd: int) -> None:
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        # The main thread's stack alone: to walk the frames of threads that run meanwhile can crash us.
        faulthandler.register(linux.STACK_SIGNAL, file=fd, all_threads=False, chain=False)
        faulthandler.enable(file=fd, all_threads=True)


def _prepare(order: Order) -> tuple[Control, Any]:
    """Everything between ``go`` and the script's first line; returns the control line and the page writer."""
    message = order.message
    _take_limits(order)
    _take_streams(order)
    os.environ.update(message["env"])
    for name in message.get("unset", ()):
        os.environ.pop(name, None)
    _reseed()
    high = out_of_the_way(order.socket.detach())
    control = Control(socket.socket(fileno=high))
    stacks_fd = out_of_the_way(order.stacks_fd)
    _install_stack_dump(stacks_fd)
    pages = _map_pages(order.pages_fd, PAGE_BYTES * int(message["local_world_size"]))
    from closeranks.worker.page import PageWriter

    writer = PageWriter(
        pages,
        int(message["local_rank"]),
        int(message["local_world_size"]),
        int(message["rank"]),
        int(message["generation"]),
    )
    writer.set_phase(Phase.START)
    if "torch.distributed.distributed_c10d" in sys.modules:
        from closeranks.worker import hooks, store

        hooks.install(writer, control, message.get("faults", []))
        if message.get("store"):
            store.register(message["store"])
        if message.get("numa_binding"):
            _bind_numa(message["numa_binding"], int(message["local_rank"]))
    return control, writer


def _bind_numa(mode: str, local_rank: int) -> None:
    """Bind this process near its GPU with torch's own policy; says so on stderr where torch can't."""
    from torch.numa import binding

    try:
        binding._maybe_apply_numa_binding_to_current_process(
            gpu_index=local_rank, numa_options=binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
        )
    except (AttributeError, TypeError, RuntimeError, OSError, ValueError, AssertionError) as error:
        sys.stderr.write(f"closeranks: --numa-binding {mode} has no effect here: {error}\n")


def _fresh_main(file: str | None) -> types.ModuleType:
    """A new ``__main__``, as ``python`` makes it: pickles, spawn and ``__main__`` guards depend on it."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    if file is not None:
        from importlib.machinery import SourceFileLoader

        module.__file__ = file
        module.__loader__ = SourceFileLoader("__main__", file)
        module.__dict__["__cached__"] = None
    sys.modules["__main__"] = module
    return module


def _run_script(path: str) -> None:
    """Run the script at ``path``, which is absolute, with its symlinks, as CPython has it."""
    if os.path.isdir(path):  # noqa: PTH112
        import runpy

        sys.path.insert(0, path)
        _fresh_main(None)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    main = _fresh_main(path)
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            source = file.read()
    except OSError as error:  # it was there when the job began; what the interpreter itself would say
        sys.stderr.write(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n"
        )
        sys.exit(2)
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _run_module(target: str) -> None:
    import runpy

    if not sys.flags.safe_path:
        here = ""
        with contextlib.suppress(FileNotFoundError):  # deleted: the interpreter, too, leaves it at "" then
            here = os.getcwd()  # noqa: PTH109
        sys.path.insert(0, here)
    _fresh_main(None)
    runpy._run_module_as_main(target, alter_argv=True)  # type: ignore[attr-defined]


def _script_traceback(error: BaseException) -> types.TracebackType | None:
    """The traceback without the frames of the launcher below the script's own."""
    entry = error.__traceback__
    own = os.path.dirname(__file__)  # noqa: PTH120
    while entry is not None:
        file = entry.tb_frame.f_code.co_filename
        if not file.startswith(own) and not file.startswith("<frozen runpy"):
            return entry
        entry = entry.tb_next
    return error.__traceback__


def _place(entry: types.TracebackType | None) -> str:
    """``file:line`` of the innermost frame of the user's own code, else of the innermost frame."""
    frames = traceback.extract_tb(entry)
    library = (f"{os.sep}site-packages{os.sep}", f"{os.sep}lib{os.sep}python", "<frozen ", _PACKAGE)
    own = [frame for frame in frames if not any(part in frame.filename for part in library)]
    chosen = own or frames
    return f"{chosen[-1].filename}:{chosen[-1].lineno}" if chosen else ""


def _show(error: BaseException, entry: types.TracebackType | None) -> None:
    """Show an uncaught exception as the interpreter does, whatever the script has made of the hook.

    Raises SystemExit where the hook does, and with 1 where the hook fails.
    """
    try:
        if not hasattr(sys, "excepthook"):
            sys.stderr.write("sys.excepthook is missing\n")
        hook = getattr(sys, "excepthook", sys.__excepthook__)
        hook(type(error), error, entry)
    except SystemExit:
        raise
    except BaseException as second:  # the hook is the script's: anything can come out of it
        second.__traceback__ = tail = second.__traceback__.tb_next if second.__traceback__ else None
        second.__context__ = None
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no stderr to show it on
            sys.stderr.write("Error in sys.excepthook:\n")
            sys.__excepthook__(type(second), second, tail)
            sys.stderr.write("\nOriginal exception was:\n")
            sys.__excepthook__(type(error), error, entry)
        sys.exit(1)


def _report(
    control: Control, writer: Any, error: BaseException, entry: types.TracebackType | None, raised_ns: int
) -> None:
    described = traceback.TracebackException(type(error), error, entry)
    text = "".join(described.format())
    control.send(
        {
            "type": "raised",
            "error": {
                "type": f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
                "message": str(described)[:4096],  # not str(error), which runs code of the script's
                "place": _place(entry),
                "step": writer.step,
                "mono_ns": raised_ns,
                "traceback": text[-32768:],
            },
        }
    )


def exec_command(order: Order) -> None:
    """Become the command of ``--no-python``. The parent-death signal survives exec; our hooks can't."""
    entry = order.message["entry"]
    _take_limits(order)
    _take_streams(order)
    for fd in (order.pages_fd, order.stacks_fd):
        os.close(fd)
    environment = {**os.environ, **order.message["env"]}
    try:
        os.execvpe(entry["target"], [entry["target"], *entry["args"]], environment)
    except OSError as error:
        sys.stderr.write(f"closeranks: can't run {entry['target']}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def serve_store(order: Order) -> NoReturn:
    """Become the store of a generation, which forks nothing. Ends when the agent closes the line."""
    linux.set_title("closeranks: store", "cr-store")
    _take_limits(order)
    _take_streams(order)
    for fd in (order.pages_fd, order.stacks_fd):
        os.close(fd)
    os.environ.update(order.message["env"])
    control = Control(order.socket)
    from closeranks.worker import store

    try:
        opened, port = store.serve()
    except (RuntimeError, OSError, ImportError) as error:  # no port, no descriptor; torch is not there
        control.send({"type": "store_failed", "why": f"{type(error).__name__}: {error}"[:500]})
        os._exit(1)
    control.send({"type": "store_opened", "port": port})
    while control.receive() is not None:
        pass
    del opened
    os._exit(0)


def _leave(writer: Any, rank_pid: int) -> None:
    """The script is over; the interpreter's own end follows. Not for children that the script forked."""
    if os.getpid() == rank_pid:
        writer.set_phase(Phase.EXIT)
        teardown.let_workers_finish()


def run(order: Order) -> None:
    """Become the rank: run the script to its end. Leaves by SystemExit, like the interpreter would."""
    message = order.message
    entry = message["entry"]
    _take_signals()
    if entry["kind"] == "command":
        exec_command(order)
    if entry["kind"] == "store":
        serve_store(order)
    argv = [entry["target"], *entry["args"]]
    shown = ["-u", *(["-m"] if entry["kind"] == "module" else []), *argv]
    linux.set_title("\0".join(["python", *shown]), f"rank {message['rank']}")
    control, writer = _prepare(order)
    sys.argv = argv
    sys.orig_argv = [sys.executable, *shown]
    rank_pid = os.getpid()
    try:
        if entry["kind"] == "module":
            _run_module(entry["target"])
        else:
            # The agent's path is from the start of the job; the current directory may be gone since.
            _run_script(entry.get("path") or os.path.abspath(entry["target"]))  # noqa: PTH100
    except SystemExit:
        _leave(writer, rank_pid)
        raise
    except BaseException as error:  # as the interpreter's own top level: everything ends here, shown once
        shown_from = _script_traceback(error)
        raised_ns = time.monotonic_ns()
        error.__traceback__ = shown_from
        try:
            _show(error, shown_from)
        finally:
            if os.getpid() == rank_pid:  # a child that the script forked ends here too
                _report(control, writer, error, shown_from, raised_ns)
            _leave(writer, rank_pid)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)
    _leave(writer, rank_pid)
