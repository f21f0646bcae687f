"""Slurm: agents as steps of an allocation, and slurmctld's word on its nodes.

An allocation has all the nodes that a job will ever get: spares are part of it from the start, and a lost
node isn't replaced by a new one. What the engine can do is to place agents where none are, and to say what
becomes of nodes. When too few are left, the batch script has Slurm begin again elsewhere (``slurm_script``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks.cluster_events import EngineDrains, NodeGone
from closeranks.engines.base import EngineFact, JobSpec, Join, agent_command
from closeranks.engines.slurm_commands import ask, ask_and_wait
from closeranks.engines.slurm_script import SlurmOptions, batch_environment, batch_script, read_options
from closeranks.engines.slurm_steps import Step, Steps
from closeranks.engines.slurm_text import (
    Fate,
    JobView,
    expand_hostlist,
    fates,
    parse_gres,
    parse_job,
    parse_nodes,
    parse_submitted,
)
from closeranks.errors import ConfigError

__all__ = ["SlurmEngine"]

_ASK_TIMEOUT_S = 10.0
_SUBMIT_TIMEOUT_S = 60.0
_MOST_PATIENCE_S = 60.0  # between two questions to a slurmctld that doesn't answer
_LOOKS = 3
_LOOK_PAUSE_S = 1.0
# An srun that fails within this time has most likely never had its agents up; its node rests for a while.
_LAUNCH_S = 60.0
_REST_S = 60.0
_REFUSED_S = 4.0  # slurmctld refuses a step at once; a node that can't be reached takes longer
_REFUSED_PAUSE_S = 3.0
_AGAIN_PAUSE_S = 1.0
_WARDENS = 3
_WARDEN_LOOKS = 6  # so many questions of ours are one of theirs
_MOST_FAILURES = 8  # one after the other, until the next request
_SETTLED_S = 5.0  # by then the agents of a step are there, or never will be
_RELEASE_GRACE_S = 10.0
_CLOSE_GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at the allocation. ``fates``: of all nodes it ever had."""

    job: JobView
    fates: dict[str, tuple[Fate, str]]


class SlurmEngine:
    """Implements ``Engine``. ``is_tethered``: agents end when this process does, even by SIGKILL."""

    def __init__(
        self, spec: JobSpec, *, environment: Mapping[str, str] = os.environ, is_tethered: bool = True
    ) -> None:
        self._spec = spec
        self._options: SlurmOptions = read_options(spec.options)
        self._environment = dict(environment)
        self._job = self._environment.get("SLURM_JOB_ID", "")
        self._is_tethered = is_tethered
        self._nodes: dict[str, None] = {}  # all that the allocation ever had, in its order
        self._join: Join | None = None
        self._steps: Steps | None = None
        self._has_placed = False
        self._taken: frozenset[str] = frozenset()
        self._released: set[str] = set()
        self._rests_until_s: dict[str, float] = {}
        self._placing = asyncio.Lock()
        self._closing = asyncio.Event()
        self._closed: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return "slurm"

    # --- where we are -------------------------------------------------------------------------------

    def runs_here(self) -> bool:
        return bool(self._job)

    def listen_address(self) -> str:
        """The address by which this host goes out to the others. Raises ConfigError if there is no way."""
        self._check_inside()
        own = self._environment.get("SLURMD_NODENAME", "")
        names = self._given_nodes() or [own or socket.gethostname()]
        answer = ask_and_wait(
            ["scontrol", "show", "node", ",".join(names)], timeout_s=_ASK_TIMEOUT_S, env=self._environment
        )
        views = parse_nodes(answer.out)
        others = [views[name].address or name if name in views else name for name in names if name != own]
        ours = views[own].address if own in views else own
        for host in [*others[:4], *([ours] if ours else []), socket.gethostname()]:
            if address := _address_towards(host):
                return address
        raise ConfigError(
            f"no address of this host leads to the nodes of Slurm job {self._job}"
            f"{f' ({answer.why})' if answer.why else ''}: see that `scontrol show node` names addresses "
            "(NodeAddr) that this host can reach"
        )

    def _given_nodes(self) -> list[str]:
        """The nodes that the allocation began with."""
        try:
            return expand_hostlist(self._environment.get("SLURM_JOB_NODELIST", ""))
        except ValueError as error:
            raise ConfigError(
                f"SLURM_JOB_NODELIST can't be read: {error}; leave it as Slurm set it"
            ) from error

    def _check_inside(self) -> None:
        if not self._job:
            raise ConfigError(
                "not inside of a Slurm allocation: SLURM_JOB_ID isn't set. Start it within sbatch or salloc, "
                "or from a login node with --engine slurm, which submits it"
            )
        tasks = self._environment.get("SLURM_STEP_NUM_TASKS", "1")
        if self._environment.get("SLURM_STEP_ID") and tasks.isdigit() and int(tasks) > 1:
            raise ConfigError(
                f"srun has started this {tasks} times: start `closeranks run` once, without srun; it places "
                "one agent on each node by itself"
            )

    def start(self, join: Join) -> None:
        """See ``Engine``. Raises ConfigError where no agent could ever be placed."""
        self._check_inside()
        if shutil.which("srun", path=self._environment.get("PATH")) is None:
            raise ConfigError("srun isn't in PATH: Slurm's programs have to be installed on this host")
        self._join = join
        self._nodes = dict.fromkeys(self._given_nodes())
        logs = self._spec.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._steps = Steps(
            self._job,
            self._spec.job_id,
            environment=self._environment,
            logs=logs if self._options.agent_output == "files" else None,
            is_tethered=self._is_tethered,
        )

    # --- placing ------------------------------------------------------------------------------------

    async def place(self, count: int, reason: str, taken: frozenset[str] = frozenset()) -> int:
        """See ``Engine``. Nodes are those of the allocation; 0 where no more of them can be used."""
        self._taken = taken
        return await self._place(count, failures=0)

    async def _place(self, count: int, failures: int) -> int:
        async with self._placing:
            if self._steps is None or self._join is None or self._closing.is_set() or count < 1:
                return 0
            free = await self._unless_closing(self._free_nodes(self._steps, count + len(self._taken))) or []
            chosen = [node for node in free if node not in self._taken][:count]
            gres = await self._gres() if chosen else {}
            groups: dict[str, list[str]] = {}
            for node in chosen:  # one step for all at first, as far as they have the same GPUs
                groups.setdefault(node if self._has_placed else gres.get(node, ""), []).append(node)
            placed = 0
            for nodes in groups.values():
                if self._closing.is_set():
                    break
                agent = agent_command(self._spec, self._join)
                step = await self._steps.begin(nodes, agent, gres.get(nodes[0], ""))
                if step is not None:
                    self._has_placed = True
                    placed += len(nodes)
                    self._spawn(self._follow(self._steps, step, failures))
            await self._watch_over(self._steps)
            return placed

    async def _watch_over(self, steps: Steps) -> None:
        """See that the job doesn't outlive its batch host, where we are on one."""
        host = self._environment.get("SLURMD_NODENAME", "")
        if self._options.requeue_without_batch_host and host in self._nodes and not self._closing.is_set():
            others = [node for node in steps.busy if node != host]
            await steps.watch_over(host, sorted(others)[:_WARDENS], _WARDEN_LOOKS * self._options.poll_s)

    async def _gres(self) -> dict[str, str]:
        """What the job has of GPUs and their like on each of its nodes; empty where Slurm doesn't say."""
        shown = await ask(
            ["scontrol", "show", "job", "-d", self._job], timeout_s=_ASK_TIMEOUT_S, env=self._environment
        )
        try:
            return parse_gres(shown.out)
        except ValueError:
            return {}

    async def _unless_closing(self, work: Coroutine[Any, Any, list[str]]) -> list[str] | None:
        """What ``work`` comes to; None if it is time to close before."""
        working, closing = asyncio.ensure_future(work), asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait((working, closing), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, closing):
                task.cancel()
            await asyncio.gather(working, closing, return_exceptions=True)

    async def _free_nodes(self, steps: Steps, count: int) -> list[str]:
        """Healthy nodes of the allocation without an agent, in order; ``count`` of them are enough."""
        look = await self._look_again()
        if look is None or not look.job.lives:
            return []
        now_s = time.monotonic()
        healthy = [
            node
            for node, (fate, _) in look.fates.items()
            if fate is Fate.FINE
            and node not in self._released
            and self._rests_until_s.get(node, 0.0) <= now_s
        ]
        busy = steps.busy
        if sum(node not in busy for node in healthy) < count:
            # A node of a step for many may have lost its agent, and nobody tells.
            settled = {node for step in steps.living if step.age_s > _SETTLED_S for node in step.nodes}
            for empty in await steps.find_empty([node for node in healthy if node in settled]):
                for step in steps.living:
                    step.nodes.discard(empty)
            busy = steps.busy
        return [node for node in healthy if node not in busy]

    async def _follow(self, steps: Steps, step: Step, failures: int) -> None:
        """Wait for the end of ``step``. Where its agents never came up, keep the promise on other nodes.

        One node that can't be reached fails a step for many as a whole (srun: "Application launch failed"):
        one by one, the others come up. And for some seconds after its start slurmctld refuses every step
        ("Memory required by task is not available"): the same nodes are tried again.
        """
        code = await steps.ended(step)
        nodes = set(step.nodes)
        if code == 0 or step.is_unwanted or step.age_s > _LAUNCH_S or failures >= _MOST_FAILURES:
            return
        is_refused = step.age_s < _REFUSED_S
        if not is_refused and len(nodes) == 1:
            self._rests_until_s.update(dict.fromkeys(nodes, time.monotonic() + _REST_S))
        # Agents may also have ended because the job has, and then it is about to close.
        await self._pause(_REFUSED_PAUSE_S if is_refused else _AGAIN_PAUSE_S)
        await self._place(len(nodes), failures + 1)

    async def _pause(self, seconds: float) -> None:
        """Let ``seconds`` pass, or less if it is time to close."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def release(self, node: str, reason: str) -> None:
        """See ``Engine``. It stays in the allocation, unused, unless an operator drains and resumes it."""
        if self._steps is None or node not in self._nodes:
            return
        self._released.add(node)
        for step in tuple(self._steps.living):
            if step.nodes == {node}:
                step.is_unwanted = True
                self._spawn(self._steps.end([step], grace_s=_RELEASE_GRACE_S))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- facts --------------------------------------------------------------------------------------

    async def facts(self) -> AsyncIterator[EngineFact]:
        """See ``Engine``. A node that drains, or is lost, is told once each time it comes to that.

        ``session`` of NodeGone is always "": slurmctld gives up nodes that it can't hear, and their processes
        may well go on.
        """
        known: dict[str, Fate] = {}
        unanswered = 0
        while not self._closing.is_set():
            look = await self._look()
            unanswered = 0 if look is not None else unanswered + 1
            if look is not None and look.job.lives:
                for node, (fate, why) in look.fates.items():
                    before = known.get(node, Fate.FINE)
                    if fate is Fate.SILENT or fate is before:
                        continue
                    known[node] = fate
                    if fate is Fate.GONE:
                        yield NodeGone(node, f"Slurm: {why}")
                    elif fate is Fate.DRAINS:
                        yield EngineDrains(node, f"Slurm: {why}")
                    else:
                        self._released.discard(node)
            wait_s = max(self._options.poll_s, min(_MOST_PATIENCE_S, self._options.poll_s * 2**unanswered))
            await self._pause(wait_s)

    async def _look_again(self) -> _Look | None:
        """Look until slurmctld answers, a few times."""
        for attempt in range(_LOOKS):
            if attempt:
                await self._pause(_LOOK_PAUSE_S)
            if (look := await self._look()) is not None or self._closing.is_set():
                return look
        return None

    async def _look(self) -> _Look | None:
        """The allocation now; None when slurmctld doesn't say."""
        listed = await ask(
            ["squeue", "-h", "-t", "all", "-j", self._job, "-o", "%T|%N"],
            timeout_s=_ASK_TIMEOUT_S,
            env=self._environment,
        )
        if not listed.ok and "nvalid job id" not in listed.why:
            return None
        try:
            job = parse_job(listed.out)
        except ValueError:
            return None
        if job is None:
            return _Look(JobView("FORGOTTEN", ()), {})
        self._nodes.update(dict.fromkeys(job.nodes))
        shown = await ask(
            ["scontrol", "show", "node", ",".join(self._nodes)],
            timeout_s=_ASK_TIMEOUT_S,
            env=self._environment,
        )
        views = parse_nodes(shown.out)
        if not shown.ok and not views:  # a name that Slurm has forgotten meanwhile doesn't hide the others
            return None
        return _Look(job, fates(self._nodes, views, job.nodes))

    # --- the end ------------------------------------------------------------------------------------

    async def close(self) -> None:
        """See ``Engine``. Steps end, and the allocation stays."""
        self._closing.set()
        if self._closed is None:
            self._closed = asyncio.create_task(self._close())
        await asyncio.shield(self._closed)

    async def _close(self) -> None:
        async with self._placing:  # what is being placed has begun by then, and can be ended
            if self._steps is not None:
                await self._steps.end_all(grace_s=_CLOSE_GRACE_S)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- from a login node --------------------------------------------------------------------------

    def render(self) -> str:
        """The batch script. Raises UsageError where an option can't be in it."""
        return batch_script(self._spec, self._options, Path.cwd())

    def submit(self) -> str:
        """Hand the batch script to sbatch; returns the job id. Raises ConfigError with sbatch's own words."""
        script = self.render()
        if shutil.which("sbatch", path=self._environment.get("PATH")) is None:
            raise ConfigError(
                "sbatch isn't in PATH: submit from a login node of the cluster, or leave --engine slurm out "
                "to run on this host"
            )
        self._spec.run_dir.mkdir(parents=True, exist_ok=True)  # slurmd writes the job's log there
        answer = ask_and_wait(
            ["sbatch", "--parsable"],
            timeout_s=_SUBMIT_TIMEOUT_S,
            stdin=script,
            env=batch_environment(self._options, self._environment),
        )
        job = parse_submitted(answer.out)
        if not answer.ok or job is None:
            raise ConfigError(
                f"Slurm did not take the job: {answer.why or 'sbatch named no job id'}. "
                "`closeranks engine render` shows what it was given"
            )
        return job


def _address_towards(host: str) -> str | None:
    """The numeric address with which this host would speak to ``host``. Nothing is sent."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None
