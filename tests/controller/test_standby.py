"""A job whose leader is killed, frozen, or cut off from etcd: another one leads it, and it alone decides."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from closeranks.controller.journal import read
from closeranks.events import RunExit
from conftest import eventually

from .etcd_rig import Line, etcd_server
from .standby_rig import Cluster, freeze, wake

PATIENT = ("--lease", "6")  # nodes that outlive the time in which another leader is found


@pytest.fixture
def server(tmp_path: Path):
    (tmp_path / "server").mkdir()
    with etcd_server(tmp_path / "server") as found:
        yield found


def test_a_leader_that_is_killed_costs_no_generation(tmp_path, server, start_closeranks):
    async def main() -> None:
        async with Cluster(tmp_path, start_closeranks, (server.url, server.url)) as cluster:
            first = await cluster.begin()
            first.again = False
            second = next(seat for seat in cluster.seats if seat is not first)
            await cluster.follow(lambda: os.kill(first.pid, signal.SIGKILL))
            assert cluster.leader() is second
            assert cluster.running() == {0} and not cluster.events("fenced")
            cluster.nodes[1].fail()
            await cluster.until(lambda: cluster.running() == {1})
            first.again = True
            first.run()  # stands by now
            await asyncio.sleep(1.0)
            assert cluster.leader() is second
            await cluster.finish()
        kinds = [record.kind for record in read(cluster.run_dirs[cluster.seats.index(second)] / "journal.db")]
        assert kinds[:3] == ["controller_started", "run_started", "cluster_state"]
        assert kinds.count("generation_starting") == 1 and kinds[-1] == "finished"

    asyncio.run(main())


@pytest.mark.slow
def test_killed_leaders_one_after_the_other(tmp_path, server, start_closeranks):
    async def main() -> None:
        async with Cluster(tmp_path, start_closeranks, (server.url, server.url)) as cluster:
            await cluster.begin()
            for _ in range(3):
                await cluster.follow(lambda: os.kill(cluster.leader().pid, signal.SIGKILL))
            assert cluster.running() == {0} and not cluster.events("fenced")
            await cluster.finish()

    asyncio.run(main())


def test_a_frozen_leader_that_wakes_up_decides_nothing(tmp_path, server, start_closeranks):
    """Nodes end their ranks with their lease, as they can't know that it decides nothing; then comes a world
    of another leader's."""

    async def main() -> None:
        async with Cluster(tmp_path, start_closeranks, (server.url, server.url)) as cluster:
            first = await cluster.begin()
            pid = first.pid
            freeze(pid)
            try:
                await cluster.until(lambda: cluster.running() == {1})
                assert cluster.leader() is not first
                assert len(cluster.events("fenced")) == 2
            finally:
                wake(pid)
            await cluster.until(lambda: first.codes == [RunExit.DEPOSED])
            await asyncio.sleep(1.0)
            assert cluster.running() == {1} and cluster.leader() is not first
            await cluster.finish()
        run_dir = cluster.run_dirs[cluster.seats.index(first)]
        records = list(read(run_dir / "journal.db"))
        woken = [record for record in records if record.kind == "deposed"]
        assert len(woken) == 1
        assert {record.generation for record in records if record.kind == "generation_starting"} == {0}

    asyncio.run(main())


@pytest.mark.slow
def test_with_a_long_lease_a_frozen_leader_costs_no_generation(tmp_path, server, start_closeranks):
    async def main() -> None:
        async with Cluster(tmp_path, start_closeranks, (server.url, server.url), flags=PATIENT) as cluster:
            first = await cluster.begin()
            pid = first.pid
            try:
                await cluster.follow(lambda: freeze(pid))
            finally:
                wake(pid)
            await cluster.until(lambda: first.codes == [RunExit.DEPOSED])
            assert cluster.running() == {0} and not cluster.events("fenced")
            await cluster.finish()

    asyncio.run(main())


def test_a_leader_that_etcd_can_not_hear_makes_way(tmp_path, server, start_closeranks):
    """Its nodes can be reached all the time; they go over to the other one, and nothing is lost."""

    async def main() -> None:
        async with (
            Line(server.port) as line,
            Cluster(tmp_path, start_closeranks, (line.url, server.url)) as cluster,
        ):
            first = await cluster.begin()
            assert first is cluster.seats[0]
            await cluster.follow(line.hold)
            assert cluster.leader() is cluster.seats[1]
            assert first.codes == [RunExit.DEPOSED]
            assert cluster.running() == {0} and not cluster.events("fenced")
            line.release()
            cluster.nodes[0].fail()
            await cluster.until(lambda: cluster.running() == {1})
            await cluster.finish()

    asyncio.run(main())


@pytest.mark.slow
def test_etcd_that_is_away_for_longer_than_a_reign_costs_no_generation(tmp_path, server, start_closeranks):
    async def main() -> None:
        async with Cluster(tmp_path, start_closeranks, (server.url, server.url)) as cluster:
            first = await cluster.begin()
            server.kill()
            await cluster.until(lambda: first.codes == [RunExit.DEPOSED])
            await asyncio.sleep(2.0)
            assert cluster.running() == {0}
            await cluster.follow(server.start)
            assert cluster.running() == {0} and not cluster.events("fenced")
            await cluster.finish()

    asyncio.run(main())


def test_while_etcd_is_slow_nothing_starts_that_it_does_not_know_of(tmp_path, server, start_closeranks):
    async def main() -> None:
        async with Cluster(tmp_path, start_closeranks, (server.url, server.url)) as cluster:
            first = await cluster.begin()
            server.freeze()
            cluster.nodes[0].fail()
            await asyncio.sleep(1.2)
            assert cluster.nodes[1].generation == 0  # not even the order to kill has gone out
            server.wake()
            await cluster.until(lambda: cluster.running() == {1})
            assert first.codes == [] and not cluster.events("fenced")
            await cluster.finish()

    asyncio.run(main())


def test_a_signal_to_one_that_waits_ends_that_one_alone(tmp_path, server, start_closeranks):
    async def main() -> None:
        async with Cluster(tmp_path, start_closeranks, (server.url, server.url)) as cluster:
            first = await cluster.begin()
            standby = next(seat for seat in cluster.seats if seat is not first)
            await cluster.until(lambda: "a standby is there" in standby.running.stderr)
            os.kill(standby.pid, signal.SIGTERM)
            await cluster.until(lambda: standby.codes == [128 + signal.SIGTERM])
            assert cluster.running() == {0} and not first.codes
            standby.codes.clear()
            standby.run()
            await cluster.finish()

    asyncio.run(main())


def test_a_first_controller_without_an_etcd_says_so(tmp_path, run_closeranks):
    done = run_closeranks(
        "run", "--engine", "local", "--nnodes", "2", "--etcd", "http://127.0.0.1:1", "--no-python", "true"
    )
    assert done.returncode == 1
    assert "no etcd keeps this job's state: http://127.0.0.1:1" in done.stderr


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--etcd", "127.0.0.1:2379"], "want http://HOST:PORT"),
        (["--etcd", "http://root:secret@127.0.0.1:2379"], "see --etcd-user"),
        (["--etcd-key", "k", "--etcd", "https://h:1"], "of no use without --etcd-cert"),
        (["--standbys", "1"], "of no use without --etcd"),
    ],
)
def test_flags_that_make_no_sense(run_closeranks, flags, wanted):
    done = run_closeranks("run", "--engine", "local", *flags, "--no-python", "true")
    assert done.returncode == 2 and wanted in done.stderr


def test_etcd_is_about_several_nodes(run_closeranks):
    done = run_closeranks("run", "--etcd", "http://127.0.0.1:2379", "--no-python", "true")
    assert done.returncode == 2 and "say where from with --engine" in done.stderr


# --- all of it on one host --------------------------------------------------------------------------


def control(runs: Path) -> dict:
    try:
        return json.loads((runs / "latest" / "control.json").read_text())
    except (OSError, ValueError):
        return {}


@pytest.fixture
def job(tmp_path, server, start_closeranks):
    """Two controllers and two nodes whose ranks do nothing; the engine's agents are real."""
    running = start_closeranks(
        "run", "--engine", "local", "--nnodes", "2", "--etcd", server.url, "--standbys", "1",
        "--log-dir", tmp_path / "runs", "--no-python", "sleep", "300",
    )  # fmt: skip
    running.wait_for("generation 0 starts")
    return running


def test_ctrl_c_ends_a_job_with_standbys(job):
    job.process.send_signal(signal.SIGINT)
    done = job.wait(30.0)
    assert done.returncode == 130, done.stderr
    assert eventually(lambda: not job.pids(), 5.0)


def test_ctrl_c_ends_a_job_that_nobody_leads(job, server, tmp_path):
    server.kill()
    job.wait_for("this controller leads no more", 20.0)
    assert eventually(lambda: job.stderr.count("can't ask etcd who leads") >= 2, 10.0), job.stderr
    job.process.send_signal(signal.SIGINT)
    done = job.wait(30.0)
    assert done.returncode == 130, done.stderr
    assert eventually(lambda: not job.pids(), 5.0)


def test_a_leader_on_one_host_is_followed_with_its_journal(job, tmp_path):
    before = control(tmp_path / "runs")["pid"]
    os.kill(before, signal.SIGKILL)
    assert eventually(lambda: control(tmp_path / "runs").get("pid", before) != before, 20.0), job.stderr
    job.wait_for("a new controller goes on")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(30.0).returncode == 143
    records = list(read(tmp_path / "runs" / "latest" / "journal.db"))
    assert [r.data["resumed"] for r in records if r.kind == "controller_started"] == [False, True]
    assert [r.generation for r in records if r.kind == "generation_starting"] == [0]
    assert records[-1].kind == "finished"
    assert not list((tmp_path / "runs" / "latest").glob("controller-*"))
