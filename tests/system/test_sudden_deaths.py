"""SIGKILL to any part of the launcher: nothing of the job may outlive it, or the training goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from conftest import eventually
from system.rig import SOON_S, Job, Run, Start, is_alive, script, settled_spares, wait_for_ranks

# Each rank with a child as DataLoader has them, a grandchild, a daemon, and one that ignores what it can.
FAMILY = """
    import multiprocessing, os, signal, time

    def sleep():
        time.sleep(600)

    def with_child():
        multiprocessing.get_context("fork").Process(target=sleep).start()
        sleep()

    def daemon():
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 256)
                for number in range(1, 32):
                    if number not in (signal.SIGKILL, signal.SIGSTOP):
                        signal.signal(number, signal.SIG_IGN)
                sleep()
            os._exit(0)
        os.wait()

    if __name__ == "__main__":
        for target in (sleep, with_child):
            multiprocessing.get_context("fork").Process(target=target).start()
        multiprocessing.get_context("spawn").Process(target=sleep).start()
        daemon()
        os.spawnvp(os.P_NOWAIT, "sleep", ["sleep", "600"])
        print("ready", os.environ["RANK"], flush=True)
        sleep()
"""
FAMILY_SIZE = 7  # with the resource tracker that spawn brings, and without the rank itself
SLOW_IMPORT = "import time\nprint('importing', flush=True)\ntime.sleep(600)"
WORKS = """
    import os, sys, time
    import closeranks
    print("generation", os.environ["CLOSERANKS_GENERATION"], flush=True)
    print("ready", os.environ["RANK"], flush=True)
    for tick in range(int(sys.argv[1]) * 20):
        print("tick", tick, flush=True)
        closeranks.step()
        time.sleep(0.05)
    print("done", flush=True)
"""


@pytest.fixture
def family(start: Start, tmp_path: Path) -> Job:
    job = start("--nproc-per-node", 2, script(tmp_path, FAMILY))
    for rank in (0, 1):
        job.running.wait_for(f"ready {rank}")
    assert eventually(lambda: len(job.running.pids()) >= 6 + 2 * FAMILY_SIZE, SOON_S)
    return job


@pytest.mark.parametrize("names", ["guard", "keeper", "agent", "guard agent", "guard keeper", "keeper agent"])
def test_nothing_outlives_the_launcher(family: Job, names: str) -> None:
    pids = [getattr(family, name) for name in names.split()]
    everything = set(family.running.pids())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    family.assert_gone()
    assert eventually(lambda: not any(is_alive(pid) for pid in everything), SOON_S)


@pytest.mark.parametrize("kind", ["--no-zygote", "--no-python"])
def test_however_the_ranks_were_started(start: Start, tmp_path: Path, kind: str) -> None:
    path = script(tmp_path, FAMILY)
    target = [sys.executable, path] if kind == "--no-python" else [path]
    job = start("--nproc-per-node", 2, kind, *target)
    for rank in (0, 1):
        job.running.wait_for(f"ready {rank}")
    os.kill(job.agent, signal.SIGKILL)
    job.assert_gone()


def test_the_guard_of_a_stopped_agent(family: Job) -> None:
    agent = family.agent
    os.kill(agent, signal.SIGSTOP)
    os.kill(family.guard, signal.SIGKILL)
    family.assert_gone()


def test_a_kill_of_the_process_group_too(family: Job) -> None:
    """What a shell's ``kill -9 %1``, ``timeout -s KILL`` and test harnesses do."""
    os.killpg(family.guard, signal.SIGKILL)
    family.assert_gone()


def test_the_agents_death_is_told(start: Start, tmp_path: Path) -> None:
    job = start("--nproc-per-node", 2, script(tmp_path, WORKS), 600)
    wait_for_ranks(job, 2)
    job.running.wait_for("tick 1")
    agent = job.agent
    os.kill(agent, signal.SIGKILL)
    done = job.running.wait(SOON_S)
    assert done.returncode == 137
    assert f"the agent (pid {agent}) was killed by SIGKILL; every rank was stopped with it" in done.stderr
    assert "Start the same command again" in done.stderr
    assert "tick 1\n" in job.text("out", 0), "what ranks had said is in their logs"


def test_the_stopped_too(start: Start, tmp_path: Path) -> None:
    job = start("--nproc-per-node", 2, "--hang-detection", "off", script(tmp_path, WORKS), 600)
    ranks = wait_for_ranks(job, 2)
    os.kill(ranks[1], signal.SIGSTOP)
    os.kill(job.part("cr-zygote"), signal.SIGSTOP)
    os.kill(job.agent, signal.SIGKILL)
    job.assert_gone()


def test_what_nobody_could_remove_the_next_job_does(start: Start, tmp_path: Path) -> None:
    """All three killed at once: only a directory is left, and not for long. Those of living jobs stay."""
    job = start("--nproc-per-node", 2, script(tmp_path, WORKS), 600)
    wait_for_ranks(job, 2)
    everything = job.running.pids()
    (left,) = job.private_dirs()
    for pid in (job.guard, job.keeper, job.agent):
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not any(is_alive(pid) for pid in everything), SOON_S)
    assert left.exists()

    other = start("--nproc-per-node", 1, script(tmp_path, WORKS), 600)
    wait_for_ranks(other, 1)
    (living,) = other.private_dirs()
    for directory in (left, living):
        os.utime(directory / "lock", (0, 0))  # a lock of the last seconds is left alone
    third = start(script(tmp_path, "print('next')", name="next.py"))
    assert third.running.wait().returncode == 0
    assert not left.exists()
    assert living.exists()


def test_while_it_starts(start: Start, tmp_path: Path) -> None:
    script(tmp_path, SLOW_IMPORT, name="no-torch/slow_import.py")
    job = start("--preload", "slow_import", script(tmp_path, WORKS), 600)
    job.running.wait_for("importing")
    os.kill(job.agent, signal.SIGKILL)
    job.assert_gone()


# --- parts that the training doesn't need ------------------------------------------------------------


def test_the_log_pump_is_started_again(start: Start, tmp_path: Path) -> None:
    job = start("--nproc-per-node", 2, script(tmp_path, WORKS), 2)
    ranks = wait_for_ranks(job, 2)
    job.running.wait_for("tick 3")
    pump = job.part("closeranks-logs")
    os.kill(pump, signal.SIGKILL)
    assert eventually(
        lambda: pump not in job.parts("closeranks-logs") and job.parts("closeranks-logs"), SOON_S
    )
    assert job.ranks() == ranks, "nobody got SIGPIPE"
    done = job.running.wait()
    assert done.returncode == 0
    for rank in (0, 1):
        assert job.text("out", rank).endswith("done\n")
        ticks = [line for line in job.text("out", rank).splitlines() if line.startswith("tick")]
        assert ticks[-1] == "tick 39"
        assert len(set(ticks)) >= 35, "what the dead pump had read and not written may be gone"
    job.assert_gone()


@pytest.mark.torch
def test_another_zygote_takes_over(start: Start, tmp_path: Path) -> None:
    job = start("--nproc-per-node", 2, script(tmp_path, WORKS), 600, torch=True)
    wait_for_ranks(job, 2)
    settled_spares(job, 2)
    zygote = job.part("cr-zygote")
    os.kill(zygote, signal.SIGKILL)
    for generation in (1, 2):
        os.kill(wait_for_ranks(job, 2)[0], signal.SIGKILL)
        job.running.wait_for(f"generation {generation}")
        wait_for_ranks(job, 2)
    settled_spares(job, 2)
    assert job.part("cr-zygote") != zygote
    # Said where it was missed first: at the next fork, or while it was to import what the script uses.
    said = ("starting another one", "can't import ahead what the script uses")
    assert any(text in job.running.stderr for text in said), job.running.stderr
    assert "no zygote" not in job.running.stderr
    os.kill(job.guard, signal.SIGTERM)
    assert job.running.wait(SOON_S).returncode == 143
    job.assert_gone()


@pytest.mark.slow
@pytest.mark.torch
def test_a_zygote_that_is_always_killed_is_given_up(start: Start, tmp_path: Path) -> None:
    job = start(script(tmp_path, WORKS), 600, torch=True)
    for generation in range(6):
        job.running.wait_for(f"generation {generation}")
        settled_spares(job, 1)
        for pid in job.parts("cr-zygote") + job.parts("cr-spare"):
            os.kill(pid, signal.SIGKILL)
        os.kill(wait_for_ranks(job, 1)[0], signal.SIGKILL)
    job.running.wait_for("generation 6")
    assert job.running.stderr.count("starting another one") == 3
    assert job.running.stderr.count("no zygote, workers are started one by one") == 1
    assert job.parts("cr-zygote") == []
    os.kill(job.guard, signal.SIGTERM)
    assert job.running.wait(SOON_S).returncode == 143


@pytest.mark.torch
def test_dead_spares_are_replaced(start: Start, tmp_path: Path) -> None:
    job = start("--nproc-per-node", 2, script(tmp_path, WORKS), 600, torch=True)
    ranks = wait_for_ranks(job, 2)
    spares: list[int] = []

    def two_wait() -> bool:
        spares[:] = job.parts("cr-spare")  # looked at once: spares that have learned may take their place
        return len(spares) == 2

    assert eventually(two_wait, SOON_S)
    first, second = spares
    with contextlib.suppress(ProcessLookupError):
        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)
    os.kill(ranks[0], signal.SIGKILL)
    job.running.wait_for("generation 1")
    assert not set(wait_for_ranks(job, 2).values()) & {first, second}
    os.kill(job.guard, signal.SIGTERM)
    job.running.wait(SOON_S)
    job.assert_gone()


# --- what shares memory -----------------------------------------------------------------------------


def test_shared_memory_of_killed_ranks_is_removed(run: Run, tmp_path: Path) -> None:
    """Python's resource tracker does that, if it isn't killed with its rank."""
    path = script(
        tmp_path,
        """
        import os, time
        from multiprocessing.shared_memory import SharedMemory

        memory = SharedMemory(create=True, size=4096, name=f"closeranks-test-{os.getpid()}")
        print("mine", memory.name, flush=True)
        if os.environ["CLOSERANKS_GENERATION"] == "0":
            if os.environ["RANK"] == "0":
                time.sleep(0.3)
                os.kill(os.getpid(), 9)
            time.sleep(600)
        time.sleep(0.3)
        """,
    )
    done, job = run("--nproc-per-node", 3, path)
    assert done.returncode == 0, done.stderr
    names = [job.text("out", rank, generation).split()[1] for rank in range(3) for generation in (0, 1)]
    assert len(set(names)) == 6
    assert [name for name in names if Path("/dev/shm", name).exists()] == []


@pytest.mark.torch
def test_torchs_shared_memory_too(run: Run, tmp_path: Path) -> None:
    """Its manager needs two seconds after the death of the rank."""
    path = script(
        tmp_path,
        """
        import os, time
        import torch, torch.multiprocessing
        torch.multiprocessing.set_sharing_strategy("file_system")
        tensor = torch.zeros(1000).share_memory_()
        print("mine", *[name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")])
        if os.environ["CLOSERANKS_GENERATION"] == "0":
            os.kill(os.getpid(), 9)
        """,
    )
    done, job = run(path, torch=True)
    assert done.returncode == 0, done.stderr
    for generation in (0, 1):
        _, name = job.text("out", 0, generation).split()
        assert not Path("/dev/shm", name).exists()


@pytest.mark.torch
def test_nor_does_torchs_shared_memory_outlive_a_killed_agent(start: Start, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, time
        import torch, torch.multiprocessing
        torch.multiprocessing.set_sharing_strategy("file_system")
        tensor = torch.zeros(1000).share_memory_()
        names = [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]
        print("mine", *names, flush=True)
        time.sleep(600)
        """,
    )
    job = start(path, torch=True)
    job.running.wait_for("mine torch_")
    os.kill(job.agent, signal.SIGKILL)
    assert job.running.wait().returncode == 128 + signal.SIGKILL
    job.assert_gone()
    _, name = job.text("out").split()
    assert not Path("/dev/shm", name).exists()
