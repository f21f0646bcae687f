"""The incidents of a job over many nodes: opened, judged, put on record, shown.

One generation that fails is one incident. Its verdict comes from an inquest over all nodes; where policy gave
a generation up because a node or the store went away, that is the verdict.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from closeranks.cluster_events import (
    ClusterEvent,
    NodeFailed,
    NodeGone,
    NodeLeft,
    StoreLost,
    Tick,
    cluster_incident_id,
)
from closeranks.controller.incident_files import write_incident
from closeranks.controller.inquest import Finding, Inquest
from closeranks.controller.sessions import Session
from closeranks.diagnose import codec
from closeranks.diagnose.outcome import detected_note, node_lost_verdict
from closeranks.events import Failure, StartGeneration
from closeranks.evidence import Evidence, EvidenceLine, Trigger, Verdict
from closeranks.policy.cluster_state import Link, Stage, World

if TYPE_CHECKING:
    from closeranks.controller.service import ClusterService

__all__ = ["Casebook", "IncidentScreen"]

_SHOW_AFTER_S = 1.0  # an incident's files and screen wait for the next first step, at most so long
_MAX_WAITING = 64


class IncidentScreen(Protocol):
    """Shows an incident to people."""

    def incident(
        self,
        evidence: Evidence,
        verdict: Verdict,
        directory: Path,
        *,
        next_generation: int | None,
        injected: bool,
    ) -> None: ...


class Casebook:
    """Of one job. ``count``: incidents so far."""

    def __init__(self, run_dir: Path, screen: IncidentScreen) -> None:
        self._run_dir = run_dir
        self._screen = screen
        self._service: ClusterService | None = None
        self._inquest: Inquest | None = None
        self._judged = -1  # the newest generation that has its incident
        self._ending_since_s = 0.0
        self._waiting: list[tuple[Evidence, Verdict, Mapping[str, Mapping[int, str]]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self.count = 0

    def attach(self, service: ClusterService) -> None:
        """Whose incidents these are."""
        self._service = service
        self.count = service.job.incidents_before

    @property
    def _owner(self) -> ClusterService:
        assert self._service is not None, "a casebook of nobody"
        return self._service

    @staticmethod
    def incident_id(generation: int) -> str:
        """As agents name it, too."""
        return cluster_incident_id(generation)

    def begin(self, world: World) -> None:
        """A generation starts: nothing more can be said of the one before."""
        if self._inquest is not None:
            self._inquest.cancel()
            self._inquest = None

    # --- evidence -----------------------------------------------------------------------------------

    def reported(self, session: Session, message: Mapping[str, Any]) -> None:
        """A node says that a generation failed there, or answers what it was asked."""
        world, generation = self._owner.job.state.world, message["generation"]
        if world is None or world.generation != generation or world.stage is not Stage.RUNNING:
            return
        if session.node not in world.members:
            return
        inquest = self._inquest
        if inquest is None or inquest.generation != generation:
            if message["type"] != "failed":
                return
            trigger = message["evidence"].get("trigger")
            kind = trigger.get("kind") if isinstance(trigger, Mapping) else ""
            inquest = self._open(world, str(kind), reporter=session.node)
        problem = inquest.add(session.node, message, session.offset_ns or 0)
        if problem:
            self._owner.notice(f"evidence of node {session.node} can't be read: {problem}")

    def accuse(self, trigger: Trigger) -> None:
        """Proved by a look at all nodes together: the generation can't go on."""
        world = self._owner.job.state.world
        if world is not None and world.stage is Stage.RUNNING and self._inquest is None:
            self._open(world, trigger.kind, trigger=trigger)

    def _open(
        self, world: World, kind: str, *, reporter: str = "", trigger: Trigger | None = None
    ) -> Inquest:
        members = [member for member in world.members.values() if not member.down]
        inquest = self._inquest = Inquest(
            self.incident_id(world.generation),
            world.generation,
            sum(member.ranks for member in world.members.values()),
            [member.node for member in members],
            self._conclude,
            trigger,
            [member.node for member in members if member.succeeded],
        )
        request = {"type": "evidence_request", "generation": world.generation, "trigger": kind}
        for member in members:
            if member.node != reporter and not self._owner.sessions.send(member.node, request):
                inquest.missing(member.node)
        return inquest

    def silent(self, node: str) -> None:
        """A node's connection is gone."""
        if self._inquest is not None:
            self._inquest.missing(node)

    def _conclude(self, finding: Finding) -> None:
        self._inquest = None
        evidence, verdict = finding.evidence, finding.verdict
        self._judge(evidence, verdict, finding.texts, detected_note(evidence, verdict))
        note = {"incident_id": evidence.incident_id, "seconds": finding.took_s}
        self._owner.job.note("evidence", note, generation=evidence.generation)
        self._owner.dispatch(NodeFailed(finding.reporter, finding.failure, finding.culprit_nodes))

    def without_evidence(self, node: str, failure: Failure) -> None:
        """A node could not even start its ranks, or not say why they failed."""
        trigger = Trigger("exit", (), failure.signature, time.monotonic_ns())
        self._judge_without(failure.generation, trigger, (node,), failure.signature)

    # --- what policy decided ------------------------------------------------------------------------

    def ended(self, before: World, after: World, event: ClusterEvent) -> None:
        """A generation is given up. Where no inquest was held, a node or the store was lost, or it was
        meant to be."""
        self._ending_since_s = time.monotonic()
        if after.generation <= self._judged:
            return
        lost, why = self._who_and_why(after, event)
        planned = before.planned is not None or after.stop_signal is not None
        if planned and not lost:
            return
        heard = [ns for name in lost if (ns := self._owner.sessions.last_heard_ns(name)) is not None]
        seats = [after.members[name] for name in lost if name in after.members]
        ranks = tuple(rank for seat in seats for rank in range(seat.first_rank, seat.first_rank + seat.ranks))
        trigger = Trigger("node_lost", ranks, why, time.monotonic_ns())
        self._judge_without(after.generation, trigger, lost, why, min(heard, default=None))

    def _who_and_why(self, world: World, event: ClusterEvent) -> tuple[tuple[str, ...], str]:
        """The nodes for which policy gave this generation up, and what became of them."""
        nodes = self._owner.job.state.nodes
        living = [member for member in world.members.values() if not member.succeeded]
        lost = [
            member.node
            for member in living
            if member.lost_at_s is not None
            or (node := nodes.get(member.node)) is None
            or node.link in (Link.LOST, Link.LEFT)
        ]
        if lost:
            return tuple(sorted(lost)), _why(event, self._owner.job.state.config.lease_length_s)
        if isinstance(event, StoreLost):
            return (event.node,), "the store in which the ranks met ended there"
        silent = [member.node for member in living if member.ended_at_s is not None]
        return tuple(sorted(silent)), "its ranks ended without a word"

    def _judge_without(
        self,
        generation: int,
        trigger: Trigger,
        nodes: tuple[str, ...],
        why: str,
        broke_ns: int | None = None,
    ) -> None:
        world = self._owner.job.state.world
        size = sum(member.ranks for member in world.members.values()) if world is not None else 0
        evidence = Evidence(self.incident_id(generation), generation, size, trigger, ranks=())
        lines = (EvidenceLine("controller", trigger.detail, "nothing was heard of it since"),)
        verdict = node_lost_verdict(nodes, why, lines)
        note = detected_note(evidence, verdict)
        note["broke_mono_ns"] = broke_ns or trigger.mono_ns
        self._judge(evidence, verdict, {}, note)

    def down(self, world: World) -> None:
        """Nothing of this generation runs any more."""
        seconds = max(0.0, time.monotonic() - self._ending_since_s)
        self._owner.job.note("killed", {"seconds": seconds, "leftovers": []}, generation=world.generation)

    # --- on record ----------------------------------------------------------------------------------

    def _judge(
        self,
        evidence: Evidence,
        verdict: Verdict,
        texts: Mapping[str, Mapping[int, str]],
        note: Mapping[str, Any],
    ) -> None:
        if evidence.generation <= self._judged:
            return
        self._judged = evidence.generation
        self.count += 1
        self._owner.job.note("detected", note, generation=evidence.generation)
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append((evidence, verdict, texts))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SHOW_AFTER_S, self.show)

    def show(self) -> None:
        """Files and screens of what has been judged since the last call."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for evidence, verdict, texts in waiting:
            directory = self._run_dir / "incidents" / evidence.incident_id
            follows = self._following(evidence.generation)
            if follows is None:
                verdict = replace(verdict, action="no restart")
            problem = write_incident(
                directory, evidence, verdict, texts.get("stacks", {}), texts.get("native", {})
            )
            if problem:
                self._owner.notice(problem)
            public = {"incident_id": evidence.incident_id, "verdict": codec.public_verdict(verdict)}
            self._owner.job.note("verdict", public, generation=evidence.generation)
            self._screen.incident(
                evidence,
                verdict,
                directory,
                next_generation=follows,
                injected=False,
            )

    def _following(self, generation: int) -> int | None:
        """The generation that follows, be it only planned as yet; None: the job ends."""
        job = self._owner.job.state.job
        if isinstance(job.plan, StartGeneration):
            return job.plan.generation
        return job.generation if job.generation > generation else None

    def close(self) -> None:
        """The job is over: show what waits."""
        if self._inquest is not None:
            self._inquest.cancel()
        self.show()


def _why(event: ClusterEvent, lease_s: float) -> str:
    """Why policy gave a generation up that nobody had reported as failed."""
    match event:
        case NodeGone():
            return event.reason
        case NodeLeft():
            return f"its agent ended: {event.reason}"
        case Tick():
            return f"nothing was heard of it for {lease_s:g} s"
        case _:
            return "its ranks ended without a word"
