"""Reads an incident directory. The one module of this room that opens files."""

from __future__ import annotations

import json
from pathlib import Path

from closeranks.diagnose.codec import evidence_from_json
from closeranks.errors import EvidenceError
from closeranks.evidence import Evidence

__all__ = ["MAX_FILE_BYTES", "load_incident"]

MAX_FILE_BYTES = 256 << 20  # a world of 16,384 ranks, 8 ranks to a node, is some 15 MB a node


def load_incident(directory: Path | str) -> Evidence:
    """The evidence of one incident, from ``evidence.json`` in its directory (or that file itself).

    Raises EvidenceError, with what to do next, if it is missing, too large, not JSON or not evidence.
    """
    path = Path(directory)
    if path.is_dir():
        path = path / "evidence.json"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise EvidenceError(
            f"{path}: no such file; name an incident directory, such as closeranks-runs/<job>/incidents/0001"
        ) from None
    except OSError as error:
        raise EvidenceError(f"{path}: can't be read: {error.strerror or error}") from None
    if len(text) > MAX_FILE_BYTES:
        raise EvidenceError(
            f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB, which no incident of one node is"
        )
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{path}: not JSON ({error}); the file is damaged or something else") from None
    try:
        return evidence_from_json(document)
    except EvidenceError as error:
        raise EvidenceError(f"{path}: {error}") from None
