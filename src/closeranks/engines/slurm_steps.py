"""Agents as steps of a Slurm allocation: one srun for one node or many, from its start to its certain end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from closeranks.engines.slurm_commands import ask, plain_environment, step_environment
from closeranks.engines.slurm_text import parse_steps
from closeranks.engines.tether import tethered

__all__ = ["Step", "Steps"]

_STEP_PREFIX = "closeranks-"
_PROBE_TIMEOUT_S = 15.0
_ASK_TIMEOUT_S = 5.0
_TERM_GRACE_S = 3.0  # from SIGTERM to the agents, to the end of srun
_ABORT_GRACE_S = 4.0  # from SIGTERM to srun, which has slurmstepd kill its tasks, to its end
_SHEPHERD_GRACE_S = 1.0

# --wait=0 and --kill-on-bad-exit=0: the end of an agent ends no other one. No --exact, so that an agent has
# all of its node that the job has; --cpu-bind=none, as its ranks are more than Slurm's one task.
_STEP_OPTIONS = (
    "--ntasks-per-node=1",
    "--overlap",  # with whatever Slurm thinks is on the node: it doesn't know of a slurmstepd that has died
    "--no-kill",
    "--kill-on-bad-exit=0",
    "--wait=0",
    "--export=ALL",
    "--input=none",
    "--mem=0",
    "--mpi=none",
    "--cpu-bind=none",
    "--quiet",  # errors are shown all the same
)

# $1: the mark of this job's agents, $2: the step's name, $3: where its output goes, or nothing. All processes
# of an agent inherit the mark, so that a node's /proc tells whether any is left: two agents are one too many.
_AGENT_SH = """
mark=CLOSERANKS_SLURM_AGENT=$1@$SLURMD_NODENAME tries=0
while grep -zqsxF -e "$mark" /proc/[0-9]*/environ; do
    tries=$((tries + 1))
    if [ "$tries" -gt 50 ]; then
        echo "closeranks: $SLURMD_NODENAME has an agent of this job already; none is added" >&2
        exit 0
    fi
    sleep 0.2
done
export "$mark" CLOSERANKS_NODE="$SLURMD_NODENAME" CLOSERANKS_SESSION="$2@$SLURMD_NODENAME"
if [ -n "$3" ] && true >>"$3/agent-$SLURMD_NODENAME.log"; then
    exec >>"$3/agent-$SLURMD_NODENAME.log" 2>&1
fi
shift 3
exec "$@"
"""
_PROBE_SH = """
mark=CLOSERANKS_SLURM_AGENT=$1@$SLURMD_NODENAME
grep -zqsxF -e "$mark" /proc/[0-9]*/environ || echo "$SLURMD_NODENAME"
"""

# With --no-kill a job whose batch host is lost stays RUNNING for ever, without a script, a controller, or
# anybody to end it. $1: the batch host, $2: seconds between two looks.
_WARDEN_SH = """
while sleep "$2"; do
    answer=$(squeue -h -j "$SLURM_JOB_ID" -o "%T %N") || continue
    [ "${answer%% *}" = RUNNING ] || continue
    hosts=$(scontrol show hostnames "${answer#* }") || continue
    if [ -n "$hosts" ] && ! printf "%s\\n" "$hosts" | grep -qxF -e "$1"; then
        scontrol requeue "$SLURM_JOB_ID" || scancel "$SLURM_JOB_ID"
    fi
done 2>/dev/null
"""


@dataclass(slots=True, eq=False)
class Step:
    """An srun of ours. ``nodes``: where its agents are, as far as we know."""

    name: str
    nodes: set[str]
    process: asyncio.subprocess.Process
    began_at_s: float = field(default_factory=time.monotonic)
    is_unwanted: bool = False

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began_at_s


class Steps:
    """All steps of one engine.

    ``logs``: a directory for what agents write, a file a node, or None for our own standard output and error.
    ``is_tethered``: sruns, and so agents, end when this process does.
    """

    def __init__(
        self, job: str, mark: str, *, environment: Mapping[str, str], logs: Path | None, is_tethered: bool
    ) -> None:
        self.living: set[Step] = set()
        self._job = job
        self._mark = f"{mark}/{job}"
        self._environment = step_environment(plain_environment(environment), job)
        self._logs = logs
        self._is_tethered = is_tethered
        self._names: set[str] = set()
        self._warden: Step | None = None

    @property
    def busy(self) -> set[str]:
        """The nodes that have an agent, as far as we know."""
        return {node for step in self.living for node in step.nodes}

    def _srun(self, nodes: Collection[str], name: str, *options: str) -> list[str]:
        count = len(nodes)
        return [
            "srun", f"--nodes={count}", f"--ntasks={count}", f"--nodelist={','.join(nodes)}",
            f"--job-name={name}", *_STEP_OPTIONS, *options,
        ]  # fmt: skip

    async def begin(self, nodes: Sequence[str], agent: Sequence[str], gres: str) -> Step | None:
        """One step with one ``agent`` and all of ``gres`` on each of ``nodes``. None: srun can't be run here.

        What a step that asks for no GPUs has of those of the job depends on how the job asked for them: all
        with --gpus-per-node, one of 16 with --gpus=16, none with --exclusive (22.05).
        """
        name = _STEP_PREFIX + secrets.token_hex(6)
        options = [f"--gres={gres}"] if gres else []
        if self._logs is not None:
            options.append("--output=none")
        command = ["sh", "-c", _AGENT_SH, "sh", self._mark, name, os.fspath(self._logs or ""), *agent]
        step = await self._start(nodes, name, [*self._srun(nodes, name, *options), *command])
        if step is not None:
            self.living.add(step)
        return step

    async def watch_over(self, batch_host: str, nodes: Sequence[str], every_s: float) -> None:
        """Have ``nodes`` requeue the job, or cancel what can't be, once Slurm has given up its batch host."""
        if self._warden is None and nodes:
            name = f"{_STEP_PREFIX}warden-{secrets.token_hex(6)}"
            srun = self._srun(nodes, name, "--gres=none", "--output=none")
            argv = [*srun, "sh", "-c", _WARDEN_SH, "sh", batch_host, f"{every_s:g}"]
            self._warden = await self._start(nodes, name, argv)

    async def _start(self, nodes: Sequence[str], name: str, argv: Sequence[str]) -> Step | None:
        self._names.add(name)
        try:
            process = await asyncio.create_subprocess_exec(
                *(tethered(argv, sys.executable) if self._is_tethered else argv),
                stdin=asyncio.subprocess.DEVNULL,
                env=self._environment,
                process_group=0,  # a Ctrl-C at our terminal is for us, who know how to stop agents in order
            )
        except OSError:
            return None
        return Step(name, set(nodes), process)

    async def ended(self, step: Step) -> int:
        """Wait for the end of ``step``; returns srun's exit code."""
        code = await step.process.wait()
        self.living.discard(step)
        return code

    async def find_empty(self, nodes: Collection[str]) -> set[str]:
        """Those of ``nodes`` on which no process of any agent of this job is left.

        Slurm doesn't know: a step whose slurmd and slurmstepd have died goes on as if nothing had happened.
        """
        if not nodes:
            return set()
        srun = self._srun(nodes, f"{_STEP_PREFIX}look", "--overlap", "--gres=none")
        answer = await ask(
            [*srun, "sh", "-c", _PROBE_SH, "sh", self._mark],
            timeout_s=_PROBE_TIMEOUT_S,
            env=self._environment,
        )
        return set(answer.out.split()) & set(nodes)

    async def end(self, steps: Collection[Step], *, grace_s: float) -> None:
        """End ``steps``: by themselves within ``grace_s``, else by SIGTERM, else by Slurm killing them."""
        if await _all_end(steps, grace_s):
            return
        await self._scancel({step.name for step in steps}, "--signal=TERM")
        if await _all_end(steps, _TERM_GRACE_S):
            return
        _signal(steps, "terminate")
        if await _all_end(steps, _ABORT_GRACE_S):
            return
        stuck = [step for step in steps if step.process.returncode is None]
        _signal(stuck, "kill")
        # srun's other half has waited for this, and has slurmctld end the step; unless that doesn't answer.
        await asyncio.sleep(_SHEPHERD_GRACE_S)
        for step in stuck:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(step.process.pid, signal.SIGKILL)

    async def end_all(self, *, grace_s: float) -> None:
        """End every step, and those that Slurm still has though their srun has gone."""
        wardens = () if self._warden is None else (self._warden,)
        await self.end((*self.living, *wardens), grace_s=grace_s)
        if self._names:
            await self._scancel(self._names)

    async def _scancel(self, names: Collection[str], *options: str) -> None:
        listed = await ask(
            ["squeue", "-h", "-s", "-j", self._job, "-o", "%i|%j"],
            timeout_s=_ASK_TIMEOUT_S,
            env=self._environment,
        )
        ids = [step.step_id for step in parse_steps(listed.out) if step.name in names]
        if ids:
            await ask(["scancel", *options, *ids], timeout_s=_ASK_TIMEOUT_S, env=self._environment)


async def _all_end(steps: Collection[Step], timeout_s: float) -> bool:
    waits = [asyncio.ensure_future(step.process.wait()) for step in steps]
    if not waits:
        return True
    _, waiting = await asyncio.wait(waits, timeout=timeout_s)
    for wait in waiting:
        wait.cancel()
    return not waiting


def _signal(steps: Collection[Step], how: str) -> None:
    for step in steps:
        if step.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                getattr(step.process, how)()
