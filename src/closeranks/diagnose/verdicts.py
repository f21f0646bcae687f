"""From what was found to the verdict that is written down: taxonomy, advice, bounds. One place for wording
that all rules share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from closeranks.diagnose.text import clean
from closeranks.evidence import Culprit, Evidence, EvidenceLine, Verdict
from closeranks.taxonomy import leaf as leaf_of

__all__ = ["Finding", "line", "to_verdict"]

MAX_LINES = 16
_MAX_LINE_CHARS = 400


@dataclass(frozen=True, slots=True)
class Finding:
    """One explanation of an incident. ``onset_ns`` is when it began, as far as known (monotonic)."""

    leaf: str
    kind: str
    ranks: tuple[int, ...]
    summary: str
    signature: str
    confidence: float
    lines: tuple[EvidenceLine, ...] = ()
    onset_ns: int | None = None
    missing: tuple[str, ...] = ()
    action: str | None = None  # None: the leaf's own advice
    retry: bool | None = None


_RESTART = "restart in place"
_CHECK = "run health check"
# What helps against each leaf (action, does a retry help). Leaves that aren't here: restart, retry.
_ADVICE: dict[str, tuple[str, bool]] = {
    "app.env_import": ("stop: user must fix the environment or the import", False),
    "app.config": ("stop: user must fix the configuration, path or permission", False),
    "app.cuda_oom": ("stop: user must lower device memory use", False),
    "app.device_assert": ("stop: user must fix the asserted condition", False),
    "app.shm": ("stop: user must free or enlarge /dev/shm", False),
    "storage.full": ("stop: user must free disk space or quota", False),
    "storage.ckpt_corrupt": ("stop: user must choose an older checkpoint", False),
    "sys.driver": (_CHECK, False),
    "sys.fabricmanager": (_CHECK, True),
    "gpu.hbm": (_CHECK, True),
    "gpu.off_bus": (_CHECK, True),
    "storage.stall": (_CHECK, True),
    "storage.stale_handle": (_CHECK, True),
    "storage.io_error": (_CHECK, True),
}


def line(source: str, text: str, why: str) -> EvidenceLine:
    """An evidence line out of text that nobody has vetted."""
    return EvidenceLine(clean(source, 80), clean(text, _MAX_LINE_CHARS), clean(why, 200))


def to_verdict(finding: Finding, evidence: Evidence) -> Verdict:
    """Fill in what follows from the leaf, and hold every bound."""
    meaning = leaf_of(finding.leaf)
    action, retry = _ADVICE.get(finding.leaf, (_RESTART, True))
    nodes = {item.rank: item.node or evidence.node for item in evidence.ranks}
    culprits = tuple(
        Culprit("rank", rank=rank, node=clean(nodes.get(rank, evidence.node), 120) or None)
        for rank in finding.ranks
    )
    return Verdict(
        leaf=finding.leaf,
        kind=finding.kind,
        culprits=culprits,
        action=finding.action or action,
        retry=retry if finding.retry is None else finding.retry,
        confidence=round(min(1.0, max(0.0, finding.confidence)), 2),
        summary=clean(finding.summary, 400),
        signature=clean(finding.signature, 300),
        evidence=_distinct(finding.lines)[:MAX_LINES],
        table5=meaning.table5,
        owner=meaning.owner,
        missing=tuple(clean(m, 200) for m in finding.missing[:8]),
    )


def _distinct(lines: Iterable[EvidenceLine]) -> tuple[EvidenceLine, ...]:
    kept: dict[tuple[str, str], EvidenceLine] = {}
    for entry in lines:
        kept.setdefault((entry.source, entry.line), entry)
    return tuple(kept.values())
