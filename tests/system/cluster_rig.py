"""A job over several nodes of this host, taken apart, and what its ranks have done."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import eventually
from system.rig import Job, comm, is_alive, parents
from system.test_restarts import TRAIN

SLOW_S = 90.0  # three agents import torch on a machine that does other things, too

# What TRAIN computes on two ranks, without any of them: DDP's mean of two gradients is exact.
EXPECTED = """
    import sys, torch
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(int(sys.argv[1])):
        found = []
        for rank in range(2):
            torch.manual_seed(1000 * step + rank)
            optimizer.zero_grad()
            (model(torch.randn(8, 4)) - torch.randn(8, 1)).square().mean().backward()
            found.append([p.grad / 2 for p in model.parameters()])
        for p, first, second in zip(model.parameters(), *found):
            p.grad = first + second
        optimizer.step()
    print("parameters", [value.hex() for p in model.parameters() for value in p.flatten().tolist()])
"""


def expected(steps: int) -> str:
    """The last line of an undisturbed run of so many steps."""
    program = textwrap.dedent(EXPECTED)
    done = subprocess.run(
        [sys.executable, "-c", program, str(steps)],
        capture_output=True,
        text=True,
        timeout=SLOW_S,
        check=True,
    )
    return done.stdout.strip()


@dataclass
class Cluster:
    """``folder``: where its script runs, and ends at the step that the file ``target`` names."""

    job: Job
    folder: Path

    # --- processes

    def named(self, name: str) -> list[int]:
        return [pid for pid in self.job.running.pids() if comm(pid) == name and is_alive(pid)]

    @property
    def controller(self) -> int:
        found: list[int] = []

        def one() -> bool:
            nonlocal found
            found = self.named("cr-controller")
            return len(found) == 1

        assert eventually(one, SLOW_S), found
        return found[0]

    def rank(self, number: int) -> int:
        found: list[int] = []

        def one() -> bool:
            nonlocal found
            found = self.named(f"rank {number}")
            return len(found) == 1

        assert eventually(one, SLOW_S), found
        return found[0]

    def nodes(self) -> dict[str, int]:
        """node -> pid of what its engine has started."""
        found = {}
        for pid in self.job.running.pids():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                if "--node" in words and is_alive(pid):
                    found[words[words.index("--node") + 1]] = pid
        return found

    def tree(self, node: str) -> list[int]:
        """Everything that belongs to that node."""
        found, above = [self.nodes()[node]], parents()
        for pid in found:
            found += [child for child, parent in above.items() if parent == pid]
        return found

    def node_of_rank(self, number: int) -> str:
        pid = self.rank(number)
        return next(node for node in self.nodes() if pid in self.tree(node))

    def signal_node(self, node: str, number: int) -> list[int]:
        """To all of its processes, as one; returns them."""
        pids = self.tree(node)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def kill_controller(self) -> None:
        pid = self.controller
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not is_alive(pid), SLOW_S)

    # --- what its ranks have done

    @property
    def generations(self) -> list[int]:
        logs = self.job.run_dir / "logs"
        return sorted(int(path.name) for path in logs.iterdir()) if logs.exists() else []

    def steps(self, generation: int, rank: int = 0) -> list[int]:
        return [int(n) for n in re.findall(r"^step (\d+)$", self.job.text("out", rank, generation), re.M)]

    def resumed(self, generation: int) -> int | None:
        found = re.search(r"^resumed (\d+)$", self.job.text("out", 0, generation), re.M)
        return int(found[1]) if found else None

    @property
    def newest(self) -> int:
        return max((step for g in self.generations for step in self.steps(g)), default=0)

    def wait_for_step(self, generation: int, beyond: int = 0, within_s: float = SLOW_S) -> None:
        """Until both ranks have made that step in this generation."""

        def moved() -> bool:
            ended = self.job.running.process.poll() is not None
            return ended or all(max(self.steps(generation, rank), default=0) > beyond for rank in range(2))

        there = eventually(moved, within_s, 0.05)
        if not there or self.job.running.process.poll() is not None:
            pytest.fail(f"no step of generation {generation}:\n{self.job.running.stderr[-4000:]}")

    def told(self, text: str, within_s: float = SLOW_S) -> None:
        self.job.running.wait_for(text, within_s)

    # --- its end

    def finish(self, more: int = 30) -> int:
        """Let it come to its end; returns at which step. The ranks' last words are an undisturbed run's."""
        target = self.newest + more
        (self.folder / "new-target").write_text(str(target))
        (self.folder / "new-target").replace(self.folder / "target")
        done = self.job.running.wait(SLOW_S)
        assert done.returncode == 0, done.stderr[-4000:]
        self.job.assert_gone()
        last = self.generations[-1]
        words = [self.job.text("out", rank, last).splitlines()[-1] for rank in range(2)]
        assert words == [expected(target)] * 2
        return target

    def assert_nothing_lost(self) -> None:
        """Each generation began after the last step of the one before, or one that was saved and not printed
        any more."""
        for before, after in zip(self.generations, self.generations[1:], strict=False):
            last = max(self.steps(before), default=self.resumed(before) or 0)
            assert last <= (self.resumed(after) or 0) <= last + 1, f"generation {after} lost steps"

    def assert_no_step_twice(self, target: int) -> None:
        done = [step for generation in self.generations for step in self.steps(generation)]
        assert done == list(range(1, target + 1))


def quiet_for(seconds: float, still: object) -> None:
    """Wait while ``still()`` stays true."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        assert still()  # type: ignore[operator]
        time.sleep(0.05)


def write_script(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.py"
    path.write_text(textwrap.dedent(TRAIN))
    return path
