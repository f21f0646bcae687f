"""Frames from peers that keep to no rules: what is refused, and that refusing is cheap."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.errors import ProtocolError
from closeranks.frames import MAX_DEPTH, MAX_FRAME_BYTES, Splitter, decode, encode, frame

REPLAYABLE = settings(print_blob=True, deadline=None, max_examples=200)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)
MESSAGES = st.dictionaries(TEXT, VALUES, max_size=5).map(lambda fields: {**fields, "type": "any"})


def nested(levels: int) -> bytes:
    """A message of so many levels, its own object among them."""
    return b'{"type":"x","a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@REPLAYABLE
@given(st.lists(MESSAGES, max_size=5), st.data())
def test_messages_come_through_whatever_pieces_they_come_in(
    messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    stream = b"".join(map(encode, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    splitter, found = Splitter(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += splitter.feed(stream[start:end])
    assert [decode(payload) for payload in found] == messages
    assert not splitter.unfinished


@REPLAYABLE
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert isinstance(message["type"], str)


def test_a_stream_cut_anywhere_is_unfinished() -> None:
    whole = encode({"type": "x"})
    for length in range(1, len(whole)):
        splitter = Splitter()
        assert splitter.feed(whole[:length]) == [] and splitter.unfinished
        assert splitter.feed(whole[length:]) == [whole[4:]] and not splitter.unfinished


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**32 - 1, struct.unpack(">I", b"GET ")[0]])
def test_a_length_that_no_frame_has_is_refused_before_any_of_it_comes(length: int) -> None:
    with pytest.raises(ProtocolError, match="limits"):
        Splitter().feed(struct.pack(">I", length))


def test_the_first_frame_has_a_bound_of_its_own() -> None:
    big, small = b"x" * 1000, b"x" * 100
    with pytest.raises(ProtocolError, match="1 to 100"):
        Splitter(1000, first_max_bytes=100).feed(frame(big))
    assert Splitter(1000, first_max_bytes=100).feed(frame(small) + frame(big)) == [small, big]


def test_a_frame_of_the_largest_size_in_small_pieces_is_held_once() -> None:
    payload = b"x" * MAX_FRAME_BYTES
    splitter, stream = Splitter(), memoryview(frame(payload))
    found = [
        p for start in range(0, len(stream), 1000) for p in splitter.feed(bytes(stream[start : start + 1000]))
    ]
    assert found == [payload] and not splitter.unfinished


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"type":"x"', "not JSON"),
        (b'{"type":"x"} {}', "not JSON"),
        (b"[1,2]", "not an object"),
        (b'"type"', "not an object"),
        (b'{"kind":"x"}', "not an object with a type"),
        (b'{"type":7}', "not an object with a type"),
        (b'{"type":"x","a":NaN}', "NaN is no number"),
        (b'{"type":"x","a":-Infinity}', "-Infinity is no number"),
        (b'{"type":"x","a":1e999}', "out of range"),
        (b'{"type":"x","a":' + b"9" * 5000 + b"}", "5,000 characters"),
        (b'{"type":"x","a":0.' + b"1" * 5000 + b"}", "out of range"),
        (b'{"type":"x","a":"\\ud800"}', "surrogate"),
        (b'{"type":"x","\\udfff":1}', "surrogate"),
        (nested(MAX_DEPTH + 1), "deeper than 32"),
        (b'{"type":"x","a":' + b'{"a":' * 40 + b"1" + b"}" * 41, "deeper than 32"),
        (b"[" * 500_000, "not JSON"),
        (b'{"a":' * 100_000, "not JSON"),
    ],
)  # fmt: skip
def test_what_others_may_not_say(payload: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why) as caught:
        decode(payload)
    assert len(str(caught.value)) < 300  # none of it comes back in the error


def test_what_is_just_allowed() -> None:
    assert decode(nested(MAX_DEPTH))["type"] == "x"
    assert decode(b'{"type":"x","a":"\\ud83d\\ude00"}')["a"] == "\N{GRINNING FACE}"
    assert decode(b'{"type":"x","a":-9223372036854775808}')["a"] == -(2**63)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (float("nan"), "can't be sent"),
        (float("inf"), "can't be sent"),
        (object(), "not JSON serializable"),
        ("x" * MAX_FRAME_BYTES, "send it in parts"),
        (json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH), "nested deeper"),
    ],
    ids=["nan", "inf", "object", "large", "deep"],
)
def test_what_we_may_not_say_ourselves(value: object, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        encode({"type": "x", "a": value})


def test_a_log_line_that_was_no_text_is_sent_all_the_same() -> None:
    line = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert decode(encode({"type": "x", "line": line})[4:])["line"] == "caf?"
