"""Evidence of several nodes, whose clocks have nothing to do with each other, as if one had seen it all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.diagnose import diagnose
from closeranks.diagnose.codec import evidence_from_json, to_json
from closeranks.diagnose.merge import NodePart, merge
from closeranks.events import ExitStatus
from closeranks.evidence import ErrorRecord, Evidence, HostFacts, RankEvidence, Trigger
from closeranks.progress import Collective, Page, Phase, Step

MS = 1_000_000
LOST = ErrorRecord("RuntimeError", "Connection closed by peer [10.0.0.2]:1", "train.py:5", 3, 0, "")


def page(rank: int, at_ns: int) -> Page:
    record = Collective(1, 0, "all_reduce", "float32", 1, 1, 5, "train.py", False, at_ns)
    return Page(
        rank=rank, generation=4, pid=100 + rank, ticks=9, tick_ns=at_ns, step=3, step_ns=at_ns - 1,
        phase=Phase.TRAIN, phase_ns=at_ns - 2, in_collective=True, world_seq=7, checkpoints=0,
        checkpoint_step=0, absolute_step=None, faults_fired=0, desync_rank=None, desync_seq=0,
        init_done=True, user_phase="", steps=(Step(3, 7, at_ns - 1),), collectives=(record,),
    )  # fmt: skip


def died(rank: int, at_ns: int, *, number: int | None = 9, error: ErrorRecord | None = None) -> RankEvidence:
    status = ExitStatus(signal=number) if error is None else ExitStatus(code=1)
    return RankEvidence(rank, 100 + rank, page(rank, at_ns), exit=status, exit_mono_ns=at_ns, error=error)


def lives(rank: int, at_ns: int) -> RankEvidence:
    return RankEvidence(rank, 100 + rank, page(rank, at_ns), answered=True)


def part(node: str, *ranks: RankEvidence, trigger: Trigger, offset_ns: int = 0, **more: object) -> NodePart:
    return NodePart(node, Evidence("x", 0, 2, trigger, ranks, node=node, **more), offset_ns)


def merged(*parts: NodePart) -> Evidence:
    return merge(parts, incident_id="g0004", generation=4, world_size=6)


def exit_of(rank: int, at_ns: int) -> Trigger:
    return Trigger("exit", (rank,), "", at_ns)


ASKED = Trigger("exit", (), "", 10)


def test_all_ranks_by_number_each_with_its_node() -> None:
    found = merged(
        part("b", lives(3, 50), lives(2, 50), trigger=exit_of(2, 60)), part("a", lives(0, 40), trigger=ASKED)
    )
    assert [(item.rank, item.node) for item in found.ranks] == [(0, "a"), (2, "b"), (3, "b")]
    assert (found.incident_id, found.generation, found.world_size) == ("g0004", 4, 6)


@pytest.mark.parametrize("offset_ns", [0, 7 * MS, -7 * MS, 10**18])
def test_every_stamp_of_a_node_moves_by_its_offset(offset_ns: int) -> None:
    error = replace(LOST, mono_ns=90)
    (item,) = merged(part("a", died(0, 100, error=error), trigger=exit_of(0, 110), offset_ns=offset_ns)).ranks
    assert item.exit_mono_ns == 100 + offset_ns
    assert item.error is not None and item.error.mono_ns == 90 + offset_ns
    assert item.page is not None
    assert (item.page.tick_ns, item.page.step_ns, item.page.phase_ns) == tuple(
        stamp + offset_ns for stamp in (100, 99, 98)
    )
    assert item.page.steps[0].mono_ns == 99 + offset_ns
    assert item.page.collectives[0].mono_ns == 100 + offset_ns


def test_nothing_else_of_a_page_changes() -> None:
    before = page(0, 100)
    (item,) = merged(part("a", lives(0, 100), trigger=exit_of(0, 1), offset_ns=5)).ranks
    assert item.page is not None
    moved = replace(
        item.page, tick_ns=100, step_ns=99, phase_ns=98, steps=before.steps, collectives=before.collectives
    )
    assert moved == before


def test_what_never_happened_has_not_happened_by_any_clock() -> None:
    never = replace(page(0, 100), step=0, step_ns=0, steps=())
    item = RankEvidence(0, 100, never, answered=True)
    (moved,) = merged(part("a", item, trigger=exit_of(0, 1), offset_ns=10**15)).ranks
    assert moved.page is not None and moved.page.step_ns == 0


def test_the_trigger_is_the_one_that_was_pulled_first_by_one_clock() -> None:
    late = part("a", died(0, 500), trigger=exit_of(0, 500), offset_ns=0)
    first = part("b", died(2, 9_000), trigger=exit_of(2, 9_000), offset_ns=-8_700)
    for parts in ((late, first), (first, late)):
        found = merged(*parts)
        assert (found.trigger.ranks, found.trigger.mono_ns, found.node) == ((2,), 300, "b")


def test_who_was_only_asked_did_not_pull_it() -> None:
    found = merged(part("a", lives(0, 5), trigger=ASKED), part("b", died(2, 900), trigger=exit_of(2, 900)))
    assert (found.trigger.ranks, found.trigger.mono_ns) == ((2,), 900)
    assert merged(part("a", lives(0, 5), trigger=ASKED)).trigger == ASKED, "where nobody did, the first asked"


def test_the_first_to_die_is_blamed_by_one_clock_and_not_by_its_own() -> None:
    """By their own clocks the victim died long before."""
    error = replace(LOST, mono_ns=100)
    victim = part("a", died(0, 100, error=error), lives(1, 100), trigger=exit_of(0, 110), offset_ns=900 * MS)
    culprit = part("b", died(2, 800 * MS), lives(3, 100), trigger=ASKED)
    verdict = diagnose(merged(victim, culprit))
    assert [(c.rank, c.node) for c in verdict.culprits] == [(2, "b")]


@given(st.integers(-(10**18), 10**18), st.integers(-(10**18), 10**18))
def test_where_a_node_s_clock_stands_makes_no_difference_to_anything(first_ns: int, second_ns: int) -> None:
    def seen(first_ns: int, second_ns: int) -> Evidence:
        error = replace(LOST, mono_ns=850 + first_ns)
        victim = died(0, 900 + first_ns, error=error)
        return merged(
            part("a", victim, trigger=exit_of(0, 950 + first_ns), offset_ns=-first_ns),
            part("b", died(2, 800 + second_ns), trigger=exit_of(2, 810 + second_ns), offset_ns=-second_ns),
        )

    assert seen(first_ns, second_ns) == seen(0, 0)


def test_the_host_facts_are_those_of_the_first_death() -> None:
    ours, theirs = HostFacts(oom_kills=1, oom_victims=(102,)), HostFacts(oom_kills=7)
    reporter = part("a", died(0, 500), trigger=exit_of(0, 500), host=theirs)
    first = part("b", died(2, 9_000), trigger=ASKED, offset_ns=-8_900, host=ours)
    assert merged(reporter, first).host == ours
    assert diagnose(merged(reporter, first)).kind == "out_of_memory"
    alive = part("a", lives(0, 500), trigger=exit_of(0, 500), host=theirs)
    assert merged(alive, part("b", lives(2, 1), trigger=ASKED, host=ours)).host == theirs


def test_who_ended_well_has_not_died() -> None:
    ended = RankEvidence(0, 100, exit=ExitStatus(code=0), exit_mono_ns=1)
    ours, theirs = HostFacts(oom_kills=1), HostFacts(oom_kills=7)
    found = merged(
        part("a", ended, trigger=ASKED, host=theirs),
        part("b", died(2, 50), trigger=exit_of(2, 50), host=ours),
    )
    assert found.host == ours


def test_the_slowest_nodes_steps_are_the_jobs() -> None:
    parts = [
        part(node, lives(rank, 1), trigger=exit_of(rank, 1), step_p99_s=slow_s)
        for node, rank, slow_s in (("a", 0, 0.2), ("b", 1, 0.9), ("c", 2, None))
    ]
    assert merged(*parts).step_p99_s == 0.9
    assert merged(parts[2]).step_p99_s is None


def test_nodes_that_gave_nothing_are_missing_and_the_verdict_stands() -> None:
    found = merged(part("b", died(2, 50), lives(3, 50), trigger=exit_of(2, 60)))
    assert found.world_size == 6 and len(found.ranks) == 2
    assert diagnose(found).culprit_ranks == (2,)


def test_what_is_merged_can_be_written_and_read() -> None:
    found = merged(
        part("a", lives(0, 5), trigger=ASKED, offset_ns=3), part("b", died(2, 9), trigger=exit_of(2, 9))
    )
    assert evidence_from_json(to_json(found)) == found


def test_a_rank_that_two_nodes_speak_of_does_not_spoil_the_file() -> None:
    found = merged(part("a", lives(0, 5), trigger=ASKED), part("b", died(0, 9), trigger=exit_of(0, 9)))
    assert evidence_from_json(to_json(found)) == found
