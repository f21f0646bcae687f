"""One connection of the channel, on either side: whole messages in and out, everything bounded.

``send`` never waits: what can't be written yet is queued, and a peer for whom too much is queued is closed.
Messages are parsed when they are received, not when they arrive: a peer that sends more than is taken from it
is read no further, and costs no more than ``max_unread_bytes``.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from closeranks.config import ChannelConfig
from closeranks.controller.tls import Tls, check_peer
from closeranks.errors import CloseranksError, ProtocolError, UntrustedPeer
from closeranks.frames import Splitter, decode, encode, frame
from closeranks.messages import check

__all__ = ["GREETING", "REFUSAL", "Peer"]

GREETING = (
    b"closeranks/1"  # the server's first frame, once it trusts the client; a change of protocol changes it
)
REFUSAL = b"closeranks/1 refuses"  # instead of it; TLS has alerts of its own for what it refuses itself
_TURN = 64  # messages in a row before others get the loop
_WRITE_AHEAD_BYTES = 64 << 10


class Peer(asyncio.Protocol):
    """The other end. ``where``: its address, for messages; ``closed_because``: "" while it is open."""

    def __init__(self, config: ChannelConfig, where: str, tls: Tls | None = None) -> None:
        self.where = where
        self.closed_because = ""
        self.failure: CloseranksError | OSError | None = None
        self.bad_frames = 0
        self._config = config
        self._tls = tls
        self._transport: asyncio.Transport | None = None
        self._splitter = Splitter(config.max_frame_bytes, config.max_first_frame_bytes)
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._reading = True
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._writing = True
        self._finished = False
        self._received = 0
        self._heard_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()  # a frame came, or the end
        self._settled = asyncio.Event()  # the handshake is over, well or not
        self._gone = asyncio.Event()

    # --- what users call

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send without waiting; False if the peer is closed, or is closed now because it doesn't read.

        Raises ProtocolError for a message that isn't in the table or is too large: a mistake of the caller's.
        """
        check(message)
        return self._send(encode(message, self._config.max_frame_bytes))

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None once the connection is over. A bad frame costs itself, up to a bound."""
        while (payload := await self._next()) is not None:
            try:
                return _parsed(payload)
            except ProtocolError as error:
                self.bad_frames += 1
                if self.bad_frames > self._config.max_bad_frames:
                    self._drop_unread()
                    self.fail(ProtocolError(f"{self.bad_frames} bad frames; the last: {error}"))
        return None

    def close(self, reason: str = "closed by us") -> None:
        """Send what is queued, within ``close_timeout_s``, and close. What wasn't received yet is dropped."""
        if self.closed_because or self._transport is None:
            return
        self._end(reason)
        self._drop_unread()
        self._arm(self._config.close_timeout_s, self._transport.abort)
        if not self._unsent:
            self._finish()

    def abort(self, reason: str) -> None:
        """Close now, whatever is queued."""
        if not self.closed_because:
            self._end(reason)
        self._drop_unread()
        if self._transport is not None:
            self._transport.abort()
        else:
            self._gone.set()

    async def wait_closed(self) -> None:
        """Return once nothing of the connection is left."""
        await self._gone.wait()

    def own_address(self) -> str:
        """Our own numeric address on this connection; "" on a Unix socket, or without one."""
        name = self._transport.get_extra_info("sockname") if self._transport is not None else None
        return str(name[0]) if isinstance(name, tuple) else ""

    # --- proving who is who

    async def prove(self, *, job_id: str, role: str) -> None:
        """Wait for the handshake and check who the other end is. Raises UntrustedPeer or OSError."""
        await self._settled.wait()
        self._raise_failure()
        if self._tls is not None:
            check_peer(self._tls.certificate, job_id=job_id, role=role)

    def greet(self) -> None:
        """The server's word that it trusts the client: in TLS 1.3 a client can't know that otherwise."""
        self._send(frame(GREETING))

    def refuse(self) -> None:
        """The server's word that it doesn't."""
        self._send(frame(REFUSAL))

    async def greeted(self) -> None:
        """The client's wait for it. Raises UntrustedPeer, ProtocolError or OSError."""
        payload = await self._next()
        if payload is None:
            self._raise_failure()
        if payload == REFUSAL:
            raise UntrustedPeer(
                "the controller doesn't trust us: these credentials are of another job or role"
            )
        if payload != GREETING:
            raise ProtocolError(f"the answer was {(payload or b'')[:40]!r}, where {GREETING!r} has to be")

    async def spoke(self) -> None:
        """Wait for a first message that makes sense; it stays to be received. Raises what is wrong."""
        payload = await self._next()
        if payload is None:
            self._raise_failure()
            raise ConnectionResetError(self.closed_because)
        _parsed(payload)
        self._unread.appendleft(payload)
        self._unread_bytes += len(payload)

    def watch(self) -> None:
        """From now on silence is limited: ``idle_timeout_s``."""
        if self.closed_because:
            return
        self._heard_s = asyncio.get_running_loop().time()
        self._arm(self._config.idle_timeout_s, self._look_for_silence)

    # --- what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=_WRITE_AHEAD_BYTES)
        if self._tls is None:
            self._settled.set()
        else:
            self.data_received(b"")  # a client begins the handshake

    def data_received(self, data: bytes) -> None:
        if self.closed_because:
            return
        try:
            plain = data if self._tls is None else self._tls.decrypt(data)
            payloads = self._splitter.feed(plain)
        except ProtocolError as error:
            self.fail(error)
            return
        self._flush_tls()
        if self._tls is not None and self._tls.established:
            self._settled.set()
        if payloads:
            self._unread += payloads
            self._unread_bytes += sum(map(len, payloads))
            self._heard_s = asyncio.get_running_loop().time()
            self._news.set()
            self._throttle()
        if self._tls is not None and self._tls.ended:
            self.eof_received()

    def eof_received(self) -> bool:
        """The other end says nothing more: the connection is over, for both. What came before is kept."""
        if not self.closed_because:
            cut = " in the middle of a frame" if self._splitter.unfinished else ""
            self._end(f"closed by the other end{cut}")
        if self._transport is not None:
            self._transport.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed_because:
            self.failure = exc if isinstance(exc, OSError) else None
            self._end(str(exc) if exc else "closed by the other end")
        if self._timer is not None:
            self._timer.cancel()
        self._drop_unsent()
        self._gone.set()

    def pause_writing(self) -> None:
        self._writing = False

    def resume_writing(self) -> None:
        self._writing = True
        while self._unsent and self._writing:
            data = self._unsent.popleft()
            self._unsent_bytes -= len(data)
            self._write(data)
        if self.closed_because and not self._unsent:
            self._finish()

    # --- inside

    def fail(self, error: CloseranksError | OSError) -> None:
        """Close for a fault of the other end; what it said before stays to be received."""
        if self.closed_because:
            return
        self.failure = error.with_traceback(None)  # which would hold on to what came
        self._end(str(error))
        self._drop_unsent()
        if self._transport is not None:
            self._arm(self._config.close_timeout_s, self._transport.abort)
            self._finish()

    def _finish(self) -> None:
        """Close our half and wait, not for long, for the other: closing with something left to read would be
        a reset, which may overtake our last words.

        The transport's own ``write_eof`` fails with a traceback when the other end has just reset.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not self._finished:
            self._finished = True
            if self._tls is not None:
                self._tls.end()
                self._flush_tls()  # with the alert that tells the other end why, should there be one
            transport.set_write_buffer_limits(high=0)  # we are told when it is empty
            transport.resume_reading()
        if transport.get_write_buffer_size() == 0:
            try:
                transport.get_extra_info("socket").shutdown(socket.SHUT_WR)
            except OSError:
                transport.abort()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.closed_because:
            raise ConnectionResetError(self.closed_because)

    def _end(self, reason: str) -> None:
        self.closed_because = reason or "closed"
        self._news.set()
        self._settled.set()

    def _arm(self, delay_s: float, call: Callable[[], object]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, call)

    def _send(self, data: bytes) -> bool:
        open_ = self._transport is not None and not self._transport.is_closing()
        if self.closed_because or not open_ or not self._settled.is_set():
            return False
        if self._writing:
            self._write(data)
            return not self.closed_because
        if self._unsent_bytes + len(data) > self._config.max_unsent_bytes:
            self.abort(f"doesn't read: {self._unsent_bytes:,} bytes wait for it")
            return False
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        return True

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        if self._tls is not None:
            self._tls.encrypt(data)
            self._flush_tls()
        elif not self._transport.is_closing():  # a transport that failed a moment ago complains of more
            self._transport.write(data)

    def _flush_tls(self) -> None:
        if self._tls is None or self._transport is None or not (data := self._tls.outgoing()):
            return
        if self._transport.is_closing():
            return
        self._transport.write(data)
        # Answers to requests for new keys, which a peer can make us owe without end by not reading them.
        if self._transport.get_write_buffer_size() > self._config.max_unsent_bytes:
            self.abort("doesn't read what its own requests ask for")

    async def _next(self) -> bytes | None:
        self._received += 1
        if self._received % _TURN == 0:
            await asyncio.sleep(0)
        while not self._unread:
            if self.closed_because:
                return None
            self._news.clear()
            await self._news.wait()
        payload = self._unread.popleft()
        self._unread_bytes -= len(payload)
        self._throttle()
        return payload

    def _throttle(self) -> None:
        if self._transport is None or self.closed_because:
            return
        if self._reading and self._unread_bytes > self._config.max_unread_bytes:
            self._reading = False
            self._transport.pause_reading()
        elif not self._reading and self._unread_bytes <= self._config.max_unread_bytes // 2:
            self._reading = True
            self._heard_s = asyncio.get_running_loop().time()
            self._transport.resume_reading()

    def _drop_unread(self) -> None:
        self._unread.clear()
        self._unread_bytes = 0

    def _drop_unsent(self) -> None:
        self._unsent.clear()
        self._unsent_bytes = 0

    def _look_for_silence(self) -> None:
        now_s = asyncio.get_running_loop().time()
        limit_s = self._config.idle_timeout_s
        silent_s = now_s - self._heard_s if self._reading else 0.0
        if silent_s >= limit_s:
            self.abort(f"silent for {silent_s:.1f} s")
        else:
            self._arm(limit_s - silent_s, self._look_for_silence)


def _parsed(payload: bytes) -> dict[str, Any]:
    message = decode(payload)
    check(message)
    return message
