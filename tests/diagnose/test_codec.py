"""Evidence and verdicts as JSON: whole, tolerant of what is missing, strict about what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from closeranks import plain
from closeranks.diagnose import diagnose, load
from closeranks.diagnose.codec import evidence_from_json, public_verdict, to_json, verdict_from_json
from closeranks.errors import EvidenceError
from closeranks.evidence import Evidence, RankEvidence, Trigger
from closeranks.progress import Phase

from .scenes import CLOSED, SIGKILL, Job, grouped
from .test_matrix import LOCK, halted, sleeping


def full_evidence() -> Evidence:
    """With something in every field."""
    job = halted(4, 1, grouped)
    victim = job.victim(job.ranks[0], CLOSED, at_ns=job.now_ns)
    dead = job.dead(job.ranks[2], SIGKILL, after_ms=3, log_tail=("é \ud800", ""), native_stack=("a", "b"))
    entries = {0: victim, 1: sleeping(job, stack=LOCK), 2: dead}
    return job.evidence("blocked", entries, ranks=(1,), oom_kills=1, oom_victims=(9,), shm_free_bytes=5)


def through_text(document: dict[str, Any]) -> Any:
    return json.loads(json.dumps(document))


def test_round_trips_through_text() -> None:
    evidence = full_evidence()
    assert evidence_from_json(through_text(to_json(evidence))) == evidence
    verdict = diagnose(evidence)
    assert verdict_from_json(through_text(to_json(verdict))) == verdict


def test_the_public_form_is_the_contract() -> None:
    document = public_verdict(diagnose(full_evidence()))
    assert list(document) == [
        "leaf", "kind", "table5", "owner", "culprits", "action", "retry", "confidence", "summary",
        "signature", "evidence",
    ]  # fmt: skip
    assert document["culprits"] == [{"scope": "rank", "rank": 2, "node": "node7", "gpu": None, "link": None}]
    assert all(list(line) == ["source", "line", "why"] for line in document["evidence"])
    assert verdict_from_json(through_text(document)).culprit_ranks == (2,)


def test_missing_and_unknown_fields_are_taken() -> None:
    """As an older or a newer version would write them."""
    least = evidence_from_json(
        {"world_size": 2, "ranks": [{"rank": 0}, {"rank": 1, "tomorrow": {"x": 1}}], "new": 1}
    )
    assert least.ranks == (RankEvidence(0, 0), RankEvidence(1, 0))
    assert least.trigger == Trigger("")
    assert diagnose(least).leaf == "unknown"
    page = {"rank": 0, "ranks": [], "world_size": 1}
    partial = evidence_from_json({"world_size": 1, "ranks": [{"rank": 0, "page": page}]}).ranks[0].page
    assert partial is not None
    assert (partial.phase, partial.collectives, partial.desync_rank) == (Phase.WAITING, (), None)


BAD: list[tuple[Any, str]] = [
    (None, "expected an object, found null"),
    ([], "expected an object, found a list"),
    ({}, "world_size is missing"),
    ({"world_size": 2}, "ranks is missing"),
    ({"world_size": "2", "ranks": []}, "world_size: expected a whole number"),
    ({"world_size": True, "ranks": []}, "world_size: expected a whole number"),
    ({"world_size": 2.0, "ranks": []}, "world_size: expected a whole number"),
    ({"world_size": 10**30, "ranks": []}, "world_size: expected a whole number of at most 64 bits"),
    ({"world_size": 1, "ranks": {}}, "ranks: expected a list"),
    ({"world_size": 1, "ranks": [3]}, r"ranks\[0\]: expected an object"),
    ({"world_size": 1, "ranks": [{}]}, r"ranks\[0\]: rank is missing"),
    ({"world_size": 1, "ranks": [{"rank": 0}, {"rank": 0}]}, "a rank occurs twice"),
    ({"world_size": 1, "ranks": [{"rank": 0, "exit": {}}]}, "either a code or a signal"),
    ({"world_size": 1, "ranks": [{"rank": 0, "exit": {"code": 1, "signal": 9}}]}, "a code or a signal"),
    ({"world_size": 1, "ranks": [{"rank": 0, "log_tail": "x"}]}, "log_tail: expected a list"),
    ({"world_size": 1, "ranks": [{"rank": 0, "log_tail": [1]}]}, r"log_tail\[0\]: expected text"),
    ({"world_size": 1, "ranks": [{"rank": 0, "answered": 1}]}, "answered: expected true or false"),
    ({"world_size": 1, "ranks": [{"rank": 0, "page": {"phase": 99}}]}, "phase: int 99 is not a known phase"),
    ({"world_size": 1, "ranks": [{"rank": 0, "page": {"groups": []}}]}, "groups: expected an object"),
    ({"world_size": 1, "ranks": [{"rank": 0, "page": {"groups": {"x": ["", []]}}}]}, "'x' is not a number"),
    ({"world_size": 1, "ranks": [{"rank": 0, "page": {"groups": {"1": [""]}}}]}, "expected 2 items, found 1"),
    ({"world_size": 1, "ranks": [], "step_p99_s": float("nan")}, "step_p99_s: expected a number"),
    ({"world_size": 1, "ranks": [], "step_p99_s": 10**400}, "step_p99_s: expected a number"),
    ({"world_size": 1, "ranks": [], "trigger": "exit"}, "trigger: expected an object"),
    ({"format": 2, "world_size": 1, "ranks": []}, "format 2 is not 1"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "words"), BAD, ids=lambda v: str(v)[:40])
def test_wrong_types_are_refused_with_their_place(document: Any, words: str) -> None:
    with pytest.raises(EvidenceError, match=words):
        evidence_from_json(document)


def test_wrong_verdicts_are_refused() -> None:
    for document, words in (
        ({}, "leaf is missing"),
        ({"leaf": "unknown", "confidence": 2}, "not between 0 and 1"),
        ({"leaf": "unknown", "culprits": [{"rank": "1"}]}, "rank: expected a whole number"),
    ):
        with pytest.raises(EvidenceError, match=words):
            verdict_from_json(document)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "MAX_ITEMS", 3)
    monkeypatch.setattr(plain, "MAX_STRING_CHARS", 5)
    ranks = [{"rank": n} for n in range(4)]
    assert len(evidence_from_json({"world_size": 3, "ranks": ranks[:3]}).ranks) == 3
    with pytest.raises(EvidenceError, match="4 items; at most 3"):
        evidence_from_json({"world_size": 4, "ranks": ranks})
    assert evidence_from_json({"world_size": 0, "ranks": [], "node": "12345"}).node == "12345"
    with pytest.raises(EvidenceError, match="text of 6 characters"):
        evidence_from_json({"world_size": 0, "ranks": [], "node": "123456"})
    groups = {str(n): ["", []] for n in range(4)}
    with pytest.raises(EvidenceError, match="4 items; at most 3"):
        evidence_from_json({"world_size": 1, "ranks": [{"rank": 0, "page": {"groups": groups}}]})


# --- files ------------------------------------------------------------------------------------------


def test_load_incident(tmp_path: Path) -> None:
    evidence = full_evidence()
    file = tmp_path / "evidence.json"
    file.write_text(json.dumps(to_json(evidence)))
    assert load.load_incident(tmp_path) == evidence
    assert load.load_incident(str(file)) == evidence


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"world_size": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b"[]", "expected an object, found a list"),
        (b'{"world_size": 1}', "ranks is missing"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "evidence.json").write_bytes(content)
    with pytest.raises(EvidenceError, match=words) as caught:
        load.load_incident(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_no_file_and_too_large_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EvidenceError, match="name an incident directory"):
        load.load_incident(tmp_path / "nowhere")
    with pytest.raises(EvidenceError, match="no such file"):
        load.load_incident(tmp_path)
    (tmp_path / "evidence.json").mkdir()
    with pytest.raises(EvidenceError, match="can't be read"):
        load.load_incident(tmp_path)
    monkeypatch.setattr(load, "MAX_FILE_BYTES", 1 << 20)
    file = tmp_path / "large.json"
    file.write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(EvidenceError, match="larger than 1 MiB"):
        load.load_incident(file)


def test_a_real_incident_fits_many_times_over() -> None:
    """A full ring on each of eight ranks: a node's evidence is some hundred times smaller than the limit."""
    job = Job(8, grouped, -1, total_steps=60).run()
    evidence = job.evidence("exit", {})
    evidence = replace(evidence, ranks=tuple(replace(r, log_tail=("x" * 200,) * 40) for r in evidence.ranks))
    assert len(json.dumps(to_json(evidence))) * 100 < load.MAX_FILE_BYTES
