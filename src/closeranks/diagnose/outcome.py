"""From an incident's evidence and verdict to the fact for policy and the note for the journal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from closeranks.events import Failure, FailureKind
from closeranks.evidence import Culprit, Evidence, EvidenceLine, RankEvidence, Verdict
from closeranks.progress import WORLD_GROUP
from closeranks.taxonomy import leaf

__all__ = ["detected_note", "failure_of", "kind_of_trigger", "node_lost_verdict"]

_KINDS = {
    "stopped": FailureKind.STOPPED,
    "desync": FailureKind.DESYNC,
    "deadlock": FailureKind.DEADLOCK,
    "blocked": FailureKind.DEADLOCK,
    "early_exit": FailureKind.EARLY_EXIT,
    "init_stall": FailureKind.INIT_STALL,
    "hang_timeout": FailureKind.HANG_TIMEOUT,
}
_DESYNCS = frozenset(
    {"skip_collective", "extra_collective", "type_mismatch", "size_mismatch", "dtype_mismatch", "wrong_order"}
)
_OWN_SIGNALS = frozenset(
    {4, 6, 7, 8, 11}
)  # SIGILL SIGABRT SIGBUS SIGFPE SIGSEGV: raised by the process itself


def kind_of_trigger(kind: str) -> FailureKind | None:
    """What a trigger says by itself, whatever the verdict; None: nothing."""
    return _KINDS.get(kind)


def detected_note(evidence: Evidence, verdict: Verdict) -> dict[str, Any]:
    """For the journal: when it broke and when that was known, on CLOCK_MONOTONIC of who writes it."""
    trigger = evidence.trigger
    exits = [item.exit_mono_ns for item in evidence.ranks if item.exit_mono_ns is not None]
    steps = [item.page.step_ns for item in evidence.ranks if item.page is not None]
    return {
        "incident_id": evidence.incident_id,
        "trigger": {"kind": trigger.kind, "ranks": list(trigger.ranks), "detail": trigger.detail},
        "last_progress_mono_ns": max(steps, default=0),
        "broke_mono_ns": _broke_ns(evidence, verdict) or min(exits, default=trigger.mono_ns),
        "detected_mono_ns": trigger.mono_ns,
    }


def failure_of(evidence: Evidence, verdict: Verdict, *, durable_progress: bool) -> Failure:
    """The fact that policy decides on, from an incident's evidence and verdict."""
    number = next(iter(verdict.culprit_ranks), None)
    broke = next((item for item in evidence.ranks if item.rank == number), None)
    step = min((item.page.progress_steps for item in evidence.ranks if item.page is not None), default=0)
    if broke is not None and broke.page is not None:
        step = broke.page.progress_steps
    codes = [item.exit.shell_code for item in evidence.ranks if item.exit is not None and not item.exit.ok]
    code = codes[0] if codes else 1
    if broke is not None and broke.exit is not None and not broke.exit.ok:
        code = broke.exit.shell_code
    return Failure(
        generation=evidence.generation,
        incident_id=evidence.incident_id,
        kind=_kind(evidence, verdict),
        rank=number,
        signature=verdict.signature,
        step=step,
        startup=step == 0,
        durable_progress=durable_progress,
        exit_code=code,
        collectives=_collectives_done(evidence, broke),
    )


def _collectives_done(evidence: Evidence, broke: RankEvidence | None) -> int:
    """How many the culprit, or else every rank, has completed on the default group; 0: there were steps."""
    meant = evidence.ranks if broke is None else (broke,)
    pages = [item.page for item in meant if item.page is not None]
    if not pages or any(page.step for page in pages):
        return 0
    # The page's own number is that of the last but one: it is written when a collective begins.
    done = [
        max([page.world_seq, *(c.seq for c in page.collectives if c.done and c.group == WORLD_GROUP)])
        for page in pages
    ]
    return min(done)


def _broke_ns(evidence: Evidence, verdict: Verdict) -> int | None:
    """When the culprit broke: its exception, its death, or its last sign of life; None without a culprit."""
    for item in evidence.ranks:
        if item.rank in verdict.culprit_ranks:
            if item.error is not None:
                return item.error.mono_ns
            if item.exit_mono_ns is not None:
                return item.exit_mono_ns
            return item.page.tick_ns if item.page is not None else None
    return None


def _kind(evidence: Evidence, verdict: Verdict) -> FailureKind:
    by_trigger = _KINDS.get(evidence.trigger.kind)
    if by_trigger is not None:
        return by_trigger
    if verdict.kind in _DESYNCS:
        return FailureKind.DESYNC
    if verdict.kind == "out_of_memory":
        return FailureKind.OUT_OF_MEMORY
    broke = next((item for item in evidence.ranks if item.rank in verdict.culprit_ranks), None)
    if broke is None:
        broke = next((item for item in evidence.ranks if item.exit is not None and not item.exit.ok), None)
    if broke is None:
        return FailureKind.EXIT_CODE
    if broke.error is not None:
        return FailureKind.EXCEPTION
    if broke.exit is not None and broke.exit.signal is not None:
        return FailureKind.CRASH if broke.exit.signal in _OWN_SIGNALS else FailureKind.SIGNAL
    return FailureKind.EXIT_CODE


def node_lost_verdict(nodes: Sequence[str], why: str, lines: Sequence[EvidenceLine] = ()) -> Verdict:
    """Nodes that are gone, as far as can be told from outside: what has happened to them nobody knows yet."""
    meaning = leaf("host.lost")
    named = ", ".join(nodes[:4]) + (", ..." if len(nodes) > 4 else "")
    return Verdict(
        leaf=meaning.name,
        kind="node_lost",
        culprits=tuple(Culprit("node", node=node) for node in nodes),
        action="replace the node; look at its console, its power and its network",
        retry=True,
        confidence=0.9,
        summary=f"node{'s' if len(nodes) > 1 else ''} {named} lost: {why}",
        signature=f"node {named} lost",
        evidence=tuple(lines),
        table5=meaning.table5,
        owner=meaning.owner,
        missing=("the node's own logs: its kernel log, and what its power supply and its switch saw",),
    )
