"""Foreign text on a terminal: nothing in it may act."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.diagnose.text import (
    base_name,
    clean,
    fold_ranks,
    join_ranks,
    place,
    shorten,
    to_ascii,
    width_of,
)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain", "plain"),
        ("a\n\tb\r\nc", "a b c"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;owned\x07title", "title"),
        ("\x1b]0;never ends", ""),
        ("\x1bP1$r\x1b\\x", "x"),
        ("\x9b2J\x1b[2Jcleared", "cleared"),
        ("a\x00\x08\x7fb", "a b"),
        ("evil\u202etxt.exe", "evil txt.exe"),
        ("zero\u200bwidth", "zero width"),
        ("\ud800half", "half"),
        ("caf\u00e9 猫", "caf\u00e9 猫"),
    ],
)
def test_clean(raw: str, shown: str) -> None:
    assert clean(raw) == shown


@given(st.text(), st.integers(1, 50))
def test_clean_is_printable_and_bounded(text: str, limit: int) -> None:
    cleaned = clean(text, limit)
    assert cleaned.isprintable()
    assert len(cleaned) <= limit
    assert clean(cleaned, limit) == cleaned


def test_clean_looks_at_no_more_than_it_shows() -> None:
    assert len(clean("x" * 50_000_000, 100)) == 100
    assert clean("\x1b]" + "x" * 10_000_000, 100).isprintable()


@given(st.sets(st.integers(0, 40)))
def test_ranges_hold_the_same_ranks(ranks: set[int]) -> None:
    text = join_ranks(ranks)
    read: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        read |= set(range(int(first), int(last or first) + 1))
    assert read == ranks


def test_words() -> None:
    assert fold_ranks([1]) == "rank 1"
    assert fold_ranks([4, 0, 2, 3]) == "ranks 0,2-4"
    assert fold_ranks([0, 1]) == "ranks 0,1"
    assert place("/a/b/train.py", 7) == "train.py:7"
    assert place("", 7) == "an unknown line"
    assert base_name("/a/b/") == "b"
    assert base_name("<string>") == "<string>"
    assert shorten("abcdef", 4) == "abc…"
    assert shorten("abcd", 4) == "abcd"
    assert width_of("猫a") == 3
    assert width_of("e\u0301") == 1
    assert to_ascii("── rank 1 · 3 → 4 … 猫") == "-- rank 1 - 3 -> 4 ... ?"
    assert to_ascii("plain") == "plain"
