"""Kill after kill: each recovered, resumed where it was, and nothing piles up.

The seed is printed; ``CLOSERANKS_TEST_SEED=N pytest tests/system/test_restarts.py`` makes the same kills.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from conftest import eventually
from system.rig import (
    SOON_S,
    Job,
    Run,
    Start,
    children,
    comm,
    is_alive,
    open_files,
    script,
    settled_spares,
    wait_for_ranks,
)

pytestmark = pytest.mark.torch

# Saves each step; stops at the step that the file "target" names. Data depend on the step alone.
TRAIN = """
    import os, sys, time
    import torch, torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = 0
    if os.path.exists("state.pt"):
        state = torch.load("state.pt", weights_only=True)
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    print("resumed", step, flush=True)
    while True:
        try:
            with open("target") as file:
                if step >= int(file.read()):
                    break
        except FileNotFoundError:
            pass
        torch.manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        (model(torch.randn(8, 4)) - torch.randn(8, 1)).square().mean().backward()
        optimizer.step()
        step += 1
        if rank == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, "new.pt")
            os.replace("new.pt", "state.pt")
        dist.barrier()  # what anyone has printed is saved
        print("step", step, flush=True)
        time.sleep(0.005)
    print("parameters", [value.hex() for p in model.parameters() for value in p.flatten().tolist()])
    dist.destroy_process_group()
"""


class Trace:
    """What the logs say of one generation."""

    def __init__(self, job: Job, generation: int, ranks: int) -> None:
        texts = [job.text("out", rank, generation) for rank in range(ranks)]
        self.resumed = [
            int(found[1]) if (found := re.search(r"resumed (\d+)\n", text)) else None for text in texts
        ]
        self.steps = [max((int(n) for n in re.findall(r"step (\d+)\n", text)), default=0) for text in texts]


def agent_state(job: Job) -> dict[str, int]:
    """What must not grow from restart to restart."""
    agent = job.agent
    status = Path(f"/proc/{agent}/status").read_text()
    numbers = dict(re.findall(r"(\w+):\s+(\d+)", status))
    return {
        "descriptors": len(open_files(agent)),
        "a zygote's": len(open_files(job.part("cr-zygote"))),
        "a rank's": len(open_files(job.ranks()[0])),
        "the pump's": len(open_files(job.part("closeranks-logs"))),
        "threads": int(numbers["Threads"]),
        "resident_kb": int(numbers["VmRSS"]),
        "maps": len(Path(f"/proc/{agent}/maps").read_text().splitlines()),
    }


def settled(job: Job, ranks: int) -> dict[str, int]:
    """The agent's state once its spares stand ready."""
    settled_spares(job, ranks)
    return agent_state(job)


def kill_again_and_again(job: Job, ranks: int, kills: int, dice: random.Random) -> int:
    """Returns the newest step. Each kill waits until the generation before has got on."""
    newest = 0
    early = False
    for generation in range(kills):
        # The moment: while it starts (not twice in a row: that is no progress), or within some steps.
        early = not early and generation > 0 and dice.random() < 0.25
        victim, moment_s = dice.randrange(ranks), dice.random() * (0.15 if early else 0.3)
        if not early:
            wait_for_step(job, generation, ranks, newest)
        time.sleep(moment_s)
        victims = wait_for_ranks(job, ranks)
        os.kill(victims[victim], signal.SIGKILL)
        assert eventually(lambda pid=victims[victim]: not is_alive(pid), SOON_S)
        newest = max([newest, *Trace(job, generation, ranks).steps])
        assert eventually(
            lambda g=generation + 1: (job.run_dir / f"logs/{g}/0.out").exists() or job.running.process.poll(),
            SOON_S * 2,
        ), job.running.stderr[-3000:]
    wait_for_step(job, kills, ranks, newest)
    return max(newest, *Trace(job, kills, ranks).steps)


def wait_for_step(job: Job, generation: int, ranks: int, newest: int) -> None:
    """Every rank has made a step in this generation, and they resumed where the last one was."""

    def moved() -> bool:
        return min(Trace(job, generation, ranks).steps) > 0 or job.running.process.poll() is not None

    assert eventually(moved, SOON_S * 3), job.running.stderr[-3000:]
    trace = Trace(job, generation, ranks)
    assert job.running.process.poll() is None, job.running.stderr[-3000:]
    assert len(set(trace.resumed)) == 1, f"generation {generation}: {trace.resumed}"
    # Saved before it is printed; the next one may be saved and not yet printed.
    assert newest <= (trace.resumed[0] or 0) <= newest + 1, f"generation {generation} lost steps"


def soak(start: Start, run: Run, folder: Path, kills: int, ranks: int) -> None:
    seed = int(os.environ.get("CLOSERANKS_TEST_SEED") or random.SystemRandom().randrange(10**6))
    print(f"CLOSERANKS_TEST_SEED={seed}")
    dice = random.Random(seed)
    path = script(folder, TRAIN)
    (folder / "killed").mkdir()
    job = start("--nproc-per-node", ranks, path, torch=True, cwd=folder / "killed")
    wait_for_step(job, 0, ranks, 0)
    before = settled(job, ranks)
    newest = kill_again_and_again(job, ranks, kills, dice)
    after = settled(job, ranks)
    print(f"{kills} kills, step {newest}: {before} -> {after}")

    assert after["descriptors"] <= before["descriptors"] + 2
    for whose in ("a zygote's", "a rank's", "the pump's"):
        assert after[whose] <= before[whose] + 1
    assert after["threads"] <= before["threads"] + 1
    assert after["maps"] <= before["maps"] + 20
    assert after["resident_kb"] <= before["resident_kb"] + 4096 + 64 * kills
    assert eventually(lambda: not zombies(job.agent), SOON_S), zombies(job.agent)
    (private,) = job.private_dirs()
    assert sorted(path.name for path in private.iterdir()) == ["control", f"g{kills}", "lock"]
    assert len(list((private / f"g{kills}").iterdir())) <= 2

    target = max(Trace(job, kills, ranks).steps) + 100
    (folder / "killed/target").write_text(str(target))
    done = job.running.wait(SOON_S * 6)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{kills} incident" in done.stderr
    job.assert_gone()
    ended = [job.text("out", rank, kills).splitlines()[-1] for rank in range(ranks)]

    (folder / "undisturbed").mkdir()
    (folder / "undisturbed/target").write_text(str(target))
    done, calm = run("--nproc-per-node", ranks, path, torch=True, cwd=folder / "undisturbed")
    assert done.returncode == 0, done.stderr
    assert ended == [calm.text("out", rank, 0).splitlines()[-1] for rank in range(ranks)]
    assert ended[0].startswith("parameters")


def zombies(agent: int) -> list[str]:
    return [comm(pid) for pid in children(agent) if not is_alive(pid)]


def test_twenty_kills(start: Start, run: Run, tmp_path: Path) -> None:
    soak(start, run, tmp_path, kills=20, ranks=2)


@pytest.mark.slow
def test_two_hundred_kills(start: Start, run: Run, tmp_path: Path) -> None:
    soak(start, run, tmp_path, kills=200, ranks=2)
