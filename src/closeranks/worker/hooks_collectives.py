"""Wraps the collectives of torch.distributed: each is recorded, compared with the neighbours', issued."""

from __future__ import annotations

import contextlib
import functools
import inspect
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from closeranks.progress import DTYPES, OPS
from closeranks.worker.hooks_groups import DTYPE_INDEX, Groups, GroupState, Sites, describe
from closeranks.worker.hooks_state import STATE
from closeranks.worker.page import P2P_OPS, PageWriter

__all__ = ["Call", "Recorder", "calls", "collective_wrappers", "wrap", "wrap_wait"]

_compiling = torch.compiler.is_dynamo_compiling
_ident = threading.get_ident
_getframe = sys._getframe
_Work = c10d.Work
_Tensor = torch.Tensor
_DTYPE = DTYPE_INDEX
_OTHER_DTYPE = DTYPES.index("other")

_MAX_PENDING = 1024

# torch's function -> the page's name for it, and the parameter that holds this rank's tensors
_FUNCTIONS: dict[str, tuple[str, str | None]] = {
    "all_reduce": ("all_reduce", "tensor"),
    "broadcast": ("broadcast", "tensor"),
    "reduce": ("reduce", "tensor"),
    "all_gather": ("all_gather", "tensor"),
    "gather": ("gather", "tensor"),
    "scatter": ("scatter", "tensor"),
    "reduce_scatter": ("reduce_scatter", "output"),
    "all_to_all": ("all_to_all", "input_tensor_list"),
    "barrier": ("barrier", None),
    "send": ("send", "tensor"),
    "recv": ("recv", "tensor"),
    "all_gather_into_tensor": ("all_gather_into_tensor", "input_tensor"),
    "all_gather_single": ("all_gather_into_tensor", "input_tensor"),
    "_all_gather_base": ("all_gather_into_tensor", "input_tensor"),
    "reduce_scatter_tensor": ("reduce_scatter_tensor", "output"),
    "reduce_scatter_single": ("reduce_scatter_tensor", "output"),
    "_reduce_scatter_base": ("reduce_scatter_tensor", "output"),
    "all_to_all_single": ("all_to_all_single", "input"),
    "all_reduce_coalesced": ("all_reduce_coalesced", "tensors"),
    "all_gather_coalesced": ("all_gather_coalesced", "input_tensor_list"),
    "broadcast_object_list": ("broadcast_object_list", None),
    "all_gather_object": ("all_gather_object", None),
    "gather_object": ("gather_object", None),
    "scatter_object_list": ("scatter_object_list", None),
    "monitored_barrier": ("monitored_barrier", None),
    "batch_isend_irecv": ("batch_isend_irecv", None),
    "isend": ("isend", "tensor"),
    "irecv": ("irecv", "tensor"),
}
# Those that go straight to C++. Any other may call some of these in turn, depending on torch's version.
_LEAVES = frozenset(
    ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all",
     "barrier", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "all_reduce_coalesced",
     "isend", "irecv", "monitored_barrier")
)  # fmt: skip
# How far these move the count that is the same on all ranks, whatever they do to the backend's own.
_CONSUMES = {"isend": 0, "irecv": 0, "batch_isend_irecv": 0, "monitored_barrier": 1}


@dataclass(frozen=True, slots=True)
class Call:
    """How one of torch's functions takes its arguments."""

    name: str
    op: int
    kinds: tuple[int, ...]  # by dtype: as in closeranks.worker.page.Record, on the default group
    p2p: bool
    leaf: bool
    batch: bool
    consumes: int | None
    tensor: str
    tensor_at: int
    group_at: int


class Recorder:
    """Takes down what the wrappers see. One per process, made when the hooks are activated."""

    def __init__(self, writer: PageWriter) -> None:
        self._writer = writer
        self.sites = Sites(writer)
        self.groups = Groups(writer, self.sites)
        self.inside: set[int] = set()  # threads in a call that is made of other recorded calls
        self.pending: dict[int, tuple[weakref.ref[Any], int]] = {}  # asynchronous ones, by id of their Work

    def group_of(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GroupState | None:
        """The group a call is for; None if it will issue nothing."""
        if call.batch:
            ops = args[0] if args else kwargs.get("p2p_op_list")
            return self.groups.get(ops[0].group if ops else None)
        at = call.group_at
        return self.groups.get(args[at] if len(args) > at >= 0 else kwargs.get("group"))

    def enter(self, call: Call, state: GroupState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Record the call as entered; where it can be compared with the neighbours', do that."""
        at = call.tensor_at
        dtype = numel = 0
        if at >= 0:
            tensor: Any = args[at] if len(args) > at else kwargs.get(call.tensor)
            if type(tensor) is _Tensor:
                dtype, numel = _DTYPE.get(tensor.dtype, _OTHER_DTYPE), tensor.numel()
            else:
                dtype, numel = describe(tensor)
        try:
            group: Any = state.group()
            seq = group._get_sequence_number_for_group() - state.offset + 1
        except RuntimeError:  # a backend that doesn't count: recorded without a number, compared with nobody
            seq, state.check = 0, None
        site = self.sites.find(_getframe(2))
        token = self._writer.collective_enter(seq, state.key, call.op, dtype, numel, site.file_key, site.line)
        check = state.check
        if check is not None and not call.p2p:
            check.check(seq, call.kinds[dtype], numel, site, _ident() == STATE.main_ident)
        return token

    def remember(self, result: Any, token: int) -> None:
        """Keep which record an asynchronous call belongs to, until it is waited for."""
        if isinstance(result, _Work):
            if len(self.pending) >= _MAX_PENDING:
                self.pending.clear()  # a script that never waits
            self.pending[id(result)] = weakref.ref(result), token
        elif type(result) is list:
            for work in result[:64]:
                if isinstance(work, _Work):
                    self.remember(work, token)


# What the hook's own part may run into: a page that was unmapped or numbers it can't hold, a backend without
# sequence numbers, another torch than we know, arguments that torch itself will refuse.
_HOOK_ERRORS = (ValueError, struct.error, RuntimeError, AttributeError, TypeError, IndexError, KeyError)


def _wrap_recorded(original: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """Around a call that issues one collective, or several as one."""
    issue = original if call.leaf else _guarded(original)
    ordered = not call.p2p and call.consumes is None
    batch, group_at = call.batch, call.group_at

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _compiling():
            return original(*args, **kwargs)
        recorder = STATE.recorder
        if recorder is None or (recorder.inside and _ident() in recorder.inside):
            return original(*args, **kwargs)
        try:
            if batch:
                state = recorder.group_of(call, args, kwargs)
            else:
                state = recorder.groups.get(
                    args[group_at] if len(args) > group_at >= 0 else kwargs.get("group")
                )
        except _HOOK_ERRORS:
            state = None
        if state is None:
            return original(*args, **kwargs)
        injector = STATE.injector
        if injector is not None and ordered and state.is_world:
            injector.poll()
            if injector.tampers:
                return injector.tamper(call.name, wrapper, args, kwargs)
        try:
            token = recorder.enter(call, state, args, kwargs)
        except _HOOK_ERRORS as error:
            _give_up(error)
            return original(*args, **kwargs)
        try:
            result = issue(*args, **kwargs)
        except BaseException:
            _failed()
            raise
        try:
            STATE.writer.collective_exit(token)
        except ValueError as error:
            _give_up(error)
        if result is not None:
            recorder.remember(result, token)
        if injector is not None and ordered and state.is_world:
            injector.collective_done(call.name)
        return result

    return wrapper


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the inside of a call that is made of others we know: it is recorded, they aren't."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        recorder = STATE.recorder
        if recorder is None:
            return original(*args, **kwargs)
        ident = _ident()
        recorder.inside.add(ident)
        try:
            return original(*args, **kwargs)
        finally:
            recorder.inside.discard(ident)

    return guarded


def _failed() -> None:
    try:
        STATE.writer.collective_failed()
    except ValueError as error:
        _give_up(error)


def _give_up(error: Exception) -> None:
    STATE.disable(f"a collective could not be recorded: {type(error).__name__}: {error}")


def wrap(original: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """The wrapper of one of torch's functions. Some move the backend's sequence number by an amount that
    differs between ranks: that is taken out again."""
    recorded = _wrap_recorded(original, call)
    if call.consumes is None:
        return recorded
    consumes = call.consumes

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        recorder = None if _compiling() else STATE.recorder
        if recorder is None:
            return original(*args, **kwargs)
        try:
            state = recorder.group_of(call, args, kwargs)
            before = state.issued() if state is not None else 0
        except _HOOK_ERRORS:
            state = None
        result = recorded(*args, **kwargs)
        if state is not None:
            with contextlib.suppress(RuntimeError, AttributeError):
                state.offset += state.issued() - before - consumes
        return result

    return wrapper


def wrap_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    """Work.wait: a rank that blocks in it is in a collective, too."""

    # pybind11 recognises a call from an override of ``wait`` by this very name and first parameter; without
    # it a Python subclass of Work that inherits ``wait`` would recurse for ever.
    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = None if _compiling() else STATE.recorder
        pending = recorder.pending.pop(id(self), None) if recorder is not None else None
        if pending is None or pending[0]() is not self:
            return original(self, *args, **kwargs)
        token = pending[1]
        try:
            STATE.writer.wait_enter(token)
        except ValueError as error:
            _give_up(error)
            return original(self, *args, **kwargs)
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            _failed()
            raise
        try:
            STATE.writer.collective_exit(token)
        except ValueError as error:
            _give_up(error)
        return result

    return wait


def calls() -> Iterator[tuple[str, Call]]:
    """torch's name, and how it is called, of every collective that this torch has."""
    for function, (name, tensor) in _FUNCTIONS.items():
        original = getattr(c10d, function, None)
        if original is None:
            continue
        parameters = list(inspect.signature(original).parameters)
        op = OPS.index(name)
        yield (
            function,
            Call(
                name=name,
                op=op,
                kinds=tuple(op << 32 | dtype << 48 for dtype in range(len(DTYPES))),
                p2p=op in P2P_OPS,
                leaf=function in _LEAVES,
                batch=function == "batch_isend_irecv",
                consumes=_CONSUMES.get(function),
                tensor=tensor or "",
                tensor_at=parameters.index(tensor) if tensor in parameters else -1,
                group_at=parameters.index("group") if "group" in parameters else -1,
            ),
        )


def collective_wrappers() -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """(name, original, wrapper) of every collective that this torch has."""
    for function, call in calls():
        original = getattr(c10d, function)
        yield function, original, wrap(original, call)
