"""Evidence and verdicts as JSON-able dicts, and back again. No I/O."""

from __future__ import annotations

from typing import Any

from closeranks.errors import EvidenceError
from closeranks.evidence import Evidence, RankEvidence, Verdict
from closeranks.plain import PlainError, from_plain, shown, to_plain

__all__ = ["FORMAT_VERSION", "evidence_from_json", "public_verdict", "to_json", "verdict_from_json"]

FORMAT_VERSION = 1
# Without these an object means nothing; all other fields have a value for "not known".
_REQUIRED: dict[type, frozenset[str]] = {
    Evidence: frozenset({"world_size", "ranks"}),
    RankEvidence: frozenset({"rank"}),
    Verdict: frozenset({"leaf"}),
}


def to_json(value: Evidence | Verdict) -> dict[str, Any]:
    """The whole object; ``evidence_from_json`` and ``verdict_from_json`` read it back as an equal one."""
    plain = to_plain(value)
    assert isinstance(plain, dict)
    return {"format": FORMAT_VERSION, **plain}


def public_verdict(verdict: Verdict) -> dict[str, Any]:
    """The verdict as tools rely on it (``closeranks diagnose --json``, ``verdict.json``)."""
    return {
        "leaf": verdict.leaf,
        "kind": verdict.kind,
        "table5": verdict.table5,
        "owner": verdict.owner,
        "culprits": [
            {"scope": c.scope, "rank": c.rank, "node": c.node, "gpu": c.gpu, "link": c.link}
            for c in verdict.culprits
        ],
        "action": verdict.action,
        "retry": verdict.retry,
        "confidence": verdict.confidence,
        "summary": verdict.summary,
        "signature": verdict.signature,
        "evidence": [{"source": e.source, "line": e.line, "why": e.why} for e in verdict.evidence],
    }


def evidence_from_json(document: Any) -> Evidence:
    """Raises EvidenceError for what isn't evidence, and says where."""
    evidence: Evidence = _read_document(Evidence, document, "evidence")
    numbers = [entry.rank for entry in evidence.ranks]
    if len(set(numbers)) != len(numbers):
        raise EvidenceError("evidence: ranks: a rank occurs twice; this file was not written by closeranks")
    return evidence


def verdict_from_json(document: Any) -> Verdict:
    """Raises EvidenceError for what isn't a verdict, and says where. Takes ``public_verdict``'s form, too."""
    verdict: Verdict = _read_document(Verdict, document, "verdict")
    if not 0.0 <= verdict.confidence <= 1.0:
        raise EvidenceError(f"verdict: confidence: {verdict.confidence} is not between 0 and 1")
    return verdict


def _read_document(kind: type, document: Any, what: str) -> Any:
    if not isinstance(document, dict):
        raise EvidenceError(f"{what}: expected an object, found {shown(document)}")
    version = document.get("format", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise EvidenceError(
            f"{what}: format {version!r} is not {FORMAT_VERSION}; "
            "read it with the version of closeranks that wrote it"
        )
    try:
        return from_plain(kind, document, what, _REQUIRED)
    except PlainError as error:
        raise EvidenceError(str(error)) from None
