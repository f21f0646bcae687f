"""Packets between agent and workers, over real sockets, from peers that keep to no rules."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from closeranks import wire
from closeranks.errors import ProtocolError

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = wire.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def send_raw(sock: socket.socket, packet: bytes, fds: list[int]) -> None:
    sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def test_a_message_arrives_with_its_descriptors(pair: Pair) -> None:
    ours, theirs = pair
    read_end, write_end = os.pipe()
    wire.send(theirs, {"type": "go", "n": 1}, [write_end])
    os.close(write_end)
    received = wire.receive(ours)
    assert received is not None
    message, fds = received
    assert message == {"type": "go", "n": 1}
    assert not any(os.get_inheritable(fd) for fd in fds)
    os.write(fds[0], b"x")
    assert os.read(read_end, 1) == b"x"
    for fd in (read_end, *fds):
        os.close(fd)


def test_nothing_to_read_and_an_end_are_told_apart(pair: Pair) -> None:
    ours, theirs = pair
    with pytest.raises(BlockingIOError):
        wire.receive(ours)
    theirs.close()
    assert wire.receive(ours) is None


@pytest.mark.parametrize(
    "packet",
    [b"\xff\xfe", b"[1,2]", b'{"kind":"go"}', b'{"type":7}', b"[" * 100_000],
    ids=["bytes", "a list", "no type", "a number", "too deep"],
)
def test_a_bad_packet_costs_neither_the_line_nor_descriptors(pair: Pair, packet: bytes) -> None:
    ours, theirs = pair
    before = open_fds()
    for _ in range(5):
        send_raw(theirs, packet, [0, 1, 2])
        with pytest.raises(ProtocolError):
            wire.receive(ours)
    assert open_fds() == before
    wire.send(theirs, {"type": "next"})
    assert wire.receive(ours) == ({"type": "next"}, [])


def test_a_packet_over_the_limit_is_dropped_with_what_it_carried(pair: Pair) -> None:
    ours, theirs = pair
    before = open_fds()
    send_raw(theirs, b" " * (wire.MAX_PACKET_BYTES + 1), [0])
    with pytest.raises(ProtocolError, match="larger than the limit"):
        wire.receive(ours)
    assert open_fds() == before


def test_too_much_is_refused_before_it_is_sent(pair: Pair) -> None:
    _, theirs = pair
    with pytest.raises(ProtocolError, match="shorten the script's arguments"):
        wire.send(theirs, {"type": "go", "args": "x" * wire.MAX_PACKET_BYTES})
    with pytest.raises(ProtocolError, match="254 descriptors"):
        wire.send(theirs, {"type": "go"}, [0] * (wire.MAX_FDS + 1))


def test_a_peer_that_is_gone_is_an_oserror_and_no_signal(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()
    with pytest.raises(OSError, match="Broken pipe"):
        wire.send(ours, {"type": "go"})
