"""The store in which the ranks of one generation meet: a file on tmpfs, named by the generation.

torch's ``env://`` would build a TCPStore. On one machine that costs name look-ups (its client formats the
peer's address for a log line, and asks the name server for the reverse name: stalls of 5 s when the answer
is late), and a restart under torchrun may read a dead generation's keys from it (pytorch#135712). A file that
no other generation ever opens has neither problem, and dies with its directory.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

__all__ = ["register"]

_WATCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def register(path: str) -> None:
    """Let ``env://`` of this process meet in ``path``.

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
        from torch.distributed import FileStore

        # A group that is destroyed and made again must not read its own former keys either.
        meetings += 1
        rank, world_size = int(given["RANK"] or 0), int(given["WORLD_SIZE"] or 1)
        store = FileStore(f"{path}.{meetings}", world_size)
        if timeout is not None:
            store.set_timeout(timeout)
        yield store, rank, world_size
        raise RuntimeError("Unable to perform re-rendezvous using env:// method")

    rendezvous._rendezvous_handlers["env"] = handler
