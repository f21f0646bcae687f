"""What policy and journal are told of an incident: nodes that are gone, and when it was known.

How an end becomes a kind of failure is in tests/agent/test_incidents.py.
"""

from __future__ import annotations

import pytest

from closeranks.diagnose import diagnose
from closeranks.diagnose.codec import public_verdict, to_json, verdict_from_json
from closeranks.diagnose.outcome import detected_note, failure_of, kind_of_trigger, node_lost_verdict
from closeranks.events import ExitStatus, FailureKind
from closeranks.evidence import ErrorRecord, Evidence, EvidenceLine, RankEvidence, Trigger
from closeranks.taxonomy import leaf


def evidence(*ranks: RankEvidence, kind: str = "exit") -> Evidence:
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
    found = evidence(victim, culprit)
    verdict = diagnose(evidence(RankEvidence(0, 100, answered=True), culprit))
    assert verdict.culprit_ranks == (1,)
    note = detected_note(found, verdict)
    assert (note["broke_mono_ns"], note["detected_mono_ns"], note["incident_id"]) == (60, 100, "g0001")
    assert note["trigger"] == {"kind": "exit", "ranks": [1], "detail": "rank 1 was killed"}


def test_it_broke_when_the_exception_was_raised_and_not_at_the_exit() -> None:
    error = ErrorRecord("KeyError", "'lr'", "train.py:9", 3, 50, "Traceback\nKeyError: 'lr'")
    culprit = RankEvidence(1, 101, exit=ExitStatus(code=1), exit_mono_ns=60, error=error)
    found = evidence(RankEvidence(0, 100, answered=True), culprit)
    assert detected_note(found, diagnose(found))["broke_mono_ns"] == 50


def test_without_a_culprit_it_broke_when_it_was_seen() -> None:
    found = evidence(RankEvidence(0, 100, answered=True), kind="hang_timeout")
    note = detected_note(found, node_lost_verdict(("b",), "power"))
    assert note["broke_mono_ns"] == note["detected_mono_ns"] == 100


def test_a_verdict_of_nodes_alone_blames_no_rank() -> None:
    ranks = [RankEvidence(n, 100 + n, exit=ExitStatus(code=7), exit_mono_ns=60) for n in range(2)]
    fact = failure_of(evidence(*ranks), node_lost_verdict(("b",), "power"), durable_progress=False)
    assert (fact.rank, fact.exit_code, fact.signature) == (None, 7, "node b lost")


@pytest.mark.parametrize("kind", ["exit", "exception", "suspect", "node_lost", ""])
def test_such_a_trigger_says_nothing_by_itself(kind: str) -> None:
    assert kind_of_trigger(kind) is None


def test_such_a_trigger_does() -> None:
    assert kind_of_trigger("hang_timeout") is FailureKind.HANG_TIMEOUT
