"""A small world that runs a training loop on paper, breaks one rank, and hands over the evidence.

Ranks are programs of collectives, some of them unseen (as DDP's reducer issues them from C++). A collective
completes when all members have come to its sequence number; what gloo does with unequal ones is chosen by
the test: it may hang, complete in silence, or abort a process. Nothing here knows how a verdict is made.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from closeranks.events import ExitStatus
from closeranks.evidence import (
    ErrorRecord,
    Evidence,
    Frame,
    GroupStatus,
    HostFacts,
    ProcessFacts,
    RankEvidence,
    ThreadFacts,
    Trigger,
)
from closeranks.progress import COLLECTIVE_SLOTS, STEP_SLOTS, Collective, Page, Phase, Step

SCRIPT = "/home/user/job/train.py"
TORCH = "/opt/venv/lib/python3.11/site-packages/torch/"
STDLIB = "/usr/lib/python3.11/"
GENERATION = 2
MS = 1_000_000
START_NS = 1_000_000 * MS

RESET = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:4285: Connection reset"
    " by peer. This is typically caused by a remote worker hanging or bugs in the application."
)
CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:30134."
    " This is typically caused by a remote worker crashing."
)
TIMED_OUT = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv"
    " operation to complete"
)
GLOO_ABORT = (
    "  what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length"
    " <= op.nbytes. 1000 vs 4. Received data size doesn't match expected size. Is there a distributed"
    " collective mismatch in your code?"
)


@dataclass(frozen=True)
class Op:
    """One thing a rank does: a collective of ``group``, an optimizer step, or (``hidden``) one from C++."""

    op: str
    line: int = 0
    numel: int = 1000
    dtype: str = "float32"
    group: int = 0
    hidden: bool = False


STEP = Op("step")
HIDDEN = Op("all_reduce", hidden=True, numel=4096)
LOSS = Op("all_reduce", 57, numel=1)


def plain(step: int, rank: int) -> list[Op]:
    """One all_reduce of the gradients a step."""
    return [Op("all_reduce", 57), STEP]


def several(step: int, rank: int) -> list[Op]:
    """Three collectives a step, two of them alike but for their line, and a barrier every ten steps."""
    ops = [Op("all_reduce", 57), Op("all_reduce", 58), Op("broadcast", 60, 16), STEP]
    return [*ops, Op("barrier", 64, 0, "none")] if step % 10 == 9 else ops


def ddp(step: int, rank: int) -> list[Op]:
    """Gradients through DDP, unseen; the loss is averaged by the script after the step."""
    return [HIDDEN, HIDDEN, HIDDEN, STEP, LOSS]


def stepless(step: int, rank: int) -> list[Op]:
    """No optimizer: nothing tells one step from the next."""
    return [Op("all_reduce", 57), Op("all_gather", 58, 8)]


def grouped(step: int, rank: int) -> list[Op]:
    """Pairs of neighbours (1), the whole data-parallel world (2), and the default group."""
    return [
        Op("all_reduce", 40, 64, group=1 + rank // 2 * 10),
        Op("all_reduce", 44, 256, group=2),
        STEP,
        LOSS,
    ]


def group_table(world: int) -> dict[int, tuple[str, tuple[int, ...]]]:
    pairs = {1 + first // 2 * 10: (f"tp{first // 2}", (first, first + 1)) for first in range(0, world, 2)}
    return {**pairs, 2: ("dp", tuple(range(world)))}


Script = Callable[[int, int], list[Op]]


@dataclass
class Rank:
    """One rank's state while its program runs."""

    number: int
    program: Iterator[tuple[int, Op]]
    clock_ns: int
    seqs: dict[int, int] = field(default_factory=dict)
    step: int = 0
    step_ns: int = 0
    steps: list[Step] = field(default_factory=list)
    records: list[Collective] = field(default_factory=list)
    at: tuple[int, int, Op] | None = None  # group, seq and op of the collective it is inside
    halted: bool = False
    finished: bool = False


@dataclass
class Job:
    """Runs ``script`` on ``world`` ranks; from ``fault_step`` on ``tamper`` may change one rank's program.

    ``meet`` says what unequal collectives do: "hang" or "silent", or "caught": the workers' own check sees
    them first, also those that differ in nothing but their step or line.
    """

    world: int
    script: Script
    culprit: int
    fault_step: int = 12
    tamper: Callable[[list[Op]], list[Op]] | None = None
    halt_at: int | None = None  # position in the fault step at which the culprit goes no further
    leave: bool = False  # it ends there with exit code 0
    meet: str = "hang"
    total_steps: int = 40
    ranks: list[Rank] = field(default_factory=list)
    clash: int = 0  # sequence number of the default group at which a worker saw a mismatch

    def __post_init__(self) -> None:
        self.groups = group_table(self.world) if self.script is grouped else {}
        self.ranks = [Rank(n, self._program(n), START_NS + n * 1000) for n in range(self.world)]

    def _program(self, number: int) -> Iterator[tuple[int, Op]]:
        for step in range(self.total_steps):
            ops = self.script(step, number)
            if number == self.culprit and step == self.fault_step:
                if self.tamper is not None:
                    ops = self.tamper(ops)
                if self.halt_at is not None:
                    ops = ops[: self.halt_at]
                    yield from ((step, op) for op in ops)
                    if not self.leave:
                        yield step, Op("halt")
                    return
            yield from ((step, op) for op in ops)

    def members(self, group: int) -> tuple[int, ...]:
        return self.groups[group][1] if group in self.groups else tuple(range(self.world))

    def run(self) -> Job:
        """Until nobody moves any more."""
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                moved |= self._advance(rank)
            self._complete()
            moved |= any(r.at is None and not r.halted and not r.finished for r in self.ranks)
        return self

    def _advance(self, rank: Rank) -> bool:
        if rank.at is not None or rank.halted or rank.finished:
            return False
        try:
            _, op = next(rank.program)
        except StopIteration:
            rank.finished = True
            return True
        rank.clock_ns += 2 * MS
        if op.op == "halt":
            rank.halted = True
        elif op.op == "step":
            rank.step += 1
            rank.step_ns = rank.clock_ns
            rank.steps.append(Step(rank.step, rank.seqs.get(0, 0), rank.clock_ns))
        else:
            seq = rank.seqs[op.group] = rank.seqs.get(op.group, 0) + 1
            rank.at = (op.group, seq, op)
            if not op.hidden:
                rank.records.append(
                    Collective(
                        seq,
                        op.group,
                        op.op,
                        op.dtype,
                        op.numel,
                        rank.step,
                        op.line,
                        SCRIPT,
                        False,
                        rank.clock_ns,
                    )
                )
        return True

    def _complete(self) -> None:
        for place in {(r.at[0], r.at[1]) for r in self.ranks if r.at is not None}:
            inside = [self.ranks[m] for m in self.members(place[0])]
            if any(r.at is None or r.at[:2] != place for r in inside):
                continue
            shapes = {(r.at[2].op, r.at[2].numel, r.at[2].dtype) for r in inside if r.at is not None}
            if len(shapes) > 1 and self.meet != "silent":
                continue
            if self.meet == "caught" and not self._alike(inside):
                self.clash = place[1]
                continue
            for r in inside:
                assert r.at is not None
                if not r.at[2].hidden:
                    r.records[-1] = replace(r.records[-1], done=True)
                r.at = None

    @staticmethod
    def _alike(inside: list[Rank]) -> bool:
        seen = {(r.at[2].hidden, r.at[2].line, r.step) for r in inside if r.at is not None}
        return len(seen) == 1

    # --- evidence -----------------------------------------------------------------------------------

    @property
    def now_ns(self) -> int:
        return max(r.clock_ns for r in self.ranks) + 1500 * MS

    def page(self, rank: Rank) -> Page:
        visible = rank.at is not None and not rank.at[2].hidden
        hidden = rank.at is not None and rank.at[2].hidden
        return Page(
            rank=rank.number,
            generation=GENERATION,
            pid=4000 + rank.number,
            ticks=rank.clock_ns // MS,
            tick_ns=rank.clock_ns,
            step=rank.step,
            step_ns=rank.step_ns,
            phase=Phase.BACKWARD if hidden else Phase.TRAIN,
            phase_ns=rank.clock_ns,
            in_collective=visible,
            world_seq=rank.seqs.get(0, 0) - (1 if visible and rank.at is not None and rank.at[0] == 0 else 0),
            checkpoints=0,
            checkpoint_step=0,
            absolute_step=None,
            faults_fired=0,
            desync_rank=(rank.number + 1) % self.world
            if self.clash and rank.number == self.world - 1
            else None,
            desync_seq=self.clash,
            init_done=True,
            user_phase="",
            steps=tuple(rank.steps[-STEP_SLOTS:]),
            collectives=tuple(rank.records[-COLLECTIVE_SLOTS:]),
            groups=dict(self.groups),
        )

    def statuses(self, rank: Rank) -> tuple[GroupStatus, ...]:
        """The flight recorder's counters: torch calls the default group "0"."""
        result = []
        for group, seq in sorted(rank.seqs.items()):
            pending = rank.at is not None and rank.at[0] == group
            name = self.groups[group][0] if group in self.groups else "0"
            op = rank.at[2].op if pending and rank.at is not None else ""
            result.append(GroupStatus(name, seq, seq - 1 if pending else seq, op))
        return tuple(result)

    def stack(self, rank: Rank) -> tuple[Frame, ...]:
        main = Frame(SCRIPT, 80, "main")
        if rank.at is not None and rank.at[2].hidden:
            return (
                Frame(TORCH + "autograd/graph.py", 865, "_engine_run_backward"),
                Frame(SCRIPT, 52, "train"),
                main,
            )
        if rank.at is not None:
            return (
                Frame(TORCH + "distributed/distributed_c10d.py", 3252, rank.at[2].op),
                Frame(TORCH + "distributed/c10d_logger.py", 83, "wrapper"),
                Frame(SCRIPT, rank.at[2].line, "train"),
                main,
            )
        return (Frame(SCRIPT, 50, "train"), main)

    def alive(self, rank: Rank) -> RankEvidence:
        """A rank that lives when evidence is taken, waiting or not."""
        waits = rank.at is not None
        thread = ThreadFacts(
            4000 + rank.number, "python", "S", "futex_wait", "202", "timed" if waits else "forever"
        )
        return RankEvidence(
            rank=rank.number,
            pid=4000 + rank.number,
            page=self.page(rank),
            process=ProcessFacts("S" if waits else "R", 0, 12.5, 0, 1 << 28, (thread,)),
            stack=self.stack(rank),
            answered=True,
            groups=self.statuses(rank),
        )

    def dead(self, rank: Rank, exit: ExitStatus, *, after_ms: float = 0.0, **more: Any) -> RankEvidence:
        """A rank that has ended, ``after_ms`` after the last thing it did."""
        return RankEvidence(
            rank=rank.number,
            pid=4000 + rank.number,
            page=self.page(rank),
            exit=exit,
            exit_mono_ns=rank.clock_ns + int(after_ms * MS),
            **more,
        )

    def victim(self, rank: Rank, message: str, *, at_ns: int, exited: bool = True) -> RankEvidence:
        """A rank whose collective raised because of another rank; gloo's own words."""
        line = rank.at[2].line if rank.at is not None and not rank.at[2].hidden else 52
        traceback = (
            f'Traceback (most recent call last):\n  File "{SCRIPT}", line 80, in <module>\n    main()\n'
            f'  File "{TORCH}distributed/distributed_c10d.py", line 3252, in all_reduce\n    work.wait()\n'
            f"RuntimeError: {message}\n"
        )
        error = ErrorRecord("RuntimeError", message, f"{SCRIPT}:{line}", rank.step, at_ns, traceback)
        page = replace(self.page(rank), in_collective=False)
        base = self.alive(rank)
        if not exited:
            failed = tuple(replace(g, last_completed=g.last_enqueued, pending_op="") for g in base.groups)
            return replace(base, page=page, error=error, groups=failed)
        return RankEvidence(
            rank.number, 4000 + rank.number, page, ExitStatus(code=1), at_ns + 15 * MS, error, groups=()
        )

    def raising(self, rank: Rank) -> RankEvidence:
        """A rank whose collective has raised a moment ago; its last words haven't reached the agent yet."""
        hook = Frame(TORCH + "distributed/distributed_c10d.py", 1928, "_distributed_excepthook")
        page = replace(self.page(rank), in_collective=False, phase=Phase.TRAIN)
        stack = (hook, Frame("/opt/closeranks/worker/bootstrap.py", 275, "_show"))
        return replace(self.alive(rank), page=page, stack=stack, groups=(), answered=False)

    def evidence(
        self, trigger: str, entries: dict[int, RankEvidence], *, ranks: tuple[int, ...] = (), **host: Any
    ) -> Evidence:
        return Evidence(
            incident_id="0003",
            generation=GENERATION,
            world_size=self.world,
            trigger=Trigger(trigger, ranks, "", self.now_ns),
            ranks=tuple(entries.get(r.number) or self.alive(r) for r in self.ranks),
            node="node7",
            host=HostFacts(**host),
            step_p99_s=0.01,
        )

    @property
    def broken(self) -> Rank:
        return self.ranks[self.culprit]


SIGKILL = ExitStatus(signal=int(signal.SIGKILL))
SIGABRT = ExitStatus(signal=int(signal.SIGABRT))
SIGSEGV = ExitStatus(signal=int(signal.SIGSEGV))
