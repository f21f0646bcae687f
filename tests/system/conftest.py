"""Starting jobs for the system tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import Finished, Running, eventually
from system.rig import GONE_S, Job, Run, Start, no_torch


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Where this test's run directories go."""
    return tmp_path / "runs"


@pytest.fixture
def start(start_closeranks: Callable[..., Running], tmp_path: Path, runs: Path) -> Iterator[Start]:
    """``start(*arguments, torch=False, env={}, stdin="", cwd=None) -> Job``: ``closeranks run`` with them.

    What still runs when the test ends is told by the death of its guard to end too.
    """
    started: list[Job] = []

    def start(
        *arguments: object, torch: bool = False, env: dict[str, str] | None = None, **more: object
    ) -> Job:
        environment = {**({} if torch else no_torch(tmp_path)), **(env or {})}
        running = start_closeranks("run", "--log-dir", runs, *map(str, arguments), env=environment, **more)
        started.append(Job(running, runs))
        return started[-1]

    yield start
    for job in started:
        if job.running.process.poll() is None:
            job.running.process.kill()
            eventually(lambda job=job: not job.running.pids(), GONE_S)


@pytest.fixture
def run(start: Start) -> Run:
    """As ``start``, to its end: nothing may be left of it then."""

    def run(*arguments: object, timeout_s: float = 120.0, **more: object) -> tuple[Finished, Job]:
        job = start(*arguments, **more)
        done = job.running.wait(timeout_s)
        if job.runs.exists():
            job.assert_gone()
        return done, job

    return run
