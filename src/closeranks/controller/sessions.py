"""Who is attached: one connection an agent, what it last said of its ranks, how its clock stands to ours."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from closeranks.controller.peer import Peer
from closeranks.linux import boot_id

__all__ = ["NodeProgress", "Session", "Sessions"]

_MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """What a node's ranks have done in a generation, the slowest first; ``absolute_step`` -1: never told."""

    generation: int
    step: int
    absolute_step: int
    saves: int
    saved_step: int
    init_done: bool


@dataclass(slots=True, eq=False)
class Session:
    """One agent's connection. ``offset_ns``: from its monotonic clock to ours, at most as wrong as the
    quickest of its messages was slow; 0 on the same host."""

    node: str
    session: str
    peer: Peer
    same_host: bool
    offset_ns: int | None = None
    heard_ns: int = field(default_factory=time.monotonic_ns)
    progress: NodeProgress | None = None

    @classmethod
    def of(cls, hello: Mapping[str, Any], peer: Peer) -> Session:
        boot = hello["boot"]
        return cls(hello["node"], hello["session"], peer, bool(boot) and boot == boot_id())

    def heard(self, beat: Mapping[str, Any]) -> None:
        """Take in a heartbeat."""
        self.heard_ns = time.monotonic_ns()
        offset_ns = 0 if self.same_host else self.heard_ns - beat["mono_ns"]
        if self.offset_ns is None or offset_ns < self.offset_ns:
            self.offset_ns = offset_ns
        row, generation = beat.get("progress"), beat.get("generation")
        if row is not None and generation is not None:
            self.progress = NodeProgress(generation, *row)

    def send(self, message: Mapping[str, Any]) -> bool:
        return self.peer.send(message)


class Sessions:
    """The newest session of each node that is attached."""

    def __init__(self) -> None:
        self._by_node: dict[str, Session] = {}
        self._last_heard_ns: dict[str, int] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._by_node.values()))

    def __len__(self) -> int:
        return len(self._by_node)

    def get(self, node: str) -> Session | None:
        return self._by_node.get(node)

    def add(self, session: Session) -> None:
        """From now on this is the node's line; an older one is closed."""
        old = self._by_node.get(session.node)
        self._by_node[session.node] = session
        if old is not None:
            old.peer.close("the agent has a newer connection")

    def remove(self, session: Session) -> None:
        if self._by_node.get(session.node) is session:
            del self._by_node[session.node]
            self._last_heard_ns.pop(session.node, None)
            self._last_heard_ns[session.node] = session.heard_ns
            if len(self._last_heard_ns) > _MAX_REMEMBERED:
                del self._last_heard_ns[next(iter(self._last_heard_ns))]

    def last_heard_ns(self, node: str) -> int | None:
        """When the node last said anything, on our monotonic clock; None: never, or long ago."""
        session = self._by_node.get(node)
        return session.heard_ns if session is not None else self._last_heard_ns.get(node)

    def is_current(self, session: Session) -> bool:
        return self._by_node.get(session.node) is session

    def send(self, node: str, message: Mapping[str, Any]) -> bool:
        """False if the node isn't attached: what it must know it will be told when it comes back."""
        session = self._by_node.get(node)
        return session is not None and session.send(message)
