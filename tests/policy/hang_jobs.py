"""A tiny make-believe job for hang detection: ranks with pages and processes, looked at every 25 ms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from closeranks.config import HangConfig
from closeranks.events import ExitStatus
from closeranks.evidence import GroupStatus, ProcessFacts, ThreadFacts
from closeranks.policy import hang
from closeranks.policy.waits import Wait
from closeranks.progress import WORLD_GROUP, Collective, Page, Phase, Step

TICK_S = 0.025
LETTERS = {Wait.RUNNING: "R", Wait.DISK: "D", Wait.STOPPED: "T", Wait.TRACED: "t", Wait.ZOMBIE: "Z"}
WCHANS = {Wait.FOREVER: "futex_do_wait", Wait.TIMED: "hrtimer_nanosleep", Wait.DISK: "nfs_wait_bit_killable"}


LOCK = "202 0x55d0a49ea900 0x189 0x0 0x0 0x0 0xffffffff 0x7fffd8cf7500 0x7fefdfca3f16"  # a private futex


def thread(
    wait: Wait, name: str = "python", wchan: str | None = None, tid: int = 2, syscall: str = ""
) -> ThreadFacts:
    where = WCHANS.get(wait, "") if wchan is None else wchan
    return ThreadFacts(tid, name, LETTERS.get(wait, "S"), where, syscall, wait.value)


@dataclass
class Rank:
    """What one rank does; tests change the fields."""

    number: int
    ticks: int = 1
    step: int = 0
    step_s: float = 0.0
    phase: Phase = Phase.START
    user_phase: str = ""
    init_done: bool = False
    records: list[Collective] = field(default_factory=list)
    in_collective: bool = False
    desync: int | None = None
    wait: Wait = Wait.RUNNING
    threads: list[ThreadFacts] = field(default_factory=list)
    child_waits: tuple[str, ...] = ()
    children: int = 0
    syscall: str = ""  # of the main thread, where its wait depends on it
    tracer: int = 0
    cpu_per_s: float = 0.0
    io_per_s: float = 0.0
    cpu_s: float = 1.0
    io_bytes: float = 0.0
    groups: tuple[GroupStatus, ...] = ()
    answers: bool = True
    stack: str = "here"
    where: str = ""
    exit: ExitStatus | None = None
    has_page: bool = True
    has_proc: bool = True

    def tick(self) -> None:
        self.ticks += 1

    def enter(self, seq: int, op: str = "all_reduce", group: int = WORLD_GROUP, numel: int = 8) -> None:
        record = Collective(seq, group, op, "float32", numel, self.step, 10, "train.py", False, 0)
        self.records.append(record)
        self.in_collective = True
        self.wait = Wait.FOREVER
        self.cpu_per_s = 0.0
        self.tick()

    def leave(self) -> None:
        self.records[-1] = replace(self.records[-1], done=True)
        self.in_collective = False
        self.wait = Wait.RUNNING
        self.tick()

    def go(
        self, wait: Wait = Wait.RUNNING, phase: Phase = Phase.TRAIN, cpu_per_s: float | None = None
    ) -> None:
        """Be outside any collective, in that wait."""
        self.wait, self.phase = wait, phase
        self.cpu_per_s = (1.0 if wait is Wait.RUNNING else 0.0) if cpu_per_s is None else cpu_per_s

    def leave_job(self, code: int = 0) -> None:
        self.exit = ExitStatus(code=code)


@dataclass
class Job:
    """Ranks, groups other than the default one, and what hang detection has said so far."""

    size: int
    config: HangConfig = field(default_factory=HangConfig)
    groups: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    tick_s: float = TICK_S
    now_s: float = 0.0
    findings: list[tuple[float, hang.Finding]] = field(default_factory=list)
    details_asked: int = 0
    each_look: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.ranks = [Rank(number) for number in range(self.size)]
        self.state = hang.initial(self.size, self.config)
        self.seq = 0

    # --- the job ---

    def start(self) -> None:
        for rank in self.ranks:
            rank.phase, rank.init_done = Phase.TRAIN, True
            rank.tick()

    def train(self, steps: int, step_s: float = 0.1, collective: bool = True) -> None:
        """All ranks in step: compute, all_reduce, step."""
        self.start()
        for _ in range(steps):
            for rank in self.ranks:
                rank.go()
            self.run(step_s)
            self.seq += 1
            for rank in self.ranks:
                if collective:
                    rank.enter(self.seq)
                    rank.leave()
                rank.step += 1
                rank.step_s = self.now_s
                rank.tick()

    def all_enter(self, op: str = "all_reduce", but: tuple[int, ...] = ()) -> None:
        """Everyone but some goes into the next collective of the default group, and stays there."""
        self.seq += 1
        for rank in self.ranks:
            if rank.number not in but and rank.exit is None:
                rank.enter(self.seq, op)

    def all_leave(self) -> None:
        for rank in self.ranks:
            if rank.in_collective:
                rank.leave()

    # --- looking ---

    def page(self, rank: Rank, rings: bool) -> Page:
        return Page(
            rank=rank.number, generation=1, pid=100 + rank.number, ticks=rank.ticks, tick_ns=0,
            step=rank.step, step_ns=int(rank.step_s * 1e9), phase=rank.phase, phase_ns=0,
            in_collective=rank.in_collective, world_seq=0, checkpoints=0, checkpoint_step=0,
            absolute_step=None, faults_fired=0, desync_rank=rank.desync, desync_seq=self.seq,
            init_done=rank.init_done, user_phase=rank.user_phase,
            steps=(Step(rank.step, 0, int(rank.step_s * 1e9)),) if rings and rank.step else (),
            collectives=tuple(rank.records[-128:]) if rings else (),
            groups=dict(self.groups) if rings else {},
            rings=rings,
        )  # fmt: skip

    def process(self, rank: Rank) -> ProcessFacts:
        return ProcessFacts(
            state=LETTERS.get(rank.wait, "S"),
            tracer_pid=rank.tracer,
            cpu_s=round(rank.cpu_s, 2),
            io_bytes=int(rank.io_bytes),
            rss_bytes=1 << 20,
            threads=(
                thread(rank.wait, tid=1, syscall=rank.syscall),
                thread(Wait.INFRASTRUCTURE, "gloo_tcp_loop"),
                *rank.threads,
            ),
            children=rank.children,
            child_waits=rank.child_waits,
        )

    def sample(self, rank: Rank, detail: bool, letter: bool) -> hang.RankSample:
        alive = rank.exit is None
        detail_alive = detail and alive
        return hang.RankSample(
            rank=rank.number,
            alive=alive,
            exit=rank.exit,
            page=self.page(rank, rings=detail) if rank.has_page else None,
            process=self.process(rank) if detail_alive and rank.has_proc else None,
            groups=rank.groups if detail_alive and rank.answers else (),
            answered=rank.answers if detail_alive else None,
            stack_id=rank.stack if detail_alive and rank.answers else "",
            where=rank.where if detail_alive else "",
            state=LETTERS.get(rank.wait, "S") if letter and alive else "",
        )

    def look(self, observed_s: float) -> hang.Finding | None:
        detail, letters = hang.wants_detail(self.state), hang.wants_state(self.state)
        self.details_asked += bool(detail)
        samples = tuple(self.sample(r, r.number in detail, r.number in letters) for r in self.ranks)
        self.state, finding = hang.observe(self.state, hang.JobSample(observed_s, samples))
        if finding is not None:
            self.findings.append((self.now_s, finding))
        return finding

    def run(self, seconds: float, until_act: bool = False) -> None:
        """Let time pass; the ranks stay as they are, but for ``each_look``."""
        end = self.now_s + seconds
        while self.now_s < end - 1e-9:
            self.now_s += self.tick_s
            for rank in self.ranks:
                rank.cpu_s += rank.cpu_per_s * self.tick_s
                rank.io_bytes += rank.io_per_s * self.tick_s
            if self.each_look is not None:
                self.each_look()
            finding = self.look(self.tick_s)
            if until_act and finding is not None and finding.level == "act":
                return

    def levels(self) -> list[str]:
        return [finding.level for _, finding in self.findings]

    def act(self) -> tuple[float, hang.Finding] | None:
        return next(((when, found) for when, found in self.findings if found.level == "act"), None)

    def acted_on(self, since_s: float, within_s: float) -> hang.Finding:
        """Run until it acts; at the latest ``within_s`` after ``since_s``."""
        self.run(within_s * 4 + 5, until_act=True)
        acted = self.act()
        assert acted is not None, self.findings
        assert acted[0] - since_s <= within_s + 1e-6, (acted[0] - since_s, self.findings)
        return acted[1]
