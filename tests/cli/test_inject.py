"""``closeranks inject`` into real jobs."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import Finished, Running

pytestmark = pytest.mark.torch

# Ranks that never meet: progress is what `closeranks.step()` says.
LOOP = """
    import time
    import closeranks
    for _ in range(6000):
        time.sleep(0.005)
        closeranks.step()
"""
Inject = Callable[..., Finished]


@pytest.fixture
def job(start_closeranks: Callable[..., Running], tmp_path: Path) -> Iterator[Running]:
    script = tmp_path / "loop.py"
    script.write_text(textwrap.dedent(LOOP))
    running = start_closeranks("run", "--nproc-per-node", "2", script)
    running.wait_for("running: generation 0")
    yield running
    running.process.terminate()
    running.wait()


@pytest.fixture
def inject(run_closeranks: Callable[..., Finished]) -> Inject:
    return lambda *arguments, **options: run_closeranks("inject", *arguments, **options)


def test_a_kill_has_happened_when_the_command_returns(job: Running, inject: Inject) -> None:
    done = inject("kill", "--rank", "1")
    assert (done.returncode, done.stdout) == (0, "done: kill:rank=1 (rank 1, generation 0)\n")
    job.wait_for("running again: generation 1")
    screen = job.stderr[job.stderr.index("incident 0001") :]
    assert "rank 1" in screen and "injected" in screen.splitlines()[2], screen


def test_a_fault_of_the_rank_itself_has_happened_too(job: Running, inject: Inject) -> None:
    done = inject("os-exit", "--rank", "0", "--param", "code=9")
    assert (done.returncode, done.stdout) == (0, "done: os-exit:rank=0,code=9 (rank 0, generation 0)\n")
    job.wait_for("running again: generation 1")
    assert "exited with code 9" in job.stderr


def test_what_is_for_later_is_on_its_way_and_ends_with_its_generation(job: Running, inject: Inject) -> None:
    later = inject("stop", "--rank", "0", "--at-step", "5000", "--json")
    answer = json.loads(later.stdout)
    assert (answer["fired"], answer["waits_for"]) == (False, "5000 completed steps of this generation")
    inject("kill", "--rank", "1")
    job.wait_for("injected fault did not happen before the ranks ended: stop:rank=0,step=5000")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["kil"], "did you mean 'kill'?"),
        (["kill", "--rank", "2"], "there is no rank 2: ranks are 0 to 1"),
        (["kill:generation=3"], "leave out generation="),
        (["kill:gen=any"], "leave out generation="),
        (["slow", "--param", "ms"], "write name=value"),
    ],
)
def test_what_can_t_be_done_is_refused(job: Running, inject: Inject, arguments: list[str], told: str) -> None:
    done = inject(*arguments)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
    assert job.process.poll() is None


def test_without_a_job_there_is_nothing_to_break(inject: Inject, tmp_path: Path) -> None:
    done = inject("kill", "--runs-dir", tmp_path, env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 2 and "no runs under" in done.stderr


def test_a_job_that_has_ended_is_said_to_be_over(inject: Inject, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "20261201-000000-train-0001"
    run.mkdir(parents=True)
    (run / "journal.db").touch()
    (run / "control.json").write_text(json.dumps({"socket": str(tmp_path / "gone"), "pid": os.getpid()}))
    done = inject("kill", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 2 and "no job is running in" in done.stderr
