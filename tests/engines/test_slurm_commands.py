"""Questions to programs that don't answer, don't exist, say too much, or fail."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

from closeranks.engines.slurm_commands import Answer, ask, ask_and_wait
from closeranks.engines.tether import tethered
from conftest import eventually, marked_processes


def asked(*argv: str, timeout_s: float = 20.0, env: dict[str, str] | None = None) -> Answer:
    return asyncio.run(ask(argv, timeout_s=timeout_s, env=env))


def test_an_answer_and_a_refusal():
    assert asked("sh", "-c", "echo yes; echo no >&2") == Answer("yes\n")
    refused = asked("sh", "-c", "echo half; echo 'x: error: it broke' >&2; exit 3")
    assert (refused.ok, refused.out, refused.why) == (False, "half\n", "it broke")
    assert ask_and_wait(["sh", "-c", "cat; exit 1"], timeout_s=20, stdin="é") == Answer(
        "é", "it said nothing"
    )


def test_a_program_that_is_not_there():
    wanted = "no-such-program can't be run: No such file or directory"
    assert asked("no-such-program").why == ask_and_wait(["no-such-program"], timeout_s=5).why == wanted


def test_a_program_that_hangs_is_killed_and_what_it_said_is_kept():
    mark = f"commands-{os.getpid()}"
    environment = {**os.environ, "CLOSERANKS_TEST_MARK": mark}
    began = time.monotonic()
    answer = asked("sh", "-c", "trap '' TERM; echo node1; exec sleep 100", timeout_s=0.5, env=environment)
    assert time.monotonic() - began < 10
    assert (answer.ok, answer.out, answer.why) == (False, "node1\n", "sh gave no answer within 0.5 s")
    assert ask_and_wait(["sleep", "100"], timeout_s=0.2).why == "sleep gave no answer within 0.2 s"
    assert eventually(lambda: not marked_processes(mark), 5)


def test_nobody_waits_for_a_question_that_is_given_up():
    mark = f"given-up-{os.getpid()}"

    async def story() -> None:
        environment = {**os.environ, "CLOSERANKS_TEST_MARK": mark}
        task = asyncio.create_task(ask(["sleep", "100"], timeout_s=100, env=environment))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(story())
    assert eventually(lambda: not marked_processes(mark), 5)


def test_defaults_of_people_do_not_change_an_answer():
    environment = {"PATH": os.environ["PATH"], "SQUEUE_FORMAT": "x", "SINFO_SORT": "y", "SLURM_CONF": "/c"}
    assert asked("env", env=environment).out.split()[1:] == ["SLURM_CONF=/c"]


def test_a_tethered_program_ends_with_who_started_it():
    mark = f"tether-{os.getpid()}"
    code = (
        "import subprocess, sys, time\n"
        "from closeranks.engines.tether import tethered\n"
        "subprocess.Popen(tethered(['sleep', '100'], sys.executable))\n"
        "print('up', flush=True)\ntime.sleep(100)\n"
    )
    environment = {**os.environ, "CLOSERANKS_TEST_MARK": mark}
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"up\n"
            assert eventually(lambda: len(marked_processes(mark)) == 2, 20)
        finally:
            parent.kill()
    assert eventually(lambda: not marked_processes(mark), 10)


def test_a_tethered_program_says_what_it_lacks():
    done = subprocess.run(
        tethered(["no-such-program"], sys.executable), capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 127
    assert "no-such-program can't be run" in done.stderr
