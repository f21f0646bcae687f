"""Evidence before the kill: what every rank was doing, taken from outside and inside at the same time.

Order matters: requests that ranks answer by themselves (stack by signal, flight recorder by their evidence
thread) go out first, /proc is read while they work, and whoever has not answered within the budget is
recorded as silent: holding the GIL, stopped or dead. Nothing here changes what a rank does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks.agent import procfs
from closeranks.agent.logs import tail
from closeranks.agent.world import Rank, World
from closeranks.diagnose.stacks import parse_faulthandler
from closeranks.evidence import Evidence, Frame, GroupStatus, HostFacts, ProcessFacts, RankEvidence, Trigger
from closeranks.linux import STACK_SIGNAL

__all__ = ["BLOCKED", "CRASH", "HANG", "Captured", "capture", "group_statuses", "take_stacks"]

_MAX_STACK_BYTES = 1 << 20
_POLL_S = 0.001
_MOST_NATIVE = 16  # ranks; each takes a process that reads the symbols of torch
_ABORT_LINE = re.compile(r"what\(\):|terminate called|Fatal Python error|[Aa]ssertion .* failed|SIGABRT")


@dataclass(frozen=True, slots=True)
class Budget:
    """How long ranks, and py-spy where it is installed, may take to answer (seconds); whether it is a hang.

    In a hang /proc is read before any signal wakes anybody, and slow tools may run. A death is already
    explained by its exit: the survivors' stacks are a bonus that must not delay the restart.
    """

    answers_s: float
    native_s: float
    hang: bool


CRASH = Budget(answers_s=0.012, native_s=0.0, hang=False)
HANG = Budget(answers_s=0.12, native_s=0.0, hang=True)
# Native frames cost py-spy up to a second a process (the symbols of torch): where a rank is blocked outside
# any collective they are the evidence, and the job has waited for longer than that already.
BLOCKED = Budget(answers_s=0.15, native_s=0.9, hang=True)


@dataclass(slots=True)
class Captured:
    """An Evidence with the raw texts that go into the incident directory."""

    evidence: Evidence
    stacks: dict[int, str]
    native: dict[int, str]
    took_s: float


def _read_stack(rank: Rank, since: int) -> str:
    return os.pread(rank.stacks_fd, _MAX_STACK_BYTES, since).decode("utf-8", "replace")


async def take_stacks(ranks: Sequence[Rank], timeout_s: float) -> dict[int, str]:
    """Python stacks of those ranks that can still run a signal handler, as faulthandler's text.

    faulthandler needs no GIL: it answers from a rank that is blocked in C, but not from a stopped one.
    """
    marks: dict[int, int] = {}
    for rank in ranks:
        if rank.alive and procfs.catches(rank.pid, STACK_SIGNAL):
            marks[rank.rank] = os.fstat(rank.stacks_fd).st_size
            rank.send_signal(STACK_SIGNAL)
    by_number = {rank.rank: rank for rank in ranks}
    sizes = dict(marks)
    waiting = {number for number in marks if procfs.state_of(by_number[number].pid) not in ("T", "t")}
    deadline = time.monotonic() + timeout_s
    while waiting and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
        for number in list(waiting):
            size = os.fstat(by_number[number].stacks_fd).st_size
            if (size > marks[number] and size == sizes[number]) or not by_number[number].alive:
                waiting.discard(number)  # it grew, and then stood still: the dump is complete
            sizes[number] = size
    return {number: text for number, mark in marks.items() if (text := _read_stack(by_number[number], mark))}


def group_statuses(reply: dict[str, Any] | None) -> tuple[GroupStatus, ...]:
    """Process-group counters from a rank's flight-recorder reply; hostile or odd replies yield fewer."""
    groups = []
    for item in (reply or {}).get("groups") or ():
        try:
            groups.append(
                GroupStatus(
                    str(item["group"])[:200],
                    int(item["last_enqueued"]),
                    int(item["last_completed"]),
                    str(item.get("pending_op", ""))[:100],
                )
            )
        except (KeyError, TypeError, ValueError):
            continue
    return tuple(groups)


async def ask_flight_recorder(ranks: Sequence[Rank], directory: Path | None, timeout_s: float) -> None:
    """Have each rank's evidence thread dump its flight recorder; replies land in ``rank.replies``."""
    asked = []
    for rank in ranks:
        if rank.alive:
            rank.replies = {}
            path = str(directory / f"{rank.rank}.json") if directory is not None else None
            if rank.say({"type": "flight_recorder", "path": path}):
                asked.append(rank)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if all(not rank.alive or "flight_recorder" in (rank.replies or {}) for rank in asked):
            return
        await asyncio.sleep(_POLL_S)


async def _outside_stacks(ranks: Sequence[Rank], budget: Budget) -> dict[int, str]:
    """py-spy's view, where it is installed: it reads a stopped process, and one that holds the GIL."""
    tool = _py_spy() if budget.hang else None
    if tool is None:
        return {}
    how = ["--native"] if budget.native_s > 0 else ["--nonblocking"]
    limit_s = max(budget.native_s, budget.answers_s)
    texts = await asyncio.gather(
        *(_py_spy_dump(tool, rank.pid, how, limit_s) for rank in ranks[:_MOST_NATIVE])
    )
    return {rank.rank: text for rank, text in zip(ranks, texts, strict=False) if text}


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


async def _py_spy_dump(tool: str, pid: int, how: Sequence[str], timeout_s: float) -> str:
    process = await asyncio.create_subprocess_exec(
        tool,
        "dump",
        "--pid",
        str(pid),
        *how,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return ""
    return out[:_MAX_STACK_BYTES].decode("utf-8", "replace")


def _aborted_by(lines: Sequence[str]) -> str:
    return next((line for line in reversed(lines) if _ABORT_LINE.search(line)), "")


def _facts(ranks: Sequence[Rank], *, children: bool) -> dict[int, ProcessFacts | None]:
    """/proc of the ranks. Finding their children takes a look at every process there is: tens of ms."""
    table = procfs.ProcessTable.take() if children else procfs.ProcessTable({}, {})
    return {rank.rank: procfs.read_process(rank.pid, table=table) for rank in ranks}


def _rank_evidence(
    world: World, rank: Rank, process: ProcessFacts | None, stack: str, native: str, log_tail: tuple[str, ...]
) -> RankEvidence:
    frames: tuple[Frame, ...] = parse_faulthandler(stack) if stack else ()
    reply = (rank.replies or {}).get("flight_recorder")
    return RankEvidence(
        rank=rank.rank,
        pid=rank.pid,
        page=world.page(rank),
        exit=rank.exit,
        exit_mono_ns=rank.exit_mono_ns,
        error=rank.error,
        process=process,
        stack=frames,
        native_stack=tuple(native.splitlines()[:200]),
        answered=reply is not None,
        groups=group_statuses(reply),
        log_tail=log_tail,
        aborted_by=_aborted_by(log_tail),
    )


async def capture(
    world: World,
    trigger: Trigger,
    *,
    incident_id: str,
    budget: Budget,
    directory: Path | None,
    log_paths: dict[int, Path],
    node: str,
    host: HostFacts,
    step_p99_s: float | None,
) -> Captured:
    """Take everything that can be known about this world now, within about ``budget.answers_s``."""
    began = time.monotonic()
    recorder_dir = None
    if directory is not None:
        recorder_dir = directory / "flight_recorder"
        try:
            recorder_dir.mkdir(parents=True, exist_ok=True)
        except OSError:
            recorder_dir = None
    living = world.alive()
    facts: dict[int, ProcessFacts | None] = {}
    if budget.hang:
        facts = _facts(living, children=True)
    answers = asyncio.gather(
        take_stacks(world.ranks, budget.answers_s),
        ask_flight_recorder(world.ranks, recorder_dir, budget.answers_s),
        _outside_stacks(living, budget),
    )
    await asyncio.sleep(0)  # the requests are out
    if not budget.hang:
        facts = _facts(living, children=False)
    stacks, _, native = await answers
    ranks = []
    for rank in world.ranks:
        path = log_paths.get(rank.rank)
        last = tail(path, max_lines=40) if path is not None else ()
        number = rank.rank
        found = (facts.get(number), stacks.get(number, ""), native.get(number, ""))
        ranks.append(_rank_evidence(world, rank, *found, last))
    evidence = Evidence(
        incident_id=incident_id,
        generation=world.generation,
        world_size=world.placement.world_size,
        trigger=trigger,
        ranks=tuple(ranks),
        node=node,
        host=host,
        step_p99_s=step_p99_s,
    )
    return Captured(evidence, stacks, native, time.monotonic() - began)
