"""Carries out injected faults inside a rank: see closeranks.faults for what can be asked for.

A fault is marked in the progress page before it is carried out: the mark outlives the process, so that the
next generation isn't given the same fault again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from closeranks.faults import MAX_FAULTS, TAMPER_KINDS, FaultSpec
from closeranks.worker.hooks_state import ControlLine
from closeranks.worker.page import PageWriter

__all__ = ["FaultInjector"]

_MB = 1024 * 1024
_CHUNK_BYTES = 16 * _MB
_SLOW_MS = 100.0

# Sources of a step count; a better one takes over as soon as it is seen.
_COLLECTIVES, _SCRIPT, _OPTIMIZER = range(3)
# Collectives that scripts use to set themselves up, and so no measure of its steps.
_SET_UP = frozenset(
    ("barrier", "broadcast", "broadcast_object_list", "all_gather_object", "gather_object",
     "scatter_object_list", "monitored_barrier")
)  # fmt: skip
# Functions whose tensors can be exchanged for others of another size or dtype, and where those are.
_TENSORS = {
    "all_reduce": ("tensor",),
    "broadcast": ("tensor",),
    "reduce": ("tensor",),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "reduce_scatter_tensor": ("output", "input"),
}


class FaultInjector:
    """The faults of one rank that are still to come, told of its progress by the hooks.

    Each fires once. ``tampers`` is true while one of them waits for a collective to change.
    """

    def __init__(
        self, specs: Iterable[tuple[int, FaultSpec]], writer: PageWriter, control: ControlLine
    ) -> None:
        self._writer = writer
        self._control = control
        self._lock = threading.Lock()
        self._coming: list[tuple[int, FaultSpec, float]] = []
        self._due_tampers: list[tuple[int, FaultSpec]] = []
        self._lasting: list[_Lasting] = []
        self._source = _COLLECTIVES
        self._collectives = 0
        self._step = 0
        self._step_ended_s = time.monotonic()
        self._unsynced: Any = None  # a DDP module whose gradients stay local for this iteration
        self.tampers = False
        for number, spec in specs:
            self.arm(number, spec)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self._coming or self._due_tampers or self._lasting or self._unsynced is not None)

    def arm(self, number: int, spec: FaultSpec) -> None:
        """Take one more fault; any thread. Raises ValueError for a number that has no bit in the page."""
        if not 0 <= number < MAX_FAULTS:
            raise ValueError(f"fault number {number} is not 0 to {MAX_FAULTS - 1}")
        with self._lock:
            self._coming.append((number, spec, time.monotonic()))
        if spec.kind == "skip":
            _watch_ddp(self)

    # --- progress -----------------------------------------------------------------------------------

    def optimizer_step(self, step: int) -> None:
        """The main optimizer has completed its ``step``-th step."""
        self._progress(_OPTIMIZER, step)

    def script_step(self, count: int) -> None:
        """``closeranks.step()`` was called for the ``count``-th time."""
        self._progress(_SCRIPT, count)

    def collective_done(self, name: str) -> None:
        """A collective on the default group has returned."""
        if name not in _SET_UP:
            self._collectives += 1
            self._progress(_COLLECTIVES, self._collectives)

    def _progress(self, source: int, step: int) -> None:
        if source < self._source:
            return
        self._source, self._step = source, step
        for lasting in tuple(self._lasting):
            if not lasting.step(time.monotonic() - self._step_ended_s):
                self._lasting.remove(lasting)
        self._step_ended_s = time.monotonic()
        self._fire_due()

    def poll(self) -> None:
        """Some progress, not a step: what is due by time, or at once, happens now."""
        if self._coming and threading.current_thread() is threading.main_thread():
            self._fire_due()

    def _fire_due(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            due = [
                (number, spec)
                for number, spec, armed_s in self._coming
                if self._is_due(spec, now_s - armed_s)
            ]
            taken = {number for number, _ in due}
            self._coming = [item for item in self._coming if item[0] not in taken]
        for number, spec in due:
            if spec.kind in TAMPER_KINDS:
                self._due_tampers.append((number, spec))
                self.tampers = True
            else:
                self._fire(number, spec)

    def _is_due(self, spec: FaultSpec, waited_s: float) -> bool:
        return self._step >= spec.step if spec.step is not None else waited_s >= (spec.after_s or 0.0)

    def _mark(self, number: int, spec: FaultSpec) -> None:
        self._writer.fault_fired(number)
        self._control.send({"type": "fault_fired", "id": number, "kind": spec.kind, "step": self._step})

    def _fire(self, number: int, spec: FaultSpec) -> None:
        self._mark(number, spec)
        if spec.kind in ("slow", "leak"):
            self._lasting.append(_Slow(spec) if spec.kind == "slow" else _Leak(spec))
        elif spec.kind != "agent-kill":  # the agent does that to itself once it hears of it
            _ACTIONS[spec.kind](spec)

    # --- collectives --------------------------------------------------------------------------------

    def tamper(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Carry out the waiting fault on this call of ``function`` (a collective on the default group)."""
        number, spec = self._due_tampers[0]
        bound = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
        changed = _changed(spec.kind, name, bound)
        if changed is None:  # it has no tensor to change: wait for the next
            self.tampers = False
            try:
                return function(*args, **kwargs)
            finally:
                self.tampers = True
        self._tampered()
        self._mark(number, spec)
        if spec.kind == "skip":
            return _completed_work() if bound.get("async_op") else None
        other, arguments = changed
        target = function if other == name else _function(other)
        return target(**arguments)

    def _tampered(self) -> None:
        del self._due_tampers[0]
        self.tampers = bool(self._due_tampers)

    def ddp_forward(self, module: Any) -> None:
        """A DistributedDataParallel module begins an iteration. Its collectives come from C++, where none can
        be left out; so a skipped one is an iteration whose gradients aren't synchronised."""
        if self._unsynced is module:
            module.require_backward_grad_sync = True
            self._unsynced = None
        if self._due_tampers and self._due_tampers[0][1].kind == "skip":
            torch = sys.modules["torch"]
            if module.require_backward_grad_sync and torch.is_grad_enabled():
                number, spec = self._due_tampers[0]
                self._tampered()
                self._mark(number, spec)
                module.require_backward_grad_sync = False
                self._unsynced = module


_ddp_injector: FaultInjector | None = None


def _watch_ddp(injector: FaultInjector) -> None:
    """Have DistributedDataParallel's forward report to ``injector``; only once there is a skip to inject."""
    global _ddp_injector
    patched = _ddp_injector is not None
    _ddp_injector = injector
    parallel = sys.modules.get("torch.nn.parallel")
    if patched or parallel is None:
        return
    original = parallel.DistributedDataParallel.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _ddp_injector is not None:
            _ddp_injector.ddp_forward(self)
        return original(self, *args, **kwargs)

    parallel.DistributedDataParallel.forward = forward


# --- changing one collective ------------------------------------------------------------------------


def _function(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(sys.modules["torch.distributed"], name)
    return found


def _changed(kind: str, name: str, bound: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """What is issued in place of ``name(**bound)``; None where ``kind`` can't be done to it."""
    if kind == "skip":
        return name, bound
    torch = sys.modules["torch"]
    if kind == "op":
        return _other_op(torch, name, bound)
    names = _TENSORS.get(name, ())
    tensors = {key: bound[key] for key in names if isinstance(bound.get(key), torch.Tensor)}
    if len(tensors) != len(names) or not names:
        return None
    make = _other_dtype if kind == "dtype" else _other_size
    return name, {**bound, **{key: make(torch, tensor) for key, tensor in tensors.items()}}


def _other_dtype(torch: Any, tensor: Any) -> Any:
    """As many elements of another dtype, of the same size where there is one: gloo won't notice."""
    by_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    other = by_size.get(tensor.element_size(), torch.int64)
    if other is tensor.dtype:
        other = {1: torch.int8, 2: torch.float16, 4: torch.float32, 8: torch.float64}[tensor.element_size()]
    return torch.zeros(tensor.numel(), dtype=other, device=tensor.device)


def _other_size(torch: Any, tensor: Any) -> Any:
    return torch.zeros(max(2 * tensor.numel(), 2), dtype=tensor.dtype, device=tensor.device)


def _other_op(torch: Any, name: str, bound: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    tensor = next((value for value in bound.values() if isinstance(value, torch.Tensor)), None)
    data = torch.zeros(1) if tensor is None else tensor.detach().clone()
    asynchronous = {"async_op": True} if bound.get("async_op") else {}
    if name == "all_reduce":
        return "broadcast", {"tensor": data, "src": 0, **asynchronous}
    return "all_reduce", {"tensor": data, **asynchronous}


def _completed_work() -> Any:
    torch = sys.modules["torch"]
    future = torch.futures.Future()
    future.set_result([])
    return torch._C._distributed_c10d._create_work_from_future(future)


# --- what breaks at once ----------------------------------------------------------------------------


def _kill(spec: FaultSpec) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # the signal is on its way: no further step


def _stop(spec: FaultSpec) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang_in_python(spec: FaultSpec) -> None:
    never_released = threading.Lock()
    never_released.acquire()
    never_released.acquire()


def _hang_in_c(spec: FaultSpec) -> None:
    # PyDLL keeps the GIL while it calls; a mutex, unlike pause() or sleep(), isn't left for a signal.
    mutex = ctypes.create_string_buffer(128)  # all zero: a PTHREAD_MUTEX_INITIALIZER on Linux
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


def _spin(spec: FaultSpec) -> None:
    while True:
        pass


def _raise(spec: FaultSpec) -> None:
    raise RuntimeError(str(spec.get("message")))


def _exit(spec: FaultSpec) -> None:
    sys.exit(int(spec.get("code") or 0))


def _os_exit(spec: FaultSpec) -> None:
    os._exit(int(spec.get("code") or 0))


def _segv(spec: FaultSpec) -> None:
    ctypes.string_at(0)


def _memory_limit_bytes() -> int:
    """The tightest memory limit of our cgroups, and a little more, so that it is met; else all memory."""
    limits = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root, name = ("/sys/fs/cgroup", "memory.max")
            if controllers:
                root, name = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            place = Path(root + path)
            for directory in (place, *place.parents):
                with contextlib.suppress(OSError, ValueError):
                    limits.append(int((directory / name).read_text()) * 11 // 10)
    limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits)


def _oom(spec: FaultSpec) -> None:
    given = spec.get("limit_mb")
    limit_bytes = int(given) * _MB if given is not None else _memory_limit_bytes()
    with contextlib.suppress(OSError):  # so that the killer takes us, and nobody else
        Path("/proc/self/oom_score_adj").write_text("1000")
    kept = []
    for _ in range(0, limit_bytes, _CHUNK_BYTES):
        kept.append(b"\1" * min(_CHUNK_BYTES, limit_bytes))
    held_mb = sum(map(len, kept)) // _MB
    kept.clear()
    raise MemoryError(f"injected by closeranks: held {held_mb} MB and was not killed for it")


_ACTIONS: dict[str, Callable[[FaultSpec], None]] = {
    "kill": _kill,
    "stop": _stop,
    "hang-python": _hang_in_python,
    "hang-c": _hang_in_c,
    "spin": _spin,
    "exception": _raise,
    "exit": _exit,
    "os-exit": _os_exit,
    "segv": _segv,
    "oom": _oom,
}


# --- what lasts -------------------------------------------------------------------------------------


class _Lasting:
    """A fault that goes on for a number of steps, or until the end."""

    def __init__(self, spec: FaultSpec) -> None:
        steps = spec.get("for")
        self._left = int(steps) if steps is not None else -1

    def step(self, took_s: float) -> bool:
        """A step has ended that took so long; False once this was the last."""
        self._act(took_s)
        self._left -= 1
        return self._left != 0

    def _act(self, took_s: float) -> None:
        raise AssertionError("a subclass says what happens")


class _Slow(_Lasting):
    def __init__(self, spec: FaultSpec) -> None:
        super().__init__(spec)
        factor, ms = spec.get("factor"), spec.get("ms")
        self._factor = float(factor) if factor is not None else None
        self._more_s = (float(ms) if ms is not None else _SLOW_MS) / 1000

    def _act(self, took_s: float) -> None:
        time.sleep(self._more_s if self._factor is None else took_s * (self._factor - 1))


_leaked: list[bytes] = []  # it isn't given back when the fault is over


class _Leak(_Lasting):
    def __init__(self, spec: FaultSpec) -> None:
        super().__init__(spec)
        self._bytes = int(float(spec.get("mb") or 0) * _MB)

    def _act(self, took_s: float) -> None:
        _leaked.append(b"\1" * self._bytes)
