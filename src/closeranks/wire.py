"""Messages between agent, zygote and workers: one JSON object a packet over a Unix SEQPACKET socket.

Packets keep their borders, so there is no framing to get wrong; each is bounded, and file descriptors ride
along. Both ends belong to one job: they are made by ``socketpair`` before the fork, and have no address.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from closeranks.errors import ProtocolError

__all__ = ["MAX_FDS", "MAX_PACKET_BYTES", "receive", "send", "socketpair", "user_of"]

MAX_PACKET_BYTES = 192 * 1024  # below the default SO_SNDBUF of 208 KiB, above any environment we send
MAX_FDS = 253  # SCM_MAX_FD of the Linux kernel
_UCRED = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


def socketpair() -> tuple[socket.socket, socket.socket]:
    """Two connected SEQPACKET sockets, close-on-exec."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
    return ours, theirs


def send(sock: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message. Raises ProtocolError if it is too large, OSError if the peer is gone."""
    packet = json.dumps(message, separators=(",", ":"), ensure_ascii=True).encode()
    if len(packet) > MAX_PACKET_BYTES or len(fds) > MAX_FDS:
        raise ProtocolError(
            f"message {message.get('type')!r} is too large: {len(packet):,} bytes, {len(fds)} descriptors "
            f"(limits: {MAX_PACKET_BYTES:,}, {MAX_FDS}); shorten the script's arguments or the environment"
        )
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one message and its descriptors; None when the peer has closed.

    Raises BlockingIOError on a non-blocking socket with nothing to read, ProtocolError on a bad packet.
    """
    packet, ancillary, flags, _ = sock.recvmsg(
        MAX_PACKET_BYTES, socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if not packet:
        return None
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ProtocolError("a packet was larger than the limit and was dropped")
        return _parse(packet), list(fds)
    except ProtocolError:
        for fd in fds:  # nobody else will know of them
            os.close(fd)
        raise


def user_of(sock: socket.socket) -> int:
    """The user at the other end of a connected Unix socket, as the kernel knows it (SO_PEERCRED)."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def _parse(packet: bytes) -> dict[str, Any]:
    try:
        message = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a packet was not JSON: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("a packet was not an object with a type")
    return message
