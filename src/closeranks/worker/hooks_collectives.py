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

from closeranks.progress import OPS
from closeranks.worker.hooks_groups import Groups, GroupState, Sites, describe
from closeranks.worker.hooks_state import STATE
from closeranks.worker.page import P2P_OPS

__all__ = ["Recorder", "collective_wrappers", "recorder", "set_recorder", "wrap_wait"]

_compiling = torch.compiler.is_dynamo_compiling
_ident = threading.get_ident
_getframe = sys._getframe
_Work = c10d.Work

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
# How far these move the count that is the same on all ranks, whatever they do to the backend's own.
_CONSUMES = {"isend": 0, "irecv": 0, "batch_isend_irecv": 0, "monitored_barrier": 1}


@dataclass(frozen=True, slots=True)
class Call:
    """How one of torch's functions takes its arguments."""

    name: str
    op: int
    p2p: bool
    consumes: int | None
    tensor: str
    tensor_at: int
    group: str
    group_at: int


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str, at: int) -> Any:
    if at < len(args):
        return args[at] if at >= 0 else None
    return kwargs.get(name)


class Recorder:
    """Takes down what the wrappers see. One per process, made when the hooks are activated."""

    def __init__(self) -> None:
        self._writer = STATE.writer
        self.sites = Sites(STATE.writer)
        self.groups = Groups(STATE.writer, self.sites)
        self._pending: dict[int, tuple[weakref.ref[Any], int]] = {}

    def group_of(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[GroupState, Any] | None:
        """The group a call is for; None if it will issue nothing."""
        if call.name == "batch_isend_irecv":
            ops = _argument(args, kwargs, "p2p_op_list", 0)
            return self.groups.get(ops[0].group if ops else None)
        return self.groups.get(_argument(args, kwargs, call.group, call.group_at))

    def enter(
        self, call: Call, state: GroupState, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> int:
        """Record the call as entered; where it can be compared with the neighbours', do that."""
        dtype, numel = describe(_argument(args, kwargs, call.tensor, call.tensor_at))
        seq: int = group._get_sequence_number_for_group() - state.offset + 1
        site = self.sites.find(_getframe(2))
        writer = self._writer
        token = writer.collective_enter(seq, state.key, call.op, dtype, numel, site.file_key, site.line)
        check = state.check
        if check is not None and not call.p2p:
            kind = call.op << 32 | dtype << 48
            check.check(
                seq,
                (kind, numel, writer.step | site.line << 32, site.file_key),
                site,
                _ident() == STATE.main_ident,
            )
        return token

    def remember(self, result: Any, token: int) -> None:
        """Keep which record an asynchronous call belongs to, until it is waited for."""
        if isinstance(result, _Work):
            if len(self._pending) >= _MAX_PENDING:
                self._pending.clear()  # a script that never waits
            self._pending[id(result)] = weakref.ref(result), token
        elif type(result) is list:
            for work in result[:64]:
                if isinstance(work, _Work):
                    self.remember(work, token)

    def recall(self, work: Any) -> int | None:
        """The record of a call that is waited for now; None if it came from elsewhere."""
        pending = self._pending.pop(id(work), None)
        return pending[1] if pending is not None and pending[0]() is work else None


_recorder: Recorder


def set_recorder() -> Recorder:
    """Make the recorder of this process; after ``STATE.writer`` is set, before ``STATE.active`` is."""
    global _recorder
    _recorder = Recorder()
    return _recorder


def recorder() -> Recorder:
    """The recorder of this process; only while ``STATE.active``."""
    return _recorder


# What the hook's own part may run into: a page that was unmapped or numbers it can't hold, a backend without
# sequence numbers, another torch than we know, arguments that torch itself will refuse.
_HOOK_ERRORS = (ValueError, struct.error, RuntimeError, AttributeError, TypeError, IndexError, KeyError)


def _wrap(original: Callable[..., Any], call: Call) -> Callable[..., Any]:
    countable = not call.p2p and call.consumes is None

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _compiling() or not STATE.active:
            return original(*args, **kwargs)
        ident = _ident()
        inside = STATE.open_threads
        if ident in inside:
            return original(*args, **kwargs)
        taking = _recorder
        try:
            found = taking.group_of(call, args, kwargs)
        except _HOOK_ERRORS:
            found = None
        if found is None:
            return original(*args, **kwargs)
        state, group = found
        injector = STATE.injector
        if injector is not None and countable and state.is_world:
            injector.poll()
            if injector.tampers:
                return injector.tamper(call.name, wrapper, args, kwargs)
        inside.add(ident)
        token = -1
        done = False
        try:
            try:
                token = taking.enter(call, state, group, args, kwargs)
            except _HOOK_ERRORS as error:
                _give_up(error)
            result = original(*args, **kwargs)
            done = True
        finally:
            inside.discard(ident)
            if token >= 0:
                _finish(token, done)
        if result is not None and token >= 0:
            taking.remember(result, token)
        if injector is not None and countable and state.is_world:
            injector.collective_done(call.name)
        return result

    return wrapper


def _finish(token: int, done: bool) -> None:
    try:
        if done:
            STATE.writer.collective_exit(token)
        else:
            STATE.writer.collective_failed(token)
    except ValueError as error:
        _give_up(error)


def _give_up(error: Exception) -> None:
    STATE.disable(f"a collective could not be recorded: {type(error).__name__}: {error}")


def _wrap_shifting(original: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """For calls that move the backend's sequence number by an amount of their own: take that out again."""
    recorded = _wrap(original, call)
    assert call.consumes is not None
    consumes = call.consumes

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _compiling() or not STATE.active:
            return original(*args, **kwargs)
        try:
            found = _recorder.group_of(call, args, kwargs)
            before = found[0].raw(found[1]) - found[0].offset if found is not None else 0
        except _HOOK_ERRORS:
            found = None
        result = recorded(*args, **kwargs)
        if found is not None:
            state, group = found
            with contextlib.suppress(RuntimeError):
                state.offset += state.raw(group) - state.offset - before - consumes
        return result

    return wrapper


def wrap_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    """Work.wait: a rank that blocks in it is in a collective, too."""

    # pybind11 recognises a call from an override of ``wait`` by this very name and first parameter; without
    # it a Python subclass of Work that inherits ``wait`` would recurse for ever.
    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _compiling() or not STATE.active:
            return original(self, *args, **kwargs)
        ident = _ident()
        inside = STATE.open_threads
        if ident in inside:
            return original(self, *args, **kwargs)
        token = _recorder.recall(self)
        inside.add(ident)
        try:
            STATE.writer.wait_enter(token)
        except ValueError as error:
            _give_up(error)
        try:
            return original(self, *args, **kwargs)
        finally:
            inside.discard(ident)
            try:
                STATE.writer.wait_exit(token)
            except ValueError as error:
                _give_up(error)

    return wait


def collective_wrappers() -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """(name, original, wrapper) of every collective that this torch has."""
    for function, (name, tensor) in _FUNCTIONS.items():
        original = getattr(c10d, function, None)
        if original is None:
            continue
        parameters = list(inspect.signature(original).parameters)
        op = OPS.index(name)
        call = Call(
            name=name,
            op=op,
            p2p=op in P2P_OPS,
            consumes=_CONSUMES.get(name),
            tensor=tensor or "",
            tensor_at=parameters.index(tensor) if tensor in parameters else -1,
            group="group",
            group_at=parameters.index("group") if "group" in parameters else -1,
        )
        wrap = _wrap if call.consumes is None else _wrap_shifting
        yield function, original, wrap(original, call)
