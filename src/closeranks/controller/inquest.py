"""One failing generation over many nodes: evidence from all of them, one verdict, one fact for policy.

Whoever reports first is often a victim: a rank's death shows on the nodes that were talking to it, too. So
every other node is asked at once, and judged together; who doesn't answer in time is part of the evidence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from closeranks.diagnose import diagnose
from closeranks.diagnose.codec import evidence_from_json
from closeranks.diagnose.merge import NodePart, merge
from closeranks.diagnose.outcome import failure_of, node_lost_verdict
from closeranks.errors import EvidenceError
from closeranks.events import Failure, FailureKind
from closeranks.evidence import Evidence, Trigger, Verdict

__all__ = ["Finding", "Inquest"]

_QUICK_S, _THOROUGH_S = 0.5, 1.5
_QUICK = frozenset({"exit", "exception"})
_MAX_TEXTS = 4096  # ranks whose raw stacks are kept


@dataclass(frozen=True, slots=True)
class Finding:
    """What an inquest came to. ``texts``: raw stacks, by "stacks" or "native" and rank."""

    evidence: Evidence
    verdict: Verdict
    failure: Failure
    reporter: str
    culprit_nodes: tuple[str, ...]
    texts: Mapping[str, Mapping[int, str]]
    took_s: float


class Inquest:
    """Open from the first report of a generation's failure until ``conclude`` has been called, once.

    ``through``: nodes whose ranks have all ended well; they may have nothing to say.
    ``trigger``: nobody has reported anything; it was proved by looking at all nodes together.
    """

    def __init__(
        self,
        incident_id: str,
        generation: int,
        world_size: int,
        nodes: Iterable[str],
        conclude: Callable[[Finding], None],
        trigger: Trigger | None = None,
        through: Iterable[str] = (),
    ) -> None:
        self.generation = generation
        self._incident_id = incident_id
        self._world_size = world_size
        self._waiting = set(nodes)
        self._through = frozenset(through)
        self._absent: set[str] = set()
        self._conclude = conclude
        self._parts: list[NodePart] = []
        self._durable = False
        self._texts: dict[str, dict[int, str]] = {"stacks": {}, "native": {}}
        self._first = ""  # who said anything, be it unreadable
        self._reporter = ""
        self._began_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._done = False
        self._trigger = trigger
        # The first part that can be read may tell that it is to be quicker.
        self._timer = asyncio.get_running_loop().call_later(_THOROUGH_S, self._finish)

    def add(self, node: str, message: Mapping[str, Any], offset_ns: int) -> str:
        """A node's report, or its answer; returns "" or why it can't be read. May conclude."""
        if self._done or node not in self._waiting:
            return ""
        self._waiting.discard(node)
        self._first = self._first or node
        problem = ""
        try:
            evidence = evidence_from_json(message["evidence"])
        except EvidenceError as error:
            problem = str(error)
        else:
            self._parts.append(NodePart(node, evidence, offset_ns))
            self._durable = self._durable or message["durable"]
            self._keep_texts(message["texts"])
            if not self._reporter:
                self._reporter = node
                if self._trigger is None and evidence.trigger.kind in _QUICK and self._timer is not None:
                    self._timer.cancel()
                    self._timer = asyncio.get_running_loop().call_later(_QUICK_S, self._finish)
        self._finish_if_complete()
        return problem

    def missing(self, node: str) -> None:
        """This node can't be asked: it isn't attached."""
        if node in self._waiting:
            self._waiting.discard(node)
            self._absent.add(node)
        self._finish_if_complete()

    def cancel(self) -> None:
        self._done = True
        if self._timer is not None:
            self._timer.cancel()

    def _keep_texts(self, texts: Mapping[str, Any]) -> None:
        for kind, kept in self._texts.items():
            for rank, text in (texts.get(kind) or {}).items():
                if isinstance(text, str) and rank.isdecimal() and len(rank) < 8 and len(kept) < _MAX_TEXTS:
                    kept[int(rank)] = text

    def _finish_if_complete(self) -> None:
        if not self._waiting and self._first:
            self._finish()

    def _finish(self) -> None:
        if self._done:
            return
        self.cancel()
        if not self._first:
            return  # nobody answers: then leases end
        silent = tuple(sorted((self._waiting | self._absent) - self._through))
        if self._parts:
            evidence = merge(
                self._parts,
                incident_id=self._incident_id,
                generation=self.generation,
                world_size=self._world_size,
            )
        else:
            trigger = Trigger("exit", (), f"node {self._first} reported a failure", time.monotonic_ns())
            evidence = Evidence(self._incident_id, self.generation, self._world_size, trigger, ranks=())
        if self._trigger is not None:
            evidence = replace(evidence, trigger=self._trigger)
        verdict = diagnose(evidence)
        failure = failure_of(evidence, verdict, durable_progress=self._durable)
        if silent and not verdict.culprits:
            why = "it gave no evidence when its peers lost it"
            verdict = node_lost_verdict(silent, why, verdict.evidence)
            failure = _about_nodes(failure, verdict)
        culprits = {culprit.node for culprit in verdict.culprits if culprit.node}
        self._conclude(
            Finding(
                evidence=evidence,
                verdict=verdict,
                failure=failure,
                reporter=self._reporter or self._first,
                culprit_nodes=tuple(sorted(culprits)),
                texts=self._texts,
                took_s=time.monotonic() - self._began_s,
            )
        )


def _about_nodes(failure: Failure, verdict: Verdict) -> Failure:
    """The failure as one of nodes: nothing the script did, whatever its ranks said when they lost a peer."""
    return replace(failure, kind=FailureKind.NODE_LOST, rank=None, signature=verdict.signature)
