"""Makes torch in this process report progress, before an unmodified script runs in it.

``prepare()`` replaces functions of torch by wrappers that do nothing yet; it may run in a process that is
forked later. ``install()`` makes them live. However a script gets hold of a function, it gets the wrapper, as
that is put into every module that holds the original under its own name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch.distributed import distributed_c10d as c10d

from closeranks.errors import UsageError
from closeranks.faults import parse_spec
from closeranks.worker import hooks_collectives, hooks_training
from closeranks.worker.faults import FaultInjector
from closeranks.worker.hooks_evidence import start_evidence_thread
from closeranks.worker.hooks_state import STATE, ControlLine
from closeranks.worker.page import PageWriter
from closeranks.worker.teardown import wrap_destroy

__all__ = ["install", "prepare", "start_evidence_thread"]

_prepared = False


def prepare() -> None:
    """Put the wrappers in place, once. They pass straight through until ``install``."""
    global _prepared
    if _prepared:
        return
    _prepared = True
    patches = [
        *hooks_collectives.collective_wrappers(),
        *hooks_training.function_patches(),
        ("destroy_process_group", c10d.destroy_process_group, wrap_destroy(c10d.destroy_process_group)),
    ]
    _replace(patches)
    for owner, name, wrapper in hooks_training.class_patches():
        setattr(owner, name, wrapper)
    c10d.Work.wait = hooks_collectives.wrap_wait(c10d.Work.wait)
    hooks_training.register_optimizer_hooks()
    sys.meta_path.insert(0, hooks_training.PatchOnImport())
    os.register_at_fork(after_in_child=STATE.in_child)


def _replace(patches: Sequence[tuple[str, Callable[..., Any], Callable[..., Any]]]) -> None:
    by_name: dict[str, list[tuple[Callable[..., Any], Callable[..., Any]]]] = {}
    for name, original, wrapper in patches:
        by_name.setdefault(name, []).append((original, wrapper))
    names = by_name.keys()
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        namespace = module.__dict__
        for name in names & namespace.keys():
            for original, wrapper in by_name[name]:
                if namespace[name] is original:
                    setattr(module, name, wrapper)
    # Loaded before us, dynamo knows the originals as what it turns into functional collectives.
    functional = sys.modules.get("torch.distributed._functional_collectives")
    remaps = getattr(functional, "traceable_collective_remaps", None)
    if isinstance(remaps, dict):
        remaps.update({wrapper: remaps[original] for _, original, wrapper in patches if original in remaps})


def install(writer: PageWriter, control: ControlLine, faults: Sequence[Mapping[str, Any]] = ()) -> None:
    """Report this process's progress to ``writer``, and what can't wait to ``control``.

    ``faults``: ``{"id": 0..63, "spec": text}`` each, what this rank shall do to itself in this generation.
    Raises UsageError for one that can't be read.
    """
    specs = []
    for fault in faults:
        number, text = fault.get("id"), fault.get("spec")
        if not isinstance(number, int) or not isinstance(text, str):
            raise UsageError(f"not a fault: {dict(fault)!r}")
        specs.append((number, parse_spec(text)))
    prepare()
    STATE.activate(
        writer,
        control,
        FaultInjector(specs, writer, control),
        lambda: hooks_collectives.Recorder(writer),
        lambda: start_evidence_thread(control),
    )
