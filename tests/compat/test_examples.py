"""The example does what its page says: it resumes, and no interruption shows in its parameters."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_tiny.py"


def digest(output: str) -> str:
    found = re.findall(r"parameters sha256 ([0-9a-f]{64})", output)
    assert len(found) == 1, output
    return found[0]


@pytest.fixture
def train(run_closeranks: Callable, tmp_path: Path) -> Callable:
    def run(*flags: str, name: str, steps: int, nproc: int = 4):
        done = run_closeranks(
            *("run", "--log-dir", tmp_path / "runs", "--nproc-per-node", nproc, *flags, SCRIPT),
            *("--steps", steps, "--checkpoint", tmp_path / name, "--checkpoint-every", 3, "--log-every", 10),
        )
        assert done.returncode == 0, done.stderr
        return done

    return run


def test_interruptions_leave_no_trace_in_the_parameters(train: Callable) -> None:
    """Checkpoints lie three steps apart, so work is done again; with four ranks, sums have an order."""
    undisturbed = train(name="plain.pt", steps=40)
    assert "resumed" not in undisturbed.stdout
    train(name="stopped.pt", steps=1)
    train(name="stopped.pt", steps=17)
    stopped = train(
        *("--inject", "kill:rank=2,step=7", "--inject", "exit:rank=0,step=8,generation=1"),
        name="stopped.pt",
        steps=40,
    )
    assert stopped.stdout.count("resumed after step") == 3
    assert digest(stopped.stdout) == digest(undisturbed.stdout)


def test_the_commands_of_its_page_work(run_closeranks: Callable, tmp_path: Path) -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    commands = [shlex.split(line) for line in re.findall(r"^    (closeranks run .*)$", page, re.MULTILINE)]
    assert len(commands) == 3
    for command in commands:
        where = [part.replace("/tmp/", f"{tmp_path}/") for part in command[2:]]
        done = run_closeranks("run", "--log-dir", tmp_path / "runs", *where, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert digest(done.stdout)
