"""Incidents on one node of many: evidence goes to the controller, which sees all nodes and judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from closeranks.agent.capture import Captured
from closeranks.agent.incidents import Incidents, now_trigger
from closeranks.agent.world import World
from closeranks.cluster_events import cluster_incident_id
from closeranks.evidence import Evidence, RankEvidence, Trigger
from closeranks.plain import to_plain

if TYPE_CHECKING:
    from closeranks.agent.node_agent import NodeAgent

__all__ = ["NodeIncidents", "fitted"]

MAX_EVIDENCE_BYTES = 700_000  # of a message of at most a MiB
_MAX_TEXT_CHARS = 16_384  # of one rank's raw stacks
_LINE_CHARS = 120
_WHOLE_LINES = 10  # from so many lines on, tracebacks and threads are kept whole
_RING = 24  # newest collectives of a rank that are kept where room is short


class NodeIncidents(Incidents):
    """Captures as on one machine, and reports."""

    _owner: NodeAgent
    _reported = -1  # the newest generation of which evidence is on its way

    def is_reported(self, generation: int) -> bool:
        return generation <= self._reported

    async def handle(self, world: World, trigger: Trigger) -> None:
        self._reported = world.generation
        await super().handle(world, trigger)

    def _id_of(self, world: World) -> str:
        return cluster_incident_id(world.generation)

    def _conclude(self, world: World, captured: Captured) -> None:
        self._report("failed", world, captured)

    async def contribute(self, world: World, trigger: str) -> None:
        """What this node knows about a generation that failed elsewhere; its ranks may have ended well."""
        self._reported = world.generation
        world.failing = True
        try:
            captured = await self._capture(world, now_trigger(trigger, (), ""), self._id_of(world))
            self._report("evidence", world, captured)
        except Exception as error:  # a bug in here must not cost the job its verdict from the other nodes
            self._owner.console.internal_error(error)

    def _report(self, kind: str, world: World, captured: Captured) -> None:
        durable = self._owner.watch.durable_progress(world)
        self._owner.watch.end(world)
        evidence, texts = fitted(captured)
        self._owner.reports.say(
            {
                "type": kind, "generation": world.generation, "durable": durable, "evidence": evidence,
                "texts": texts,
            }
        )  # fmt: skip


def fitted(captured: Captured) -> tuple[dict[str, Any], dict[str, Any]]:
    """Evidence and raw texts as plain data that a message has room for: the least telling parts go first."""
    texts: dict[str, Mapping[int, str]] = {
        "stacks": {rank: text[:_MAX_TEXT_CHARS] for rank, text in captured.stacks.items()},
        "native": {rank: text[:_MAX_TEXT_CHARS] for rank, text in captured.native.items()},
    }
    evidence = captured.evidence
    for reduced, with_texts in (
        (evidence, True),
        (evidence, False),
        (_reduced(evidence, ring=_RING, lines=10), False),
        (_reduced(evidence, ring=4, lines=2), False),
        (_reduced(evidence, ring=0, lines=0), False),
    ):
        plain = to_plain(reduced), to_plain(texts) if with_texts else {}
        if _size_chars(plain) <= MAX_EVIDENCE_BYTES:
            break
    return plain


def _size_chars(value: Any) -> int:
    """About how long ``value`` is as JSON; quicker than making it."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace")) + 3
    if isinstance(value, Mapping):
        return sum(len(key) + 4 + _size_chars(item) for key, item in value.items()) + 2
    if isinstance(value, list | tuple):
        return sum(_size_chars(item) + 1 for item in value) + 2
    return 21 if isinstance(value, int | float) and not isinstance(value, bool) else 6


def _reduced(evidence: Evidence, *, ring: int, lines: int) -> Evidence:
    def smaller(item: RankEvidence) -> RankEvidence:
        page = item.page
        if page is not None:
            kept = page.collectives[len(page.collectives) - ring :] if ring else ()
            page = replace(page, collectives=kept, steps=page.steps[-4:])
        error, process = item.error, item.process
        if error is not None and lines < _WHOLE_LINES:
            room = lines * _LINE_CHARS
            error = replace(
                error, traceback=error.traceback[len(error.traceback) - room :], message=error.message[:room]
            )
        if process is not None and lines < _WHOLE_LINES:
            waits = process.child_waits[:lines]
            process = replace(process, threads=process.threads[:lines], child_waits=waits)
        return replace(
            item,
            page=page,
            error=error,
            process=process,
            stack=item.stack[: 4 * lines],
            log_tail=item.log_tail[len(item.log_tail) - lines :] if lines else (),
            native_stack=item.native_stack[:lines],
        )

    return replace(evidence, ranks=tuple(smaller(item) for item in evidence.ranks))
