"""Words for people out of untrusted strings: cleaned, shortened, ranks folded into ranges."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

__all__ = ["base_name", "clean", "fold_ranks", "join_ranks", "place", "shorten", "to_ascii", "width_of"]

# CSI, OSC/DCS/APC/PM strings with their terminator, and the two-byte escapes: all that moves a cursor or
# sets a title. The lengths are bounded so that an unterminated string swallows no more than itself.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]{0,32}[ -/]{0,8}[@-~]?"
    r"|\x1b[\]PX^_][^\x07\x1b\x9c]{0,4096}(?:\x07|\x1b\\|\x9c)?|\x1b.?",
    re.DOTALL,
)
_SPACES = re.compile(r"\s+")
_ASCII = {
    "─": "-", "·": "-", "→": "->", "←": "<-", "…": "...", "≥": ">=", "≤": "<=", "“": '"', "”": '"',
    "\N{EN DASH}": "-", "\N{EM DASH}": "-", "\N{MULTIPLICATION SIGN}": "x",
    "\N{LEFT SINGLE QUOTATION MARK}": "'", "\N{RIGHT SINGLE QUOTATION MARK}": "'",
}  # fmt: skip


def clean(text: str, limit: int = 300) -> str:
    """One line without escape sequences, control or invisible characters, at most ``limit`` characters."""
    text = text[: limit * 8 + 4096]
    if not text.isprintable():  # controls, bidi overrides, zero widths, surrogates, line separators
        text = _ESCAPES.sub("", text)
        text = "".join(c if c.isprintable() else " " for c in text)
    return shorten(_SPACES.sub(" ", text).strip(), limit)


def shorten(text: str, limit: int) -> str:
    """Cut to ``limit`` characters, the last one an ellipsis if anything was cut."""
    return text if len(text) <= limit else text[: max(0, limit - 1)].rstrip() + "…"


def width_of(text: str) -> int:
    """Columns that ``text`` takes on a terminal: wide characters two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def to_ascii(text: str) -> str:
    """The same text for a terminal or file that can't show Unicode; what has no stand-in becomes ``?``."""
    if text.isascii():
        return text
    return "".join(_ASCII.get(c, c) for c in text).encode("ascii", "replace").decode("ascii")


def join_ranks(ranks: Iterable[int]) -> str:
    """``(0, 2, 3, 4)`` -> ``"0,2-4"``."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(
        str(first) if first == last else f"{first},{last}" if last == first + 1 else f"{first}-{last}"
        for first, last in parts
    )


def fold_ranks(ranks: Iterable[int]) -> str:
    """``(1,)`` -> ``"rank 1"``, ``(0, 2, 3, 4)`` -> ``"ranks 0,2-4"``."""
    ranks = set(ranks)
    return f"rank{'s' if len(ranks) != 1 else ''} {join_ranks(ranks)}"


def base_name(path: str) -> str:
    """The last component of a path, cleaned; the whole of it where there is none."""
    return clean(path.rstrip("/").rsplit("/", 1)[-1] or path, 80)


def place(file: str, line: int) -> str:
    """``("/home/u/train.py", 57)`` -> ``"train.py:57"``; a line that nobody knows is said to be unknown."""
    return f"{base_name(file)}:{line}" if file else "an unknown line"
