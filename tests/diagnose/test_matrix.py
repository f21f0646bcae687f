"""Every way to break x every rank as the one that breaks x 2, 4 and 8 ranks: the verdict names that rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from closeranks.diagnose import diagnose
from closeranks.events import ExitStatus
from closeranks.evidence import ErrorRecord, Evidence, Frame, RankEvidence, ThreadFacts, Verdict
from closeranks.progress import Phase

from . import scenes
from .scenes import CLOSED, GLOO_ABORT, LOSS, MS, RESET, SCRIPT, SIGABRT, SIGKILL, SIGSEGV, TIMED_OUT, Job, Op

WORLDS = (2, 4, 8)
PLACES = [(world, culprit) for world in WORLDS for culprit in range(world)]
SCRIPTS = [scenes.plain, scenes.several, scenes.ddp, scenes.stepless, scenes.grouped]


@pytest.fixture(params=PLACES, ids=lambda p: f"{p[0]}ranks-culprit{p[1]}")
def place(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


def blames(verdict: Verdict, rank: int) -> None:
    """One culprit, the right one, and a verdict fit to be written down."""
    assert verdict.culprit_ranks == (rank,), verdict
    assert verdict.confidence >= 0.6
    assert verdict.evidence
    assert verdict.summary.startswith(f"rank {rank} ")
    assert verdict.signature
    assert not any(c.isdigit() and "pid" in verdict.signature for c in verdict.signature)
    assert verdict.culprits[0].node == "node7"


def halted(world: int, culprit: int, script: scenes.Script = scenes.plain, **more: object) -> Job:
    """A job whose culprit stops before the last thing of its fault step, all others waiting for it."""
    position = {scenes.ddp: 2, scenes.several: 1}.get(script, 0)
    return Job(world, script, culprit, halt_at=position, **more).run()  # type: ignore[arg-type]


# --- deaths -----------------------------------------------------------------------------------------


def deaths(job: Job, end: RankEvidence) -> Iterator[Evidence]:
    """The same death seen at once, a little later, and with victims' errors stamped before it was noticed."""
    others = [r for r in job.ranks if r.number != job.culprit]
    yield job.evidence("exit", {job.culprit: end}, ranks=(job.culprit,))
    assert end.exit_mono_ns is not None
    for lag_ms, message in ((-4, CLOSED), (6, RESET), (2, "Broken pipe")):
        entries = {r.number: job.victim(r, message, at_ns=end.exit_mono_ns + lag_ms * MS) for r in others}
        yield job.evidence("exit", {job.culprit: end, **entries}, ranks=(others[0].number,))
    first = {others[0].number: job.victim(others[0], CLOSED, at_ns=end.exit_mono_ns - 8 * MS, exited=False)}
    yield job.evidence("exception", {job.culprit: end, **first}, ranks=(others[0].number,))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_sigkill_from_outside(place: tuple[int, int], script: scenes.Script) -> None:
    job = halted(*place, script)
    for evidence in deaths(job, job.dead(job.broken, SIGKILL, after_ms=15)):
        verdict = diagnose(evidence)
        blames(verdict, job.culprit)
        assert (verdict.leaf, verdict.kind, verdict.signature) == ("unknown", "rank_exit", "SIGKILL")
        assert verdict.action == "restart in place"


def test_out_of_memory(place: tuple[int, int]) -> None:
    job = halted(*place)
    end = job.dead(job.broken, SIGKILL, after_ms=15)
    for evidence in deaths(job, end):
        named = replace(evidence, host=replace(evidence.host, oom_kills=1, oom_victims=(end.pid,)))
        counted = replace(evidence, host=replace(evidence.host, oom_kills=1))
        for verdict in map(diagnose, (named, counted)):
            blames(verdict, job.culprit)
            assert (verdict.leaf, verdict.kind) == ("app.host_oom", "out_of_memory")
        someone_else = replace(evidence, host=replace(evidence.host, oom_kills=1, oom_victims=(99,)))
        assert diagnose(someone_else).kind == "rank_exit"


@pytest.mark.parametrize("exit", [SIGSEGV, SIGABRT, ExitStatus(signal=7), ExitStatus(signal=8)])
def test_crash_of_its_own(place: tuple[int, int], exit: ExitStatus) -> None:
    job = halted(*place)
    stack = (Frame(SCRIPT, 33, "native_part"), Frame(SCRIPT, 80, "main"))
    for evidence in deaths(job, job.dead(job.broken, exit, after_ms=15, stack=stack)):
        verdict = diagnose(evidence)
        blames(verdict, job.culprit)
        assert (verdict.leaf, verdict.kind) == ("app.crash_segv", "native_crash")
        assert "train.py:33" in verdict.summary


@pytest.mark.parametrize("code", [1, 3, 137, 255])
def test_exit_codes_and_os_exit(place: tuple[int, int], code: int) -> None:
    job = halted(*place)
    for evidence in deaths(job, job.dead(job.broken, ExitStatus(code=code), after_ms=15)):
        verdict = diagnose(evidence)
        blames(verdict, job.culprit)
        assert (verdict.kind, verdict.signature) == ("rank_exit", f"exit code {code}")


@pytest.mark.parametrize("alive", [True, False])
def test_uncaught_exception(place: tuple[int, int], alive: bool) -> None:
    job = halted(*place)
    raised = job.broken.clock_ns + 3 * MS
    error = ErrorRecord("ValueError", "bad batch", f"{SCRIPT}:57", 12, raised, "")
    end = replace(job.dead(job.broken, ExitStatus(code=1), after_ms=25), error=error)
    for evidence in deaths(job, end):
        if alive:
            there = replace(job.alive(job.broken), error=error)
            entries = tuple(there if r.rank == job.culprit else r for r in evidence.ranks)
            evidence = replace(evidence, ranks=entries)
        verdict = diagnose(evidence)
        blames(verdict, job.culprit)
        assert (verdict.leaf, verdict.kind) == ("app.exception", "exception")
        assert verdict.signature == f"ValueError at {SCRIPT}:57"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_early_exit_with_0(place: tuple[int, int], script: scenes.Script) -> None:
    job = halted(*place, script, leave=True)
    end = job.dead(job.broken, ExitStatus(code=0), after_ms=15)
    verdict = diagnose(job.evidence("early_exit", {job.culprit: end}, ranks=(job.culprit,)))
    blames(verdict, job.culprit)
    assert (verdict.leaf, verdict.kind) == ("comm.desync", "early_exit")
    victims = {
        r.number: job.victim(r, CLOSED, at_ns=job.broken.clock_ns + 30 * MS)
        for r in job.ranks
        if r.number != job.culprit
    }
    blames(diagnose(job.evidence("exception", {**victims, job.culprit: end})), job.culprit)


# --- standstills ------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_sigstop(place: tuple[int, int], script: scenes.Script) -> None:
    job = halted(*place, script)
    alive = job.alive(job.broken)
    assert alive.process is not None
    end = replace(alive, process=replace(alive.process, state="T"), answered=False, stack=(), groups=())
    verdict = diagnose(job.evidence("stopped", {job.culprit: end}, ranks=(job.culprit,)))
    blames(verdict, job.culprit)
    assert (verdict.leaf, verdict.kind, verdict.signature) == ("app.hang", "frozen_process", "SIGSTOP")
    timed_out = {
        r.number: job.victim(r, TIMED_OUT, at_ns=job.now_ns) for r in job.ranks if r.number != job.culprit
    }
    blames(diagnose(job.evidence("exception", {job.culprit: end, **timed_out})), job.culprit)


def sleeping(job: Job, *, stack: tuple[Frame, ...], answered: bool = True, state: str = "S") -> RankEvidence:
    alive = job.alive(job.broken)
    assert alive.process is not None
    thread = ThreadFacts(alive.pid, "python", state, "futex_wait", "202 0x0", "forever")
    process = replace(alive.process, state=state, threads=(thread,))
    groups = alive.groups if answered else ()
    return replace(alive, process=process, stack=stack, answered=answered, groups=groups)


LOCK = (Frame(scenes.STDLIB + "threading.py", 327, "wait"), Frame(SCRIPT, 50, "train"))
IN_C = (Frame(SCRIPT, 51, "native_part"), Frame(SCRIPT, 50, "train"))
IN_DATA = (
    Frame(scenes.STDLIB + "queue.py", 171, "get"),
    Frame(scenes.TORCH + "utils/data/dataloader.py", 1234, "_try_get_data"),
    Frame(SCRIPT, 48, "train"),
)


@pytest.mark.parametrize("trigger", ["blocked", "deadlock", "hang_timeout"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_hang_in_python_and_in_c(place: tuple[int, int], script: scenes.Script, trigger: str) -> None:
    job = halted(*place, script)
    for end, reason in (
        (sleeping(job, stack=LOCK), "waits for a lock"),
        (sleeping(job, stack=IN_C, answered=False), "train.py:51"),
    ):
        for named in ((), (job.culprit,)):
            verdict = diagnose(job.evidence(trigger, {job.culprit: end}, ranks=named))
            blames(verdict, job.culprit)
            assert verdict.leaf == "app.hang"
            assert verdict.kind in ("host_block", "subgroup_hang")
            assert reason in verdict.summary


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_never_enters(place: tuple[int, int], script: scenes.Script) -> None:
    job = halted(*place, script)
    verdict = diagnose(job.evidence("hang_timeout", {}))
    blames(verdict, job.culprit)
    assert verdict.leaf == "app.hang"
    assert verdict.kind in ("never_enters", "subgroup_hang")


def test_subgroup_hang(place: tuple[int, int]) -> None:
    job = halted(*place, scenes.grouped)
    verdict = diagnose(job.evidence("blocked", {job.culprit: sleeping(job, stack=LOCK)}))
    blames(verdict, job.culprit)
    assert verdict.kind == ("subgroup_hang" if job.world > 2 else "host_block")


def test_data_and_storage_stalls(place: tuple[int, int]) -> None:
    job = halted(*place)
    data = diagnose(job.evidence("blocked", {job.culprit: sleeping(job, stack=IN_DATA)}))
    blames(data, job.culprit)
    assert data.leaf == "data.stall"
    plain = sleeping(job, stack=())
    assert plain.page is not None
    by_phase = replace(plain, page=replace(plain.page, phase=Phase.DATA))
    assert diagnose(job.evidence("blocked", {job.culprit: by_phase})).leaf == "data.stall"
    disk = diagnose(job.evidence("hang_timeout", {job.culprit: sleeping(job, stack=IN_C, state="D")}))
    blames(disk, job.culprit)
    assert disk.leaf == "storage.stall"


def test_only_stacks_are_known(place: tuple[int, int]) -> None:
    """A script that closeranks has no pages of: the stacks alone show who is outside."""
    job = halted(*place)
    entries = {r.number: replace(job.alive(r), page=None, groups=()) for r in job.ranks}
    entries[job.culprit] = replace(sleeping(job, stack=LOCK), page=None, groups=())
    blames(diagnose(job.evidence("hang_timeout", entries)), job.culprit)


def test_peers_gave_up_on_a_late_rank(place: tuple[int, int]) -> None:
    """All raise in the end; the one that came after the others had timed out is the cause."""
    job = Job(*((place[0], scenes.plain, place[1]))).run()
    job = halted(*place)
    late_ns = job.now_ns + 2000 * MS
    entries = {
        r.number: job.victim(r, TIMED_OUT, at_ns=job.now_ns + r.number * MS)
        for r in job.ranks
        if r.number != job.culprit
    }
    rank = job.broken
    rank.halted, waiting = False, job.ranks[(job.culprit + 1) % job.world]
    assert waiting.at is not None
    rank.at, rank.seqs[0] = waiting.at, waiting.at[1]
    rank.records.append(replace(waiting.records[-1], mono_ns=late_ns))
    entries[job.culprit] = job.victim(rank, CLOSED, at_ns=late_ns + 5 * MS)
    verdict = diagnose(job.evidence("exception", entries))
    blames(verdict, job.culprit)
    assert verdict.kind == "never_enters"


# --- mismatches -------------------------------------------------------------------------------------


def without(position: int) -> Callable[[list[Op]], list[Op]]:
    return lambda ops: ops[:position] + ops[position + 1 :]


def with_extra(position: int, extra: Op | None = None) -> Callable[[list[Op]], list[Op]]:
    return lambda ops: [*ops[:position], extra or ops[position], *ops[position:]]


def changed(position: int, **to: object) -> Callable[[list[Op]], list[Op]]:
    return lambda ops: [replace(op, **to) if i == position else op for i, op in enumerate(ops)]  # type: ignore[arg-type]


def mismatches(job: Job) -> Iterator[tuple[str, Evidence]]:
    """What the agent may see of one mismatch: a finding, a hang, timeouts, an abort on either side."""
    yield "caught", job.evidence("desync", {})
    yield "hang", job.evidence("deadlock", {})
    innocent = next(r.number for r in job.ranks if r.number != job.culprit)
    inside = [r for r in job.ranks if r.at is not None]
    if job.clash or len(inside) < 2:
        return
    if not any(r.at[2].hidden for r in inside if r.at is not None):  # a dead rank's recorder can't be asked
        timed_out = {r.number: job.victim(r, TIMED_OUT, at_ns=job.now_ns + r.number * MS) for r in job.ranks}
        yield "timeouts", job.evidence("exception", timed_out)
    for aborted in (job.culprit, innocent):
        end = job.dead(
            job.ranks[aborted], SIGABRT, after_ms=12, aborted_by=GLOO_ABORT, log_tail=(GLOO_ABORT,)
        )
        yield f"abort of {aborted}", job.evidence("exit", {aborted: end}, ranks=(aborted,))
        raising = {r.number: job.raising(r) for r in job.ranks if r.number != aborted}
        yield f"abort of {aborted}, others raise", job.evidence("exit", {**raising, aborted: end})
        assert end.exit_mono_ns is not None
        victims = {
            r.number: job.victim(r, RESET, at_ns=end.exit_mono_ns - 3 * MS)
            for r in job.ranks
            if r.number != aborted
        }
        yield (
            f"abort of {aborted}, all down",
            job.evidence("exit", {**victims, aborted: end}, ranks=(aborted,)),
        )


def check_mismatch(job: Job, kinds: tuple[str, ...]) -> None:
    seen = 0
    for name, evidence in mismatches(job.run()):
        verdict = diagnose(evidence)
        assert verdict.culprit_ranks == (job.culprit,), (name, verdict)
        blames(verdict, job.culprit)
        assert verdict.leaf == "comm.desync", name
        assert verdict.kind in kinds, (name, verdict)
        assert "train.py:" in verdict.summary
        seen += 1
    assert seen >= 2


MEET = pytest.mark.parametrize("meet", ["caught", "hang"])


@pytest.mark.parametrize(
    ("script", "position"),
    [(scenes.several, 0), (scenes.several, 1), (scenes.several, 2), (scenes.ddp, 4), (scenes.grouped, 3)],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_skipped_collective(place: tuple[int, int], script: scenes.Script, position: int) -> None:
    check_mismatch(
        Job(*place[:1], script, place[1], tamper=without(position), meet="caught"), ("skip_collective",)
    )


@pytest.mark.parametrize("position", [0, 1])
def test_skipped_collective_without_steps(place: tuple[int, int], position: int) -> None:
    job = Job(place[0], scenes.stepless, place[1], tamper=without(position))
    check_mismatch(job, ("skip_collective",))


def test_skipped_collective_that_differs_in_its_step_alone(place: tuple[int, int]) -> None:
    job = Job(place[0], scenes.plain, place[1], tamper=without(0), meet="caught")
    check_mismatch(job, ("skip_collective",))


@pytest.mark.parametrize(
    ("script", "position"), [(scenes.ddp, 4), (scenes.grouped, 3)], ids=["ddp", "grouped"]
)
def test_skipped_collective_that_gloo_runs_into(
    place: tuple[int, int], script: scenes.Script, position: int
) -> None:
    """Nobody caught it: the ranks stand in collectives of unequal size, or one of them has been aborted."""
    check_mismatch(
        Job(place[0], script, place[1], tamper=without(position)), ("skip_collective", "wrong_order")
    )


@pytest.mark.parametrize("position", [0, 1])
def test_skipped_collective_in_a_subgroup(place: tuple[int, int], position: int) -> None:
    """The others wait in the group, the culprit in the next one: it looks like a circle."""
    job = Job(place[0], scenes.grouped, place[1], tamper=without(position)).run()
    verdict = diagnose(job.evidence("deadlock", {}))
    blames(verdict, job.culprit)
    assert verdict.leaf == "comm.desync"
    assert verdict.kind == "skip_collective"


def test_silent_skip_shows_at_the_end(place: tuple[int, int]) -> None:
    """Gradients of different steps were averaged to the end; then the culprit is done and the others wait."""
    job = Job(place[0], scenes.plain, place[1], tamper=without(0), meet="silent").run()
    assert job.broken.finished
    done = {job.culprit: job.dead(job.broken, ExitStatus(code=0), after_ms=12)}
    verdict = diagnose(job.evidence("early_exit", done))
    blames(verdict, job.culprit)
    assert verdict.kind == "skip_collective"


def test_silent_extra_shows_at_the_end(place: tuple[int, int]) -> None:
    """The innocent are done; the culprit alone still waits."""
    job = Job(place[0], scenes.plain, place[1], tamper=with_extra(0), meet="silent").run()
    assert not job.broken.finished
    done = {r.number: job.dead(r, ExitStatus(code=0), after_ms=12) for r in job.ranks if r.finished}
    verdict = diagnose(job.evidence("early_exit", done))
    blames(verdict, job.culprit)
    assert verdict.kind == "extra_collective"


EXTRA = Op("all_reduce", 99, 4)


@MEET
@pytest.mark.parametrize(
    ("script", "position", "extra"),
    [
        (scenes.plain, 0, EXTRA),
        (scenes.several, 0, EXTRA),
        (scenes.several, 1, Op("barrier", 99, 0, "none")),
        (scenes.several, 2, EXTRA),
        (scenes.ddp, 0, EXTRA),
        (scenes.ddp, 4, EXTRA),
        (scenes.stepless, 1, EXTRA),
    ],
    ids=lambda v: getattr(v, "__name__", getattr(v, "op", v)),
)
def test_extra_collective(
    place: tuple[int, int], script: scenes.Script, position: int, extra: Op, meet: str
) -> None:
    job = Job(place[0], script, place[1], tamper=with_extra(position, extra), meet=meet)
    check_mismatch(job, ("extra_collective", "type_mismatch", "size_mismatch"))


def test_same_collective_twice(place: tuple[int, int]) -> None:
    job = Job(place[0], scenes.plain, place[1], tamper=with_extra(0), meet="caught")
    check_mismatch(job, ("extra_collective",))


CHANGES = [
    (scenes.plain, 0), (scenes.several, 1), (scenes.ddp, 4), (scenes.stepless, 0), (scenes.grouped, 1),
    (scenes.grouped, 3),
]  # fmt: skip


@MEET
@pytest.mark.parametrize(("script", "position"), CHANGES, ids=lambda v: getattr(v, "__name__", v))
def test_wrong_size(place: tuple[int, int], script: scenes.Script, position: int, meet: str) -> None:
    job = Job(place[0], script, place[1], tamper=changed(position, numel=4), meet=meet)
    check_mismatch(job, ("size_mismatch",))


@MEET
@pytest.mark.parametrize(("script", "position"), CHANGES, ids=lambda v: getattr(v, "__name__", v))
def test_wrong_dtype(place: tuple[int, int], script: scenes.Script, position: int, meet: str) -> None:
    job = Job(place[0], script, place[1], tamper=changed(position, dtype="int32"), meet=meet)
    check_mismatch(job, ("dtype_mismatch",))


@MEET
@pytest.mark.parametrize("line", [None, 71])
@pytest.mark.parametrize(("script", "position"), CHANGES, ids=lambda v: getattr(v, "__name__", v))
def test_wrong_type(
    place: tuple[int, int], script: scenes.Script, position: int, meet: str, line: int | None
) -> None:
    to = {"op": "broadcast"} if line is None else {"op": "broadcast", "line": line}
    job = Job(place[0], script, place[1], tamper=changed(position, **to), meet=meet)
    check_mismatch(job, ("type_mismatch",))


def test_silent_dtype_mismatch_is_found_before_its_consequence(place: tuple[int, int]) -> None:
    """gloo adds int32 bytes as floats; an innocent rank fails its own assertion a moment later."""
    job = Job(
        place[0], scenes.plain, place[1], tamper=changed(0, dtype="int32"), meet="silent", total_steps=14
    ).run()
    innocent = next(r for r in job.ranks if r.number != job.culprit)
    error = ErrorRecord("AssertionError", "loss is nan", f"{SCRIPT}:61", 13, job.now_ns, "")
    entry = replace(job.dead(innocent, ExitStatus(code=1), after_ms=1600), error=error)
    verdict = diagnose(job.evidence("exception", {innocent.number: entry}))
    blames(verdict, job.culprit)
    assert verdict.kind == "dtype_mismatch"


def test_groups_entered_in_another_order(place: tuple[int, int]) -> None:
    swap: Callable[[list[Op]], list[Op]] = lambda ops: [  # noqa: E731
        replace(ops[1], line=47), replace(ops[0], line=48), *ops[2:]
    ]  # fmt: skip
    job = Job(place[0], scenes.grouped, place[1], tamper=swap).run()
    verdict = diagnose(job.evidence("deadlock", {}))
    blames(verdict, job.culprit)
    assert (verdict.leaf, verdict.kind) == ("comm.desync", "wrong_order")


def test_fault_in_the_first_steps(place: tuple[int, int]) -> None:
    """Two steps of history are enough to tell two ranks apart."""
    for step in (2, 3):
        job = Job(place[0], scenes.plain, place[1], fault_step=step, tamper=changed(0, numel=4))
        check_mismatch(job, ("size_mismatch",))
        job = Job(place[0], scenes.ddp, place[1], fault_step=step, tamper=without(4))
        check_mismatch(job, ("skip_collective",))


def test_long_after_the_rings_have_wrapped(place: tuple[int, int]) -> None:
    for script in (scenes.several, scenes.ddp):
        job = Job(
            place[0],
            script,
            place[1],
            fault_step=300,
            total_steps=320,
            tamper=changed(2 if script is scenes.several else 4, numel=9),
        )
        check_mismatch(job, ("size_mismatch",))
    job = Job(
        place[0], scenes.plain, place[1], fault_step=300, total_steps=320, tamper=without(0), meet="caught"
    )
    check_mismatch(job, ("skip_collective",))


def test_loss_is_the_op_that_ddp_shows() -> None:
    assert scenes.ddp(0, 0)[4] is LOSS
