"""Asking Slurm's programs, each for a bounded time, in an environment that changes none of their answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from closeranks.engines.slurm_text import refusal

__all__ = ["Answer", "ask", "ask_and_wait", "plain_environment", "step_environment"]

_MAX_ANSWER_BYTES = 64 << 20

# squeue and its like take filters and formats from here; a question must mean the same everywhere.
_ANSWER_SHAPING = ("SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_")

# What srun reads as options of the step (srun(1), "INPUT ENVIRONMENT VARIABLES", 20.11 to 24.05). An agent
# gets all of its node, whatever shape the batch script's own tasks were given: SLURM_GPUS=32 for a job of
# four nodes would have a step on one of them ask for 32. Where slurmctld is and how to reach it stays.
_STEP_NAMES = (
    "ACCTG_FREQ", "BCAST", "BCAST_EXCLUDE", "COMPRESS", "CONSTRAINT", "CORE_SPEC", "CPUS_PER_GPU",
    "CPUS_PER_TASK", "CPU_BIND", "CPU_BIND_LIST", "CPU_BIND_TYPE", "CPU_BIND_VERBOSE", "DEPENDENCY",
    "DISTRIBUTION", "DIST_LLLP", "DIST_PLANESIZE", "EPILOG", "EXACT", "EXCLUSIVE", "EXIT_ERROR",
    "EXIT_IMMEDIATE", "EXPORT_ENV", "GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK",
    "GPU_BIND", "GRES", "GRES_FLAGS", "HINT", "HOSTFILE", "IMMEDIATE", "KILL_BAD_EXIT", "LABELIO",
    "MEM_BIND", "MEM_BIND_LIST", "MEM_BIND_PREFER", "MEM_BIND_SORT", "MEM_BIND_TYPE", "MEM_BIND_VERBOSE",
    "MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE", "MPI_TYPE", "MULTI", "NNODES", "NO_KILL", "NPROCS",
    "NTASKS", "NTASKS_PER_CORE", "NTASKS_PER_GPU", "NTASKS_PER_NODE", "NTASKS_PER_SOCKET",
    "NTASKS_PER_TRES", "OPEN_MODE", "OVERCOMMIT", "OVERLAP", "PROLOG", "RELATIVE", "REMOTE_CWD",
    "REQ_SWITCH", "RESV_PORTS", "SPREAD_JOB", "STDERRMODE", "STDINMODE", "STDOUTMODE", "STEP_GRES",
    "SWITCHES", "TASK_EPILOG", "TASK_PROLOG", "TEST_EXEC", "THREADS", "THREADS_PER_CORE", "THREAD_SPEC",
    "TIMELIMIT", "TRES_BIND", "TRES_PER_TASK", "UNBUFFEREDIO", "USE_MIN_NODES", "WAIT", "WHOLE",
    "WORKING_DIR",
)  # fmt: skip
_STEP_SHAPING = frozenset(f"SLURM_{name}" for name in _STEP_NAMES)
# Of an srun's own variables, those that say how much of a node its tasks get.
_SRUN_SHAPING = frozenset({"SRUN_CPUS_PER_TASK", "SRUN_EXPORT_ENV"})


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program said. ``why`` is "" if it succeeded, else the reason in one line."""

    out: str
    why: str = ""

    @property
    def ok(self) -> bool:
        return not self.why


def plain_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without what filters or formats Slurm's answers."""
    return {name: value for name, value in environment.items() if not name.startswith(_ANSWER_SHAPING)}


def step_environment(environment: Mapping[str, str], job: str) -> dict[str, str]:
    """``environment`` for an srun of ours in allocation ``job``, with nothing that shapes its step."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _STEP_SHAPING and name not in _SRUN_SHAPING
    }
    return {**kept, "SLURM_JOB_ID": job, "SLURM_JOBID": job}


def _answer(argv: Sequence[str], code: int, out: bytes, err: bytes) -> Answer:
    text = out[:_MAX_ANSWER_BYTES].decode("utf-8", "replace")
    if code == 0:
        return Answer(text)
    return Answer(text, refusal(err.decode("utf-8", "replace")) or f"{argv[0]} ended with {code}")


def _cannot_run(argv: Sequence[str], error: OSError) -> Answer:
    return Answer("", f"{argv[0]} can't be run: {error.strerror or error}")


async def ask(argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> Answer:
    """Run ``argv`` to its end, or kill it after ``timeout_s``; what it said by then is in the answer."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=plain_environment(os.environ if env is None else env),
            process_group=0,  # not for a Ctrl-C at our terminal
        )
    except OSError as error:
        return _cannot_run(argv, error)
    assert process.stdout is not None and process.stderr is not None
    heard = [bytearray(), bytearray()]
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(_read(process.stdout, heard[0]), _read(process.stderr, heard[1]))
            code = await process.wait()
    except TimeoutError:
        return Answer(heard[0].decode("utf-8", "replace"), f"{argv[0]} gave no answer within {timeout_s:g} s")
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return _answer(argv, code, bytes(heard[0]), bytes(heard[1]))


async def _read(stream: asyncio.StreamReader, into: bytearray) -> None:
    """Read to the end, and keep what is within bounds."""
    while chunk := await stream.read(1 << 16):
        into += chunk[: max(0, _MAX_ANSWER_BYTES - len(into))]


def ask_and_wait(
    argv: Sequence[str], *, timeout_s: float, stdin: str = "", env: Mapping[str, str] | None = None
) -> Answer:
    """The same for callers that have no event loop. Blocks."""
    try:
        done = subprocess.run(
            argv,
            input=stdin.encode("utf-8", "surrogateescape"),
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env=plain_environment(os.environ if env is None else env),
        )
    except subprocess.TimeoutExpired:
        return Answer("", f"{argv[0]} gave no answer within {timeout_s:g} s")
    except OSError as error:
        return _cannot_run(argv, error)
    return _answer(argv, done.returncode, done.stdout, done.stderr)
