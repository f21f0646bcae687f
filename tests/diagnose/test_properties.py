"""What must hold for any job and any evidence: the innocent are never named, and nothing ever raises."""

from __future__ import annotations

import string
from dataclasses import dataclass, replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from closeranks.diagnose import diagnose
from closeranks.diagnose.codec import evidence_from_json, to_json, verdict_from_json
from closeranks.diagnose.screen import render
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
    Verdict,
)
from closeranks.progress import DTYPES, OPS, Collective, Page, Phase, Step
from closeranks.taxonomy import leaf

from . import scenes
from .scenes import GENERATION, MS, SCRIPT, SIGKILL, STEP, TIMED_OUT, Job, Op
from .test_matrix import IN_C, LOCK, sleeping, with_extra, without

TRIGGERS = ("exit", "exception", "stopped", "desync", "deadlock", "blocked", "early_exit", "init_stall")
TRIGGERS += ("hang_timeout", "suspect", "unheard of")


# --- any script that repeats itself -----------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A collective of a loop, every ``period`` steps; ``own_line``: rank 0 calls it from another line."""

    op: Op
    period: int
    own_line: bool
    uneven: bool  # of another size on every rank and step


@dataclass(frozen=True)
class Loop:
    """A loop with what real ones have: periods, rank 0's own lines, sizes that differ where they may, unseen
    collectives, ranks that step more than one optimizer, or none."""

    calls: tuple[Call, ...]
    step_at: int
    steps: int
    steps_of_rank_0: int

    def __call__(self, step: int, rank: int) -> list[Op]:
        made: list[Op] = []
        for i, call in enumerate((*self.calls, None)):
            if i == self.step_at:
                made += [STEP] * (self.steps_of_rank_0 if rank == 0 else self.steps)
            if call is not None and (i == 0 or step % call.period == call.period - 1):
                line = call.op.line + (1 if call.own_line and rank == 0 else 0)
                numel = call.op.numel + (7 * rank + step) * call.uneven
                made.append(replace(call.op, line=line, numel=numel))
        return made


@st.composite
def scripts(draw: st.DrawFn) -> Loop:
    count = draw(st.integers(1, 5))
    calls = []
    for i in range(count):
        op = draw(
            st.sampled_from(["all_reduce", "broadcast", "all_gather", "all_to_all", "gather", "barrier"])
        )
        hidden = op == "all_reduce" and draw(st.booleans())
        numel = 0 if op == "barrier" else draw(st.sampled_from([1, 16, 1000]))
        uneven = op in ("all_to_all", "gather") and draw(st.booleans())
        made = Op(op, 50 + 2 * i, numel, "float32", 0, hidden)
        calls.append(Call(made, draw(st.sampled_from([1, 1, 1, 2, 5])), draw(st.booleans()), uneven))
    steps = draw(st.integers(0, 1))
    return Loop(tuple(calls), draw(st.integers(0, count)), steps, draw(st.sampled_from([steps, steps, 2])))


WORLDS = st.sampled_from([2, 4, 8]).flatmap(lambda w: st.tuples(st.just(w), st.integers(0, w - 1)))


def run_until_halt(place: tuple[int, int], script: scenes.Script, step: int) -> Job:
    job = Job(place[0], script, place[1], fault_step=step, halt_at=0, total_steps=step + 3)
    # Unequal shapes are legal here: only ops that allow it have them.
    job.meet = "silent"
    return job.run()


@settings(max_examples=100, deadline=None)
@given(WORLDS, scripts(), st.integers(0, 40))
def test_a_death_is_named_whatever_the_script_does(
    place: tuple[int, int], script: scenes.Script, step: int
) -> None:
    job = run_until_halt(place, script, step)
    end = job.dead(job.broken, SIGKILL, after_ms=12)
    victims = {
        r.number: job.victim(r, scenes.CLOSED, at_ns=job.broken.clock_ns + 2 * MS)
        for r in job.ranks
        if r.number != job.culprit
    }
    for entries in ({}, victims):
        verdict = diagnose(job.evidence("exit", {**entries, job.culprit: end}))
        assert verdict.culprit_ranks == (job.culprit,)
        assert verdict.signature == "SIGKILL"


@settings(max_examples=100, deadline=None)
@given(WORLDS, scripts(), st.integers(0, 40), st.sampled_from(["blocked", "deadlock", "hang_timeout"]))
def test_a_hang_is_named_whatever_the_script_does(
    place: tuple[int, int], script: scenes.Script, step: int, trigger: str
) -> None:
    job = run_until_halt(place, script, step)
    for end in (sleeping(job, stack=LOCK), sleeping(job, stack=IN_C, answered=False)):
        verdict = diagnose(job.evidence(trigger, {job.culprit: end}))
        assert verdict.culprit_ranks == (job.culprit,), verdict
        assert verdict.leaf == "app.hang", verdict


@settings(max_examples=100, deadline=None)
@given(WORLDS, scripts(), st.integers(0, 40), st.integers(0, 400), st.sampled_from(TRIGGERS))
def test_nobody_is_accused_in_a_healthy_job(
    place: tuple[int, int], script: scenes.Script, stop: int, moves: int, trigger: str
) -> None:
    """Caught in the middle of things, ranks some collectives apart, under any pretext."""
    job = Job(place[0], script, -1, total_steps=stop + 1, meet="silent")
    for _ in range(moves % (stop * 8 + 9)):
        for rank in job.ranks:
            job._advance(rank)
        job._complete()
    entries = {r.number: job.dead(r, ExitStatus(code=0)) for r in job.ranks if r.finished}
    if trigger in ("blocked", "deadlock", "hang_timeout", "early_exit", "init_stall"):
        trigger = "suspect"  # a claim that somebody stands still is true or the watcher's fault
    verdict = diagnose(job.evidence(trigger, entries))
    assert verdict.culprits == (), verdict
    assert verdict.kind == "unknown" or not verdict.culprits


@settings(max_examples=100, deadline=None)
@given(
    WORLDS,
    st.integers(4, 40),
    st.sampled_from([scenes.plain, scenes.several, scenes.ddp, scenes.grouped]),
    st.data(),
)
def test_a_mismatch_never_names_an_innocent(
    place: tuple[int, int], step: int, script: scenes.Script, data: st.DataObject
) -> None:
    """Whatever is left out or put in: the culprit is named, or nobody."""
    # Of two ranks, one of which leaves out what both come to for the first time (a barrier), neither is the
    # odd one; nor is it just after that, where what is left out and what is new add up to what is usual.
    assume(not (place[0] == 2 and script is scenes.several and step in (9, 10)))
    visible = [i for i, op in enumerate(script(step, place[1])) if op.op != "step"]
    position = data.draw(st.sampled_from(visible))
    numel = data.draw(st.sampled_from([1, 4, 1000]))
    op = data.draw(st.sampled_from(["all_reduce", "barrier", "broadcast"]))
    extra = Op(op, data.draw(st.sampled_from([57, 58, 99])), numel)
    tamper = without(position) if data.draw(st.booleans()) else with_extra(position, extra)
    job = Job(place[0], script, place[1], fault_step=step, total_steps=step + 4, tamper=tamper)
    job.meet = data.draw(st.sampled_from(["caught", "hang", "silent"]))
    job.run()
    entries = {r.number: job.dead(r, ExitStatus(code=0)) for r in job.ranks if r.finished}
    if len(entries) == len(job.ranks):
        return
    for trigger in ("desync", "deadlock", "hang_timeout") if not entries else ("early_exit",):
        verdict = diagnose(job.evidence(trigger, entries))
        assert verdict.culprit_ranks in ((), (job.culprit,)), verdict


LOST = [scenes.CLOSED, scenes.RESET, TIMED_OUT, "Broken pipe", "Socket Timeout"]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([2, 4, 8]),
    st.lists(st.sampled_from(LOST), min_size=8, max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.booleans(),
)  # fmt: skip
def test_a_lost_peer_is_no_guilt(world: int, messages: list[str], dead: list[bool], paged: bool) -> None:
    """Ranks whose only sign is that they lost a peer are never named, whoever else did or didn't."""
    job = run_until_halt((world, 0), scenes.plain, 5)
    entries = {
        r.number: job.victim(r, messages[r.number], at_ns=job.now_ns + r.number * MS, exited=dead[r.number])
        for r in job.ranks
    }
    if not paged:
        entries = {n: replace(e, page=None) for n, e in entries.items()}
    verdict = diagnose(job.evidence("exception", entries))
    assert verdict.culprits == ()
    assert verdict.leaf in ("unknown", "comm.timeout")
    assert verdict.missing


# --- any evidence at all ----------------------------------------------------------------------------

small = st.integers(0, 12)
words = st.text(string.printable + "\x1b\u202e\ud800é猫", max_size=40)
files = st.sampled_from(["", SCRIPT, scenes.TORCH + "distributed/distributed_c10d.py", "a\x1b[31m.py"])
frames = st.builds(Frame, files, small, words)
maybe_ns = st.sampled_from([0, 1, 10**9, 10**9 + 5, 2**63])
exits = st.one_of(
    st.builds(ExitStatus, code=st.sampled_from([0, 1, 2, 3, 137])),
    st.builds(ExitStatus, signal=st.sampled_from([1, 6, 7, 9, 11, 15, 77])),
)
texts = st.one_of(words, st.sampled_from([scenes.GLOO_ABORT, scenes.CLOSED, TIMED_OUT, "CUDA out of memory"]))
errors = st.builds(ErrorRecord, words, texts, words, small, maybe_ns, texts)
records = st.builds(
    Collective, small, st.integers(0, 2), st.sampled_from(OPS), st.sampled_from(DTYPES), small, small, small,
    files, st.booleans(), maybe_ns,
)  # fmt: skip
groups = st.dictionaries(
    st.integers(0, 2), st.tuples(words, st.lists(small, max_size=4).map(tuple)), max_size=3
)
pages = st.builds(
    Page, rank=small, generation=st.sampled_from([GENERATION] * 3 + [1]), pid=small,
    ticks=small, tick_ns=maybe_ns, step=small, step_ns=maybe_ns,
    phase=st.sampled_from(Phase), phase_ns=maybe_ns,
    in_collective=st.booleans(), world_seq=small, checkpoints=small, checkpoint_step=small,
    absolute_step=st.none() | small, faults_fired=small, desync_rank=st.none() | small, desync_seq=small,
    init_done=st.booleans(), user_phase=words,
    steps=st.lists(st.builds(Step, small, small, maybe_ns), max_size=4).map(tuple),
    collectives=st.lists(records, max_size=12).map(tuple), groups=groups,
)  # fmt: skip
threads = st.builds(ThreadFacts, small, words, st.sampled_from("RSDTtZ"), words, words, words)
processes = st.builds(
    ProcessFacts, st.sampled_from(["R", "S", "D", "T", "t", "Z", "", "?"]), small, st.floats(0, 9), small,
    small, st.lists(threads, max_size=2).map(tuple), small, st.lists(words, max_size=2).map(tuple),
)  # fmt: skip
statuses = st.builds(GroupStatus, st.sampled_from(["0", "dp", "", "\x1b"]), small, small, words)


def entry(rank: int) -> st.SearchStrategy[RankEvidence]:
    return st.builds(
        RankEvidence, st.just(rank), small, st.none() | pages, st.none() | exits, st.none() | maybe_ns,
        st.none() | errors, st.none() | processes, st.lists(frames, max_size=3).map(tuple),
        st.lists(words, max_size=2).map(tuple), st.booleans(), st.lists(statuses, max_size=2).map(tuple),
        st.lists(texts, max_size=2).map(tuple), st.sampled_from(["", scenes.GLOO_ABORT, scenes.RESET]),
    )  # fmt: skip


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    world = draw(st.integers(0, 4))
    trigger = Trigger(
        draw(st.sampled_from(TRIGGERS)), tuple(draw(st.lists(small, max_size=3))), draw(words), draw(maybe_ns)
    )
    host = HostFacts(
        draw(small),
        tuple(draw(st.lists(small, max_size=2))),
        draw(st.none() | small),
        draw(st.none() | small),
    )
    ranks = tuple(draw(entry(n)) for n in range(world))
    return Evidence(draw(words), GENERATION, draw(st.integers(0, 2**64)), trigger, ranks, draw(words), host)


def is_plain(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def check_bounds(verdict: Verdict, evidence: Evidence) -> None:
    assert leaf(verdict.leaf).owner == verdict.owner
    assert 0.0 <= verdict.confidence <= 1.0
    assert set(verdict.culprit_ranks) <= {entry.rank for entry in evidence.ranks}
    assert len(verdict.evidence) <= 16
    for text in (verdict.summary, verdict.signature, *verdict.missing, *(e.line for e in verdict.evidence)):
        assert is_plain(text), ascii(text)
        assert len(text) <= 400
    assert verdict.culprits or verdict.missing or verdict.leaf != "unknown"


@settings(max_examples=100, deadline=None)
@given(evidences())
def test_odd_evidence_never_raises(evidence: Evidence) -> None:
    verdict = diagnose(evidence)
    check_bounds(verdict, evidence)
    assert diagnose(evidence) == verdict
    for width in (20, 80, 120):
        screen = render(
            evidence, verdict, width=width, run_hint=evidence.incident_id, next_step=evidence.node
        )
        assert is_plain(screen), ascii(screen)
    assert verdict_from_json(to_json(verdict)) == verdict


@settings(max_examples=100, deadline=None)
@given(evidences())
def test_evidence_survives_the_way_through_json(evidence: Evidence) -> None:
    assert evidence_from_json(to_json(evidence)) == evidence
