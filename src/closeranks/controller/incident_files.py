"""An incident's directory: evidence and verdict for machines, stacks and log tails for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from closeranks.diagnose import codec
from closeranks.evidence import Evidence, Verdict

__all__ = ["write_incident"]

# Beyond that nobody reads it with bare eyes, and Python indents so slowly (a second for 10,000 ranks) that
# agents would wait for the answers to their heartbeats.
_INDENTED_RANKS = 256


def write_incident(
    directory: Path,
    evidence: Evidence,
    verdict: Verdict,
    stacks: Mapping[int, str],
    native: Mapping[int, str],
) -> str:
    """Write the incident's files; returns "" or what went wrong (a full disk must not stop the restart)."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        indent = 1 if len(evidence.ranks) <= _INDENTED_RANKS else None
        _write(directory / "evidence.json", json.dumps(codec.to_json(evidence), indent=indent))
        _write(directory / "verdict.json", json.dumps(codec.public_verdict(verdict), indent=1))
        for suffix, texts in (("txt", stacks), ("native.txt", native)):
            for rank, text in texts.items():
                (directory / "stacks").mkdir(exist_ok=True)
                _write(directory / "stacks" / f"{rank}.{suffix}", text)
        for item in evidence.ranks:
            if item.log_tail:
                (directory / "logs").mkdir(exist_ok=True)
                _write(directory / "logs" / f"{item.rank}.err", "\n".join(item.log_tail) + "\n")
    except OSError as error:
        return f"can't write {error.filename or directory}: {error.strerror}"
    return ""


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a reader never sees half a file."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text, "utf-8", "surrogateescape")
    partial.replace(path)
