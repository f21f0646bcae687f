"""Frames between controller and agents: four bytes of length, big-endian, then a JSON object. No I/O.

What arrives is bounded before it is looked at: in length, in depth, in the size of its numbers. What Python
would take and others would not, NaN, Infinity and halves of surrogate pairs, is refused (RFC 8259).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, NoReturn

from closeranks.errors import ProtocolError

__all__ = ["HEADER", "MAX_DEPTH", "MAX_FRAME_BYTES", "Splitter", "decode", "encode", "frame"]

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 20
MAX_DEPTH = 32
_MAX_NUMBER_CHARS = 64  # 64 bits in decimal take 20, a double 24, and who writes all its digits some more


def frame(payload: bytes, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """``payload`` with its length before it. Raises ProtocolError if it is empty or too long."""
    if not 0 < len(payload) <= max_bytes:
        raise ProtocolError(f"a frame of {len(payload):,} bytes (limits: 1 to {max_bytes:,}) can't be sent")
    return HEADER.pack(len(payload)) + payload


def encode(message: Mapping[str, Any], max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """The frame of one message. Raises ProtocolError where the other end would have to refuse it.

    Halves of surrogate pairs, which undecodable bytes in a log leave behind, are sent as "?".
    """
    kind = message.get("type")
    try:
        text = json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"message {kind!r} can't be sent: {error}") from error
    payload = text.encode("utf-8", "replace")
    if len(payload) > max_bytes:
        raise ProtocolError(
            f"message {kind!r} is too large: {len(payload):,} bytes (limit: {max_bytes:,}); send it in parts"
        )
    if _may_be_deep(text) and _too_deep(message):
        raise ProtocolError(f"message {kind!r} is nested deeper than {MAX_DEPTH} levels")
    return frame(payload, max_bytes)


def decode(payload: bytes) -> dict[str, Any]:
    """The message in one frame's payload. Raises ProtocolError for anything but an object with a type."""
    try:
        text = payload.decode("utf-8")
        message = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame was not JSON: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("a frame was not an object with a type")
    if _may_be_deep(text) and _too_deep(message):
        raise ProtocolError(f"a frame was nested deeper than {MAX_DEPTH} levels")
    if "\\u" in text:
        try:
            json.dumps(message, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ProtocolError("a frame held half of a surrogate pair") from error
    return message


class Splitter:
    """Cuts a stream of bytes into payloads, whatever pieces it comes in; holds one unfinished frame at most.

    ``first_max_bytes`` bounds the first frame: a stranger's, as long as nothing has proved it otherwise.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES, first_max_bytes: int | None = None) -> None:
        self._limit_bytes = max_bytes if first_max_bytes is None else min(first_max_bytes, max_bytes)
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def unfinished(self) -> bool:
        """Whether the stream stands in the middle of a frame."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that ``data`` completes. Raises ProtocolError at a length that no frame may have:
        the stream makes no sense from there on.
        """
        self._buffer += data
        found: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, start)
            if not 0 < length <= self._limit_bytes:
                raise ProtocolError(f"a frame of {length:,} bytes (limits: 1 to {self._limit_bytes:,})")
            end = start + HEADER.size + length
            if end > len(self._buffer):
                break
            found.append(bytes(self._buffer[start + HEADER.size : end]))
            start = end
            self._limit_bytes = self._max_bytes
        del self._buffer[:start]
        return found


def _whole(digits: str) -> int:
    if len(digits) > _MAX_NUMBER_CHARS:
        raise ValueError(f"a number of {len(digits):,} characters")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits) if len(digits) <= _MAX_NUMBER_CHARS else math.inf
    if not math.isfinite(number):
        raise ValueError("a number out of range")
    return number


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


_DECODER = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=_refuse)


def _may_be_deep(text: str) -> bool:
    """Each level has a bracket of its own, and most messages have few of them."""
    return text.count("[") + text.count("{") > MAX_DEPTH


def _too_deep(value: object) -> bool:
    """Level by level, as what is too deep for us may be too deep for recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, Mapping) else container)  # type: ignore[attr-defined]
            if isinstance(child, (Mapping, list, tuple))
        ]
        if not level:
            return False
    return True
