"""Python stacks as faulthandler prints them: which thread is the main one, and what it waits for.

The text comes from a process that may have been corrupt when it wrote it: nothing in it is trusted, all of
it is bounded, and garbage yields fewer frames, never an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from closeranks.evidence import Frame

__all__ = [
    "MAX_FRAMES",
    "MAX_TEXT_CHARS",
    "MAX_THREADS",
    "ThreadStack",
    "in_backward",
    "in_collective",
    "is_raising",
    "parse_faulthandler",
    "parse_stacks",
    "user_frame",
    "why_blocked",
]

MAX_TEXT_CHARS = 1 << 20
MAX_THREADS = 256
MAX_FRAMES = 128
_MAX_NAME_CHARS = 500  # faulthandler's own limit for file and function names

# Python 3.14 puts the thread's name in brackets behind its number.
_THREAD = re.compile(
    r"(Thread|Current thread|Stack)(?: (0x[0-9a-fA-F]{1,16}))?(?: \[[^\n]{0,64}\])?"
    r" \(most recent call first\):"
)
_FRAME = re.compile(r'  File "([^\n]{0,600})", line (\d{1,9}|\?{3}) in ([^\n]{0,600})')


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One thread's block. ``ident`` is ``threading.get_ident()`` there (0: the text doesn't say, as in a dump
    of one thread); ``frames`` are innermost first."""

    ident: int
    current: bool  # "Current thread": the one that ran the signal handler
    frames: tuple[Frame, ...]
    collecting: bool = False  # it was inside the garbage collector

    @property
    def is_started_thread(self) -> bool:
        """True if its outermost frame is that of threading.Thread: certainly not the main thread."""
        return bool(self.frames) and self.frames[-1].function == "_bootstrap"


def parse_stacks(text: str) -> tuple[ThreadStack, ...]:
    """The last ``MAX_THREADS`` thread blocks, in the order printed (faulthandler: newest thread first)."""
    threads: list[ThreadStack] = []
    ident: int | None = None
    current = collecting = False
    frames: list[Frame] = []
    for line in text[-MAX_TEXT_CHARS:].splitlines():  # the tail: the newest dump is the last
        head = _THREAD.match(line)
        if head:
            if ident is not None:
                threads.append(ThreadStack(ident, current, tuple(frames), collecting))
            ident, current, collecting, frames = int(head[2] or "0", 16), head[1] != "Thread", False, []
            continue
        if ident is None:
            continue
        frame = _FRAME.fullmatch(line)
        if frame and len(frames) < MAX_FRAMES:
            number = int(frame[2]) if frame[2] != "???" else 0
            frames.append(Frame(frame[1][:_MAX_NAME_CHARS], number, frame[3][:_MAX_NAME_CHARS]))
        elif line.strip() == "Garbage-collecting":
            collecting = True
    if ident is not None:
        threads.append(ThreadStack(ident, current, tuple(frames), collecting))
    return tuple(threads[-MAX_THREADS:])


def parse_faulthandler(text: str, main_ident: int | None = None) -> tuple[Frame, ...]:
    """The main thread's frames, innermost first; empty where the text doesn't hold them.

    ``main_ident`` (``threading.main_thread().ident``) decides where given. Without it: faulthandler walks
    the interpreter's thread list, newest first, so the main thread is the last block of a dump, unless
    the dump was cut off; no thread that ``threading`` started is ever taken for it. "Current thread" says
    nothing: the kernel hands a signal to any thread. Of several dumps in one text the newest counts.
    """
    threads = parse_stacks(text)
    if main_ident is not None:
        for thread in reversed(threads):
            if thread.ident in (main_ident, 0):  # one that wasn't asked for others answers for itself
                return thread.frames
        return ()
    for thread in reversed(threads):
        if thread.frames and not thread.is_started_thread:
            return thread.frames
    return ()


# --- whose code, and why it stands still ------------------------------------------------------------

_OWN_PACKAGE = __file__.rpartition("/diagnose/")[0] + "/"
_FOREIGN = re.compile(
    r"/site-packages/|/dist-packages/|/lib/python\d[\d.]*/|^<frozen |/closeranks/(?:worker|agent|cli)/"
    r"|/torch/(?:distributed|nn|optim|utils|autograd|cuda|multiprocessing|_\w+)/"
)


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's own code: not torch, an installed package, the standard library
    or closeranks. None where there is none."""
    for frame in frames:
        if not frame.file.startswith(_OWN_PACKAGE) and not _FOREIGN.search(frame.file):
            return frame
    return None


# (file, function, reason): the first rule that one of the innermost frames meets. Libraries before the
# primitives they block in: a DataLoader waits in queue.get, too.
_RULES: tuple[tuple[str, str, str], ...] = (
    (r"", r"^(_distributed_excepthook|print_exception|excepthook)$", "reports an exception"),
    (r"torch/utils/data/|/dataloader\.py$", r"", "waits for the data loader"),
    (r"torch/distributed/(checkpoint|_shard/checkpoint)/", r"", "saves or loads a checkpoint"),
    (r"torch/serialization\.py$", r"", "saves or loads a checkpoint"),
    (r"torch/distributed/rendezvous\.py$", r"", "waits for the other ranks to start"),
    (
        r"torch/distributed/distributed_c10d\.py$",
        r"^_?(init_process_|new_(process_)?)group",
        "sets up a process group",
    ),
    (r"torch/distributed/(distributed_c10d|_functional_collectives)\.py$", r"", "waits in a collective"),
    (r"torch/autograd/", r"_engine_run_backward|^backward$", "runs backward"),
    (r"torch/cuda/", r"synchronize", "waits for the GPU"),
    (r"^<frozen importlib", r"^_find_and_load|^exec_module$|^_call_with_frames_removed$", "imports a module"),
    (r"subprocess\.py$", r"^_?(wait|try_wait|communicate|run|call)$", "waits for a child process"),
    (r"multiprocessing/(popen_|process)", r"^(wait|poll|join)$", "waits for a child process"),
    (r"/threading\.py$", r"^(join|_wait_for_tstate_lock)$", "waits for a thread"),
    (r"concurrent/futures/", r"^(result|wait|shutdown)$", "waits for a thread"),
    (r"multiprocessing/(synchronize|queues|connection)\.py$", r"", "waits for another process"),
    (
        r"/(threading|queue|asyncio/locks)\.py$",
        r"^(wait|wait_for|acquire|__enter__|get|put)$",
        "waits for a lock",
    ),
    (r"/(socket|ssl|selectors|http/client)\.py$", r"", "waits for the network"),
    (r"/(urllib3|requests|httpx|aiohttp)/", r"", "waits for the network"),
    (r"", r"^_?(save|load)_?(state_dict|check_?point|ckpt)\w*$", "saves or loads a checkpoint"),
    (r"", r"^\w*(checkpoint|ckpt)\w*$", "saves or loads a checkpoint"),
    (r"", r"^_?sleep(_for(ever)?)?$", "sleeps"),
    (r"", r"^_?(acquire|lock|acquire_lock)$", "waits for a lock"),
    (r"/gc\.py$", r"", "collects garbage"),
)
_REASONS = tuple((re.compile(file), re.compile(function), reason) for file, function, reason in _RULES)
_INNERMOST = 12


def why_blocked(frames: Sequence[Frame], *, collecting: bool = False) -> str:
    """A likely reason in a few words ("waits for a lock"), from file and function names; "" if none fits.

    C functions leave no Python frame: ``time.sleep`` or ``lock.acquire`` called by the script itself shows
    as a line of the script; /proc tells more there.
    """
    if collecting:
        return "collects garbage"
    near = frames[:_INNERMOST]
    for file, function, reason in _REASONS:
        if any(file.search(f.file) and function.search(f.function) for f in near):
            return reason
    return ""


_COLLECTIVE_FILES = re.compile(
    r"torch/distributed/(distributed_c10d|_functional_collectives|c10d_logger)\.py$"
)
_EXCEPT_HOOKS = frozenset({"_distributed_excepthook", "print_exception", "excepthook"})
_OUR_REPORT = ("worker/bootstrap.py", frozenset({"_report", "_show"}))  # what a script's exception ends in
_OUR_REPORT = ("worker/bootstrap.py", frozenset({"_report", "_show"}))  # what a script's exception ends in
_SETUP = re.compile(r"^_?(init_process_group|new_(process_)?group|destroy_process_group)")


def in_backward(frames: Sequence[Frame]) -> bool:
    """True if the innermost frame is the autograd engine's, where DDP's reducer waits as well."""
    return bool(frames) and frames[0].function == "_engine_run_backward"


def is_raising(frames: Sequence[Frame]) -> bool:
    """True if the script is over with an exception that is just being reported."""
    file, functions = _OUR_REPORT
    return any(
        f.function in _EXCEPT_HOOKS or (f.function in functions and f.file.endswith(file))
        for f in frames[:_INNERMOST]
    )


def in_collective(frames: Sequence[Frame]) -> bool:
    """True if the innermost frames are those of a torch.distributed call that waits for other ranks."""
    near = frames[:_INNERMOST]
    if is_raising(near):
        return False
    return any(_COLLECTIVE_FILES.search(f.file) for f in near[:4]) and not any(
        _SETUP.search(f.function) for f in near
    )
