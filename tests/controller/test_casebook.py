"""Incidents of a job over many nodes: one a generation, judged from all nodes, whoever speaks first."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.policy.cluster_state import Standing

from .service_rig import THREE, Rig, killed, living, play, report, soon, victim


async def started(rig: Rig) -> None:
    await rig.attach("abcd")
    await rig.all_run(0, "abc")


def culprits(rig: Rig) -> list[list[tuple[str | None, int | None]]]:
    return [[(c.node, c.rank) for c in verdict.culprits] for _, verdict, _ in rig.console.incidents]


def test_one_node_s_failure_is_judged_with_what_all_others_have_seen(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        texts = {"stacks": {"2": "stack of 2", "x": "no rank"}, "native": {"3": "native of 3"}, "odd": {}}
        rig.agents["b"].send(report("failed", 0, killed(2), living(3), texts=texts))
        for node in "ac":
            assert await rig.agents[node].hears("evidence_request") == {
                "type": "evidence_request", "generation": 0, "trigger": "exit",
            }  # fmt: skip
        assert rig.agents["a"].told("kill") == [], "evidence comes before the kill"
        rig.agents["a"].send(report("evidence", 0, living(0), victim(1)))
        rig.agents["c"].send(report("evidence", 0, living(4), victim(5)))
        await rig.all_run(1, "abc")
        evidence, _, follows = await rig.shown()
        assert [(item.rank, item.node) for item in evidence.ranks] == [
            (0, "a"), (1, "a"), (2, "b"), (3, "b"), (4, "c"), (5, "c"),
        ]  # fmt: skip
        assert (evidence.incident_id, evidence.world_size, follows) == ("g0000", 6, 1)

    rig = play(tmp_path, scene)
    assert culprits(rig) == [[("b", 2)]]
    for node in "bd":
        assert rig.agents[node].told("evidence_request") == []
    assert [len(rig.records(kind)) for kind in ("detected", "evidence", "verdict", "killed")] == [1] * 4
    folder = tmp_path / "incidents" / "g0000"
    assert json.loads((folder / "verdict.json").read_text())["culprits"][0]["node"] == "b"
    assert (folder / "stacks" / "2.txt").read_text() == "stack of 2"
    assert (folder / "stacks" / "3.native.txt").read_text() == "native of 3"
    assert rig.casebook.count == 1


def test_a_victim_that_speaks_first_is_not_blamed(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["a"].send(report("failed", 0, living(0), victim(1)))
        await rig.agents["b"].hears("evidence_request")
        rig.agents["c"].send(report("failed", 0, killed(4, at_ns=90), living(5)))
        rig.agents["b"].send(report("evidence", 0, living(2), living(3)))
        await rig.shown()

    assert culprits(play(tmp_path, scene)) == [[("c", 4)]]


def test_a_node_that_gives_no_evidence_holds_nobody_up(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["b"].send(report("failed", 0, killed(2), living(3)))
        rig.agents["a"].send(report("evidence", 0, living(0), living(1)))
        await rig.all_run(1, "abc")
        evidence, _, _ = await rig.shown()
        assert [item.rank for item in evidence.ranks] == [0, 1, 2, 3]

    rig = play(tmp_path, scene)
    assert culprits(rig) == [[("b", 2)]], "its silence is no reason to look for another"
    assert 0.4 < rig.records("evidence")[0].data["seconds"] < 5.0


def test_where_all_others_are_victims_the_silent_one_is_the_culprit(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["a"].send(report("failed", 0, victim(0), victim(1)))
        rig.agents["b"].send(report("evidence", 0, victim(2), victim(3)))
        await rig.shown()

    rig = play(tmp_path, scene)
    assert culprits(rig) == [[("c", None)]]
    assert "it gave no evidence when its peers lost it" in rig.console.incidents[0][1].summary


def test_an_exception_of_the_script_waits_for_no_one_who_can_t_be_asked(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        await rig.agents["c"].break_off()
        await soon(lambda: rig.service.sessions.get("c") is None)
        rig.agents["a"].send(report("failed", 0, killed(0), living(1)))
        await rig.agents["b"].hears("evidence_request")
        rig.agents["b"].send(report("evidence", 0, living(2), living(3)))
        await soon(lambda: rig.records("evidence"))

    rig = play(tmp_path, scene)
    assert rig.records("evidence")[0].data["seconds"] < 0.45


def test_a_connection_that_breaks_meanwhile_is_not_waited_for(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["a"].send(report("failed", 0, victim(0), victim(1)))
        rig.agents["b"].send(report("evidence", 0, victim(2), victim(3)))
        await rig.agents["c"].hears("evidence_request")
        await rig.agents["c"].break_off()
        await rig.shown()

    assert culprits(play(tmp_path, scene)) == [[("c", None)]]


def test_a_node_that_attaches_anew_meanwhile_can_still_give_its_evidence(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["a"].send(report("failed", 0, victim(0), victim(1)))
        rig.agents["b"].send(report("evidence", 0, victim(2), victim(3)))
        await rig.agents["c"].hears("evidence_request")
        rig.agents["c"].running = 0
        assert (await rig.agents["c"].attach())["type"] == "welcome"
        rig.agents["c"].send(report("evidence", 0, killed(4), living(5)))
        await rig.shown()
        assert culprits(rig) == [[("c", 4)]]

    play(tmp_path, scene)


def test_ranks_that_can_t_be_started_are_an_incident_without_evidence(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["b"].say("broke", generation=0, kind="launch", reason="no descriptors")
        await rig.all_run(1, "abc")
        evidence, verdict, follows = await rig.shown()
        assert (evidence.ranks, follows) == ((), 1)
        assert "no descriptors" in verdict.summary

    rig = play(tmp_path, scene)
    assert culprits(rig) == [[("b", None)]]
    assert rig.job.state.nodes["b"].blamed_at_s is not None, "twice, and it is excluded"


def test_a_node_that_breaks_twice_is_excluded(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["b"].say("broke", generation=0, kind="launch", reason="no descriptors")
        await rig.all_run(1, "abc")
        rig.agents["b"].say("broke", generation=1, kind="launch", reason="no descriptors")
        await rig.all_run(2, "adc")
        assert rig.job.state.nodes["b"].standing is Standing.EXCLUDED
        await soon(lambda: len(rig.console.incidents) == 2)

    play(tmp_path, scene)


@pytest.mark.parametrize("generation", [1, 7])
def test_what_is_said_of_another_generation_is_nothing(tmp_path: Path, generation: int) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["b"].send(report("failed", generation, killed(2), living(3)))
        rig.agents["b"].say("broke", generation=generation, kind="launch", reason="late")
        rig.agents["b"].send(report("evidence", 0, killed(2), living(3)))  # nobody has asked
        await asyncio.sleep(1.0)
        assert rig.world.generation == 0 and rig.casebook.count == 0

    assert play(tmp_path, scene).console.incidents == []


def test_a_failure_said_twice_is_one(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        for _ in range(2):
            rig.agents["b"].send(report("failed", 0, killed(2), living(3)))
        for node, ranks in {"a": (0, 1), "c": (4, 5)}.items():
            rig.agents[node].send(report("evidence", 0, *map(living, ranks)))
        await rig.all_run(1, "abc")
        rig.agents["b"].send(report("failed", 0, killed(2), living(3)))
        await rig.shown()
        await asyncio.sleep(0.3)
        assert rig.world.generation == 1

    assert play(tmp_path, scene).casebook.count == 1


def test_evidence_that_can_t_be_read_is_said_and_costs_its_part_alone(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["b"].send(report("failed", 0, killed(2), living(3)))
        bad = {**report("evidence", 0), "evidence": {"ranks": "all"}}
        rig.agents["a"].send(bad)
        rig.agents["c"].send(report("evidence", 0, living(4), living(5)))
        await rig.shown()

    rig = play(tmp_path, scene)
    assert culprits(rig) == [[("b", 2)]]
    assert any("evidence of node a can't be read" in text for text in rig.console.told)


def test_a_first_report_that_can_t_be_read_does_not_hide_the_failure(tmp_path: Path) -> None:
    """The others are asked, and answer; policy hears of it."""

    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["b"].send({**report("failed", 0), "evidence": {"ranks": "all"}})
        for node, ranks in {"a": (0, 1), "c": (4, 5)}.items():
            await rig.agents[node].hears("evidence_request")
            rig.agents[node].send(report("evidence", 0, *map(victim, ranks)))
        await rig.all_run(1, "abc")

    assert len(play(tmp_path, scene).records("detected")) == 1


def test_a_first_report_that_can_t_be_read_does_not_wait_for_ever_either(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["b"].send({**report("failed", 0), "evidence": {"ranks": "all"}})
        await rig.agents["a"].hears("evidence_request")
        await soon(lambda: rig.records("detected"), within_s=4.0)

    play(tmp_path, scene)


def test_a_node_lost_in_the_middle_of_an_inquest_is_one_incident_still(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["a"].send(report("failed", 0, victim(0), victim(1)))
        await rig.agents["b"].hears("evidence_request")
        rig.agents["c"].say("goodbye", reason="end of allocation")
        await rig.all_run(1, "abd")
        await rig.shown()

    rig = play(tmp_path, scene)
    assert len(rig.records("detected")) == 1 and rig.casebook.count == 1
    assert culprits(rig) == [[("c", None)]]


def test_the_last_incident_of_a_job_is_shown_before_its_end(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["a"].ignores.add("kill")  # so that nothing follows before the job is told to stop
        rig.agents["b"].say("broke", generation=0, kind="launch", reason="no descriptors")
        await soon(lambda: rig.casebook.count == 1)
        rig.service.stop_requested("SIGTERM received", 15)
        rig.agents["a"].say("down", generation=0)
        assert rig.ended is not None
        await asyncio.wait_for(rig.ended, 20.0)

    rig = play(tmp_path, scene)
    ((_, verdict, follows),) = rig.console.incidents
    assert follows is None and verdict.action == "no restart"


def test_where_files_can_t_be_written_the_job_goes_on(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        (tmp_path / "incidents").write_text("in the way")
        rig.agents["b"].say("broke", generation=0, kind="launch", reason="no descriptors")
        await rig.all_run(1, "abc")
        await rig.shown()

    assert any("can't write" in text for text in play(tmp_path, scene).console.told)


def test_a_planned_end_is_no_incident(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        await rig.step("abc", 3, saves=1)
        await rig.service.answer({"type": "drain", "node": "b", "deadline_s": 300})
        await rig.agents["a"].hears("prepare")
        for node in "abc":
            rig.agents[node].say("prepared", generation=0, saves=2)
        await rig.all_run(1, "adc")

    rig = play(tmp_path, scene, replace(THREE, drain_prepare_s=300.0))
    assert rig.records("detected") == [] and rig.casebook.count == 0


# --- whom not to blame, and what not to call an incident ----------------------------------------------


def test_ranks_that_ended_without_a_word_are_told_of_their_own_node(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["b"].say("down", generation=0)
        _, verdict, _ = await rig.shown()
        assert [culprit.node for culprit in verdict.culprits] == ["b"]
        assert "nothing was heard" not in verdict.summary

    play(tmp_path, scene)


def test_a_node_that_is_lost_while_another_drains_is_an_incident(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        await rig.step("abc", 3, saves=1)
        await rig.service.answer({"type": "drain", "node": "b", "deadline_s": 300})
        await rig.agents["a"].hears("prepare")
        rig.agents["c"].say("goodbye", reason="power")
        await rig.all_run(1, "abd")
        assert len(rig.records("detected")) == 1

    play(tmp_path, scene)


def test_what_breaks_in_a_job_that_is_told_to_stop_is_no_incident(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["b"].ignores.add("stop")
        rig.service.stop_requested("SIGTERM received", 15)
        await rig.agents["b"].hears("stop")
        rig.agents["b"].say("broke", generation=0, kind="launch", reason="stopped while it started")
        rig.agents["b"].say("down", generation=0)
        assert rig.ended is not None
        await asyncio.wait_for(rig.ended, 20.0)
        assert rig.console.incidents == []

    play(tmp_path, scene)


@pytest.mark.parametrize("how", ["broke", "failed"])
def test_a_node_without_ranks_can_t_report_their_failure(tmp_path: Path, how: str) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        if how == "broke":
            rig.agents["d"].say("broke", generation=0, kind="launch", reason="none of mine")
        else:
            rig.agents["d"].send(report("failed", 0, killed(2)))
        await asyncio.sleep(0.5)
        assert rig.casebook.count == 0
        assert [agent.told("evidence_request") for agent in rig.agents.values()] == [[]] * 4

    play(tmp_path, scene)


def test_a_node_that_is_through_is_not_lost_because_it_has_no_evidence(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["b"].say("succeeded", generation=0)
        await soon(lambda: rig.world.members["b"].succeeded)
        rig.agents["a"].send(report("failed", 0, victim(0), victim(1)))
        rig.agents["c"].send(report("evidence", 0, victim(4), victim(5)))
        _, verdict, _ = await rig.shown()
        assert verdict.kind != "node_lost"

    play(tmp_path, scene)
