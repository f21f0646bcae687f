"""Packets between agent and log pump: one JSON object, a newline, and raw bytes after it where there are any.

Imported by the pump, so it imports next to nothing. The channel is a SOCK_SEQPACKET socketpair, so a packet
is a message; file descriptors travel beside it.

Agent to pump: ``config`` (always first), ``attach`` (with the two read ends), ``drain``,
``say`` (the text follows the newline), ``close``.
Pump to agent: ``drained``, ``disk``, ``console``, ``dropped``, ``protocol``.
"""

from __future__ import annotations

import json

from closeranks.errors import ProtocolError

TYPE_CHECKING = False  # typing itself would cost the pump milliseconds
if TYPE_CHECKING:
    from typing import Any

    Message = dict[str, Any]
else:
    Message = dict

__all__ = ["MAX_PACKET_BYTES", "MAX_SAY_BYTES", "Message", "pack", "unpack"]

MAX_PACKET_BYTES = 65536
MAX_SAY_BYTES = 32768


def pack(message: Message, payload: bytes = b"") -> bytes:
    """Encode; raises ProtocolError when the packet would be longer than ``MAX_PACKET_BYTES``."""
    packet = json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n" + payload
    if len(packet) > MAX_PACKET_BYTES:
        raise ProtocolError(
            f"a log pump message of {len(packet)} bytes is over {MAX_PACKET_BYTES}; shorten it"
        )
    return packet


def unpack(packet: bytes) -> tuple[Message, bytes]:
    """Decode; raises ProtocolError on anything that ``pack`` did not make."""
    head, newline, payload = packet.partition(b"\n")
    try:
        message = json.loads(head) if newline else None
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a log pump message: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("not a log pump message: no type")
    return message, payload
