"""Packets between agent and log pump."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.log_protocol import MAX_PACKET_BYTES, MAX_SAY_BYTES, pack, unpack
from closeranks.errors import ProtocolError


@given(st.binary(max_size=1000), st.text(max_size=50))
def test_round_trip(payload: bytes, text: str) -> None:
    message = {"type": "say", "text": text, "undecodable": "\udcff"}
    assert unpack(pack(message, payload)) == (message, payload)


def test_the_longest_say_fits() -> None:
    assert len(pack({"type": "say"}, b"x" * MAX_SAY_BYTES)) <= MAX_PACKET_BYTES


def test_a_packet_that_would_be_cut_is_refused() -> None:
    with pytest.raises(ProtocolError, match="shorten it"):
        pack({"type": "say"}, b"x" * MAX_PACKET_BYTES)


@pytest.mark.parametrize(
    "packet",
    [b"", b"\n", b"{}\n", b"[]\n", b'{"type": 1}\n', b'{"type": "x"}', b"\xff\n", b"[" * 60000 + b"\n"],
)
def test_garbage_is_a_protocol_error(packet: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(packet)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(packet: bytes) -> None:
    try:
        message, _ = unpack(packet)
    except ProtocolError:
        return
    assert isinstance(message["type"], str)
