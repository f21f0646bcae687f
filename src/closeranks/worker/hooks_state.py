"""What the hooks of this process share. Knows nothing of torch, so that the public API can ask it cheaply."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from closeranks.progress import Phase

if TYPE_CHECKING:
    from closeranks.worker.faults import FaultInjector
    from closeranks.worker.hooks_collectives import Recorder
    from closeranks.worker.page import PageWriter

__all__ = ["STATE", "THREAD_NAME", "ControlLine", "HookState", "name_thread"]


# How the agent knows our threads from the script's: at most 15 bytes, as the kernel keeps it.
THREAD_NAME = "closeranks-ev"
_PR_SET_NAME = 15
_HOLD_LOOK_S = 0.05


def name_thread() -> None:
    """Show the calling thread under THREAD_NAME in /proc, too."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, THREAD_NAME.encode(), 0, 0, 0)


class ControlLine(Protocol):
    """The worker's line to its agent. Neither call raises; ``send`` doesn't block for long."""

    def send(self, message: Mapping[str, Any]) -> bool: ...

    def receive(self) -> dict[str, Any] | None: ...


class _Nowhere:
    """The line of a process that has no agent."""

    def send(self, message: Mapping[str, Any]) -> bool:
        return False

    def receive(self) -> dict[str, Any] | None:
        return None


class HookState:
    """One per process. While ``active`` is false every hook passes straight through."""

    __slots__ = (
        "active", "control", "dcp_saves", "faults", "hold_saves", "hold_until_s", "injector", "main_ident",
        "main_optimizer",
        "optimizer_phase", "optimizer_seen", "recorder", "script_steps", "start_evidence", "why_off",
        "world_begun", "world_seq", "writer",
    )  # fmt: skip

    writer: PageWriter
    main_optimizer: weakref.ref[Any] | None
    optimizer_phase: tuple[int, int] | None

    def __init__(self) -> None:
        self.active = False
        self.control: ControlLine = _Nowhere()
        self.recorder: Recorder | None = None  # None: collectives pass straight through
        self.faults: FaultInjector | None = None
        self.injector: FaultInjector | None = None  # ``faults`` while it has anything to do
        self.why_off = "not installed"
        self.world_seq: Callable[[], int] = int
        self.start_evidence: Callable[[], object] | None = None  # None: it has been
        self._reset()

    def _reset(self) -> None:
        self.main_ident = threading.main_thread().ident or 0
        self.main_optimizer = None
        self.optimizer_phase = None
        self.optimizer_seen = False
        self.script_steps = 0  # calls of closeranks.step()
        self.dcp_saves = 0  # torch.distributed.checkpoint saves under way: their inner torch.save don't count
        self.hold_until_s: float | None = None  # a restart is planned: wait for it with the next save done
        self.hold_saves = 0  # saves completed when that was said
        self.world_begun = False  # the page knows of the default group that is being made

    def activate(
        self,
        writer: PageWriter,
        control: ControlLine,
        faults: FaultInjector | None,
        make_recorder: Callable[[], Recorder],
        start_evidence: Callable[[], object],
    ) -> None:
        """From now on the hooks write to ``writer`` and speak to ``control``."""
        self._reset()
        self.writer, self.control, self.faults = writer, control, faults
        self.injector = None if faults is None or faults.idle else faults
        self.start_evidence = start_evidence
        recorder = make_recorder()  # now that there is a line for it to speak to
        self.world_seq = recorder.groups.world_seq
        self.why_off = ""
        self.recorder = recorder
        self.active = True

    def disable(self, why: str) -> None:
        """Stop all hooks of this process: a page that can't be written must not stop the training."""
        if self.active:
            self.active, self.recorder = False, None
            self.why_off = why
            self.control.send({"type": "hooks_off", "why": why[:500]})

    def in_child(self) -> None:
        """After a fork: we aren't the rank, so we neither write its page nor speak for it."""
        was_active, self.active = self.active, False
        self.recorder = None
        self.control, self.injector, self.faults = _Nowhere(), None, None
        if was_active:
            self.why_off = "forked from the rank"
            self.writer.detach()

    def begin_evidence(self) -> None:
        """Start the thread that answers the agent, if it doesn't run yet."""
        start, self.start_evidence = self.start_evidence, None
        if start is not None:
            start()

    def hold(self, hold_s: float) -> None:
        """A restart is planned. Once a checkpoint more has been saved, the next step is not to begin."""
        self.hold_saves = self.writer.saves
        self.hold_until_s = time.monotonic() + hold_s

    def wait_held(self) -> None:
        """At the beginning of a step, where ``hold`` was said: wait to be killed, as what there is is saved.

        At the end of what a checkpoint consists of, such as renaming its file, and not of the save itself.
        """
        until_s = self.hold_until_s
        if until_s is None or self.writer.saves <= self.hold_saves:
            return
        self.writer.set_held(True)
        while time.monotonic() < until_s:
            time.sleep(_HOLD_LOOK_S)
        self.writer.set_held(False)
        self.hold_until_s = None

    def wait_for_lease(self) -> None:
        """Before anything lasting is written: a rank that was frozen, with its host, say, may wake up when
        others have gone on without it. It must not write over what they saved, and is about to be killed.
        """
        while self.active and self.writer.lease_is_over():
            time.sleep(_HOLD_LOOK_S)

    @staticmethod
    def onwards(previous: int) -> int:
        """The phase to go back to, after what only a training does: it isn't starting any more."""
        return Phase.TRAIN if previous <= Phase.START else previous


STATE = HookState()
