"""Nodes that are cut off, on isolated hosts: never two worlds at once, and the job goes on where it can.

Real agents, real ranks and gloo, over TLS, in network namespaces. The ranks note every step that they
complete, and at the end their notes must add up (see chaos/rounds.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "tests" / "chaos"))

from isolated_hosts import Hosts, why_not  # noqa: E402 - it lies beside the benchmarks
from rounds import BrokenPromise, Chaos, check  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.skipif(bool(why_not()), reason=f"isolated hosts: {why_not()}"),
]

LEASE_S, MARGIN_S = 2.0, 0.5  # by default
STEPS_SOON_S = 40.0


class Partitioned(Chaos):
    """A job of three nodes and a spare on four hosts, its controller on a fifth."""

    hosts: Hosts

    def start(self, step_s: float) -> None:
        environment = {**os.environ, "CHAOS_FOLDER": str(self.folder), "CHAOS_STEP_S": str(step_s)}
        command = [
            *self.hosts.inside(self.hosts.hub),
            sys.executable, "-m", "closeranks", "run", "--engine", "local", "--nnodes", "3", "--spares", "1",
            "--engine-option", "hosts=" + ",".join(self.hosts.names),
            "--engine-option", "prefix=nsenter --net=/run/netns/{node}",
            "--engine-option", f"listen={self.hosts.hub_address}",
            "--nproc-per-node", "1", "--log-dir", str(self.folder / "runs"),
            str(ROOT / "tests" / "chaos" / "train.py"),
        ]  # fmt: skip
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=self.folder
            )

    def seated(self) -> dict[int, str]:
        """rank -> node."""
        return {node["ranks"][0]: node["node"] for node in self.status()["nodes"] if node["ranks"]}

    def goes_on(self) -> int:
        return self.wait_for_steps(self.saved_step() + 5)

    def end(self) -> dict[str, int]:
        (self.folder / "stop").touch()
        assert self.process is not None
        assert self.process.wait(STEPS_SOON_S) == 0, (self.folder / "output").read_text()[-3000:]
        return check(self.folder)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Partitioned]:
    with Hosts(4) as hosts:
        made = Partitioned(tmp_path, None, None)  # type: ignore[arg-type] - nothing here is left to chance
        made.hosts = hosts
        try:
            made.start(0.01)
            made.wait_for_steps(5)
            yield made
        except BrokenPromise as error:
            pytest.fail(f"{error}\n{(tmp_path / 'output').read_text(errors='replace')[-3000:]}")
        finally:
            made.kill()


def test_a_spare_takes_the_place_of_a_node_that_is_cut_off(job: Partitioned) -> None:
    node = job.seated()[1]
    job.hosts.link(node, up=False)
    job.goes_on()
    assert node not in job.seated().values()
    job.hosts.link(node, up=True)
    job.goes_on()
    assert job.end()["generations"] == 2


@pytest.mark.exhaustive
def test_the_node_that_has_the_store_and_rank_0_may_be_cut_off(job: Partitioned) -> None:
    node = job.seated()[0]
    job.hosts.link(node, up=False)
    job.goes_on()
    assert node not in job.seated().values()
    assert job.end()["generations"] == 2


@pytest.mark.parametrize("direction", ["in", pytest.param("out", marks=pytest.mark.exhaustive)])
def test_a_node_that_is_cut_off_one_way_stops_by_itself(job: Partitioned, direction: str) -> None:
    node = job.seated()[2]
    job.hosts.drop(node, direction)
    job.goes_on()
    assert node not in job.seated().values()
    job.hosts.heal(node)
    job.goes_on()
    assert job.end()["generations"] == 2


@pytest.mark.exhaustive
def test_a_cut_shorter_than_the_lease_costs_nothing(job: Partitioned) -> None:
    node = job.seated()[1]
    job.hosts.link(node, up=False)
    time.sleep(0.2)
    job.hosts.link(node, up=True)
    job.goes_on()
    assert node in job.seated().values()
    assert job.end()["generations"] == 1


@pytest.mark.exhaustive
def test_all_ranks_stop_when_the_controller_is_cut_off_and_start_again_with_it(job: Partitioned) -> None:
    for node in job.hosts.names:
        job.hosts.link(node, up=False)
    time.sleep(LEASE_S + MARGIN_S + 1.0)
    stopped_at = job.saved_step()
    time.sleep(1.0)
    assert job.saved_step() == stopped_at, "steps are made without a lease"
    for node in job.hosts.names:
        job.hosts.link(node, up=True)
    job.goes_on()
    job.end()


@pytest.mark.exhaustive
def test_the_minority_stops_and_the_job_waits_where_too_few_are_left(job: Partitioned) -> None:
    cut = [job.seated()[1], job.seated()[2]]
    for node in cut:
        job.hosts.link(node, up=False)
    time.sleep(LEASE_S + MARGIN_S + 1.5)
    stopped_at = job.saved_step()
    time.sleep(1.0)
    assert job.saved_step() == stopped_at, "a world of three with two nodes"
    for node in cut:
        job.hosts.link(node, up=True)
    job.wait_for_steps(stopped_at + 3)
    job.end()
