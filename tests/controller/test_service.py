"""The controller as a whole: real messages over a real socket, a real journal, and made-up agents."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.cluster_events import NodeGone
from closeranks.engines import local
from closeranks.engines.base import JobSpec, Join
from closeranks.engines.local import LocalEngine
from closeranks.events import RunExit
from closeranks.policy.cluster_state import Link, Stage

from .service_rig import JOB, THREE, FakeEngine, Rig, killed, living, play, report, soon

NO_SPARE = replace(THREE, spares=0)


async def started(rig: Rig, spares: str = "d") -> None:
    """Generation 0 runs on a, b and c."""
    await rig.attach("abc" + spares)
    await rig.all_run(0, "abc")


# --- start and end ----------------------------------------------------------------------------------


def test_a_job_starts_on_its_nodes_beside_a_spare(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        orders = [rig.agents[node].told("start") for node in "abc"]
        assert [order["node_rank"] for (order,) in orders] == [0, 1, 2]
        assert [order["first_rank"] for (order,) in orders] == [0, 2, 4]
        assert {(order["world_size"], order["ranks"], order["node_count"]) for (order,) in orders} == {
            (6, 2, 3)
        }
        assert {order["store"] for (order,) in orders} == {"tcp://a:0"}
        assert rig.agents["d"].told("start") == [] and rig.agents["b"].told("store_open") == []

    rig = play(tmp_path, scene)
    assert rig.engine.placed[0] == (4, "the job begins")
    assert [record.generation for record in rig.records("generation_starting")] == [0]
    assert [record.generation for record in rig.records("generation_started")] == [0]


def test_a_spare_that_is_on_its_way_is_not_asked_for_again(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.attach("abc")
        await rig.all_run(0, "abc")
        await rig.attach("d")

    assert play(tmp_path, scene).engine.placed == [(4, "the job begins")]


def test_what_the_ranks_come_to_is_on_record(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        await rig.step("ab", 0)
        assert rig.records("first_step") == []
        await rig.step("abc", 5)
        await soon(lambda: rig.records("progress"))

    rig = play(tmp_path, scene)
    assert len(rig.records("init_done")) == len(rig.records("first_step")) == 1
    assert any("running: generation 0" in text for text in rig.console.told)
    assert rig.records("progress")[-1].data["step"] == 5


def test_the_job_ends_when_all_ranks_have_and_every_agent_is_told(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        for node in "abc":
            rig.agents[node].say("succeeded", generation=0)
            rig.agents[node].say("down", generation=0)
        assert rig.ended is not None
        finish = await asyncio.wait_for(rig.ended, 20.0)
        assert finish.exit_code == RunExit.OK
        for node in "abcd":
            assert len(rig.agents[node].told("finish")) == 1

    rig = play(tmp_path, scene)
    assert rig.engine.closed == 1
    assert rig.console.incidents == [] and rig.casebook.count == 0


def test_a_stop_goes_to_all_ranks_and_ends_with_the_signal_s_code(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.service.stop_requested("SIGTERM received", 15)
        for node in "abc":
            assert (await rig.agents[node].hears("stop"))["signal"] == 15
        assert rig.ended is not None
        assert (await asyncio.wait_for(rig.ended, 20.0)).exit_code == 143

    assert play(tmp_path, scene).console.incidents == []


def test_without_the_process_that_the_user_started_it_ends(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.service.guard_died()
        assert rig.ended is not None
        assert (await asyncio.wait_for(rig.ended, 20.0)).exit_code == 137
        assert len(rig.agents["a"].told("finish")) == 1

    play(tmp_path, scene)


def test_an_agent_that_attaches_again_to_a_job_that_has_ended_is_told_so(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["d"].ignores.add("finish")  # the controller waits for it
        await rig.agents["a"].break_off()
        rig.service.guard_died()
        await rig.agents["d"].hears("finish")
        first = await rig.agents["a"].attach()
        assert first["type"] == "refused" or await rig.agents["a"].hears("finish", within_s=3.0)

    play(tmp_path, scene)


# --- who may attach ---------------------------------------------------------------------------------


def test_a_second_agent_of_a_node_is_refused_for_as_long_as_the_first_is_there(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        refused = await rig.agent("b", "s2").attach()
        assert (refused["type"], refused["for_good"]) == ("refused", False)
        rig.agents["b"].say("ready")
        await asyncio.sleep(0.3)
        assert not rig.agents["b"].closed.is_set() and rig.service.sessions.get("b").session == "s1"

    play(tmp_path, scene)


def test_another_job_s_agent_is_refused_for_good(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        refused = await rig.agent("a", job="job-2").attach()
        assert refused == {"type": "refused", "reason": "this is another job's controller", "for_good": True}
        assert rig.job.state.nodes == {}

    play(tmp_path, scene)


def test_an_agent_that_was_released_is_refused_for_good_and_its_successor_is_not(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        await rig.service.answer({"type": "drain", "node": "d"})
        await rig.agents["d"].hears("finish")
        await soon(lambda: rig.engine.released == ["d"])
        refused = await rig.agents["d"].attach()
        assert (refused["type"], refused["for_good"]) == ("refused", True)
        assert (await rig.agent("d", "s2").attach())["type"] == "welcome"

    play(tmp_path, scene)


def test_a_newer_connection_of_the_same_agent_takes_the_place_of_the_older(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        old = rig.agents["b"].peer
        rig.agents["b"].running = 0
        assert (await rig.agents["b"].attach())["type"] == "welcome"
        await asyncio.wait_for(old.wait_closed(), 10.0)
        await asyncio.sleep(1.0)
        assert not rig.agents["b"].closed.is_set()
        assert rig.world.generation == 0 and rig.world.stage is Stage.RUNNING

    assert play(tmp_path, scene).agents["b"].told("kill") == []


def test_a_heartbeat_without_a_lease_ends_the_connection(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["c"].beats = False
        await soon(lambda: rig.job.state.nodes["c"].link is Link.LOST)
        assert not rig.agents["c"].closed.is_set()
        acks = len(rig.agents["c"].told("heartbeat_ack"))
        rig.agents["c"].beat(99)
        await asyncio.wait_for(rig.agents["c"].closed.wait(), 10.0)
        assert len(rig.agents["c"].told("heartbeat_ack")) == acks

    play(tmp_path, scene)


def test_whoever_doesn_t_begin_with_hello_is_not_heard(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        from closeranks.controller.connect import connect

        found = await connect(rig.path, 0, None)
        assert found.peer is not None
        found.peer.send({"type": "down", "generation": 0})
        assert await found.peer.receive() is None
        await found.peer.wait_closed()

    play(tmp_path, scene)


# --- nodes that go ----------------------------------------------------------------------------------


def test_a_node_that_falls_silent_is_the_incident_and_a_spare_takes_its_place(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["b"].beats = False
        await rig.all_run(1, "adc")
        (order,) = rig.agents["d"].told("start")
        assert (order["node_rank"], order["first_rank"], order["store"]) == (1, 2, "tcp://a:1")
        evidence, verdict, follows = await rig.shown()
        assert (evidence.trigger.kind, evidence.trigger.ranks, follows) == ("node_lost", (2, 3), 1)
        assert [culprit.node for culprit in verdict.culprits] == ["b"]
        assert "nothing was heard of it for 2 s" in verdict.summary

    rig = play(tmp_path, scene)
    assert [record.generation for record in rig.records("detected")] == [0]
    (verdict,) = rig.records("verdict")
    assert verdict.data["incident_id"] == "g0000"
    assert (tmp_path / "incidents" / "g0000" / "verdict.json").exists()
    assert [record.generation for record in rig.records("killed")] == [0]


def test_the_engine_s_word_that_a_session_is_gone_needs_no_lease_to_end(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        await rig.agents["c"].close()
        rig.engine.tell.put_nowait(NodeGone("c", "power", "s1"))
        await soon(lambda: rig.agents["d"].running == 1, within_s=1.5)
        _, verdict, _ = await rig.shown()
        assert [culprit.node for culprit in verdict.culprits] == ["c"] and "power" in verdict.summary

    play(tmp_path, scene, replace(THREE, lease_s=5.0))


def test_an_agent_that_says_goodbye_is_believed_at_once(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["c"].say("goodbye", reason="end of allocation")
        await soon(lambda: rig.agents["d"].running == 1, within_s=1.5)
        _, verdict, _ = await rig.shown()
        assert "its agent ended: end of allocation" in verdict.summary

    play(tmp_path, scene, replace(THREE, lease_s=5.0))


def test_a_store_that_is_lost_costs_a_generation_and_is_said(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["a"].say("store_lost", generation=0)
        await rig.all_run(1, "abc")
        _, verdict, _ = await rig.shown()
        assert "the store in which the ranks met ended there" in verdict.summary

    play(tmp_path, scene)


def test_what_a_released_or_lost_node_lacks_is_asked_of_the_engine(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        await rig.service.answer({"type": "drain", "node": "d"})
        await soon(lambda: len(rig.engine.placed) == 2)
        assert rig.engine.placed[1][0] == 1

    play(tmp_path, scene)


# --- making way -------------------------------------------------------------------------------------


def test_a_drain_waits_for_the_save_of_all_and_costs_nothing(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        await rig.step("abc", 3, saves=1)
        answer = await rig.service.answer({"type": "drain", "node": "b", "deadline_s": 60, "reason": "fan"})
        assert answer == {"ok": True, "node": "b", "deadline_s": 60, "spares": 1, "seated": True}
        for node in "abc":
            assert not (await rig.agents[node].hears("prepare"))["last_call"]
        rig.agents["a"].say("prepared", generation=0, saves=2)
        for node in "bc":
            assert (await rig.agents[node].hears("prepare", 2))["last_call"]
        assert len(rig.agents["a"].told("prepare")) == 1
        assert rig.agents["a"].told("kill") == [], "the others have their last call"
        for node in "bc":
            rig.agents[node].say("prepared", generation=0, saves=0)
        await rig.all_run(1, "adc")
        assert "fan" in (await rig.agents["b"].hears("finish"))["reason"]

    rig = play(tmp_path, scene)
    assert rig.engine.released == ["b"]
    assert rig.console.incidents == [] and rig.job.state.job.budget.restarts == 0


def test_where_nothing_was_ever_saved_a_drain_waits_for_nothing(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        await rig.step("abc", 3)
        await rig.service.answer({"type": "drain", "node": "b"})
        await rig.all_run(1, "adc")
        assert rig.agents["a"].told("prepare") == []

    assert play(tmp_path, scene).console.incidents == []


def test_an_agent_that_must_leave_is_drained_within_what_it_has(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["c"].say("leaving", deadline_s=30.0, reason="SIGTERM received")
        await rig.all_run(1, "abd")
        assert "SIGTERM" in (await rig.agents["c"].hears("finish"))["reason"]

    play(tmp_path, scene)


def test_a_drain_of_a_node_that_there_isn_t_names_those_there_are(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        answer = await rig.service.answer({"type": "drain", "node": "x"})
        assert answer == {"ok": False, "error": "this job has no node 'x'; its nodes are a, b, c, d"}

    play(tmp_path, scene)


# --- questions --------------------------------------------------------------------------------------


def test_a_fault_goes_to_the_node_that_has_the_rank_and_its_answer_comes_back(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        asked = asyncio.ensure_future(rig.service.answer({"type": "inject", "spec": "kill:rank=3"}))
        order = await rig.agents["b"].hears("inject")
        assert order["spec"] == "kill:rank=3"
        rig.agents["b"].say("injected", id="another", reply={"ok": False})
        rig.agents["b"].say("injected", id=order["id"], reply={"ok": True, "fired": True})
        assert await asked == {"ok": True, "fired": True}
        assert rig.agents["a"].told("inject") == rig.agents["c"].told("inject") == []

    play(tmp_path, scene)


def test_a_fault_that_can_t_be_is_said_to_be_none(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        async def error(spec: str) -> str:
            answer = await rig.service.answer({"type": "inject", "spec": spec})
            assert not answer["ok"]
            return str(answer["error"])

        assert "no rank runs" in await error("kill:rank=0")
        await started(rig)
        assert "did you mean 'kill'" in await error("kil")
        assert "no rank 6: ranks are 0 to 5" in await error("kill:rank=6")
        await rig.agents["c"].break_off()
        await soon(lambda: rig.service.sessions.get("c") is None)
        assert "node c can't be reached" in await error("kill:rank=5")

    play(tmp_path, scene)


def test_the_status_shows_nodes_and_their_ranks(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        assert (await rig.service.answer({"type": "status"}))["stage"] == "forming"
        await started(rig)
        status = await rig.service.answer({"type": "status"})
        assert status["ok"] and (status["generation"], status["world_size"]) == (0, 6)
        ranks = {node["node"]: node["ranks"] for node in status["nodes"]}
        assert ranks == {"a": [0, 2], "b": [2, 2], "c": [4, 2], "d": None}
        assert not (await rig.service.answer({"type": "explode"}))["ok"]

    play(tmp_path, scene)


def test_what_agents_see_goes_on_record_with_the_node_s_name(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        data = {"seconds": 0.1, "leftovers": []}
        rig.agents["b"].say("event", kind="killed", generation=0, data=data)
        rig.agents["b"].say("event", kind="notice", generation=None, data={"text": "x" * 9000, "node": "z"})
        await soon(lambda: rig.records("notice"))

    rig = play(tmp_path, scene)
    (seen,) = rig.records("node_killed")
    assert (seen.data["node"], seen.generation) == ("b", 0)
    notice = next(record for record in rig.records("notice") if record.data.get("node") == "b")
    assert len(notice.data["text"]) == 2000


@pytest.mark.parametrize("kind", ["cluster_state", "controller_started", "decided", "finished", "verdict"])
def test_an_agent_can_t_write_what_only_the_controller_decides(tmp_path: Path, kind: str) -> None:
    """A cluster_state of an agent's would be the job's after the next restart of the controller."""

    async def scene(rig: Rig) -> None:
        await started(rig)
        data = {"set": {}, "gone": ["node/a", "job"], "last": True}
        rig.agents["b"].say("event", kind=kind, generation=0, data=data)
        rig.agents["b"].say("event", kind="notice", generation=0, data={"text": "after it"})
        await soon(lambda: any(record.data.get("text") == "after it" for record in rig.records("notice")))
        assert [record for record in rig.records(kind) if record.data.get("node") == "b"] == []

    play(tmp_path, scene)


# --- the controller itself is killed ----------------------------------------------------------------


async def come_back(rig: Rig, nodes: str) -> None:
    """As agents do whose controller was gone: with the ranks they hold."""
    for node in nodes:
        rig.agents[node].got.clear()
    await rig.attach(nodes)


def test_a_controller_that_comes_back_starts_nothing_twice(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        await rig.step("abc", 7)
        for _ in range(2):
            await rig.kill_controller()
            await rig.start()
            await come_back(rig, "abcd")
            await rig.step("abc", 9)
        for node in "abcd":
            told = {message["type"] for message in rig.agents[node].got} - {"heartbeat_ack"}
            assert told == set(), f"{node} was told {told}"
        assert rig.engine.placed == [] and rig.world.generation == 0
        rig.agents["c"].send(report("failed", 0, killed(4), living(5)))
        await rig.all_run(1, "abc")

    rig = play(tmp_path, scene)
    assert [record.generation for record in rig.records("generation_starting")] == [0, 1]


def test_who_does_not_come_back_to_it_is_lost_after_the_grace_and_not_before(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        await rig.kill_controller()
        await rig.start()
        await come_back(rig, "acd")
        await asyncio.sleep(2.0)
        assert rig.world.generation == 0 and rig.world.stage is Stage.RUNNING
        await rig.all_run(1, "adc")
        _, verdict, _ = await rig.shown()
        assert [culprit.node for culprit in verdict.culprits] == ["b"]

    play(tmp_path, scene, replace(THREE, reattach_grace_s=4.0))


def test_a_failure_that_was_told_to_one_that_died_is_told_again(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["b"].send(report("failed", 0, killed(2), living(3)))
        await rig.agents["a"].hears("evidence_request")
        await rig.kill_controller()
        await rig.start()
        await come_back(rig, "abcd")
        rig.agents["b"].send(report("failed", 0, killed(2), living(3)))
        await rig.all_run(1, "abc")
        _, verdict, _ = await rig.shown()
        assert verdict.culprit_ranks == (2,)

    play(tmp_path, scene)


def test_an_agent_with_older_ranks_is_told_to_kill_them(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        await rig.kill_controller()
        rig.agents["d"].running = 0
        await rig.start()
        await come_back(rig, "abcd")
        assert (await rig.agents["d"].hears("kill"))["generation"] == 0
        assert rig.agents["a"].told("kill") == []

    play(tmp_path, scene)


def test_one_that_was_killed_after_the_end_was_decided_ends_the_job_all_the_same(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        for node in "abcd":
            rig.agents[node].ignores.add("finish")
        for node in "abc":
            rig.agents[node].say("succeeded", generation=0)
        await soon(lambda: rig.job.state.finished)
        await rig.kill_controller()
        await rig.start()
        assert rig.ended is not None
        finish = await asyncio.wait_for(rig.ended, 6.0)
        assert finish.exit_code == RunExit.OK

    play(tmp_path, scene)


def test_incidents_before_its_death_are_counted(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await started(rig)
        rig.agents["c"].send(report("failed", 0, killed(4), living(5)))
        await rig.all_run(1, "abc")
        await rig.kill_controller()
        await rig.start()
        assert rig.casebook.count == 1

    play(tmp_path, scene)


def test_a_node_that_replaces_another_after_a_restart_has_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a name that is in use it would be refused for as long as the other one lives."""

    async def scene(rig: Rig) -> None:
        spec = JobSpec(JOB, tmp_path, 3, 3, 0, ("train.py",), "python", {})
        for node in ("node0", "node1", "node2"):
            rig.agents[node] = rig.agent(node)
            await rig.agents[node].attach()
        await soon(lambda: rig.job.state.world is not None)
        await rig.kill_controller()
        await rig.start()
        engine = rig.service.engine = LocalEngine(spec)
        engine.start(Join(rig.path))
        for node in ("node0", "node1"):
            await rig.agents[node].attach()
        await soon(lambda: named)
        await engine.close()
        assert set(named).isdisjoint({"node0", "node1"})

    named: list[str] = []

    def command(spec: JobSpec, join: Join, *, node: str, session: str) -> list[str]:
        named.append(node)
        return ["sleep", "600"]

    monkeypatch.setattr(local, "agent_command", command)
    monkeypatch.setattr(local, "_END_S", 0.1)
    play(tmp_path, scene, replace(NO_SPARE, reattach_grace_s=2.0))


def test_one_that_was_killed_before_it_had_placed_the_first_nodes_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[FakeEngine] = []
    place = FakeEngine.place

    async def slow_at_first(
        engine: FakeEngine, count: int, reason: str, taken: frozenset[str] = frozenset()
    ) -> int:
        engines.append(engine)
        if engine is engines[0]:
            await asyncio.Event().wait()
        return await place(engine, count, reason, taken)

    async def scene(rig: Rig) -> None:
        await soon(lambda: rig.records("cluster_state") and engines)
        await rig.kill_controller()
        await rig.start()
        await rig.attach("a")  # one had come
        await soon(lambda: rig.engine.placed, within_s=6.0)

    monkeypatch.setattr(FakeEngine, "place", slow_at_first)
    play(tmp_path, scene, replace(THREE, reattach_grace_s=1.0))
