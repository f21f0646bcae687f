"""Which of several signs is the first cause, and what nobody is blamed for."""

from __future__ import annotations

import ast
import time
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.diagnose import diagnose, first_cause
from closeranks.events import ExitStatus
from closeranks.evidence import ErrorRecord, Evidence, HostFacts, RankEvidence, ThreadFacts
from closeranks.progress import Collective, Phase
from closeranks.taxonomy import leaf

from . import scenes
from .scenes import CLOSED, GLOO_ABORT, MS, RESET, SCRIPT, SIGABRT, SIGKILL, SIGSEGV, TIMED_OUT, Job, Op
from .test_matrix import IN_C, LOCK, changed, halted, sleeping, with_extra, without


def error(
    job: Job, at_ms: float, kind: str = "ValueError", message: str = "x", line: int = 57
) -> ErrorRecord:
    return ErrorRecord(kind, message, f"{SCRIPT}:{line}", 12, job.now_ns + int(at_ms * MS), "")


def died_at(job: Job, rank: int, exit: ExitStatus, at_ms: float, **more: object) -> RankEvidence:
    """Ended ``at_ms`` after the job came to a halt."""
    state = job.ranks[rank]
    return job.dead(state, exit, after_ms=(job.now_ns - state.clock_ns) / MS + at_ms, **more)


# --- order ------------------------------------------------------------------------------------------


def test_the_earliest_of_two_independent_failures() -> None:
    job = halted(4, 1)
    for first, second in ((0, 3), (3, 0)):
        entries = {
            first: replace(job.alive(job.ranks[first]), error=error(job, 5)),
            second: replace(job.alive(job.ranks[second]), error=error(job, 9, "KeyError", "k", 99)),
        }
        verdict = diagnose(job.evidence("exception", entries))
        assert verdict.culprit_ranks == (first,)
        assert any(f"rank {second}" in line.source and line.why == "later" for line in verdict.evidence)


def test_the_same_exception_everywhere_names_all_the_first_one_first() -> None:
    job = halted(4, 1)
    entries = {r: replace(job.alive(job.ranks[r]), error=error(job, 9 - r)) for r in range(4)}
    verdict = diagnose(job.evidence("exception", entries))
    assert verdict.culprit_ranks == (3, 2, 1, 0)


def test_a_kill_precedes_what_its_peers_say_a_moment_earlier() -> None:
    """The pidfd is read some milliseconds after the peer's socket broke; even an unknown text is later."""
    job = halted(2, 1)
    entries = {
        1: died_at(job, 1, SIGKILL, 10),
        0: replace(
            job.alive(job.ranks[0]), error=error(job, 2, "RuntimeError", "some new words for a lost peer")
        ),
    }
    assert diagnose(job.evidence("exception", entries, ranks=(0,))).culprit_ranks == (1,)
    much_earlier = replace(entries[0], error=error(job, -500, "RuntimeError", "some new words"))
    assert diagnose(job.evidence("exception", {**entries, 0: much_earlier})).culprit_ranks == (0,)


def test_a_stop_and_a_death() -> None:
    """Whoever showed its last sign of life before the other died was first."""
    job = halted(4, 1)
    alive = job.alive(job.broken)
    assert alive.process is not None
    frozen = replace(alive, process=replace(alive.process, state="T"))
    late_death = {1: frozen, 2: died_at(job, 2, ExitStatus(code=7), 900)}
    assert diagnose(job.evidence("exit", late_death)).culprit_ranks == (1,)
    early_death = {1: frozen, 2: job.dead(job.ranks[2], ExitStatus(code=7), after_ms=-900)}
    assert diagnose(job.evidence("exit", early_death)).culprit_ranks == (2,)


def test_an_exception_of_the_mismatched_rank_itself_comes_first() -> None:
    """It raised, and its except clause ran into a barrier: the exception is the cause, on the same rank."""
    tamper = with_extra(0, Op("barrier", 99, 0, "none"))
    job = Job(4, scenes.plain, 2, tamper=tamper).run()
    own = replace(job.alive(job.broken), error=error(job, 3))
    verdict = diagnose(job.evidence("exception", {2: own}))
    assert (verdict.culprit_ranks, verdict.kind) == ((2,), "exception")


def test_a_kill_is_not_explained_by_an_older_mismatch() -> None:
    job = Job(4, scenes.plain, 2, tamper=changed(0, dtype="int32"), meet="silent", total_steps=14).run()
    verdict = diagnose(job.evidence("exit", {0: died_at(job, 0, SIGKILL, 100)}))
    assert (verdict.culprit_ranks, verdict.kind) == ((0,), "rank_exit")


def test_import_errors_are_not_explained_by_a_mismatch() -> None:
    job = Job(4, scenes.plain, 2, tamper=changed(0, dtype="int32"), meet="silent", total_steps=14).run()
    entry = replace(job.alive(job.ranks[0]), error=error(job, 50, "ImportError", "no module"))
    assert diagnose(job.evidence("exception", {0: entry})).culprit_ranks == (0,)


# --- native aborts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "leaf_name"),
    [
        ("terminate called after throwing an instance of 'std::bad_alloc'", "app.host_oom"),
        ("  what():  CUDA error: an illegal memory access was encountered", "app.cuda_memfault"),
        ("  what():  CUDA error: uncorrectable ECC error encountered", "gpu.hbm"),
        ("free(): invalid pointer", "app.crash_segv"),
        ("", "app.crash_segv"),
    ],
)
def test_aborts_of_its_own(words: str, leaf_name: str) -> None:
    job = halted(4, 1)
    verdict = diagnose(job.evidence("exit", {1: died_at(job, 1, SIGABRT, 5, aborted_by=words)}))
    assert (verdict.culprit_ranks, verdict.leaf, verdict.kind) == ((1,), leaf_name, "native_crash")


@pytest.mark.parametrize(
    "words", [f"  what():  {RESET}", "[Rank 0] Watchdog caught collective operation timeout"]
)
def test_aborts_over_a_lost_peer_are_victims(words: str) -> None:
    job = halted(4, 1)
    entries = {0: died_at(job, 0, SIGABRT, 5, aborted_by=words), 1: died_at(job, 1, SIGSEGV, 9)}
    assert diagnose(job.evidence("exit", entries)).culprit_ranks == (1,)


def test_a_gloo_abort_without_rings_accuses_nobody() -> None:
    job = halted(2, 1)
    entries = {0: replace(died_at(job, 0, SIGABRT, 5, aborted_by=GLOO_ABORT), page=None)}
    verdict = diagnose(job.evidence("exit", entries))
    assert (verdict.culprits, verdict.leaf) == ((), "comm.desync")
    assert verdict.missing


def test_bus_error_with_a_full_dev_shm() -> None:
    job = halted(4, 1)
    crash = {1: died_at(job, 1, ExitStatus(signal=7), 5)}
    assert diagnose(job.evidence("exit", crash, shm_free_bytes=4096)).leaf == "app.shm"
    assert diagnose(job.evidence("exit", crash, shm_free_bytes=1 << 33)).leaf == "app.crash_segv"


# --- exits ------------------------------------------------------------------------------------------


def test_an_exit_code_is_explained_by_the_log() -> None:
    job = halted(4, 1)
    log = (
        "step 11", "Traceback (most recent call last):", f'  File "{SCRIPT}", line 60, in <module>',
        "    main()",
        "ModuleNotFoundError: No module named 'apex'",
    )  # fmt: skip
    verdict = diagnose(job.evidence("exit", {1: died_at(job, 1, ExitStatus(code=1), 5, log_tail=log)}))
    assert (verdict.leaf, verdict.kind) == ("app.env_import", "exception")
    assert verdict.signature == "ModuleNotFoundError at train.py:60"
    usage = ("usage: train.py [-h]", "train.py: error: unrecognized arguments: --nope")
    verdict = diagnose(job.evidence("exit", {1: died_at(job, 1, ExitStatus(code=2), 5, log_tail=usage)}))
    assert (verdict.leaf, verdict.retry) == ("app.config", False)


def test_an_exit_code_after_a_lost_peer_is_a_victims() -> None:
    job = halted(4, 1)
    log = (
        "Traceback (most recent call last):",
        f'  File "{SCRIPT}", line 60, in f',
        f"RuntimeError: {CLOSED}",
    )
    entries = {
        0: died_at(job, 0, ExitStatus(code=9), 1, log_tail=log),
        1: died_at(job, 1, ExitStatus(code=3), 30),
    }
    assert diagnose(job.evidence("exit", entries)).culprit_ranks == (1,)
    entries[0] = died_at(job, 0, ExitStatus(code=9), 1, log_tail=("giving up: Connection reset by peer",))
    assert diagnose(job.evidence("exit", entries)).culprit_ranks == (1,)


def test_a_killed_data_loader_worker_is_out_of_memory_only_if_that_was_counted() -> None:
    job = halted(4, 1)
    killed = "DataLoader worker (pid 26316) is killed by signal: Killed. "
    entries = {1: replace(job.alive(job.ranks[1]), error=error(job, 5, "RuntimeError", killed))}
    evidence = job.evidence("exception", entries)
    verdict = diagnose(evidence)
    assert (verdict.leaf, verdict.culprit_ranks) == ("unknown", (1,))
    assert any("no OOM kill was counted" in line.line for line in verdict.evidence)
    verdict = diagnose(replace(evidence, host=HostFacts(oom_kills=1)))
    assert (verdict.leaf, verdict.culprit_ranks) == ("app.host_oom", (1,))


def test_who_left_before_a_collective_that_comes_once_left_early() -> None:
    """The others have waited there until they lost it; none of them ever came to that line before."""

    def script(step: int, rank: int) -> list[Op]:
        last = [Op("barrier", 70, 0, "none")] if step == 19 else []
        return [*scenes.plain(step, rank), *last]

    job = Job(3, script, 2, fault_step=19, total_steps=20, tamper=without(2))
    job.run()
    left = job.ranks[2]
    assert left.finished and not job.ranks[0].finished
    entries = {
        2: job.dead(left, ExitStatus(code=0)),
        0: job.victim(job.ranks[0], CLOSED, at_ns=job.now_ns + 2 * MS),
        1: job.victim(job.ranks[1], CLOSED, at_ns=job.now_ns + 3 * MS),
    }
    verdict = diagnose(job.evidence("exit", entries))
    assert (verdict.kind, verdict.culprit_ranks) == ("early_exit", (2,)), verdict


def test_interrupts_and_other_signals() -> None:
    job = halted(4, 1)
    interrupted = replace(job.alive(job.broken), error=error(job, 3, "KeyboardInterrupt", ""))
    assert diagnose(job.evidence("exception", {1: interrupted})).signature == "SIGINT"
    for number, name in ((15, "SIGTERM"), (1, "SIGHUP"), (24, "SIGXCPU")):
        verdict = diagnose(job.evidence("exit", {1: died_at(job, 1, ExitStatus(signal=number), 3)}))
        assert (verdict.culprit_ranks, verdict.signature) == ((1,), name)


def test_signatures_repeat_from_one_incident_to_the_next() -> None:
    """Other pids, times, ranks and generations, the same thing at the same place."""
    first, second = halted(4, 1, fault_step=5), halted(8, 6, fault_step=11)
    for make in (
        lambda j: j.evidence("exit", {j.culprit: died_at(j, j.culprit, SIGSEGV, 3)}),
        lambda j: j.evidence("exception", {j.culprit: replace(j.alive(j.broken), error=error(j, 1))}),
        lambda j: j.evidence("blocked", {j.culprit: sleeping(j, stack=LOCK)}),
    ):
        moved = replace(make(second), incident_id="0009")
        assert diagnose(make(first)).signature == diagnose(moved).signature
    skips = [Job(n, scenes.ddp, 1, fault_step=k, tamper=without(4)).run() for n, k in ((2, 6), (8, 13))]
    one, other = (diagnose(j.evidence("deadlock", {})).signature for j in skips)
    assert one == other == f"skip_collective all_reduce at {SCRIPT}:57"


# --- nobody -----------------------------------------------------------------------------------------


def accuses_nobody(evidence: Evidence) -> None:
    verdict = diagnose(evidence)
    assert verdict.culprits == ()
    assert verdict.missing
    assert verdict.confidence <= 0.9


def test_nothing_decides() -> None:
    job = Job(4, scenes.plain, -1, total_steps=5).run()
    accuses_nobody(job.evidence("suspect", {}))
    accuses_nobody(job.evidence("hang_timeout", {}))
    accuses_nobody(job.evidence("exit", {r.number: job.dead(r, ExitStatus(code=0)) for r in job.ranks}))
    accuses_nobody(Evidence("1", 0, 0, job.evidence("exit", {}).trigger, ()))


def test_a_suspicion_names_who_is_waited_for_and_accuses_nobody() -> None:
    job = halted(4, 1)
    verdict = diagnose(job.evidence("suspect", {1: sleeping(job, stack=LOCK)}))
    assert (verdict.leaf, verdict.culprits, verdict.action, verdict.retry) == ("unknown", (), "wait", False)
    assert "rank 1 waits for a lock" in verdict.summary


def test_a_debugger_is_not_a_fault() -> None:
    job = halted(4, 1)
    alive = job.alive(job.broken)
    assert alive.process is not None
    for held in (replace(alive.process, state="t", tracer_pid=77), replace(alive.process, tracer_pid=77)):
        verdict = diagnose(job.evidence("hang_timeout", {1: replace(alive, process=held)}))
        assert (verdict.culprits, verdict.action) == ((), "wait")
        assert "debugger" in verdict.summary


def test_all_ranks_stopped_is_nobodys_fault() -> None:
    job = halted(4, 1)
    stopped = {}
    for rank in job.ranks:
        entry = job.alive(rank)
        assert entry.process is not None
        stopped[rank.number] = replace(entry, process=replace(entry.process, state="T"))
    verdict = diagnose(job.evidence("stopped", stopped))
    assert (verdict.culprits, verdict.action) == ((), "wait")


def test_two_ranks_that_meet_in_different_collectives_from_the_start() -> None:
    """No majority, no past: both call sites are told, neither rank is blamed."""
    job = Job(2, scenes.plain, 1, fault_step=0, tamper=changed(0, op="broadcast", line=71)).run()
    verdict = diagnose(job.evidence("deadlock", {}))
    assert (verdict.leaf, verdict.culprits) == ("comm.desync", ())
    assert "train.py:57" in verdict.summary
    assert "train.py:71" in verdict.summary


# --- proofs -----------------------------------------------------------------------------------------


def only_ddp(step: int, rank: int) -> list[Op]:
    """All that the script does on its own is done in C++."""
    return [Op("all_reduce", hidden=True, numel=6), scenes.STEP]


def after_ddp(world: int, visible: dict[int, Op], *, passes: bool) -> Job:
    """Ranks that come to a collective of the script's own, while the rest is in DDP's next backward.

    ``passes``: gloo paired them all the same, and let those with the visible one go on to the next.
    """
    job = Job(world, only_ddp, -1, total_steps=30).run()
    for rank in job.ranks:
        rank.finished = False
        seq = rank.seqs[0] + 1
        rank.at = (0, seq, scenes.HIDDEN)
        op = visible.get(rank.number)
        if op is not None:
            rank.records.append(
                Collective(
                    seq, 0, op.op, op.dtype, op.numel, rank.step, op.line, SCRIPT, passes, rank.clock_ns
                )
            )
            rank.at = (0, seq + 1, scenes.HIDDEN) if passes else (0, seq, op)
        rank.seqs[0] = rank.at[1]
    return job


EXTRA = Op("all_reduce", 15, 4)


@pytest.mark.parametrize(("world", "culprit"), [(3, 1), (4, 1), (4, 0), (8, 7)])
def test_an_all_reduce_skipped_for_ddps_that_gloo_let_pass(world: int, culprit: int) -> None:
    """The others have completed theirs: no record is open, and only the flight recorder tells the rest."""
    job = after_ddp(world, {r: EXTRA for r in range(world) if r != culprit}, passes=True)
    verdict = diagnose(job.evidence("desync", {}, ranks=(culprit,)))
    assert (verdict.leaf, verdict.kind, verdict.culprit_ranks) == (
        "comm.desync",
        "skip_collective",
        (culprit,),
    )
    assert verdict.summary.startswith(f"rank {culprit} skipped all_reduce #31 of the default group")
    assert "train.py:15" in verdict.summary


@pytest.mark.parametrize(("world", "culprit"), [(3, 0), (4, 0), (8, 3)])
def test_an_all_reduce_of_one_rank_alone_that_gloo_let_pass(world: int, culprit: int) -> None:
    job = after_ddp(world, {culprit: EXTRA}, passes=True)
    verdict = diagnose(job.evidence("desync", {}, ranks=tuple(r for r in range(world) if r != culprit)))
    assert (verdict.kind, verdict.culprit_ranks) == ("extra_collective", (culprit,))
    assert "train.py:15" in verdict.summary


def test_what_gloo_let_pass_is_no_mismatch_without_a_proof() -> None:
    """DDP's own in flight beside a visible one looks the same, for a moment, in health."""
    job = after_ddp(4, {0: EXTRA, 2: EXTRA, 3: EXTRA}, passes=True)
    for trigger in ("suspect", "exit"):
        assert diagnose(job.evidence(trigger, {})).culprits == ()


@pytest.mark.parametrize("alone", [0, 1])
def test_a_barrier_of_one_of_two_ranks_beside_ddp(alone: int) -> None:
    """Neither came to it before, so either may be in error; both sides are told."""
    job = after_ddp(2, {alone: Op("barrier", 66, 0, "none")}, passes=False)
    verdict = diagnose(job.evidence("desync", {}, ranks=(0, 1)))
    assert (verdict.leaf, verdict.culprits) == ("comm.desync", ())
    assert verdict.summary.startswith("ranks 0,1 are in different collectives at #31")
    assert f"rank {alone} in barrier (train.py:66)" in verdict.summary
    assert f"rank {1 - alone} in all_reduce issued from C++ (train.py:52 train)" in verdict.summary


PROOFS = ("desync", "deadlock", "blocked", "early_exit", "stopped", "init_stall", "hang_timeout")


def scenery() -> dict[str, Job]:
    return {
        "in step": Job(4, scenes.plain, -1, total_steps=5).run(),
        "nothing done": Job(4, scenes.plain, -1, total_steps=0).run(),
        "only in C++": after_ddp(4, {}, passes=False),
        "passed": after_ddp(4, {2: EXTRA}, passes=True),
        "two": after_ddp(2, {0: EXTRA}, passes=False),
        "outside": halted(4, 1),
        "one of two outside": halted(2, 1, scenes.ddp),
    }


@pytest.mark.parametrize("blind", ["", "pages", "stacks", "all", "suspended", "debugged"])
@pytest.mark.parametrize("name", scenery())
@pytest.mark.parametrize("kind", PROOFS)
def test_what_was_proved_is_said(kind: str, name: str, blind: str) -> None:
    """A generation was ended for it: the verdict says at least as much, however little else is known."""
    job = scenery()[name]
    entries = {rank.number: job.alive(rank) for rank in job.ranks}
    for number, entry in entries.items():
        if blind in ("pages", "all"):
            entry = replace(entry, page=None)
        if blind in ("stacks", "all"):
            entry = replace(entry, stack=(), process=None, groups=(), answered=False)
        if blind in ("suspended", "debugged"):
            assert entry.process is not None
            state = {"suspended": ("T", 0), "debugged": ("t", 7)}[blind]
            entry = replace(entry, process=replace(entry.process, state=state[0], tracer_pid=state[1]))
        entries[number] = entry
    told = job.evidence(kind, entries, ranks=(1,))
    for detail in ("rank 1 is as it should not be", ""):
        verdict = diagnose(replace(told, trigger=replace(told.trigger, detail=detail)))
        assert "nothing is wrong" not in verdict.summary
        assert "nothing in the evidence" not in verdict.summary
        assert verdict.leaf != "unknown" or detail in verdict.summary, verdict
        assert verdict.culprits or verdict.leaf != "unknown" or kind == "hang_timeout" or blind, verdict


# --- send and receive -------------------------------------------------------------------------------


def in_pairs(job: Job, waits: dict[int, Op], *, lost: bool) -> dict[int, RankEvidence]:
    """Some ranks wait in a send or receive, the others have finished."""
    entries = {}
    for rank in job.ranks:
        op = waits.get(rank.number)
        if op is None:
            entries[rank.number] = job.dead(rank, ExitStatus(code=0), after_ms=5)
            continue
        rank.records.append(Collective(1, 0, op.op, "float32", 4, 0, op.line, SCRIPT, False, rank.clock_ns))
        rank.at = (0, 1, op)
        entries[rank.number] = (
            job.victim(rank, CLOSED, at_ns=job.now_ns) if lost else replace(job.alive(rank), groups=())
        )
    return entries


@pytest.mark.parametrize(
    ("trigger", "lost"), [("exit", True), ("early_exit", False), ("hang_timeout", False)]
)
def test_who_waits_for_a_message_accuses_nobody(trigger: str, lost: bool) -> None:
    """One receive too many here, or one send too few there: those who have finished may have done it all."""
    job = Job(4, lambda step, rank: [], -1, total_steps=1).run()
    entries = in_pairs(job, {1: Op("recv", 9), 2: Op("recv", 8)}, lost=lost)
    verdict = diagnose(job.evidence(trigger, entries, ranks=(1,)))
    assert (verdict.leaf, verdict.kind, verdict.culprits) == ("comm.desync", "unanswered", ())
    assert verdict.confidence <= 0.6
    assert "rank 1 in recv (train.py:9), rank 2 in recv (train.py:8)" in verdict.summary
    assert "0 steps" not in str(verdict)


def test_who_is_about_to_finish_has_left_as_well() -> None:
    job = Job(3, lambda step, rank: [], -1, total_steps=1).run()
    entries = in_pairs(job, {1: Op("recv", 9)}, lost=True)
    for rank in (0, 2):
        page = replace(job.page(job.ranks[rank]), phase=Phase.EXIT)
        entries[rank] = replace(job.alive(job.ranks[rank]), page=page, groups=())
    verdict = diagnose(job.evidence("exit", entries, ranks=(1,)))
    assert (verdict.kind, verdict.culprits) == ("unanswered", ())
    assert "ranks 0,2 have come to the end of the script" in verdict.summary


def test_a_message_that_a_lost_rank_owed_explains_nothing() -> None:
    """All lost a peer, and no rank has finished: one of them broke."""
    job = Job(2, lambda step, rank: [], -1, total_steps=1).run()
    entries = in_pairs(job, {0: Op("recv", 9), 1: Op("recv", 9)}, lost=True)
    assert diagnose(job.evidence("exit", entries, ranks=(1,))).kind == "unknown"


def test_all_wait_for_messages() -> None:
    job = Job(2, lambda step, rank: [], -1, total_steps=1).run()
    entries = in_pairs(job, {0: Op("send", 9), 1: Op("send", 9)}, lost=False)
    verdict = diagnose(job.evidence("hang_timeout", entries))
    assert (verdict.kind, verdict.culprits) == ("unanswered", ())
    assert "ranks 0,1 in send (train.py:9)" in verdict.summary


def test_who_left_a_collective_is_named_beside_a_message_nobody_answers() -> None:
    job = halted(4, 3, leave=True)
    entries = {3: job.dead(job.broken, ExitStatus(code=0), after_ms=5)}
    entries |= {r: e for r, e in in_pairs(job, {1: Op("recv", 9)}, lost=False).items() if r == 1}
    verdict = diagnose(job.evidence("early_exit", entries, ranks=(3,)))
    assert (verdict.kind, verdict.culprit_ranks) == ("early_exit", (3,))


def test_a_stopped_rank_that_is_only_suspected_is_left_alone() -> None:
    job = halted(4, 1)
    alive = job.alive(job.broken)
    assert alive.process is not None
    stopped = replace(alive, process=replace(alive.process, state="T"))
    for kind, action, retry in (("suspect", "wait", False), ("stopped", "restart in place", True)):
        verdict = diagnose(job.evidence(kind, {1: stopped}, ranks=(1,)))
        assert (verdict.kind, verdict.culprit_ranks) == ("frozen_process", (1,))
        assert (verdict.action, verdict.retry) == (action, retry)


def test_two_ranks_that_wait_in_different_groups_from_the_start() -> None:
    swap = lambda ops: [ops[1], ops[0], *ops[2:]]  # noqa: E731
    job = Job(2, scenes.grouped, 1, fault_step=0, tamper=swap).run()
    verdict = diagnose(job.evidence("deadlock", {}))
    assert (verdict.leaf, verdict.kind, verdict.culprits) == ("comm.desync", "deadlock", ())


def test_timeouts_alone() -> None:
    job = Job(4, scenes.plain, -1, total_steps=5).run()
    lost = {r.number: job.victim(r, TIMED_OUT, at_ns=job.now_ns) for r in job.ranks}
    assert diagnose(job.evidence("exception", lost)).leaf == "comm.timeout"


# --- set-up and special places ----------------------------------------------------------------------


def at_init(job: Job, phases: dict[int, Phase]) -> dict[int, RankEvidence]:
    entries = {}
    for rank in job.ranks:
        entry = job.alive(rank)
        page = replace(job.page(rank), init_done=False, phase=phases.get(rank.number, Phase.INIT))
        entries[rank.number] = replace(entry, page=page, groups=(), stack=())
    return entries


def test_init_stall() -> None:
    job = Job(4, scenes.plain, -1, total_steps=0).run()
    everyone = diagnose(job.evidence("init_stall", at_init(job, {})))
    assert (everyone.leaf, everyone.kind, everyone.culprits) == ("comm.bootstrap", "init_stall", ())
    one_missing = diagnose(job.evidence("init_stall", at_init(job, {2: Phase.START})))
    assert (one_missing.leaf, one_missing.culprit_ranks) == ("app.hang", (2,))


def test_a_monitored_barrier_names_the_absent() -> None:
    job = halted(4, 1)
    words = "Rank 1 failed to pass monitoredBarrier in 5000 ms"
    entries = {0: replace(job.victim(job.ranks[0], words, at_ns=job.now_ns), page=None)}
    entries |= {r: replace(job.alive(job.ranks[r]), page=None, stack=(), groups=()) for r in (1, 2, 3)}
    assert diagnose(job.evidence("exception", entries)).culprit_ranks == (1,)


def test_of_several_outside_the_one_that_cannot_move() -> None:
    """Two ranks have not come; one computes, the other waits for ever on a lock of its own."""
    job = halted(8, 3)
    slow = job.ranks[5]
    slow.at, slow.seqs[0] = None, slow.seqs[0] - 1
    slow.records.pop()
    entries = {3: sleeping(job, stack=LOCK)}
    assert diagnose(job.evidence("hang_timeout", entries)).culprit_ranks == (3,)
    assert diagnose(
        job.evidence("blocked", {**entries, 3: sleeping(job, stack=IN_C)}, ranks=(3,))
    ).culprit_ranks == (3,)


def test_pages_of_an_older_generation_are_not_believed() -> None:
    job = halted(2, 1)
    evidence = job.evidence("hang_timeout", {})
    stale = tuple(
        replace(r, page=replace(r.page, generation=1) if r.page else None, stack=(), groups=(), process=None)
        for r in evidence.ranks
    )
    accuses_nobody(replace(evidence, ranks=stale))


def test_a_waiting_thread_is_read_from_proc_where_no_stack_is() -> None:
    job = halted(4, 1)
    for wchan, words in (
        ("hrtimer_nanosleep", "sleeps"),
        ("nfs_wait_bit_killable", "NFS"),
        ("0", "for ever"),
    ):
        end = sleeping(job, stack=())
        assert end.process is not None
        thread = ThreadFacts(end.pid, "python", "S", wchan, "", "forever")
        end = replace(end, process=replace(end.process, threads=(thread,)))
        assert words in diagnose(job.evidence("blocked", {1: end})).summary


# --- the room's own rules ---------------------------------------------------------------------------


def test_every_verdict_is_in_the_taxonomy() -> None:
    from closeranks.diagnose import messages, verdicts

    for _, name in messages._LEAVES:
        assert leaf(name)
    for name, (action, _) in verdicts._ADVICE.items():
        assert leaf(name)
        assert action.startswith(
            ("stop: user must fix", "stop: user must", "run health check", "restart in place")
        )


def test_the_room_is_pure() -> None:
    """Only ``load`` may touch files."""
    banned = {"asyncio", "socket", "subprocess", "time", "random", "os", "pathlib", "threading", "datetime"}
    room = Path(first_cause.__file__).parent
    for path in room.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {
            name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
        }
        allowed = {"pathlib"} if path.name == "load.py" else set()
        assert imported & banned <= allowed, path
        opens = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "open"]
        assert not opens, path


def test_it_is_fast() -> None:
    """A millisecond or two at 8 ranks with full rings; the bound is loose for a busy machine."""
    job = Job(8, scenes.several, 3, fault_step=60, total_steps=70, tamper=without(0), meet="caught").run()
    evidence = job.evidence("desync", {})
    took_s = []
    for _ in range(20):
        began = time.perf_counter()
        assert diagnose(evidence).culprit_ranks == (3,)
        took_s.append(time.perf_counter() - began)
    assert min(took_s) < 0.05
