"""From an incident's evidence and verdict to the one fact that policy decides on, and to its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from closeranks.agent.capture import Captured
from closeranks.agent.incidents import now_trigger
from closeranks.controller.incident_files import write_incident
from closeranks.diagnose import diagnose
from closeranks.diagnose.codec import evidence_from_json
from closeranks.diagnose.outcome import failure_of
from closeranks.events import ExitStatus, Failure, FailureKind
from closeranks.evidence import ErrorRecord, Evidence, HostFacts, ProcessFacts, RankEvidence, Trigger

KEY_ERROR = ErrorRecord("KeyError", "'lr'", "train.py:9", 3, 50, "Traceback\nKeyError: 'lr'")


def evidence(*ranks: RankEvidence, trigger: str = "exit", host: HostFacts | None = None) -> Evidence:
    return Evidence(
        incident_id="0007",
        generation=4,
        world_size=len(ranks),
        trigger=Trigger(trigger, (1,), "", 100),
        ranks=ranks,
        host=host or HostFacts(),
    )


def failure(found: Evidence) -> Failure:
    return failure_of(found, diagnose(found), durable_progress=True)


def ended(rank: int, *, code: int | None = None, signal: int | None = None, **more: object) -> RankEvidence:
    return RankEvidence(rank, 100 + rank, exit=ExitStatus(code=code, signal=signal), exit_mono_ns=60, **more)


ALIVE = RankEvidence(0, 100, answered=True)
CASES = {
    "a kill from outside": (evidence(ALIVE, ended(1, signal=9)), FailureKind.SIGNAL, 137),
    "a crash of its own": (evidence(ALIVE, ended(1, signal=11)), FailureKind.CRASH, 139),
    "an exit code": (evidence(ALIVE, ended(1, code=7)), FailureKind.EXIT_CODE, 7),
    "an exception": (evidence(ALIVE, ended(1, code=1, error=KEY_ERROR)), FailureKind.EXCEPTION, 1),
    "the OOM killer": (
        evidence(ALIVE, ended(1, signal=9), host=HostFacts(oom_kills=1, oom_victims=(101,))),
        FailureKind.OUT_OF_MEMORY,
        137,
    ),
}


@pytest.mark.parametrize(("found", "kind", "code"), CASES.values(), ids=CASES)
def test_an_end_becomes_the_kind_that_policy_knows(found: Evidence, kind: FailureKind, code: int) -> None:
    fact = failure(found)
    assert (fact.kind, fact.rank, fact.exit_code) == (kind, 1, code)
    assert (fact.generation, fact.incident_id) == (4, "0007")
    assert fact.startup and fact.durable_progress, "no page: it never came to a step"


@pytest.mark.parametrize(
    ("trigger", "kind"),
    [
        ("stopped", FailureKind.STOPPED), ("desync", FailureKind.DESYNC), ("deadlock", FailureKind.DEADLOCK),
        ("blocked", FailureKind.DEADLOCK), ("early_exit", FailureKind.EARLY_EXIT),
        ("init_stall", FailureKind.INIT_STALL), ("hang_timeout", FailureKind.HANG_TIMEOUT),
    ],
)  # fmt: skip
def test_what_set_it_off_decides_where_nobody_died(trigger: str, kind: FailureKind) -> None:
    fact = failure(evidence(ALIVE, RankEvidence(1, 101), trigger=trigger))
    assert (fact.kind, fact.exit_code) == (kind, 1)


def test_the_code_of_the_culprit_counts_not_that_of_a_victim() -> None:
    lost = ErrorRecord("RuntimeError", "Connection closed by peer [127.0.0.1]:1", "train.py:5", 3, 70, "")
    fact = failure(evidence(ended(0, code=1, error=lost), ended(1, code=42)))
    assert (fact.rank, fact.exit_code) == (1, 42)


def test_the_files_say_what_the_evidence_says(tmp_path: Path) -> None:
    tail = ("first line", "KeyError: 'lr' \udce9")
    found = evidence(ALIVE, ended(1, code=1, error=KEY_ERROR, log_tail=tail))
    captured = Captured(found, {0: "stack of 0"}, {1: "native of 1"}, 0.01)
    directory = tmp_path / "incidents" / "0007"
    assert (
        write_incident(directory, captured.evidence, diagnose(found), captured.stacks, captured.native) == ""
    )
    assert evidence_from_json(json.loads((directory / "evidence.json").read_text())) == found
    verdict = json.loads((directory / "verdict.json").read_text())
    assert verdict["culprits"][0]["rank"] == 1 and verdict["kind"] == "exception"
    assert (directory / "stacks" / "0.txt").read_text() == "stack of 0"
    assert (directory / "stacks" / "1.native.txt").read_text() == "native of 1"
    assert (directory / "logs" / "1.err").read_bytes() == b"first line\nKeyError: 'lr' \xe9\n"
    assert not list(directory.rglob("*.tmp"))


def test_a_directory_that_can_t_be_written_is_told_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "incidents").write_text("a file in the way")
    found = evidence(ALIVE, ended(1, signal=9))
    problem = write_incident(tmp_path / "incidents" / "0007", found, diagnose(found), {}, {})
    assert problem.startswith("can't write") and "Not a directory" in problem


def test_a_stopped_rank_is_the_culprit_of_its_own_evidence() -> None:
    stopped = RankEvidence(1, 101, process=ProcessFacts("T", 0, 0.0, 0, 0))
    fact = failure(evidence(ALIVE, stopped, trigger="stopped"))
    assert (fact.kind, fact.rank, fact.signature) == (FailureKind.STOPPED, 1, "SIGSTOP")


def test_a_trigger_is_dated_when_it_is_seen() -> None:
    first = now_trigger("desync", (1,), "x")
    assert 0 < first.mono_ns <= now_trigger("desync", (1,), "x").mono_ns
