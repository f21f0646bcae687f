"""The last lines of a log file, made safe: what a script prints must not drive the user's terminal."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

__all__ = ["printable", "tail"]

MAX_LINE_CHARS = 2000
# Colours, cursor movement, window titles: well-formed sequences vanish, stray control characters show up.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)|\x1b[ -/]*[0-OQ-WYZ\\`-~]"
)
# C0, DEL, C1, line separators, and the marks that reorder text to the right-to-left.
_CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """One line without escape sequences; other controls except tab become ``\\x07`` or ``\\u202e``."""
    text = _CONTROLS.sub(_visible, _ESCAPES.sub("", text))
    return text if len(text) <= MAX_LINE_CHARS else text[: MAX_LINE_CHARS - 1] + "…"


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def tail(path: Path | str, max_lines: int = 50, max_bytes: int = 65536) -> tuple[str, ...]:
    """The newest lines of the log ``path``, oldest of them first; () when there is none or it can't be read.

    Reads at most ``max_bytes``, also from ``<path>.tail`` and ``<path>.tail.1`` where a flood has gone on.
    A line that a progress bar redrew with carriage returns is shown as it looked last. Never raises OSError.
    """
    if max_lines <= 0 or max_bytes <= 0:
        return ()
    data, whole = b"", True
    for name in (f"{path}.tail", f"{path}.tail.1", f"{path}"):
        if len(data) < max_bytes:
            part, whole = _last_bytes(name, max_bytes - len(data))
            data = part + data
    if not whole and b"\n" in data[:-1]:
        data = data.partition(b"\n")[2]  # it starts in the middle of a line
    lines = data.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return tuple(printable(_last_drawn(line)) for line in lines[-max_lines:])


def _last_drawn(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def _last_bytes(name: str, limit: int) -> tuple[bytes, bool]:
    """Up to ``limit`` bytes from the end, and whether that is the whole file."""
    try:
        # O_NONBLOCK: a script may have put a FIFO there, and opening it must not wait for a writer.
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return b"", True
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return b"", True
        start = max(0, info.st_size - limit)
        return os.pread(fd, limit, start), start == 0
    except OSError:
        return b"", True
    finally:
        os.close(fd)
