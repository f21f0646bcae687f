"""The store in which the ranks of one generation meet: on one host a file on tmpfs, named by the generation.

torch's ``env://`` would build a TCPStore. On one machine that costs name look-ups (its client formats the
peer's address for a log line, and asks the name server for the reverse name: stalls of 5 s when the answer
is late), and a restart under torchrun may read a dead generation's keys from it (pytorch#135712). A file that
no other generation ever opens has neither problem, and dies with its directory.

Across hosts it is a TCPStore in a process of its own beside an agent, a new one for each generation: no rank
holds it, so that no rank's death ends it, and it forks nothing. Its address is numeric; what its clients ask
the resolver all the same is bounded by ``RESOLVER_OPTIONS`` in their environment.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

__all__ = ["RESOLVER_OPTIONS", "register", "serve"]

RESOLVER_OPTIONS = "timeout:1 attempts:1"  # resolv.conf(5): a second at most, where the default is 10 to 30
_LOOPBACK = "127.0.0.1"
_WATCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def serve() -> tuple[Any, int]:
    """Open a TCPStore on all addresses of this host; returns it and its port. It lives as long as we hold it.

    The client that torch makes with it connects to loopback, whose name needs no name server.
    """
    from torch.distributed import TCPStore

    store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
    return store, int(store.port)


def _open(place: str, meeting: int, world_size: int, timeout: timedelta | None) -> Any:
    """The store of the ``meeting``-th default group: below a path, or behind ``tcp://address:port``."""
    if not place.startswith("tcp://"):
        from torch.distributed import FileStore

        store = FileStore(f"{place}.{meeting}", world_size)
        if timeout is not None:
            store.set_timeout(timeout)
        return store
    from torch.distributed import PrefixStore, TCPStore

    address = urlsplit(place)
    limit = {} if timeout is None else {"timeout": timeout}
    client = TCPStore(address.hostname, address.port, is_master=False, wait_for_workers=False, **limit)
    return PrefixStore(f"closeranks/{meeting}", client)


def register(place: str) -> None:
    """Let ``env://`` of this process meet in ``place``: a path, or ``tcp://address:port``.

    Only for the rank itself with the environment it was given: a script that starts process groups of its
    own under other values, and children it forks, get torch's own handler.
    """
    # By its full name: torch.distributed has a function called rendezvous too.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    original: Callable[..., Iterator[Any]] = rendezvous._rendezvous_handlers["env"]
    given = {name: os.environ.get(name) for name in _WATCHED}
    owner_pid = os.getpid()
    meetings = 0

    def handler(url: str, timeout: timedelta | None = None, **kwargs: Any) -> Iterator[Any]:
        nonlocal meetings
        query = {key: values[-1] for key, values in parse_qs(urlsplit(url).query).items()}
        ours = {name: os.environ.get(name) for name in _WATCHED} == given and os.getpid() == owner_pid
        asked = (query.get("rank", given["RANK"]), query.get("world_size", given["WORLD_SIZE"]))
        if not ours or asked != (given["RANK"], given["WORLD_SIZE"]):
            keywords = dict(kwargs) if timeout is None else {"timeout": timeout, **kwargs}
            yield from original(url, **keywords)
            return
        # A group that is destroyed and made again must not read its own former keys either.
        meetings += 1
        rank, world_size = int(given["RANK"] or 0), int(given["WORLD_SIZE"] or 1)
        yield _open(place, meetings, world_size, timeout), rank, world_size
        raise RuntimeError("Unable to perform re-rendezvous using env:// method")

    rendezvous._rendezvous_handlers["env"] = handler
