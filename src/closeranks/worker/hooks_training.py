"""Hooks on what else a training does: steps, backward, data, checkpoints, making process groups."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from closeranks.progress import Phase
from closeranks.worker.hooks_state import STATE

__all__ = [
    "PatchOnImport",
    "after_optimizer_step",
    "before_optimizer_step",
    "class_patches",
    "function_patches",
    "register_optimizer_hooks",
    "within",
    "wrap_next",
]

_compiling = torch.compiler.is_dynamo_compiling
_ident = threading.get_ident

Function = Callable[..., Any]


def _off(error: ValueError) -> None:
    STATE.disable(f"the progress page can't be written: {error}")


def _enter(phase: Phase) -> int | None:
    """Enter a phase, if this is the main thread: another one's doings aren't what the rank waits for."""
    if _ident() != STATE.main_ident:
        return None
    try:
        return STATE.writer.enter_phase(phase)
    except ValueError as error:
        _off(error)
        return None


def _leave(previous: int | None) -> None:
    if previous is not None and STATE.active:
        try:
            STATE.writer.leave_phase(previous)
        except ValueError as error:
            _off(error)


def within(phase: Phase, original: Function) -> Function:
    """``original``, in a phase of its own. Passes through under dynamo, which then traces the original."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _compiling() or not STATE.active or _ident() != STATE.main_ident:
            return original(*args, **kwargs)
        writer = STATE.writer
        try:
            previous = writer.enter_phase(phase)
        except ValueError as error:
            _off(error)
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            try:
                writer.leave_phase(previous)
            except ValueError as error:
                _off(error)

    return wrapper


# --- steps ------------------------------------------------------------------------------------------


def before_optimizer_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """The first optimizer that steps is the main one: its steps are the training's."""
    if _compiling() or not STATE.active:
        return
    main = STATE.main_optimizer
    if main is None or main() is None:
        STATE.main_optimizer = weakref.ref(optimizer)
        STATE.optimizer_seen = True
    if STATE.hold_until_s is not None and main is not None and main() is optimizer:
        STATE.wait_held()
    writer = STATE.writer
    # In that phase already: an optimizer that wraps another.
    if writer.phase != Phase.OPTIMIZER and _ident() == STATE.main_ident:
        try:
            STATE.optimizer_phase = id(optimizer), writer.enter_phase(Phase.OPTIMIZER)
        except ValueError as error:
            _off(error)


def after_optimizer_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """One step more, if it was the main optimizer's; and where an injected fault at a step happens."""
    if _compiling() or not STATE.active:
        return
    main = STATE.main_optimizer
    is_main = main is not None and main() is optimizer
    entered = STATE.optimizer_phase
    back = None
    if entered is not None and entered[0] == id(optimizer):
        STATE.optimizer_phase = None
        back = entered[1] if entered[1] > Phase.START else Phase.TRAIN
    writer, recorder = STATE.writer, STATE.recorder
    try:
        if is_main and recorder is not None:
            counted = recorder.groups.world_seq()
            writer.step_done(counted, back)
            check = recorder.groups.world_check
            if check is not None and back is not None:
                check.step_done(writer.step, counted)
        elif back is not None:  # a second optimizer's step is not another step of the training
            writer.leave_phase(back)
    except ValueError as error:
        _off(error)
        return
    if STATE.start_evidence is not None:
        STATE.begin_evidence()
    if is_main and STATE.injector is not None:
        STATE.injector.optimizer_step(writer.step)


def register_optimizer_hooks() -> None:
    """torch's own hooks, called around every optimizer's step."""
    register_optimizer_step_pre_hook(before_optimizer_step)
    register_optimizer_step_post_hook(after_optimizer_step)


# --- data -------------------------------------------------------------------------------------------


def wrap_next(original: Function) -> Function:
    """A data loader's ``__next__``, in the phase of waiting for data."""

    @functools.wraps(original)
    def __next__(self: Any) -> Any:
        if not STATE.active or _ident() != STATE.main_ident:
            return original(self)
        if STATE.injector is not None:
            STATE.injector.poll()
        writer = STATE.writer
        try:
            previous = writer.enter_phase(Phase.DATA)
        except ValueError as error:
            _off(error)
            return original(self)
        try:
            return original(self)
        finally:
            try:
                writer.leave_phase(previous)
            except ValueError as error:
                _off(error)

    return __next__


def class_patches() -> Iterator[tuple[type, str, Function]]:
    """(class, attribute, wrapper): methods, patched on their class."""
    base = dataloader._BaseDataLoaderIter
    yield base, "__next__", wrap_next(base.__next__)
    # With workers, making the iterator starts processes.
    yield dataloader.DataLoader, "__iter__", within(Phase.DATA, dataloader.DataLoader.__iter__)


# --- checkpoints ------------------------------------------------------------------------------------


def _is_part() -> bool:
    """Whether a save that begins now belongs to a larger one, in this thread or one in the background."""
    if _ident() == STATE.main_ident:
        return STATE.writer.phase == Phase.CHECKPOINT
    return STATE.dcp_saves > 0


def _wrap_save(original: Function) -> Function:
    """A save that is complete when it returns, unless it is a part of a larger one."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _compiling() or not STATE.active:
            return original(*args, **kwargs)
        STATE.wait_for_lease()
        part = _is_part()
        previous = _enter(Phase.CHECKPOINT)
        try:
            result = original(*args, **kwargs)
            if not part:
                _saved(STATE.writer.step)
        finally:
            _leave(previous)
        return result

    return wrapper


def _wrap_dcp_save(original: Function) -> Function:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not STATE.active or _is_part():
            return original(*args, **kwargs)
        STATE.wait_for_lease()
        step = STATE.writer.step
        previous = _enter(Phase.CHECKPOINT)
        STATE.dcp_saves += 1
        background = None
        try:
            result = original(*args, **kwargs)
            background = _upload_of(result)
            if background is None:
                _saved(step)
        finally:
            if background is None:
                STATE.dcp_saves -= 1
            _leave(previous)
        if background is not None:
            background.add_done_callback(functools.partial(_uploaded, step))
        return result

    return wrapper


def _upload_of(result: Any) -> Any:
    """What async_save returns to wait for: a future, or an object that holds two; None: it is complete."""
    upload = getattr(result, "upload_completion", result)
    return upload if hasattr(upload, "add_done_callback") else None


def _uploaded(step: int, future: Any) -> None:
    STATE.dcp_saves = max(STATE.dcp_saves - 1, 0)
    if not future.cancelled() and future.exception() is None:
        _saved(step)


def _saved(step: int) -> None:
    if STATE.active:
        try:
            STATE.writer.checkpoint_done(step)
        except ValueError as error:
            _off(error)


_DCP: dict[str, dict[str, Callable[[Function], Function]]] = {
    "torch.distributed.checkpoint.state_dict_saver": {"save": _wrap_dcp_save, "async_save": _wrap_dcp_save},
    "torch.distributed.checkpoint.state_dict_loader": {"load": functools.partial(within, Phase.CHECKPOINT)},
}


class PatchOnImport(importlib.abc.MetaPathFinder):
    """Wraps functions of modules that only some scripts import, when they do: importing them costs 0.1 s.

    Their packages import these functions by name, so they must be wrapped before anybody has seen them.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _DCP:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _patch_after(spec.loader)
                return spec
        return None


def _patch_after(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        for name, wrap in _DCP.get(module.__name__, {}).items():
            original = getattr(module, name, None)
            if original is not None:
                setattr(module, name, wrap(original))

    loader.exec_module = exec_module


# --- process groups ---------------------------------------------------------------------------------


def _wrap_init(original: Function) -> Function:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not STATE.active:
            return original(*args, **kwargs)
        STATE.begin_evidence()  # before: a rank that is stuck in there must be able to answer
        previous = _enter(Phase.INIT)
        try:
            STATE.writer.begin_world()
            STATE.world_begun = True
        except ValueError as error:
            _off(error)
        done = False
        try:
            result = original(*args, **kwargs)
            done = True
        finally:
            if previous is not None and STATE.active:
                try:
                    if done:
                        STATE.writer.init_done()
                    STATE.writer.leave_phase(STATE.onwards(previous))
                except ValueError as error:
                    _off(error)
        if STATE.injector is not None:
            STATE.injector.poll()
        return result

    return wrapper


def _wrap_new_group(original: Function) -> Function:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        group = original(*args, **kwargs)
        recorder = STATE.recorder
        if recorder is not None and isinstance(group, c10d.ProcessGroup):
            try:
                recorder.groups.register(group)
            except ValueError as error:
                _off(error)
        return group

    return wrapper


def function_patches() -> Iterator[tuple[str, Function, Function]]:
    """(name, original, wrapper) of functions, to be replaced in every module that has them by that name."""
    yield "init_process_group", c10d.init_process_group, _wrap_init(c10d.init_process_group)
    for name in ("new_group", "split_group"):
        original = getattr(c10d, name, None)
        if original is not None:
            yield name, original, _wrap_new_group(original)
    yield "backward", torch.autograd.backward, within(Phase.BACKWARD, torch.autograd.backward)
    yield "save", torch.save, _wrap_save(torch.save)
    yield "load", torch.load, within(Phase.CHECKPOINT, torch.load)
    for module_name, wraps in _DCP.items():
        module = sys.modules.get(module_name)
        for name, wrap in wraps.items():
            original = getattr(module, name, None)
            if original is not None:
                yield name, original, wrap(original)
