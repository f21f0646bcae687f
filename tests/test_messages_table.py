"""The table of messages: each can be said, each of its fields is looked at, and errors name the field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.errors import ProtocolError
from closeranks.frames import decode, encode
from closeranks.messages import MAX_NAME_CHARS, MESSAGES, Shape, check, parse

REPLAYABLE = settings(print_blob=True, deadline=None, max_examples=200)
EXAMPLES: dict[str, Any] = {
    "bool": True,
    "int": -1,
    "count": 3,
    "float": -0.5,
    "seconds": 1.5,
    "str": "",
    "name": "node-1",
    "object": {"any": [None]},
}


def example(shape: Shape) -> Any:
    if shape.kind == "list":
        return [example(shape.parts[0])] * 2
    if shape.kind == "row":
        return [example(part) for part in shape.parts]
    return EXAMPLES[shape.kind]


def whole(kind: str) -> dict[str, Any]:
    return {"type": kind} | {name: example(parse(text)) for name, text in MESSAGES[kind].items()}


EVERY_FIELD = [(kind, name) for kind, fields in MESSAGES.items() for name in fields]


@pytest.mark.parametrize("kind", MESSAGES)
def test_each_message_can_be_said_and_heard(kind: str) -> None:
    message = whole(kind)
    check(message)
    check(decode(encode(message)[4:]))
    check({**message, "from_a_newer_peer": [1]})


@pytest.mark.parametrize(("kind", "name"), EVERY_FIELD)
def test_each_field_is_looked_at(kind: str, name: str) -> None:
    shape = parse(MESSAGES[kind][name])
    wrong = [[]] if shape.kind in ("object", "str", "name") else ["x", {}, 2**63, -(2**63)]
    for value in wrong:
        with pytest.raises(ProtocolError, match=f"'{kind}': {name}"):
            check({**whole(kind), name: value})
    without = whole(kind)
    del without[name]
    if shape.optional:
        check(without)
        check({**without, name: None})
    else:
        with pytest.raises(ProtocolError, match=f"{name} is missing"):
            check(without)
        with pytest.raises(ProtocolError, match=f"{name} is null"):
            check({**without, name: None})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seq": True}, "seq is True, not a count"),
        ({"seq": -1}, "seq is -1, not a count"),
        ({"seq": 1.0}, "seq is 1.0, not a count"),
        ({"seq": 10**400}, "seq is a number out of range, not a count"),
        ({"ranks": [[0, 1, 2, "train"]]}, r"ranks\[0\] is a list of 4, not a row of 5"),
        ({"ranks": [[0, 1, 2, "train", 0]]}, r"ranks\[0\]\[4\] is 0, not a bool"),
        ({"ranks": {"0": 1}}, "ranks is an object of 1, not a list"),
        ({"ranks": "x" * 10_000}, r"ranks is 'x{40}'\.\.\., not a list"),
    ],
)
def test_an_error_names_the_place(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ProtocolError, match=f"^message 'heartbeat': {told}$"):
        check({**whole("heartbeat"), **change})


@pytest.mark.parametrize(
    "node", ["", "x" * (MAX_NAME_CHARS + 1), "a\nb", "\x1b[31m", "a\0b", "\u202eabc", "\ud800"]
)
def test_a_name_can_be_shown_and_compared(node: str) -> None:
    with pytest.raises(ProtocolError, match=r"node is .*, not a name") as caught:
        check({**whole("hello"), "node": node})
    assert str(caught.value).isascii() and str(caught.value).isprintable()


@pytest.mark.parametrize("kind", [None, 7, [], {}, "", "helo", "\x1b[31m", "x" * 10_000])
def test_a_type_that_nobody_knows_is_an_error(kind: object) -> None:
    with pytest.raises(ProtocolError, match="no message of type") as caught:
        check({"type": kind})
    assert str(caught.value).isprintable() and len(str(caught.value)) < 100


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


@REPLAYABLE
@given(st.sampled_from(EVERY_FIELD), JSON)
def test_any_value_anywhere_is_taken_or_refused_with_its_name(field: tuple[str, str], value: Any) -> None:
    kind, name = field
    try:
        check({**whole(kind), name: value})
    except ProtocolError as error:
        assert str(error).startswith(f"message {kind!r}: {name}")


@pytest.mark.parametrize(
    "text", ["", "text", "list", "list[", "list[int", "list[]", "(int", "()", "int??", "int int", "?"]
)
def test_a_shape_that_is_none_is_a_mistake_of_ours(text: str) -> None:
    with pytest.raises(ValueError, match=r"missing|no shape|nothing is expected"):
        parse(text)


def test_shapes_nest() -> None:
    assert parse("list[(int, list[str]?)]?") == Shape(
        "list", (Shape("row", (Shape("int"), Shape("list", (Shape("str"),), optional=True))),), optional=True
    )
