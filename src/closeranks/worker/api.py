"""The optional public API: what a script may say about itself. Without an agent, every call does nothing.

``closeranks.step`` and ``closeranks.phase`` are these.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from closeranks.worker.hooks_state import STATE

__all__ = ["phase", "step"]


def step(n: int | None = None) -> None:
    """A step is complete. ``n``: its number as the script counts, over restarts (closeranks can't know it).

    Optimizer steps are seen without this. It is for scripts without a torch optimizer, whose steps these
    calls then are, and for reports in the script's own numbers. Raises TypeError if ``n`` is no integer.
    """
    number = None if n is None else int(n.__index__())
    if not STATE.active:
        return
    STATE.script_steps += 1
    if STATE.hold_until_s is not None and not STATE.optimizer_seen:
        STATE.wait_held()
    try:
        if number is not None:
            STATE.writer.absolute_step(number)
        if STATE.optimizer_seen:
            STATE.writer.tick()
        else:
            STATE.writer.step_done(STATE.world_seq())
    except ValueError as error:  # the page was unmapped under us
        STATE.disable(f"the progress page can't be written: {error}")
        return
    if STATE.start_evidence is not None:
        STATE.begin_evidence()
    if STATE.injector is not None:
        STATE.injector.script_step(STATE.script_steps)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """The script does something of its own inside this, such as ``with closeranks.phase("eval"):``.

    Its times are learned by that name (32 bytes of it), so that an evaluation isn't measured as a step.
    """
    if not STATE.active or threading.get_ident() != STATE.main_ident:
        yield
        return
    try:
        previous = STATE.writer.enter_user_phase(str(name))
    except ValueError as error:
        STATE.disable(f"the progress page can't be written: {error}")
        yield
        return
    try:
        yield
    finally:
        if STATE.active:
            try:
                STATE.writer.leave_user_phase(previous)
            except ValueError as error:
                STATE.disable(f"the progress page can't be written: {error}")
