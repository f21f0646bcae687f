"""The Slurm engine on a real Slurm of several nodes: what is placed, what is told, what is left: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from closeranks.cluster_events import EngineDrains, NodeGone
from closeranks.engines.base import EngineFact, JobSpec, Join
from closeranks.engines.slurm import SlurmEngine
from closeranks.engines.slurm_text import expand_hostlist
from closeranks.errors import ConfigError

from .slurm_rig import SlurmCluster, alive, missing, slurm_cluster, wait_until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

HOSTILE_REASON = "fan 'x' | State=DOWN; $(reboot) \x1b[2J\nNodeName=node2 State=DOWN"


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as made:
        yield made


def spec_of(cluster: SlurmCluster, **options: str) -> JobSpec:
    run_dir = cluster.directory / "runs" / "job 'one' 100%"
    return JobSpec(
        # Clusters of tests that run at the same time share this host's /proc.
        job_id=f"20261201-042655-{cluster.directory.name}",
        run_dir=run_dir,
        min_nodes=4,
        max_nodes=4,
        spares=1,
        run_argv=("--nnodes", "4", "train.py", "--name", "it's $HOME\nand more"),
        python=str(cluster.stand_in()),
        options={"poll-s": "0.5", **options},
    )


JOIN = Join("127.0.0.1:29400", Path("/run/credentials of it"))


class Inside:
    """An engine within an allocation, and what it has told."""

    def __init__(self, cluster: SlurmCluster, environment: dict[str, str], **options: str) -> None:
        self.cluster = cluster
        self.job = environment["SLURM_JOB_ID"]
        self.engine = SlurmEngine(spec_of(cluster, **options), environment=environment)
        self.engine.start(JOIN)
        self.facts: list[EngineFact] = []

    async def listen(self) -> None:
        async for fact in self.engine.facts():
            self.facts.append(fact)

    async def until(self, condition: Any, timeout_s: float) -> float:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < timeout_s, (
                f"not within {timeout_s:g} s; told: {self.facts}; living: {self.cluster.living()}; "
                f"{self.cluster.ask('sinfo', '-N', '-o', '%N %T %E')}\n{self.cluster.logs()}"
            )
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    async def living(self, *nodes: str, timeout_s: float = 20.0) -> float:
        return await self.until(lambda: self.cluster.living() == sorted(nodes), timeout_s)


@contextlib.asynccontextmanager
async def inside(
    cluster: SlurmCluster, nodes: int = 5, *, allocation: tuple[str, ...] = (), **options: str
) -> AsyncIterator[Inside]:
    made = Inside(cluster, cluster.allocate(nodes, *allocation), **options)
    listening = asyncio.create_task(made.listen())
    try:
        yield made
    finally:
        await made.engine.close()
        await asyncio.wait_for(listening, 15)


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def sruns(job: str) -> list[int]:
    """The pids of all sruns in allocation ``job`` of any cluster of this test."""
    wanted = f"SLURM_JOB_ID={job}".encode()
    mine = f"PYTEST_CURRENT_TEST={os.environ['PYTEST_CURRENT_TEST']}".partition(" ")[0].encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == "srun":
                given = (entry / "environ").read_bytes().split(b"\0")
                if wanted in given and any(word.startswith(mine) for word in given):
                    found.append(int(entry.name))
    return found


def test_agents_come_up_on_every_node_and_close_leaves_nothing(cluster: SlurmCluster):
    async def story() -> None:
        # What a batch script of another shape has in its environment, and would have a step of one task obey.
        allocation = ("--gpus-per-node=4", "--cpus-per-task=2")
        cluster.environment["SLURMD_NODENAME"] = "node0"  # as on a batch host, on which others keep an eye
        async with inside(cluster, allocation=allocation) as job:
            assert await job.engine.place(5, "the beginning") == 5
            assert await job.living("node0", "node1", "node2", "node3", "node4") < 10
            agents = cluster.agents()
            assert len({agent.env["CLOSERANKS_SESSION"] for agent in agents}) == 5
            for agent in agents:
                assert agent.argv == [
                    "-m", "closeranks", "agent", "--controller", "127.0.0.1:29400",
                    "--credentials", "/run/credentials of it",
                    "--run-dir", f"{cluster.directory}/runs/job 'one' 100%", "--",
                    "--nnodes", "4", "train.py", "--name", "it's $HOME\nand more",
                ]  # fmt: skip
                assert agent.env["SLURMD_NODENAME"] == agent.node
                assert agent.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
                assert agent.env["CLOSERANKS_SESSION"].endswith(f"@{agent.node}")
            assert await job.engine.place(1, "one too many") == 0
            assert len([name for name in cluster.steps(job.job) if "warden" in name]) == 1
            began = time.monotonic()
            await job.engine.close()
            assert time.monotonic() - began < 10
            assert cluster.living() == []
            await job.until(lambda: set(cluster.steps(job.job)) <= {"extern"}, 10)
            assert cluster.state(job.job) == "RUNNING"  # the allocation isn't ours to end
            await job.engine.close()
            assert await job.engine.place(1, "after the end") == 0
            assert job.facts == []

    play(story())
    assert not sruns("1")


def test_a_step_gets_its_node_whatever_the_batch_script_was_given(cluster: SlurmCluster):
    async def story() -> None:
        environment = cluster.allocate(2, "--gpus=16")
        environment |= {
            "SLURM_GPUS": "16", "SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_NPROCS": "2",
            "SLURM_GPUS_PER_TASK": "1", "SLURM_MEM_PER_CPU": "900", "SLURM_CPU_BIND": "map_cpu:0",
            "SLURM_EXACT": "1", "SRUN_CPUS_PER_TASK": "1", "SLURM_HINT": "nomultithread",
            "SLURM_LABELIO": "1",
            "SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": "/nonexistent", "SQUEUE_STATES": "PENDING",
            "SQUEUE_FORMAT": "nothing", "SLURM_SUBMIT_DIR": "/somewhere", "SLURM_TIMELIMIT": "1",
        }  # fmt: skip
        job = Inside(cluster, environment)
        assert await job.engine.place(1, "first") == 1
        await job.living("node0")
        assert await job.engine.place(1, "second") == 1
        await job.living("node0", "node1")
        for agent in cluster.agents():
            assert agent.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
            assert agent.env["SLURM_SUBMIT_DIR"] == "/somewhere"
        await job.engine.close()
        assert cluster.living() == []

    play(story())


@pytest.mark.parametrize(
    "asked",
    [("--exclusive",), ("--gpus=16",), ("--gpus-per-task=4", "--ntasks-per-node=2"), ("--gres=gpu:8",)],
)
def test_an_agent_gets_all_gpus_however_the_job_has_asked_for_them(
    cluster: SlurmCluster, asked: tuple[str, ...]
):
    async def story() -> None:
        async with inside(cluster, 3 if asked[0] != "--gpus=16" else 2, allocation=asked) as job:
            assert await job.engine.place(2, "") == 2
            await job.living("node0", "node1")
            if asked[0] != "--gpus=16":
                assert await job.engine.place(1, "") == 1
                await job.living("node0", "node1", "node2")
            for agent in cluster.agents():
                assert agent.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"

    play(story())


def test_output_of_agents_goes_to_files_if_wished(cluster: SlurmCluster):
    async def story() -> None:
        async with inside(cluster, 2, **{"agent-output": "files"}) as job:
            await job.engine.place(2, "")
            await job.living("node0", "node1")
            logs = cluster.directory / "runs" / "job 'one' 100%" / "logs"
            for node in ("node0", "node1"):
                path = logs / f"agent-{node}.log"
                await job.until(lambda path=path, node=node: path.exists() and node in path.read_text(), 10)

    play(story())


@pytest.mark.slow
def test_a_crashed_node_is_replaced_at_once_and_told_once(cluster: SlurmCluster):
    async def story() -> None:
        async with inside(cluster) as job:
            assert await job.engine.place(4, "the world") == 4
            await job.living("node0", "node1", "node2", "node3")
            before = {agent.pid for agent in cluster.agents() if agent.node != "node2"}
            cluster.crash("node2")
            began = time.monotonic()
            assert await job.engine.place(1, "3 of 4 nodes can be used") == 1
            await job.living("node0", "node1", "node3", "node4")
            assert time.monotonic() - began < 8
            await job.until(lambda: job.facts, 90)
            (fact,) = job.facts
            assert isinstance(fact, NodeGone)
            assert (fact.node, fact.session) == ("node2", "")
            assert "left the allocation" in fact.reason
            # Others go on, and a node that comes back isn't the job's any more.
            cluster.start_slurmd("node2")
            await job.until(lambda: "idle" in cluster.ask("sinfo", "-h", "-N", "-n", "node2", "-o", "%T"), 30)
            assert await job.engine.place(1, "one more") == 0
            await asyncio.sleep(2)
            assert cluster.living() == ["node0", "node1", "node3", "node4"]
            assert before <= {agent.pid for agent in cluster.agents() if agent.lives}
            assert len(job.facts) == 1
        assert cluster.living() == []

    play(story())


@pytest.mark.slow
def test_a_dead_node_does_not_keep_the_first_agents_from_coming_up(cluster: SlurmCluster):
    """Slurm fails a step for many when one node can't be reached, and doesn't know that it is dead."""

    async def story() -> None:
        async with inside(cluster) as job:
            cluster.crash("node1")
            assert await job.engine.place(4, "the beginning") == 4
            await job.living("node0", "node2", "node3", "node4", timeout_s=90)

    play(story())


def test_a_drained_node_is_told_with_its_reason_once_each_time(cluster: SlurmCluster):
    async def story() -> None:
        async with inside(cluster) as job:
            await job.engine.place(4, "")
            await job.living("node0", "node1", "node2", "node3")
            cluster.run("scontrol", "update", "NodeName=node1", "State=DRAIN", f"Reason={HOSTILE_REASON}")
            await job.until(lambda: job.facts, 10)
            await asyncio.sleep(1.5)
            (fact,) = job.facts
            assert isinstance(fact, EngineDrains)
            assert fact.node == "node1"
            assert fact.reason == "Slurm: fan 'x' | State=DOWN; $(reboot)  [2J"
            # The spare is free; a node that drains is none, even when nobody is on it.
            cluster.run("scontrol", "update", "NodeName=node4", "State=DRAIN", "Reason=too")
            assert await job.engine.place(1, "") == 0
            await job.until(lambda: len(job.facts) == 2, 10)
            cluster.run("scontrol", "update", "NodeName=node1,node4", "State=RESUME")
            await asyncio.sleep(1.5)
            assert await job.engine.place(1, "") == 1
            await job.living("node0", "node1", "node2", "node3", "node4")
            cluster.run("scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=again")
            await job.until(lambda: job.facts[-1].reason == "Slurm: again", 10)
            assert [fact.node for fact in job.facts] == ["node1", "node4", "node1"]
            cluster.run("scontrol", "update", "NodeName=node0", "State=FAIL", "Reason=soon")
            await job.until(lambda: job.facts[-1] == EngineDrains("node0", "Slurm: soon"), 10)
            assert len(cluster.living()) == 5  # a drain kills nothing

    play(story())


@pytest.mark.slow
def test_a_health_check_program_drains_its_node():
    def extra(directory: Path) -> str:
        script = directory / "health"
        script.write_text(
            f"#!/bin/sh\nexport SLURM_CONF={directory}/slurm.conf\n"
            f'[ -e "{directory}/sick-$SLURMD_NODENAME" ] && '
            'scontrol update NodeName="$SLURMD_NODENAME" State=DRAIN Reason="ECC errors"\nexit 0\n'
        )
        script.chmod(0o755)
        return f"HealthCheckProgram={script}\nHealthCheckInterval=2\nHealthCheckNodeState=ANY"

    async def story(cluster: SlurmCluster) -> None:
        async with inside(cluster) as job:
            await job.engine.place(4, "")
            await job.living("node0", "node1", "node2", "node3")
            (cluster.directory / "sick-node3").touch()
            await job.until(lambda: job.facts, 40)
            assert job.facts == [EngineDrains("node3", "Slurm: ECC errors")]

    with slurm_cluster(conf_extra=extra) as cluster:
        play(story(cluster))


@pytest.mark.slow
def test_a_lost_step_is_found_which_slurm_does_not_miss(cluster: SlurmCluster):
    """slurmd and its stepd die with all they had, and slurmd is back at once: Slurm sees nothing."""

    async def story() -> None:
        async with inside(cluster, 4) as job:
            assert await job.engine.place(4, "") == 4
            await job.living("node0", "node1", "node2", "node3")
            cluster.crash("node2")
            cluster.start_slurmd("node2")
            await job.living("node0", "node1", "node3")
            # As soon as the node answers again: until then it isn't one to be placed on.
            placed = 0
            began = time.monotonic()
            while not placed and time.monotonic() - began < 30:
                placed = await job.engine.place(1, "3 of 4 nodes can be used")
            assert placed == 1
            await job.living("node0", "node1", "node2", "node3")
            assert job.facts == []
            assert await job.engine.place(1, "") == 0
        assert cluster.living() == []

    play(story())


def test_a_single_agent_that_ended_leaves_its_node_free(cluster: SlurmCluster):
    async def story() -> None:
        async with inside(cluster, 3) as job:
            await job.engine.place(2, "")
            await job.living("node0", "node1")
            assert await job.engine.place(1, "") == 1
            await job.living("node0", "node1", "node2")
            os.kill(cluster.agents()[-1].pid, signal.SIGTERM)  # a clean end
            await job.living("node0", "node1")
            assert await job.engine.place(1, "") == 1
            await job.living("node0", "node1", "node2")

    play(story())


@pytest.mark.slow
def test_a_released_node_is_not_used_again_until_an_operator_gives_it_back(cluster: SlurmCluster):
    async def story() -> None:
        async with inside(cluster, 3) as job:
            await job.engine.place(2, "")
            await job.living("node0", "node1")
            await job.engine.place(1, "")
            await job.living("node0", "node1", "node2")
            for name in ("node9", "../../x; touch /tmp/x", "", "-a", "node0,node1"):
                await job.engine.release(name, "nobody knows it")
            os.kill(cluster.agents()[-1].child, signal.SIGKILL)
            await job.engine.release("node2", "it drains")  # its agent doesn't end by itself
            await job.living("node0", "node1", timeout_s=20)
            assert await job.engine.place(1, "") == 0
            cluster.run("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=maintenance")
            await job.until(lambda: job.facts, 10)
            cluster.run("scontrol", "update", "NodeName=node2", "State=RESUME")
            await asyncio.sleep(1.5)
            assert await job.engine.place(1, "") == 1
            await job.living("node0", "node1", "node2")

    play(story())


def test_a_node_never_gets_a_second_agent_of_the_same_job(cluster: SlurmCluster):
    """Whoever comes back to an allocation knows nothing of the agents that are there."""

    async def story() -> None:
        async with inside(cluster, 2) as job:
            await job.engine.place(2, "")
            await job.living("node0", "node1")
            environment = {**cluster.environment, "SLURM_JOB_ID": job.job, "SLURM_JOB_NODELIST": "node[0-1]"}
            second = Inside(cluster, environment)
            assert await second.engine.place(2, "") == 2
            await asyncio.sleep(3)
            assert cluster.living() == ["node0", "node1"]
            await second.engine.close()
            assert cluster.living() == ["node0", "node1"]
            assert len(cluster.agents()) == 2

    play(story())


ALONE = """
import asyncio, json, sys
from pathlib import Path
from closeranks.engines.base import JobSpec, Join
from closeranks.engines.slurm import SlurmEngine
from closeranks.engines.slurm_text import expand_hostlist

async def main():
    engine = SlurmEngine(JobSpec(sys.argv[1], Path(sys.argv[1]), 2, 2, 0, ("train.py",), sys.argv[2]))
    engine.start(Join("127.0.0.1:1"))
    print(engine.listen_address(), await engine.place(2, ""), flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_agents_go_with_an_engine_that_is_killed(cluster: SlurmCluster):
    environment = cluster.allocate(2)
    script = cluster.directory / "alone.py"
    script.write_text(ALONE)
    argv = [sys.executable, str(script), str(cluster.directory / "r"), str(cluster.stand_in())]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().split() == ["127.0.0.1", "2"]
            wait_until(lambda: cluster.living() == ["node0", "node1"], 20, cluster.logs)
        finally:
            process.kill()
    assert wait_until(lambda: not cluster.living(), 15, cluster.living) < 10
    wait_until(lambda: set(cluster.steps(environment["SLURM_JOB_ID"])) <= {"extern"}, 20, cluster.logs)


def test_a_cancelled_job_tells_nothing_and_gets_no_agents(cluster: SlurmCluster):
    async def story() -> None:
        async with inside(cluster, 3) as job:
            await job.engine.place(2, "")
            await job.living("node0", "node1")
            cluster.run("scancel", job.job)
            await job.living()
            assert await job.engine.place(1, "") == 0
            await asyncio.sleep(2)
            assert job.facts == []
            began = time.monotonic()
            await job.engine.close()
            assert time.monotonic() - began < 5

    play(story())


@pytest.mark.slow
def test_without_an_answer_from_slurmctld_nothing_is_concluded(cluster: SlurmCluster):
    async def story() -> None:
        async with inside(cluster) as job:
            await job.engine.place(4, "")
            await job.living("node0", "node1", "node2", "node3")
            cluster.kill_controller()
            placing = asyncio.create_task(job.engine.place(1, ""))
            await asyncio.sleep(8)
            assert job.facts == []
            assert cluster.living() == ["node0", "node1", "node2", "node3"]
            cluster.start_controller()
            assert await asyncio.wait_for(placing, 60) in (0, 1)
            cluster.run("scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=still there")
            await job.until(lambda: job.facts, 60)
            assert job.facts == [EngineDrains("node1", "Slurm: still there")]
            cluster.kill_controller()
            began = time.monotonic()
            await job.engine.close()  # only slurmctld can end steps; agents are left to their controller
            assert time.monotonic() - began < 30
            assert not sruns(job.job)

    play(story())


@pytest.mark.slow
def test_agents_are_placed_after_a_restart_of_slurmctld(cluster: SlurmCluster):
    """Which refuses all steps for its first seconds."""

    async def story() -> None:
        async with inside(cluster, 3) as job:
            await job.engine.place(2, "")
            await job.living("node0", "node1")
            await asyncio.sleep(6)  # slurmctld saves its state every 5 s
            cluster.kill_controller()
            cluster.start_controller()
            await job.until(lambda: cluster.ask("scontrol", "ping").endswith("is UP"), 20)
            placed = 0
            began = time.monotonic()
            while not placed and time.monotonic() - began < 30:
                placed = await job.engine.place(1, "")
            await job.living("node0", "node1", "node2", timeout_s=30)
        assert cluster.living() == []

    play(story())


@pytest.mark.parametrize("text", ["node[1-3,08-011],x,y[5-6]", "a[1-2][03-04]", "n[2-3,7]", "c1-[5-6]"])
def test_lists_of_hosts_are_read_as_slurm_reads_them(cluster: SlurmCluster, text: str):
    assert expand_hostlist(text) == cluster.run("scontrol", "show", "hostnames", text).splitlines()


def test_the_address_is_the_one_that_leads_to_the_others(cluster: SlurmCluster):
    environment = {**cluster.environment, "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node[0-3]"}
    for own in (
        {},
        {"SLURMD_NODENAME": "node0"},
        {"SLURM_JOB_NODELIST": "node0", "SLURMD_NODENAME": "node0"},
    ):
        engine = SlurmEngine(spec_of(cluster), environment={**environment, **own})
        assert engine.listen_address() == "127.0.0.1"


# --- from a login node ------------------------------------------------------------------------------


def submit(cluster: SlurmCluster, plan: dict[str, Any], **options: str) -> tuple[str, SlurmEngine]:
    (cluster.directory / "run.json").write_text(json.dumps(plan))
    engine = SlurmEngine(spec_of(cluster, **options), environment=cluster.environment)
    return engine.submit(), engine


def finished(cluster: SlurmCluster, job: str, *states: str, timeout_s: float = 60.0) -> str:
    wait_until(
        lambda: cluster.state(job) in states, timeout_s, lambda: cluster.job(job, "JobState") + log(cluster)
    )
    return cluster.state(job)


def log(cluster: SlurmCluster) -> str:
    found = sorted(cluster.directory.glob("runs/*/slurm-*.log"))
    return "\n".join(path.read_text() for path in found)


def test_a_submitted_job_runs_as_it_was_typed(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(cluster.directory / "home")
    comment = "a \\ b 'c' \"d\" $HOME `id` # e; é"
    cluster.environment |= {"SBATCH_PARTITION": "nonsense", "SBATCH_NO_REQUEUE": "1", "SBATCH_OPEN_MODE": "t"}
    job, _ = submit(
        cluster, {"code": 0}, partition="train", comment=comment, gpus_per_node="2", time="10",
        setup="export GREETING='hello there' # said",
    )  # fmt: skip
    assert job.isdigit()
    shown = cluster.ask("scontrol", "show", "job", job)
    assert f"Comment={comment}" in shown
    assert "Requeue=1" in shown
    finished(cluster, job, "COMPLETED")
    (run,) = cluster.runs()
    assert run["argv"] == [
        "-m", "closeranks", "run", "--engine", "slurm", "--nnodes", "4", "train.py", "--name",
        "it's $HOME\nand more",
    ]  # fmt: skip
    assert run["cwd"] == str(cluster.directory / "home")
    assert run["env"]["SLURM_JOB_NUM_NODES"] == "5"
    assert run["env"]["GREETING"] == "hello there"
    assert run["env"]["CLOSERANKS_SUBMITTED"] == str(spec_of(cluster).run_dir)


@pytest.mark.slow
def test_a_job_without_enough_healthy_nodes_begins_again_on_others():
    with slurm_cluster(8) as cluster:
        begins_again(cluster)


def begins_again(cluster: SlurmCluster) -> None:
    plan = {"code": 93, "excluded": ["node1", "x; scontrol shutdown", "node2"]}
    job, _ = submit(cluster, plan, exclude="node5", nodelist="node0")
    wait_until(lambda: cluster.job(job, "ExcNodeList") == "node1,node2,node5", 30, lambda: log(cluster))
    finished(cluster, job, "PENDING")
    assert "too few healthy nodes: the job is requeued, leaving out node1,node2,node5" in log(cluster)
    time.sleep(
        3
    )  # Slurm takes a late word on the first start for one on the second, and so waits two minutes
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    finished(cluster, job, "COMPLETED", timeout_s=60)
    again = cluster.runs()[-1]
    assert again["env"]["SLURM_JOB_NODELIST"] == "node[0,3-4,6-7]"


@pytest.mark.slow
@pytest.mark.parametrize(("requeues", "state"), [("--requeue", "PENDING"), ("--no-requeue", "CANCELLED")])
def test_a_job_does_not_outlive_its_batch_host(cluster: SlurmCluster, requeues: str, state: str):
    """To Slurm a job with --no-kill goes on without its script, on the other nodes, for ever."""
    script = cluster.directory / "alone.py"
    script.write_text(
        ALONE.replace('("train.py",), sys.argv[2])', '("train.py",), sys.argv[2], {"poll-s": "0.5"})')
    )
    argv = [sys.executable, str(script), str(cluster.directory / "r"), str(cluster.stand_in())]
    batch = cluster.directory / "batch.sh"
    batch.write_text(f"#!/bin/bash\nexec {shlex.join(argv)}\n")
    job = cluster.run(
        "sbatch", "--parsable", "--nodes=3", "--no-kill", requeues, "--output=/dev/null", str(batch)
    )
    wait_until(lambda: len(cluster.living()) == 2, 30, cluster.logs)
    host = cluster.job(job, "BatchHost")
    assert host == "node0"
    time.sleep(3)
    assert cluster.state(job) == "RUNNING"
    cluster.crash(host)
    finished(cluster, job, state, timeout_s=90)
    wait_until(lambda: not cluster.living(), 20, cluster.living)


@pytest.mark.parametrize(
    ("options", "state"), [({}, "FAILED"), ({"at-time-limit": "requeue"}, "PENDING")], ids=["end", "requeue"]
)
def test_the_signal_before_the_time_limit_reaches_the_run(
    cluster: SlurmCluster, options: dict[str, str], state: str
):
    job, _ = submit(cluster, {"code": 1, "wait_s": 60}, **options)
    wait_until(lambda: bool(cluster.runs()), 20, lambda: log(cluster))
    cluster.run("scancel", "--batch", "--signal=TERM", job)  # what slurmctld sends for --signal=B:TERM@120
    finished(cluster, job, state)
    assert ("requeued" in log(cluster)) == (state == "PENDING")


def test_a_cancelled_job_is_not_requeued(cluster: SlurmCluster):
    job, _ = submit(cluster, {"code": 1, "wait_s": 60}, **{"at-time-limit": "requeue"})
    wait_until(lambda: bool(cluster.runs()), 20, lambda: log(cluster))
    cluster.run("scancel", job)
    finished(cluster, job, "CANCELLED")
    time.sleep(3)
    assert finished(cluster, job, "CANCELLED") == "CANCELLED"


def test_sbatch_refuses_in_its_own_words(cluster: SlurmCluster):
    for options, words in (
        ({"partition": "nope"}, "Invalid partition name specified"),
        ({"frobnicate": "1"}, "unrecognized option '--frobnicate=1'"),
        ({"time": "soon"}, "Invalid --time specification"),
    ):
        with pytest.raises(ConfigError) as caught:
            submit(cluster, {"code": 0}, **options)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    assert cluster.ask("squeue", "-h") == ""


def test_the_rig_stops_what_it_started():
    with slurm_cluster(2) as cluster:
        pids = [cluster._pid(f"slurmd-node{number}.pid") for number in (0, 1)]
        pids += [cluster._pid("slurmctld.pid"), cluster._pid("munge/munged.pid")]
        assert all(pid is not None and alive(pid) for pid in pids)
    assert not any(pid is not None and alive(pid) for pid in pids)
    assert not cluster.directory.exists()
