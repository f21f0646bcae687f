"""An agent's line to its job's controller: attach, stay attached, come back; and the lease that hangs on it.

The lease counts from when the newest answered heartbeat was **sent**, so that it always ends here before it
ends at the controller, whatever the network does. Where the lease is over, the owner kills its ranks: others
may be about to take their place. The one exception: as long as the controller's own host says that nobody
listens there, nobody decides, and ranks may go on for a grace (docs/decisions/0008-many-nodes.md).

Where a job has several controllers, one of them leads, and the others listen nowhere. Then only a refusal of
the one that our lease is from proves anything, and the grace counts from when that one last answered: whoever
leads next began after that, and waits as long (docs/decisions/0009-standby.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from closeranks import __version__
from closeranks.backoff import Backoff
from closeranks.controller.connect import Connected, ConnectOutcome, connect
from closeranks.controller.credentials import Credentials
from closeranks.controller.peer import Peer
from closeranks.linux import boot_id, boottime_s

__all__ = ["LinkOwner", "NodeIdentity", "NodeLink", "split_endpoint"]

_CONNECT_TIMEOUT_S = 2.0
_WELCOME_S = 1.5
_RETRY_FIRST_S, _RETRY_MAX_S = 0.05, 1.0
_MAX_BEATS_UNANSWERED = 64
_LEASE_LOOKS = 20  # a lease; how late its end may be noticed
_CLOSE_TIMEOUT_S = 1.0
_LEAST_PATIENCE_S = 1.5
_SILENT = "it does not answer"


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Who this agent is. ``session``: a random id of this very process; ``address``: where ranks and stores
    of this node can be reached, "" = the one that faces the controller."""

    job_id: str
    node: str
    session: str
    slots: int
    address: str = ""


class LinkOwner(Protocol):
    """Who is told what comes over the line."""

    def running(self) -> int | None:
        """The generation whose ranks, or traces of them, are here."""

    def beat(self) -> Mapping[str, Any]:
        """What the next heartbeat says: ``generation``, ``ranks``, ``progress``."""

    def attached(self) -> None:
        """The controller has let us in, perhaps again: what it may not have heard is to be said again."""

    def obey(self, message: Mapping[str, Any]) -> None:
        """An order."""

    def lease_held(self, end_s: float) -> None:
        """We may act for the job until then, on our clock; said again and again, as it moves."""

    def lease_over(self, why: str) -> None:
        """Nothing of this job may run here from now on, until there is a new order."""

    def turned_away(self, reason: str) -> None:
        """The controller wants nothing of us, ever."""


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """``host:port`` -> (host, port), ``/path`` -> (path, 0). ValueError for anything else."""
    if endpoint.startswith("/"):
        return endpoint, 0
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{endpoint!r} is neither HOST:PORT nor the path of a socket")
    return host.removeprefix("[").removesuffix("]"), int(port)


class NodeLink:
    """Attached, or trying to be, from ``run`` to ``close``. ``endpoint``: of the controller, or of several,
    with commas. ``refusals_count``: the controller's own host is reached directly, with no proxy that would
    refuse for it."""

    def __init__(
        self,
        endpoint: str,
        credentials: Credentials | None,
        identity: NodeIdentity,
        owner: LinkOwner,
        *,
        uniform: Callable[[], float],
        refusals_count: bool = True,
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        self.address = identity.address
        self._places = [split_endpoint(one) for one in endpoint.split(",")]
        self._place = 0  # where we try next
        self._lease_from = -1  # the place that last answered us
        self._term = -1  # of the newest leader that let us in
        self._answered_s = 0.0  # when the newest heartbeat that was answered was sent
        self._orphan_until_s: float | None = None  # who gave us our lease is dead; until then, nobody decides
        self._credentials = credentials
        self._identity = identity
        self._owner = owner
        self._backoff = Backoff(uniform, first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S)
        self._refusals_count = refusals_count
        self._clock = clock
        self._peer: Peer | None = None
        self._welcome = False
        self._beat_s = 1.0
        self._lease_s = 0.0
        self._grace_s = 0.0
        self._lease_end_s = 0.0
        self._seq = 0
        self._sent: deque[tuple[int, float]] = deque(maxlen=_MAX_BEATS_UNANSWERED)
        self._alone_until_s: float | None = None  # the controller's host says that nobody is there
        self._lapsed = True  # before the first welcome there is no lease
        self._closing = False
        self._next_beat = asyncio.Event()

    # --- what the owner calls

    @property
    def holds_lease(self) -> bool:
        return self._clock() < self._lease_end_s or self._in_grace()

    def send(self, message: Mapping[str, Any]) -> bool:
        """False if it can't be sent now."""
        return self._welcome and self._peer is not None and self._peer.send(message)

    def beat_now(self) -> None:
        """There is something to tell that shouldn't wait for the next beat."""
        self._next_beat.set()

    async def run(self) -> None:
        """Attach again and again; returns after ``close``."""
        watching = asyncio.get_running_loop().create_task(self._watch_lease())
        try:
            while not self._closing:
                await self._try_each()
                if not self._closing:
                    await asyncio.sleep(self._backoff.next_s())
        finally:
            watching.cancel()

    async def close(self, reason: str) -> None:
        """Say goodbye. Whatever ran here has ended."""
        self._closing = True
        peer, self._peer = self._peer, None
        if peer is not None:
            if self._welcome:
                peer.send({"type": "goodbye", "reason": reason})
            peer.close(reason)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(peer.wait_closed(), _CLOSE_TIMEOUT_S)

    # --- the line

    async def _try_each(self) -> None:
        """Each place once, or until one has let us in, to which we come back first."""
        for _ in self._places:
            place = self._place
            found = await connect(*self._places[place], self._credentials, timeout_s=_CONNECT_TIMEOUT_S)
            self._note_outcome(found)
            if found.peer is not None and await self._attach(found.peer):
                return
            self._place = (place + 1) % len(self._places)
            if self._closing:
                return

    def _note_outcome(self, found: Connected) -> None:
        if len(self._places) > 1:
            died = found.outcome is ConnectOutcome.REFUSED and self._place == self._lease_from
            # Where the lease is over, whoever gave it may have decided about us before it died.
            if died and self._refusals_count and self._clock() < self._lease_end_s:
                self._orphan_until_s = self._answered_s + self._grace_s
        elif found.outcome is ConnectOutcome.OK:
            if self._alone_until_s is not None:  # somebody is there again; it has so long to let us in
                self._alone_until_s = min(self._alone_until_s, self._clock() + _WELCOME_S)
        elif found.outcome is not ConnectOutcome.REFUSED:
            self._alone_until_s = None
        elif self._alone_until_s is None and self._refusals_count and self._clock() < self._lease_end_s:
            self._alone_until_s = self._clock() + self._grace_s

    async def _attach(self, peer: Peer) -> bool:
        """One connection, from hello to its end. False: this isn't who leads, or it answers no more."""
        self._peer, self._welcome = peer, False
        self._sent.clear()
        if not self.address:
            self.address = peer.own_address() or "127.0.0.1"
        who = self._identity
        self._remember_beat(0)
        peer.send(
            {
                "type": "hello", "job": who.job_id, "node": who.node, "session": who.session,
                "slots": who.slots, "address": self.address, "running": self._owner.running(),
                "version": __version__, "boot": boot_id(),
            }
        )  # fmt: skip
        beating: asyncio.Task[None] | None = None
        try:
            while (message := await peer.receive()) is not None:
                kind = message["type"]
                if kind == "welcome":
                    if not self._welcomed(message):
                        return False
                    beating = beating or asyncio.get_running_loop().create_task(self._keep_beating(peer))
                    self._owner.attached()
                elif kind == "heartbeat_ack":
                    self._answered(message["seq"])
                elif kind == "refused":
                    self._alone_until_s = None
                    if message["for_good"]:
                        self._owner.turned_away(message["reason"])
                    return False
                elif self._welcome:
                    self._owner.obey(message)
            return self._welcome and peer.closed_because != _SILENT
        finally:
            if beating is not None:
                beating.cancel()
            if self._peer is peer:
                self._peer = None
            self._welcome = False
            peer.close("attaching anew")

    def _welcomed(self, message: Mapping[str, Any]) -> bool:
        """False: it was deposed long ago, and doesn't know yet."""
        term = message.get("term")
        if term is not None and term < self._term:
            return False
        self._term = term if term is not None else self._term
        self._lease_from, self._orphan_until_s, self._alone_until_s = self._place, None, None
        self._beat_s, self._lease_s = max(0.01, message["beat_s"]), message["lease_s"]
        self._grace_s = message["grace_s"]
        self._welcome = True
        self._backoff.reset()
        self._answered(0)
        return True

    async def _keep_beating(self, peer: Peer) -> None:
        while not peer.closed_because:
            if len(self._places) > 1 and self._is_silent():
                peer.abort(_SILENT)
                return
            self._next_beat.clear()
            self._seq += 1
            self._remember_beat(self._seq)
            beat = {"type": "heartbeat", "seq": self._seq, "mono_ns": time.monotonic_ns()}
            peer.send({**beat, **self._owner.beat()})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._next_beat.wait(), self._beat_s)

    def _is_silent(self) -> bool:
        """Whether it is time to look for another controller: this one may be frozen, with its lines open."""
        patience_s = max(_LEAST_PATIENCE_S, self._lease_s / 2)
        return bool(self._sent) and self._clock() - self._sent[0][1] > patience_s

    # --- the lease

    def _remember_beat(self, seq: int) -> None:
        self._sent.append((seq, self._clock()))

    def _answered(self, seq: int) -> None:
        while self._sent and self._sent[0][0] <= seq:
            number, sent_s = self._sent.popleft()
            if number == seq:
                self._lease_end_s = max(self._lease_end_s, sent_s + self._lease_s)
                self._answered_s = sent_s
                self._lapsed = False

    def _in_grace(self) -> bool:
        if self._orphan_until_s is not None:
            return self._clock() < self._orphan_until_s
        return self._alone_until_s is not None and self._clock() < self._alone_until_s

    async def _watch_lease(self) -> None:
        while True:
            if self.holds_lease:
                alone_s = self._clock() + self._lease_s / 2 if self._in_grace() else 0.0
                self._owner.lease_held(max(self._lease_end_s, alone_s))
            elif not self._lapsed:
                self._lapsed = True
                self._owner.lease_over("the controller has not answered for as long as the lease lasts")
            await asyncio.sleep(max(0.01, self._lease_s / _LEASE_LOOKS))
