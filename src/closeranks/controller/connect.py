"""An agent's side of the channel: attach, or say precisely why not.

What an agent does next hangs on that. A host that answers "nobody listens" is alive, its controller is gone
and will be back: ranks go on. No answer at all may mean that this node is cut off, and others may soon take
its place: that is what the lease is for. A peer that can't prove itself is for people to look at.

Unencrypted refusals can be forged by whoever is on the path, and a proxy, such as a Service of Kubernetes,
refuses for hosts that it can't see: REFUSED is a hint for how soon to try again, never a proof.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from closeranks.config import ChannelConfig
from closeranks.controller.channel import is_loopback, shown
from closeranks.controller.credentials import CONTROLLER, Credentials
from closeranks.controller.peer import Peer
from closeranks.controller.tls import Tls, client_context
from closeranks.errors import ConfigError, ProtocolError, UntrustedPeer
from closeranks.wire import user_of

__all__ = ["ConnectOutcome", "Connected", "connect"]

_MAX_ADDRESSES = 4
_LOOKUPS = threading.BoundedSemaphore(4)  # a resolver may hang for minutes, and its thread with it


class ConnectOutcome(Enum):
    """How an attempt to attach ended; where several addresses were tried, the one that says most."""

    OK = "attached"
    UNTRUSTED = "somebody answered who can't prove to be this job's controller, or who doesn't trust us"
    REFUSED = "the host answers, and no controller is there"
    TIMEOUT = "no answer"
    UNREACHABLE = "no way there"


_SAYS_MOST = list(ConnectOutcome)


@dataclass(frozen=True, slots=True)
class Connected:
    """The outcome, and the peer if it is OK; ``detail``: what happened, for people."""

    outcome: ConnectOutcome
    detail: str
    peer: Peer | None = None


_Target = tuple[socket.AddressFamily, object]


async def connect(
    address: str,
    port: int,
    credentials: Credentials | None,
    *,
    timeout_s: float = 5.0,
    config: ChannelConfig | None = None,
) -> Connected:
    """Attach to the controller at ``address``: numeric, a name, or the path of a Unix socket.

    All of it, the look-up of a name included, takes at most ``timeout_s``. Raises ConfigError where the
    credentials can't be used, or are missing for another machine.
    """
    if not 0 < port < 65536 and not address.startswith("/"):
        raise ConfigError(f"the controller can't be at port {port}: ports are 1 to 65535")
    config = config or ChannelConfig()
    context = client_context(credentials) if credentials is not None else None
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    try:
        targets = await _targets(address, port, timeout_s)
    except TimeoutError as error:
        return Connected(ConnectOutcome.TIMEOUT, f"looking up {address!r}: {error}")
    except (OSError, UnicodeError) as error:
        return Connected(ConnectOutcome.UNREACHABLE, f"looking up {address!r}: {_why(error)}")
    if context is None:
        _stay_on_this_machine(targets)
    best: Connected | None = None
    for index, target in enumerate(targets):
        share_s = (deadline_s - loop.time()) / (len(targets) - index)
        found = await _attempt(target, config, context, credentials, share_s)
        if best is None or _SAYS_MOST.index(found.outcome) < _SAYS_MOST.index(best.outcome):
            best = found
        if best.outcome is ConnectOutcome.OK:
            break
    return best or Connected(ConnectOutcome.UNREACHABLE, f"{address!r} has no address")


async def _attempt(
    target: _Target,
    config: ChannelConfig,
    context: ssl.SSLContext | None,
    credentials: Credentials | None,
    timeout_s: float,
) -> Connected:
    where = shown(target[1])
    peer = Peer(config, where, Tls(context, server_side=False) if context is not None else None)
    try:
        async with asyncio.timeout(timeout_s):
            await _open(target, peer)
            await peer.prove(job_id=credentials.job_id if credentials else "", role=CONTROLLER)
            await peer.greeted()
        peer.watch()
        return Connected(ConnectOutcome.OK, where, peer)
    except (OSError, ProtocolError) as error:
        outcome = _outcome(error, target[0])
        why = f"no answer within {timeout_s:.1f} s" if isinstance(error, TimeoutError) else _why(error)
        peer.abort(why)
        await peer.wait_closed()
        return Connected(outcome, f"{where}: {why}")
    except asyncio.CancelledError:
        peer.abort("given up")
        raise


async def _open(target: _Target, peer: Peer) -> None:
    family, name = target
    loop = asyncio.get_running_loop()
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        await loop.sock_connect(sock, name)  # type: ignore[arg-type]
        if family == socket.AF_UNIX and (uid := user_of(sock)) not in (os.getuid(), 0):
            raise UntrustedPeer(f"it belongs to user {uid}, not to us")
        await loop.create_connection(lambda: peer, sock=sock)
    except BaseException:
        sock.close()
        raise


def _outcome(error: OSError | ProtocolError, family: socket.AddressFamily) -> ConnectOutcome:
    """A Unix socket is on this host, which is alive: nobody there is a refusal, too."""
    on_this_host = family == socket.AF_UNIX
    if isinstance(error, ProtocolError) or (on_this_host and isinstance(error, PermissionError)):
        return ConnectOutcome.UNTRUSTED
    if isinstance(error, ConnectionError) or (on_this_host and isinstance(error, FileNotFoundError)):
        return ConnectOutcome.REFUSED
    if isinstance(error, TimeoutError):
        return ConnectOutcome.TIMEOUT
    return ConnectOutcome.UNREACHABLE


def _why(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)


# --- where to ---------------------------------------------------------------------------------------


def _stay_on_this_machine(targets: Iterable[_Target]) -> None:
    for family, name in targets:
        if family != socket.AF_UNIX and isinstance(name, tuple) and not is_loopback(name[0]):
            raise ConfigError(
                f"the controller at {shown(name)} is on another machine, and nothing is sent there without "
                "TLS; give this agent the job's credentials"
            )


async def _targets(address: str, port: int, timeout_s: float) -> list[_Target]:
    """Raises OSError or UnicodeError for a name that means nothing, TimeoutError when nobody says."""
    if address.startswith("/"):
        return [(socket.AF_UNIX, address)]
    numeric = False
    with contextlib.suppress(ValueError):
        numeric = bool(ipaddress.ip_address(address))
    if numeric:
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        found: _Found = list(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=flags))
    else:
        found = await _look_up(address, port, timeout_s)
    return [(family, name) for family, _, _, _, name in found[:_MAX_ADDRESSES]]


_Found = list[tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]]


async def _look_up(host: str, port: int, timeout_s: float) -> _Found:
    """getaddrinfo knows no time limit: it runs in a thread that nobody waits for, not even our exit."""
    if not _LOOKUPS.acquire(blocking=False):
        raise TimeoutError("earlier look-ups of names hang still")
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Found] = loop.create_future()

    def settle(found: _Found, error: OSError | UnicodeError | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(found)
        else:
            future.set_exception(error)

    def look_up() -> None:
        found: _Found = []
        failed: OSError | UnicodeError | None = None
        try:
            found = list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            failed = error
        finally:
            _LOOKUPS.release()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, found, failed)

    try:
        threading.Thread(target=look_up, name="resolver", daemon=True).start()
    except RuntimeError as error:  # no more threads for us
        _LOOKUPS.release()
        raise OSError(str(error)) from error
    try:
        return await asyncio.wait_for(future, timeout_s)
    except TimeoutError:
        raise TimeoutError(f"no answer from the resolver within {timeout_s:g} s") from None
