"""A real etcd of a test's own, a line to it that can be cut, and a server that answers as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from closeranks.config import EtcdConfig

ETCD = shutil.which("etcd")
_START_S = 20.0


def free_ports(count: int) -> list[int]:
    """Free at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


@dataclass
class EtcdServer:
    """One member by itself. Elections are quick here, so that leases may be short."""

    folder: Path
    port: int
    peer_port: int
    flags: tuple[str, ...] = ()
    scheme: str = "http"
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def config(self, **changes: object) -> EtcdConfig:
        quick = {"urls": (self.url,), "ttl_s": 2.0, "margin_s": 0.4, "poll_s": 0.05, **changes}
        return EtcdConfig(**quick)  # type: ignore[arg-type]

    def start(self) -> None:
        peer = f"http://127.0.0.1:{self.peer_port}"
        with (self.folder / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    str(ETCD), "--data-dir", str(self.folder / "etcd"), "--heartbeat-interval", "20",
                    "--election-timeout", "200", "--listen-client-urls", self.url,
                    "--advertise-client-urls", self.url, "--listen-peer-urls", peer,
                    "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
                    *self.flags,
                ],
                stdout=log, stderr=log, cwd=self.folder,
            )  # fmt: skip

    def await_ready(self) -> None:
        deadline_s = time.monotonic() + _START_S
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.url}/health", timeout=1) as said,
            ):
                if b"true" in said.read():
                    return
            if time.monotonic() > deadline_s or self.process is None or self.process.poll() is not None:
                pytest.fail(f"etcd did not start: {(self.folder / 'etcd.log').read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)


@contextlib.contextmanager
def etcd_server(folder: Path, *flags: str, scheme: str = "http", ready: bool = True) -> Iterator[EtcdServer]:
    """``with``: it runs, and its data lies in ``folder``. Skips the test where there is no etcd."""
    if ETCD is None:
        pytest.skip("ETCD IS MISSING, so standbys go untested: apt-get install etcd-server")
    port, peer_port = free_ports(2)
    server = EtcdServer(folder, port, peer_port, flags, scheme)
    server.start()
    try:
        if ready:
            server.await_ready()
        yield server
    finally:
        server.kill()


@dataclass
class Line:
    """Passes bytes on to ``port``, until it is told otherwise. ``async with``."""

    port: int
    held: bool = False
    _server: asyncio.Server | None = None
    _pairs: set[asyncio.StreamWriter] = field(default_factory=set)
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Line:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def hold(self) -> None:
        """From now on nothing gets through, in either direction, and nobody is told."""
        self.held = True

    def release(self) -> None:
        """What was held goes on its way."""
        self.held = False
        self._moved.set()
        self._moved = asyncio.Event()

    def cut(self) -> None:
        """Every connection breaks."""
        for writer in self._pairs:
            writer.transport.abort()
        self._pairs.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        self._pairs |= {writer, there_writer}
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(self._pass(reader, there_writer), self._pass(there_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                while self.held:
                    await self._moved.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@contextlib.asynccontextmanager
async def answering(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]):
    """The URL of a server that does ``answer`` on each connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await answer(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
