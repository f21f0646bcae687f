"""What one rank was doing, in half a sentence: the words that verdicts and the screen have in common."""

from __future__ import annotations

import re

from closeranks.diagnose.messages import Blame, parse_traceback, read_error
from closeranks.diagnose.stacks import in_collective, user_frame, why_blocked
from closeranks.diagnose.text import clean, place
from closeranks.diagnose.view import View
from closeranks.events import signal_name
from closeranks.evidence import Frame, ProcessFacts, RankEvidence
from closeranks.policy.waits import Wait
from closeranks.progress import Collective

__all__ = [
    "blocked_reason",
    "call_site",
    "collective_text",
    "error_text",
    "frame_text",
    "is_stopped",
    "short_collective",
    "stack_text",
    "status_text",
]

# Where the kernel shows it: the function a thread sleeps in.
_WCHANS = (
    ("nanosleep", "sleeps"),
    ("futex", "waits for a lock"),
    ("do_wait", "waits for a child process"),
    ("pipe_", "waits for a pipe"),
    ("sk_wait", "waits for the network"),
    ("inet_csk", "waits for the network"),
    ("unix_stream", "waits for another process"),
    ("nfs", "waits for NFS"),
    ("rpc_wait", "waits for NFS"),
    ("io_schedule", "waits for a disk"),
    ("folio_wait", "waits for a disk"),
    ("flock", "waits for a file lock"),
)
_WAITS: dict[str, str] = {
    Wait.DISK: "waits for a disk or driver (state D)",
    Wait.TIMED: "sleeps, or waits with a time limit",
    Wait.FOREVER: "waits for ever on something of its own (a lock, a pipe, a child)",
    Wait.EXTERNAL: "waits for something outside",
    Wait.RUNNING: "runs",
    Wait.TRACED: "is held by a debugger",
}


def call_site(record: Collective) -> str:
    """``train.py:57`` of the collective."""
    return place(record.file, record.line)


def collective_text(view: View, record: Collective) -> str:
    """``all_reduce #114 of the default group (1000 x float32, step 57, train.py:57)``."""
    size = f"{record.numel} x {record.dtype}, " if record.dtype != "none" or record.numel else ""
    return (
        f"{record.op} #{record.seq} of {view.group_label(record.group)} "
        f"({size}step {record.step}, {call_site(record)})"
    )


def short_collective(view: View, record: Collective) -> str:
    """``all_reduce #114 of the default group (train.py:57)``."""
    return f"{record.op} #{record.seq} of {view.group_label(record.group)} ({call_site(record)})"


def error_text(entry: RankEvidence, limit: int = 200) -> str:
    """``ValueError: bad batch at train.py:57``."""
    error = entry.error
    if error is None:
        return ""
    message = clean(error.message, limit)
    name = clean(error.type.removeprefix("builtins."), 120) or "an exception"
    file, _, number = error.place.rpartition(":")
    where = place(file, int(number)) if file and number.isdecimal() else clean(error.place, 120)
    return name + (f": {message}" if message else "") + (f" at {where}" if where else "")


# gloo and c10d put the C++ line before the message and advice behind it.
_WRAPPING = re.compile(r"^(?:\s*what\(\):)?\s*(?:\[(?:enforce fail at )?[^\]\s]{0,300}:\d+\])?\s*")


def said(message: str, limit: int = 120) -> str:
    """The heart of a library's error message, in one line."""
    return clean(_WRAPPING.sub("", message[:2000], count=1).partition(". This is typically")[0], limit)


def is_stopped(process: ProcessFacts | None) -> bool:
    """Stopped by a signal; being held by a debugger (``t``) is something else."""
    return process is not None and process.state == "T" and process.tracer_pid == 0


def frame_text(entry: RankEvidence) -> str:
    """The innermost frame of the user's code, ``train.py:61 train_step``, or of anything, or ""."""
    frame = user_frame(entry.stack) or (entry.stack[0] if entry.stack else None)
    if frame is None:
        return ""
    return f"{place(frame.file, frame.line)} {clean(frame.function, 80)}".rstrip()


def stack_text(entry: RankEvidence, depth: int = 4) -> str:
    """``train.py:61 train_step ← train.py:80 main``: the innermost frames of the user's own code, or of
    anything where there are none. Of a rank that is gone, those of the traceback it left."""
    stack = entry.stack
    if not stack and entry.error is not None:
        stack = tuple(Frame(*place, "") for place in reversed(parse_traceback(entry.error.traceback).places))
    frames = [f for f in stack if user_frame((f,)) is not None] or list(stack)
    return " ← ".join(f"{place(f.file, f.line)} {clean(f.function, 60)}".rstrip() for f in frames[:depth])


def blocked_reason(entry: RankEvidence) -> str:
    """Why the main thread stands still ("waits for a lock"), by its stack, else by /proc; "" if unknown."""
    reason = why_blocked(entry.stack)
    if reason or entry.process is None:
        return reason
    process = entry.process
    if not process.threads:
        return _WAITS[Wait.DISK] if process.state == "D" else ""
    main = process.threads[0]
    for name, words in _WCHANS:
        if name in main.wchan:
            return words
    return _WAITS.get(main.wait, "")


def status_text(view: View, rank: int) -> str:
    """What the rank did when evidence was taken, the most telling fact first."""
    entry = view.ranks[rank]
    if entry.error is not None:
        error = entry.error
        reading = read_error(error.type, error.message, error.traceback)
        if reading.blame is Blame.PEER:
            return f"{'gave up waiting' if reading.timeout else 'lost a peer'}: {said(error.message)}"
        return f"raised {error_text(entry, 100)}"
    if entry.exit is not None:
        if entry.exit.signal is not None:
            words = f": {said(entry.aborted_by)}" if entry.aborted_by else ""
            return f"was killed by {signal_name(entry.exit.signal)}{words}"
        return "finished with exit code 0" if entry.exit.ok else f"exited with code {entry.exit.code}"
    process, page = entry.process, view.pages.get(rank)
    if is_stopped(process):
        return "is stopped (state T)" + (
            f" in step {page.step} ({clean(page.phase_name, 40)})" if page else ""
        )
    record = view.open_record(rank)
    if record is not None:
        return f"waits in {record.op} #{record.seq} of {view.group_label(record.group)}, {call_site(record)}"
    for group, (enqueued, completed, op) in sorted(view.enqueued.get(rank, {}).items()):
        if enqueued > completed:
            return f"waits in {clean(op, 40) or 'a collective'} #{enqueued} of {view.group_label(group)}"
    if in_collective(entry.stack):
        return f"waits in a collective, {frame_text(entry)}".rstrip(", ")
    what = blocked_reason(entry) or ("is in " + clean(page.phase_name, 40) if page else "is running")
    where = frame_text(entry)
    return what + (f", {where}" if where else "") + (f", step {page.step}" if page else "")
