"""Starting jobs for the system tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Finished, Running

from system.rig import Job, no_torch


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Where this test's run directories go."""
    return tmp_path / "runs"


@pytest.fixture
def start(start_closeranks: Callable[..., Running], tmp_path: Path, runs: Path) -> Callable[..., Job]:
    """``start(*arguments, torch=False, env={}, stdin="", cwd=None) -> Job``: ``closeranks run`` with them."""

    def start(*arguments: object, torch: bool = False, env: dict[str, str] | None = None, **more: object) -> Job:
        environment = {**({} if torch else no_torch(tmp_path)), **(env or {})}
        running = start_closeranks("run", "--log-dir", runs, *map(str, arguments), env=environment, **more)
        return Job(running, runs)

    return start


@pytest.fixture
def run(start: Callable[..., Job]) -> Callable[..., tuple[Finished, Job]]:
    """As ``start``, to its end: nothing may be left of it then."""

    def run(*arguments: object, timeout_s: float = 120.0, **more: object) -> tuple[Finished, Job]:
        job = start(*arguments, **more)
        done = job.running.wait(timeout_s)
        if job.runs.exists():
            job.assert_gone()
        return done, job

    return run
