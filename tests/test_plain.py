"""Dataclasses to plain data and back: equal, tolerant of other versions, and deaf to what makes no sense."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks import plain
from closeranks.events import ExitStatus
from closeranks.plain import PlainError, from_plain, to_plain


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(Enum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True)
class Left:
    a: int


@dataclass(frozen=True)
class Right:
    b: str


@dataclass(frozen=True)
class Thing:
    name: str
    count: int
    size_s: float
    on: bool
    colour: Colour
    level: Level
    maybe: int | None
    pair: tuple[int, str]
    many: tuple[float, ...]
    named: dict[str, Left]
    numbered: dict[int, tuple[int, ...]]
    either: Left | Right | None
    extra: tuple[str, ...] = ("usual",)
    more: dict[str, int] = field(default_factory=dict)


def things() -> st.SearchStrategy[Thing]:
    whole = st.integers(-(2**63), 2**63)
    text = st.text(max_size=5)
    number = st.floats(-1e300, 1e300)
    return st.builds(
        Thing, text, whole, number, st.booleans(), st.sampled_from(Colour), st.sampled_from(Level),
        st.none() | whole, st.tuples(whole, text), st.lists(number, max_size=3).map(tuple),
        st.dictionaries(text, st.builds(Left, whole), max_size=3),
        st.dictionaries(st.integers(0, 10**19), st.lists(whole, max_size=2).map(tuple), max_size=3),
        st.none() | st.builds(Left, whole) | st.builds(Right, text),
    )  # fmt: skip


@given(things())
def test_through_json_and_back_it_is_the_same(thing: Thing) -> None:
    assert from_plain(Thing, json.loads(json.dumps(to_plain(thing))), "x") == thing


def test_what_an_older_version_left_out_has_a_value_for_not_known() -> None:
    found = from_plain(Thing, {}, "x")
    assert (found.name, found.count, found.size_s, found.on) == ("", 0, 0.0, False)
    assert (found.colour, found.maybe, found.many, found.named) == (Colour.RED, None, (), {})
    assert (found.extra, found.more, found.either) == (("usual",), {}, None)


def test_what_a_newer_version_added_is_left_alone() -> None:
    assert from_plain(Left, {"a": 1, "from_tomorrow": {"x": []}}, "x") == Left(1)


def test_what_must_be_there_is_named_where_it_isn_t() -> None:
    with pytest.raises(PlainError, match="record: a is missing"):
        from_plain(Left, {}, "record", {Left: frozenset({"a"})})


@pytest.mark.parametrize(
    ("hint", "value", "told"),
    [
        (Left, [], "x: expected an object, found a list"),
        (Left, {"a": "1"}, "x: a: expected a whole number of at most 64 bits, found text"),
        (Left, {"a": True}, "found true or false"),
        (Left, {"a": 1.5}, "found float 1.5"),
        (Left, {"a": 2**65}, "expected a whole number"),
        (float, "1", "expected a number"),
        (float, True, "expected a number"),
        (float, float("inf"), "expected a number"),
        (float, float("nan"), "expected a number"),
        (float, 10**400, "expected a number"),
        (bool, 1, "expected true or false"),
        (str, None, "expected text, found null"),
        (Colour, "green", "text is not a known colour"),
        (Colour, [], "a list is not a known colour"),
        (tuple[int, str], [1], "expected 2 items, found 1"),
        (tuple[int, ...], {}, "expected a list, found an object"),
        (tuple[int, ...], [0, "1"], r"x\[1\]: expected a whole number"),
        (dict[int, int], {"one": 1}, "key 'one' is not a number"),
        (dict[int, int], {"-1": 1}, "is not a number"),
        (dict[int, int], {"9" * 21: 1}, "is not a number"),
        (dict[str, int], [], "expected an object"),
        (ExitStatus, {}, "an exit has either a code or a signal"),
        (ExitStatus, {"code": 1, "signal": 9}, "an exit has either"),
    ],
)
def test_what_it_isn_t_is_said_and_where(hint: Any, value: Any, told: str) -> None:
    with pytest.raises(PlainError, match=told):
        from_plain(hint, value, "x")


@pytest.mark.parametrize("hint", [tuple[int, ...], dict[str, int]])
def test_what_is_too_long_is_not_read(hint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "MAX_ITEMS", 3)
    three: Any = [0] * 3 if hint == tuple[int, ...] else dict.fromkeys("abc", 0)
    four: Any = [0] * 4 if hint == tuple[int, ...] else dict.fromkeys("abcd", 0)
    assert len(from_plain(hint, three, "x")) == 3
    with pytest.raises(PlainError, match="4 items; at most 3 are read"):
        from_plain(hint, four, "x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


def test_a_row_that_an_older_version_left_out_is_as_long_as_a_row_is() -> None:
    found = from_plain(Thing, {}, "x")
    assert from_plain(Thing, to_plain(found), "x") == found


@given(st.dictionaries(st.sampled_from(sorted(set(Thing.__dataclass_fields__) - {"pair"})), JSON))
def test_whatever_comes_it_is_read_or_refused(document: dict[str, Any]) -> None:
    try:
        found = from_plain(Thing, {"pair": [1, ""], **document}, "x")
    except PlainError as error:
        assert str(error).startswith("x")
    else:
        assert from_plain(Thing, to_plain(found), "x") == found
