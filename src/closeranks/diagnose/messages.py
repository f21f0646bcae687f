"""What an error message says about its own rank: that it broke, or that somebody else did.

Two tables of patterns. Whoever lost a peer, or timed out on one, is a victim and must not be taken for the
cause; everything else names a leaf of the taxonomy. Order matters: the first pattern that matches wins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

__all__ = [
    "Blame",
    "ParsedTraceback",
    "Reading",
    "named_absentees",
    "parse_traceback",
    "read_error",
    "read_text",
]

_MAX_MESSAGE_CHARS = 8192
_MAX_TRACEBACK_CHARS = 65536


class Blame(Enum):
    """Whose fault an error is, as far as its own text tells."""

    OWN = "own"  # this rank broke
    PEER = "peer"  # another rank went away or did not come: this one is a victim
    MISMATCH = "mismatch"  # ranks are in different collectives: either side may be the one in error


@dataclass(frozen=True, slots=True)
class Reading:
    """``leaf`` of the taxonomy and whose fault it is; ``timeout``: a victim that waited in vain."""

    leaf: str
    blame: Blame
    timeout: bool = False


def _any(*patterns: str, flags: int = 0) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE | flags)


_MISMATCH = _any(
    r"op\.preamble\.length <= op\.nbytes",
    r"distributed collective mismatch",
    r"detected mismatch between collectives",
)
_TIMEOUT = _any(
    r"timed out waiting",
    r"timed out after \d+ ?(?:ms|milliseconds|seconds)",
    r"socket timeout",
    r"watchdog caught collective",
    r"wait timeout after",
    r"failed to pass monitoredBarrier",
    r"client socket has timed out",
    r"timeout caused pair closure",
    r"timed out in \w*barrier",
)
_PEER_LOST = _any(
    r"connection closed by (?:remote )?peer",
    r"connection reset by (?:remote )?peer",
    r"connection refused",
    r"connection was likely closed",
    r"broken pipe",
    r"\b(?:read|write) error\b",
    r"socket recv failed",
    r"failed to recv, got 0 bytes",
    r"recvValue failed|sendBytes failed|recvBytes",
    r"peer .{0,40}(?:disconnected|went away|closed)",
    r"remote process (?:exited|has terminated)",
    r"DistStoreError|DistNetworkError|store->get|should dump. flag",
    r"ncclRemoteError|ncclSystemError|ncclInternalError|unhandled system error",
    r"NCCL communicator was aborted",
    r"got completion with error|NET/OFI Request completed",
)
# A client of something that isn't a rank: a lost connection there is this rank's own trouble.
_NOT_A_RANK = re.compile(
    r"/(?:urllib3?|requests|httpx?|httpcore|aiohttp|botocore|boto3|s3fs|gcsfs|fsspec|huggingface_hub|paramiko"
    r"|redis|psycopg2?|pymongo|grpc|wandb|mlflow)/|http/client\.py"
)

# Searched in "Type: message". Hardware and driver first: what they say is true whatever wraps it.
_LEAVES: tuple[tuple[re.Pattern[str], str], ...] = (
    (_any(r"uncorrectable ECC"), "gpu.hbm"),
    (
        _any(
            r"GPU is lost",
            r"no CUDA-capable device",
            r"unable to determine the device handle",
            r"fallen off the bus",
        ),
        "gpu.off_bus",
    ),
    (_any(r"system not yet initialized", r"system has unsupported display driver"), "sys.fabricmanager"),
    (_any(r"driver/library version mismatch", r"CUDA driver version is insufficient"), "sys.driver"),
    (_any(r"device-side assert"), "app.device_assert"),
    (
        _any(r"illegal memory access", r"misaligned address", r"unspecified launch failure"),
        "app.cuda_memfault",
    ),
    (
        _any(r"(?:CUDA|HIP) out of memory", r"^(?:\w+\.)*OutOfMemoryError", r"CUBLAS_STATUS_ALLOC_FAILED"),
        "app.cuda_oom",
    ),
    (
        _any(
            r"insufficient shared memory",
            r"unable to (?:open|allocate|write) (?:to )?shared memory",
            r"failed to extend /dev/shm",
            r"/dev/shm\b.{0,200}no space left",
            r"no space left.{0,200}/dev/shm\b",
            r"killed by signal: bus error",
        ),
        "app.shm",
    ),
    (_any(r"DataLoader timed out"), "data.stall"),
    (_any(r"killed by signal: segmentation fault"), "app.crash_segv"),
    (
        _any(
            r"^MemoryError", r"std::bad_alloc", r"can(?:'t|not) allocate memory", r"killed by signal: killed"
        ),
        "app.host_oom",
    ),
    (_any(r"no space left on device", r"disk quota exceeded", r"\bENOSPC\b", r"\bEDQUOT\b"), "storage.full"),
    (
        _any(r"stale (?:nfs )?file handle", r"transport endpoint is not connected", r"\bESTALE\b"),
        "storage.stale_handle",
    ),
    (_any(r"address already in use", r"EADDRINUSE"), "comm.port_in_use"),
    (
        _any(r"^(?:ModuleNotFound|Import)Error", r"undefined symbol", r"cannot open shared object file"),
        "app.env_import",
    ),
    (
        _any(
            r"PytorchStreamReader failed",
            r"central directory",
            r"^(?:\w+\.)*UnpicklingError",
            r"invalid load key",
            r"error while deserializing header",
        ),
        "storage.ckpt_corrupt",
    ),
    (_any(r"input/output error", r"\bEIO\b", r"PytorchStreamWriter failed"), "storage.io_error"),
    (
        _any(
            r"^(?:FileNotFound|Permission|NotADirectory|IsADirectory)Error",
            r"^(?:argparse\.)?Argument(?:Type)?Error",
            r"^SystemExit: 2$",
            r"^(?:\w+\.)*(?:Usage|Config)Error",
        ),
        "app.config",
    ),
    (
        _any(
            r"^FloatingPointError",
            r"\bnans?\b",
            r"\bnon-?finite\b",
            r"\bnot finite\b",
            r"\binf(?:inite)? (?:loss|grad)",
            r"\b(?:loss|grad\w*|norm) (?:is|=|became) ?inf",
        ),
        "app.numerics_nan",
    ),
)
# "nan" in a KeyError is a column of a table.
_NUMERIC_TYPES = re.compile(
    r"^(?:\w+\.)*(?:FloatingPointError|AssertionError|ValueError|RuntimeError|ArithmeticError|NaN\w*|Abort\w*)"
)


@dataclass(frozen=True, slots=True)
class ParsedTraceback:
    """A chain of exceptions, oldest first, as "Type: message"; ``places`` are (file, line) of the last one's
    frames, outermost first."""

    exceptions: tuple[str, ...]
    places: tuple[tuple[str, int], ...]


_TB_FRAME = re.compile(r'\s{2,4}File "([^"\n]{1,500})", line (\d{1,9})')
_TB_HEAD = "Traceback (most recent call last):"
_TB_EXCEPTION = re.compile(r"[A-Za-z_][\w.]{0,200}(?::|$)")


def parse_traceback(text: str) -> ParsedTraceback:
    """Take a printed traceback apart, chained ones too. Garbage yields empty parts."""
    exceptions: list[str] = []
    places: list[tuple[str, int]] = []
    inside = False
    for line in text[-_MAX_TRACEBACK_CHARS:].splitlines():
        if line.lstrip(" |+").startswith(_TB_HEAD):
            inside, places = True, []
        elif not inside:
            continue
        elif frame := _TB_FRAME.match(line):
            places.append((frame[1], int(frame[2])))
        elif line and not line[0].isspace() and _TB_EXCEPTION.match(line):
            exceptions.append(line[:_MAX_MESSAGE_CHARS])
            inside = False
    return ParsedTraceback(tuple(exceptions[-32:]), tuple(places[-128:]))


def read_text(text: str) -> Reading | None:
    """What one "Type: message", or the last words of a native abort, say; None if no pattern matches."""
    text = text[:_MAX_MESSAGE_CHARS]
    if _MISMATCH.search(text):
        return Reading("comm.desync", Blame.MISMATCH)
    for pattern, leaf in _LEAVES:
        if pattern.search(text):
            if leaf == "app.numerics_nan" and not _NUMERIC_TYPES.match(text):
                continue
            # "Connection reset by peer" wrapped in an I/O error is still a lost peer.
            if leaf == "storage.io_error" and _PEER_LOST.search(text):
                break
            return Reading(leaf, Blame.OWN)
    if _TIMEOUT.search(text):
        return Reading("comm.timeout", Blame.PEER, timeout=True)
    if _PEER_LOST.search(text):
        return Reading("comm.peer_lost", Blame.PEER)
    return None


def read_error(kind: str, message: str, traceback: str = "") -> Reading:
    """Judge an exception by its own text and by what it was raised from.

    An error raised while handling a lost peer is a victim's, whatever it calls itself; a specific cause
    further up the chain (a full disk inside "RuntimeError: save failed") gives its leaf to a general one.
    """
    kind = kind.removeprefix("builtins.")
    own = read_text(f"{kind}: {message}")
    chain = [r for r in map(read_text, parse_traceback(traceback).exceptions[:-1]) if r is not None]
    reading = own
    if own is None or own.blame is Blame.PEER:
        reading = chain[0] if chain else own
    if reading is None:
        return Reading("app.exception", Blame.OWN)
    if reading.blame is Blame.PEER and _NOT_A_RANK.search(traceback[-_MAX_TRACEBACK_CHARS:]):
        return Reading("app.exception", Blame.OWN)
    return reading


_ABSENT = re.compile(r"ranks? ((?:\d{1,6}(?:, ?)?){1,64}) failed to pass monitoredBarrier", re.IGNORECASE)


def named_absentees(message: str) -> tuple[int, ...]:
    """The ranks that a monitored barrier says did not come."""
    found = _ABSENT.search(message[:_MAX_MESSAGE_CHARS])
    return tuple(int(n) for n in re.findall(r"\d{1,6}", found[1])) if found else ()
