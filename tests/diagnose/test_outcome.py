"""From an incident's evidence and verdict to the one fact that policy decides on, and the journal's note."""

from __future__ import annotations

import pytest

from closeranks.diagnose import diagnose
from closeranks.diagnose.codec import public_verdict, to_json, verdict_from_json
from closeranks.diagnose.outcome import detected_note, failure_of, kind_of_trigger, node_lost_verdict
from closeranks.events import ExitStatus, Failure, FailureKind
from closeranks.evidence import (
    ErrorRecord,
    Evidence,
    EvidenceLine,
    HostFacts,
    ProcessFacts,
    RankEvidence,
    Trigger,
)
from closeranks.taxonomy import leaf


def found_by(*ranks: RankEvidence, kind: str = "exit") -> Evidence:
    return Evidence("g0001", 1, len(ranks), Trigger(kind, (1,), "rank 1 was killed", 100), ranks)


def test_a_lost_node_s_verdict_names_it_and_says_what_nobody_knows() -> None:
    lines = (EvidenceLine("controller", "x", "y"),)
    verdict = node_lost_verdict(("b",), "nothing was heard of it for 2 s", lines)
    assert [(c.scope, c.node, c.rank) for c in verdict.culprits] == [("node", "b", None)]
    assert verdict.summary == "node b lost: nothing was heard of it for 2 s"
    assert (verdict.kind, verdict.leaf, verdict.retry) == ("node_lost", "host.lost", True)
    assert (verdict.owner, verdict.table5) == (leaf("host.lost").owner, leaf("host.lost").table5)
    assert verdict.evidence == lines and verdict.missing
    assert verdict_from_json(to_json(verdict)) == verdict
    assert public_verdict(verdict)["culprits"][0]["node"] == "b"


def test_of_many_lost_nodes_the_sentence_names_some_and_the_verdict_all() -> None:
    names = [f"n{i}" for i in range(9)]
    verdict = node_lost_verdict(names, "power")
    assert verdict.summary == "nodes n0, n1, n2, n3, ... lost: power"
    assert [culprit.node for culprit in verdict.culprits] == names


def test_one_node_lost_twice_is_the_same_signature_whatever_the_reason() -> None:
    assert node_lost_verdict(("b",), "power").signature == node_lost_verdict(("b",), "silence").signature
    assert node_lost_verdict(("b",), "power").signature != node_lost_verdict(("c",), "power").signature


def test_it_broke_when_the_culprit_died_and_not_when_a_victim_did() -> None:
    victim = RankEvidence(0, 100, exit=ExitStatus(code=1), exit_mono_ns=30)
    culprit = RankEvidence(1, 101, exit=ExitStatus(signal=9), exit_mono_ns=60)
    found = found_by(victim, culprit)
    verdict = diagnose(found_by(RankEvidence(0, 100, answered=True), culprit))
    assert verdict.culprit_ranks == (1,)
    note = detected_note(found, verdict)
    assert (note["broke_mono_ns"], note["detected_mono_ns"], note["incident_id"]) == (60, 100, "g0001")
    assert note["trigger"] == {"kind": "exit", "ranks": [1], "detail": "rank 1 was killed"}


def test_it_broke_when_the_exception_was_raised_and_not_at_the_exit() -> None:
    error = ErrorRecord("KeyError", "'lr'", "train.py:9", 3, 50, "Traceback\nKeyError: 'lr'")
    culprit = RankEvidence(1, 101, exit=ExitStatus(code=1), exit_mono_ns=60, error=error)
    found = found_by(RankEvidence(0, 100, answered=True), culprit)
    assert detected_note(found, diagnose(found))["broke_mono_ns"] == 50


def test_without_a_culprit_it_broke_when_it_was_seen() -> None:
    found = found_by(RankEvidence(0, 100, answered=True), kind="hang_timeout")
    note = detected_note(found, node_lost_verdict(("b",), "power"))
    assert note["broke_mono_ns"] == note["detected_mono_ns"] == 100


def test_a_verdict_of_nodes_alone_blames_no_rank() -> None:
    ranks = [RankEvidence(n, 100 + n, exit=ExitStatus(code=7), exit_mono_ns=60) for n in range(2)]
    fact = failure_of(found_by(*ranks), node_lost_verdict(("b",), "power"), durable_progress=False)
    assert (fact.rank, fact.exit_code, fact.signature) == (None, 7, "node b lost")


@pytest.mark.parametrize("kind", ["exit", "exception", "suspect", "node_lost", ""])
def test_such_a_trigger_says_nothing_by_itself(kind: str) -> None:
    assert kind_of_trigger(kind) is None


def test_such_a_trigger_does() -> None:
    assert kind_of_trigger("hang_timeout") is FailureKind.HANG_TIMEOUT


# --- how an end becomes a kind of failure ------------------------------------------------------------

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


def test_a_stopped_rank_is_the_culprit_of_its_own_evidence() -> None:
    stopped = RankEvidence(1, 101, process=ProcessFacts("T", 0, 0.0, 0, 0))
    fact = failure(evidence(ALIVE, stopped, trigger="stopped"))
    assert (fact.kind, fact.rank, fact.signature) == (FailureKind.STOPPED, 1, "SIGSTOP")
