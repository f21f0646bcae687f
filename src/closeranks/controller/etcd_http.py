"""HTTP/1.1 to one etcd at a time: a request, a bounded answer, in bounded time. No more of HTTP than that.

On asyncio's streams, as a thread that waits in http.client can't be told to stop. Connections are kept, since
a TLS handshake costs more than what is asked; nothing is followed, decompressed or cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from closeranks.controller.channel import is_loopback, shown
from closeranks.errors import ConfigError, EtcdError

__all__ = ["Endpoint", "HttpLine", "parse_endpoint"]

_MAX_HEAD_BYTES = 32 << 10
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: [^\r\n]*)?\r\n")
_LENGTH = re.compile(rb"[0-9]{1,12}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One etcd, by its URL."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


def parse_endpoint(url: str) -> Endpoint:
    """``http://host:2379`` or ``https://...``. Raises ValueError for anything else."""
    wanted = "want http://HOST:PORT or https://HOST:PORT"
    if not url.isprintable() or not url.isascii() or " " in url:
        raise ValueError(wanted)
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError("want no user in it, as command lines can be read by all: see --etcd-user")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(wanted)
    if parts.path not in ("", "/") or (parts.port is not None and parts.port == 0):
        raise ValueError(wanted)
    return Endpoint(parts.hostname, parts.port or 2379, parts.scheme == "https")


class HttpLine:
    """A connection to one etcd, opened when it is needed, and again when it broke. One call at a time."""

    def __init__(self, endpoint: Endpoint, context: ssl.SSLContext | None, max_answer_bytes: int) -> None:
        self.endpoint = endpoint
        self._context = context
        self._max_bytes = max_answer_bytes
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes, token: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer. Raises EtcdError; ConfigError for plain text to another machine."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._post(path, body, token)
        except TimeoutError:
            self.close()
            raise EtcdError(f"{self.endpoint} did not answer within {timeout_s:.1f} s") from None
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            self.close()
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise EtcdError(f"{self.endpoint}: {why}") from error
        except BaseException:  # given up in the middle: what comes on this connection is of no use
            self.close()
            raise

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _post(self, path: str, body: bytes, token: str) -> tuple[int, bytes]:
        if self._streams is not None:
            # Kept from earlier, and perhaps closed meanwhile: that says nothing of the host.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                return await self._exchange(*self._streams, path, body, token)
            self.close()
        self._streams = await self._open()
        return await self._exchange(*self._streams, path, body, token)

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        where = self.endpoint
        reader, writer = await asyncio.open_connection(
            where.host, where.port, ssl=self._context if where.tls else None, limit=_MAX_HEAD_BYTES
        )
        peer = writer.get_extra_info("peername")
        if not where.tls and not (isinstance(peer, tuple) and is_loopback(peer[0].partition("%")[0])):
            writer.transport.abort()
            raise ConfigError(
                f"etcd at {where} ({shown(peer)}) is on another machine, and nothing is sent there without "
                "TLS; give it https://, with --etcd-ca and, where it wants them, --etcd-cert and --etcd-key"
            )
        return reader, writer

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes, token: str
    ) -> tuple[int, bytes]:
        host = f"[{self.endpoint.host}]" if ":" in self.endpoint.host else self.endpoint.host
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}:{self.endpoint.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        if token:
            head += f"Authorization: {token}\r\n"
        writer.write(head.encode("ascii") + b"\r\n" + body)
        await writer.drain()
        status, headers = await _read_head(reader)
        while status < 200:
            status, headers = await _read_head(reader)
        answer = await self._read_body(reader, headers)
        if headers.get(b"connection", b"").lower() == b"close" or not _has_end(headers):
            self.close()
        return status, answer

    async def _read_body(self, reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> bytes:
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            return await self._read_chunks(reader)
        if b"content-length" in headers:
            length = headers[b"content-length"]
            if not _LENGTH.fullmatch(length):
                raise ValueError("its answer has no sensible length")
            return await reader.readexactly(self._bounded(int(length)))
        parts, size_bytes = [], 0
        while part := await reader.read(65536):
            size_bytes = self._bounded(size_bytes + len(part))
            parts.append(part)
        return b"".join(parts)

    async def _read_chunks(self, reader: asyncio.StreamReader) -> bytes:
        parts: list[bytes] = []
        size_bytes = 0
        while True:
            line = _CHUNK.fullmatch(await reader.readuntil(b"\r\n"))
            if line is None:
                raise ValueError("its answer is no HTTP")
            length = int(line[1], 16)
            if length == 0:
                break
            size_bytes = self._bounded(size_bytes + length + 64)  # a chunk of one byte takes more than that
            parts.append(await reader.readexactly(length))
            if await reader.readexactly(2) != b"\r\n":
                raise ValueError("its answer is no HTTP")
        left_bytes = _MAX_HEAD_BYTES
        while (trailer := await reader.readuntil(b"\r\n")) != b"\r\n":
            left_bytes -= len(trailer)
            if left_bytes < 0:
                raise ValueError("its answer has no end")
        return b"".join(parts)

    def _bounded(self, size_bytes: int) -> int:
        if size_bytes > self._max_bytes:
            raise ValueError(f"its answer is larger than {self._max_bytes:,} bytes")
        return size_bytes


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    head = await reader.readuntil(b"\r\n\r\n")
    line, _, rest = head.partition(b"\r\n")
    status = _STATUS.fullmatch(line + b"\r\n")
    if status is None:
        raise ValueError(f"its answer is no HTTP: {line[:40]!r}")
    headers = {}
    for field in rest.split(b"\r\n"):
        name, colon, value = field.partition(b":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return int(status[1]), headers


def _has_end(headers: dict[bytes, bytes]) -> bool:
    return b"content-length" in headers or headers.get(b"transfer-encoding", b"").lower() == b"chunked"
