"""Where agents attach to a job's controller: accepts connections, lets in those of this job, bounds the rest.

Three ways to listen: TLS with the job's credentials on any address; plain on a loopback address, for the
people of one machine; plain on a Unix socket, where the kernel says which user is at the other end. Nothing
is plain between machines.

A connection is in the lobby until it has proved itself and said a first message that makes sense. Strangers
fill the lobby and nothing else: it is small, nobody stays for long, and the oldest makes room for the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import stat
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from closeranks.config import ChannelConfig
from closeranks.controller.credentials import AGENT, Credentials
from closeranks.controller.peer import Peer
from closeranks.controller.tls import Tls, server_context
from closeranks.errors import CloseranksError, ConfigError, ProtocolError, UntrustedPeer
from closeranks.wire import user_of

__all__ = ["ChannelServer", "is_loopback"]

_BACKLOG = 4096  # the kernel cuts it to net.core.somaxconn
_SHORT_OF_MEANS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_RETRY_ACCEPT_S = 0.1
_HUNG_UP = (7, 8)  # TCP_CLOSE, TCP_CLOSE_WAIT of the kernel's net/tcp_states.h
_MAX_UNIX_PATH_BYTES = 107


class ChannelServer:
    """``async with``: listening. ``on_peer`` runs once for each agent let in; the connection ends with it.

    ``address`` is numeric, or the path of a Unix socket. ``turned_away`` counts connections that were not let
    in, by reason; ``last_turned_away`` tells of the latest.
    """

    def __init__(
        self,
        address: str,
        port: int,
        credentials: Credentials | None,
        on_peer: Callable[[Peer], Awaitable[None]],
        config: ChannelConfig | None = None,
    ) -> None:
        self.turned_away: Counter[str] = Counter()
        self.last_turned_away = ""
        self._address = address
        self._port = port
        self._tls = server_context(credentials) if credentials is not None else None
        self._job_id = credentials.job_id if credentials is not None else ""
        self._on_peer = on_peer
        self._config = config or ChannelConfig()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._lobby: dict[asyncio.Task[None], tuple[Peer, float]] = {}  # since when; the oldest comes first
        self._peers: dict[asyncio.Task[None], Peer] = {}

    @property
    def address(self) -> str:
        """Where it listens: ``127.0.0.1:4711``, ``[::1]:4711``, or a path."""
        if self._listener is None or self._listener.family == socket.AF_UNIX:
            return self._address
        return shown(self._listener.getsockname())

    @property
    def port(self) -> int:
        """The port it listens on, also where 0 was asked for."""
        if self._listener is None or self._listener.family == socket.AF_UNIX:
            return self._port
        return int(self._listener.getsockname()[1])

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Those who are let in."""
        return tuple(self._peers.values())

    async def __aenter__(self) -> ChannelServer:
        self._listener = self._listen()
        self._accepting = asyncio.get_running_loop().create_task(self._accept(self._listener))
        self._accepting.add_done_callback(self._stopped_accepting)
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._listener is not None and self._accepting is not None
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listener.close()
        if self._listener.family == socket.AF_UNIX:
            with contextlib.suppress(OSError):
                Path(self._address).unlink(missing_ok=True)
        leaving = [peer for peer, _ in self._lobby.values()]
        for peer in self._peers.values():
            peer.close("the controller ends")
        tasks = [*self._lobby, *self._peers]
        leaving += self._peers.values()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(peer.wait_closed() for peer in leaving))

    # --- listening

    def _listen(self) -> socket.socket:
        """Raises ConfigError, with what to do, for an address that can't or may not be listened on."""
        try:
            if self._address.startswith("/"):
                return _listen_unix(Path(self._address))
            ip = ipaddress.ip_address(self._address)
            if self._tls is None and not ip.is_loopback:
                raise ConfigError(
                    f"the controller would listen on {self._address} without TLS, open to anyone on the "
                    "network; give it the job's credentials, or a loopback address"
                )
            if not 0 <= self._port < 65536:
                raise ConfigError(f"the controller can't listen on port {self._port}: ports are 0 to 65535")
            return _listen_tcp(self._address, self._port)
        except ValueError as error:
            raise ConfigError(
                f"the controller can't listen on {self._address!r}: name a numeric address, or a path from /"
            ) from error
        except OSError as error:
            where = self._address if self._address.startswith("/") else f"{self._address} port {self._port}"
            raise ConfigError(
                f"the controller can't listen on {where}: {error.strerror or error}; name another"
            ) from error

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._make_room()
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # the caller has gone already, or we have no descriptors left
                self._turn_away("not accepted", str(error))
                await asyncio.sleep(_RETRY_ACCEPT_S if error.errno in _SHORT_OF_MEANS else 0)
                continue
            try:
                await self._receive_caller(sock, shown(address))
            except OSError as error:
                sock.close()
                self._turn_away("not accepted", str(error))

    async def _receive_caller(self, sock: socket.socket, where: str) -> None:
        loop = asyncio.get_running_loop()
        if len(self._peers) >= self._config.max_connections:
            sock.close()
            self._turn_away("full", f"{where}: {len(self._peers):,} connections are open")
            return
        if _has_hung_up(sock):  # in a rush, callers lose patience before it is their turn
            sock.close()
            self._turn_away("hung up", f"{where}: closed before it was accepted")
            return
        tls = Tls(self._tls, server_side=True) if self._tls is not None else None
        peer = Peer(self._config, where, tls)
        await loop.connect_accepted_socket(lambda: peer, sock)  # doesn't wait for the other end
        task = loop.create_task(self._admit(peer, sock))
        self._lobby[task] = (peer, loop.time())
        task.add_done_callback(self._left_lobby)

    async def _make_room(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self._lobby) >= self._config.max_in_handshake:
            task, (peer, since_s) = next(iter(self._lobby.items()))
            left_s = since_s + self._config.handshake_grace_s - loop.time()
            if left_s > 0:
                await asyncio.wait(self._lobby, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            else:
                peer.abort("made room for others")
                await asyncio.wait([task])
            await asyncio.sleep(0)  # for callbacks of those that are done

    # --- the lobby

    async def _admit(self, peer: Peer, sock: socket.socket) -> None:
        limit_s = self._config.handshake_timeout_s
        try:
            if sock.family == socket.AF_UNIX and (uid := user_of(sock)) not in (os.getuid(), 0):
                raise UntrustedPeer(f"user {uid} may not attach to a job of user {os.getuid()}")
            async with asyncio.timeout(limit_s):
                await peer.prove(job_id=self._job_id, role=AGENT)
                peer.greet()
                await peer.spoke()
        except TimeoutError:
            peer.abort(f"no message within {limit_s:g} s")
        except (OSError, ProtocolError) as error:
            if isinstance(error, UntrustedPeer):
                peer.refuse()
            peer.fail(error)
        if peer.closed_because:
            await peer.wait_closed()  # it holds a descriptor until then, and so its place

    def _left_lobby(self, task: asyncio.Task[None]) -> None:
        peer, _ = self._lobby.pop(task)
        if task.cancelled() or self._accepting is None or self._accepting.done():
            peer.abort("the controller ends")
        elif (error := task.exception()) is not None:
            peer.abort("a bug")
            self._report(error)
        elif peer.closed_because:
            kind = peer.closed_because if peer.failure is None else type(peer.failure).__name__
            self._turn_away(kind, f"{peer.where}: {peer.closed_because}")
        else:
            serving = asyncio.get_running_loop().create_task(self._serve(peer))
            self._peers[serving] = peer
            serving.add_done_callback(self._left)

    def _turn_away(self, kind: str, what: str) -> None:
        self.turned_away[kind] += 1
        self.last_turned_away = what

    # --- those let in

    async def _serve(self, peer: Peer) -> None:
        peer.watch()
        try:
            await self._on_peer(peer)
        except (CloseranksError, OSError) as error:
            peer.close(str(error))
        finally:
            peer.close()
        await peer.wait_closed()

    def _left(self, task: asyncio.Task[None]) -> None:
        peer = self._peers.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            peer.abort("a bug")
            self._report(error)

    def _stopped_accepting(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(error)

    def _report(self, error: BaseException) -> None:
        context = {"message": "a connection of the channel met a bug", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)


def _has_hung_up(sock: socket.socket) -> bool:
    """Whether the caller is gone, though what it said waits to be read: a handshake would be for nobody."""
    if sock.family == socket.AF_UNIX:
        return False
    (state,) = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)  # tcpi_state of struct tcp_info
    return state in _HUNG_UP


def is_loopback(address: str) -> bool:
    """Whether a numeric address stays on this machine."""
    return ipaddress.ip_address(address).is_loopback


def shown(address: object) -> str:
    """A socket's address, for people."""
    if isinstance(address, tuple):
        host, port = address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "a Unix socket"


def _listen_tcp(address: str, port: int) -> socket.socket:
    flags = socket.AI_NUMERICHOST | socket.AI_PASSIVE
    family, kind, protocol, _, name = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=flags)[
        0
    ]
    listener = socket.socket(family, kind, protocol)
    try:
        # A controller that comes back takes its port again, whatever connections of the last one linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _ready(listener, name)
    except OSError:
        listener.close()
        raise


def _listen_unix(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _MAX_UNIX_PATH_BYTES:
        raise ConfigError(f"{path} is too long for a Unix socket ({_MAX_UNIX_PATH_BYTES} bytes); shorten it")
    _remove_dead(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        _ready(listener, str(path))
        path.chmod(0o600)
    except OSError:
        listener.close()
        raise
    return listener


def _ready(listener: socket.socket, name: object) -> socket.socket:
    listener.setblocking(False)
    listener.bind(name)  # type: ignore[arg-type]
    listener.listen(_BACKLOG)
    return listener


def _remove_dead(path: Path) -> None:
    """Remove the socket of a controller that was killed; one that answers stays, and binding will fail."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            probe.connect(str(path))
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
    except OSError:
        return
