"""The progress page: what is written is what a reader sees, at every size and after any amount of it."""

import mmap
import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.progress import (
    COLLECTIVE_SLOTS,
    OPS,
    PAGE_BYTES,
    STEP_SLOTS,
    STRINGS_BYTES,
    Collective,
    Field,
    Phase,
    Step,
    key_of,
    read_page,
)
from closeranks.worker.page import P2P_OPS, PageWriter

ALL_REDUCE, BROADCAST, SEND = OPS.index("all_reduce"), OPS.index("broadcast"), OPS.index("send")
FLOAT32 = 1


@pytest.fixture
def pages():
    mapping = mmap.mmap(-1, 3 * PAGE_BYTES)
    yield mapping


def page_of(mapping, rank, **options):
    return read_page(memoryview(mapping)[rank * PAGE_BYTES : (rank + 1) * PAGE_BYTES], **options)


def issue(writer, seq, *, group=0, op=ALL_REDUCE, numel=4, line=7):
    token = writer.collective_enter(seq, group, op, FLOAT32, numel, 99, line)
    writer.collective_exit(token)
    return token


def test_a_new_page_says_who_writes_it(pages):
    assert page_of(pages, 1) is None
    PageWriter(pages, 1, 3, 5, 2)
    page = page_of(pages, 1)
    assert (page.rank, page.generation, page.pid, page.phase) == (5, 2, os.getpid(), Phase.WAITING)
    assert page.ticks == 1 and page.tick_ns > 0
    assert (page.absolute_step, page.desync_rank, page.init_done, page.in_collective) == (None,) * 2 + (
        False,
    ) * 2
    assert page_of(pages, 0) is None and page_of(pages, 2) is None


def test_an_older_generation_s_page_is_wiped(pages):
    old = PageWriter(pages, 0, 3, 0, 0)
    old.step_done(3)
    issue(old, 1)
    old.intern_file("/old.py")
    old.fault_fired(4)
    old.flag_desync(1, 7)
    PageWriter(pages, 0, 3, 0, 1)
    page = page_of(pages, 0)
    assert (page.generation, page.step, page.steps, page.collectives) == (1, 0, (), ())
    assert (page.faults_fired, page.desync_rank) == (0, None)


@pytest.mark.parametrize("arguments", [(3, 3), (-1, 3), (0, 4)])
def test_refuses_a_place_outside_the_mapping(pages, arguments):
    with pytest.raises(ValueError, match="no page for local rank"):
        PageWriter(pages, *arguments, 0, 0)


def test_takes_a_memoryview_too(pages):
    writer = PageWriter(memoryview(pages), 2, 3, 2, 0)
    writer.tick()
    assert page_of(pages, 2).ticks == 2


def test_signs_of_life_move_ticks_and_time(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    acts = [
        writer.tick,
        lambda: writer.enter_phase(Phase.DATA),
        lambda: writer.step_done(1),
        lambda: writer.absolute_step(9),
        writer.checkpoint_done,
        writer.init_done,
        lambda: writer.collective_enter(1, 0, ALL_REDUCE, FLOAT32, 1, 0, 0),
        lambda: writer.collective_exit(0),
        lambda: writer.wait_enter(0),
        writer.collective_failed,
        lambda: writer.leave_user_phase(writer.enter_user_phase("x")),
    ]
    for act in acts:
        before = page_of(pages, 0)
        act()
        after = page_of(pages, 0)
        assert after.ticks > before.ticks and after.tick_ns > before.tick_ns


def test_phases_nest(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    assert writer.set_phase(Phase.TRAIN) == Phase.WAITING
    outer = writer.enter_phase(Phase.CHECKPOINT)
    inner = writer.enter_phase(Phase.DATA)
    assert page_of(pages, 0).phase is Phase.DATA
    assert page_of(pages, 0).phase_ns == page_of(pages, 0).tick_ns
    writer.leave_phase(inner)
    assert page_of(pages, 0).phase is Phase.CHECKPOINT
    writer.leave_phase(outer)
    assert page_of(pages, 0).phase is Phase.TRAIN


def test_user_phases_nest_with_their_names(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    writer.set_phase(Phase.TRAIN)
    outer = writer.enter_user_phase("eval")
    inner = writer.enter_user_phase("é" * 40)
    assert page_of(pages, 0).phase_name == "é" * 16  # 32 bytes, and no half character
    data = writer.enter_phase(Phase.DATA)
    writer.leave_phase(data)
    assert page_of(pages, 0).phase_name == "é" * 16
    writer.leave_user_phase(inner)
    assert page_of(pages, 0).phase_name == "eval"
    writer.leave_user_phase(outer)
    assert page_of(pages, 0).phase_name == "train"


def test_steps_are_kept_newest_last(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    for n in range(1, STEP_SLOTS + 6):
        writer.step_done(10 * n)
    page = page_of(pages, 0)
    assert page.step == writer.step == STEP_SLOTS + 5
    assert page.world_seq == 10 * (STEP_SLOTS + 5)
    assert [(s.step, s.world_seq) for s in page.steps] == [(n, 10 * n) for n in range(6, STEP_SLOTS + 6)]
    assert page.step_ns == page.tick_ns == page.steps[-1].mono_ns
    assert all(isinstance(step, Step) for step in page.steps)


def test_a_step_can_end_a_phase(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    writer.enter_phase(Phase.OPTIMIZER)
    writer.step_done(0)
    assert page_of(pages, 0).phase is Phase.OPTIMIZER
    writer.step_done(0, Phase.TRAIN)
    assert page_of(pages, 0).phase is Phase.TRAIN and writer.phase == Phase.TRAIN


def test_a_collective_is_open_until_it_returns(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    key = writer.intern_file("/train.py")
    group = writer.intern_group("tp", (1, 3))
    writer.step_done(0)
    token = writer.collective_enter(8, group, BROADCAST, FLOAT32, 2**40, key, 123)
    page = page_of(pages, 0)
    assert page.in_collective
    (record,) = page.collectives
    assert record == Collective(
        seq=8, group=group, op="broadcast", dtype="float32", numel=2**40, step=1, line=123, file="/train.py",
        done=False, mono_ns=page.tick_ns,
    )  # fmt: skip
    assert record.where == "/train.py:123"
    assert page.groups == {group: ("tp", (1, 3))}
    assert page.world_seq == 0  # not the default group's
    writer.collective_exit(token)
    page = page_of(pages, 0)
    assert not page.in_collective and page.last().done


def test_what_failed_stays_open_and_nobody_is_in_it(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    writer.collective_enter(1, 0, ALL_REDUCE, FLOAT32, 1, 0, 0)
    writer.collective_failed()
    page = page_of(pages, 0)
    assert not page.in_collective and not page.last().done
    writer.collective_failed()  # one too many does no harm
    writer.collective_enter(2, 0, ALL_REDUCE, FLOAT32, 1, 0, 0)
    assert page_of(pages, 0).in_collective


def test_two_threads_inside_count_as_inside_until_both_are_out(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    first = writer.collective_enter(1, 0, ALL_REDUCE, FLOAT32, 1, 0, 0)
    second = writer.collective_enter(1, 5, ALL_REDUCE, FLOAT32, 1, 0, 0)
    writer.collective_exit(first)
    page = page_of(pages, 0)
    assert page.in_collective and [c.done for c in page.collectives] == [True, False]
    writer.collective_exit(second)
    assert not page_of(pages, 0).in_collective


def test_an_asynchronous_one_is_open_again_while_waited_for(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    token = issue(writer, 1)
    issue(writer, 2)
    writer.wait_enter(token)
    page = page_of(pages, 0)
    assert page.in_collective and [c.done for c in page.collectives] == [False, True]
    writer.collective_exit(token)
    page = page_of(pages, 0)
    assert not page.in_collective and all(c.done for c in page.collectives)


def test_the_ring_keeps_the_newest_and_old_tokens_touch_nothing(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    stale = writer.collective_enter(1, 0, ALL_REDUCE, FLOAT32, 1, 0, 0)
    for seq in range(2, COLLECTIVE_SLOTS + 2):
        writer.collective_enter(seq, 0, ALL_REDUCE, FLOAT32, 1, 0, 0)
    writer.collective_exit(stale)
    writer.wait_enter(stale)
    page = page_of(pages, 0)
    assert [c.seq for c in page.collectives] == list(range(2, COLLECTIVE_SLOTS + 2))
    assert not any(c.done for c in page.collectives)


def test_strings_are_interned_until_the_table_is_full(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    key = writer.intern_file("/a.py")
    assert key == key_of("/a.py") == writer.intern_file("/a.py")
    names = [f"/{n:04}/" + "x" * 100 for n in range(2 * STRINGS_BYTES // 100)]
    keys = [writer.intern_file(name) for name in names]
    assert 0 < keys.count(0) < len(keys)
    assert keys[-1] == 0 and writer.intern_file(names[-1]) == 0
    ranks = tuple(range(60))  # a key of its own, if no text
    assert writer.intern_group("late", ranks) == key_of("late|" + ",".join(map(str, ranks)))
    assert writer.intern_file("/" + "y" * 70000) == 0
    page = page_of(pages, 0)
    assert page.groups == {}
    used = int.from_bytes(pages[Field.STRINGS_BYTES : Field.STRINGS_BYTES + 8], "little")
    assert used <= STRINGS_BYTES
    issue(writer, 1)
    kept = [name for name, key in zip(names, keys, strict=True) if key]
    writer.collective_enter(2, 0, ALL_REDUCE, FLOAT32, 1, key_of(kept[-1]), 3)
    assert page_of(pages, 0).last().file == kept[-1]


def test_strings_that_are_no_text_are_kept_as_they_can_be(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    key = writer.intern_file("/\udcff.py")
    writer.collective_enter(2, 0, ALL_REDUCE, FLOAT32, 1, key, 3)
    assert page_of(pages, 0).last().file == "/?.py"


def test_checkpoints_carry_the_step_they_hold(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    writer.step_done(0)
    writer.step_done(0)
    writer.checkpoint_done()
    assert (page_of(pages, 0).checkpoints, page_of(pages, 0).checkpoint_step) == (1, 2)
    writer.checkpoint_done(1)
    assert (page_of(pages, 0).checkpoints, page_of(pages, 0).checkpoint_step) == (2, 1)


@pytest.mark.parametrize(("told", "read"), [(0, 0), (41, 41), (-5, 0), (2**70, 2**64 - 2)])
def test_absolute_steps(pages, told, read):
    writer = PageWriter(pages, 0, 3, 0, 0)
    writer.absolute_step(told)
    assert page_of(pages, 0).absolute_step == read


def test_fired_faults_are_bits(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    writer.fault_fired(0)
    writer.fault_fired(63)
    assert page_of(pages, 0).faults_fired == 1 | 1 << 63


def test_the_first_desync_stays(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    writer.flag_desync(2, 17)
    writer.flag_desync(1, 18)
    assert (page_of(pages, 0).desync_rank, page_of(pages, 0).desync_seq) == (2, 17)


def test_a_held_rank_says_why(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    assert page_of(pages, 0).short_step is None
    writer.hold(0, 4)
    assert page_of(pages, 0).short_step == (0, 4)
    writer.hold()
    assert page_of(pages, 0).short_step is None


def test_a_rank_that_waits_for_its_planned_end_is_seen_to(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    assert not page_of(pages, 0).held and writer.saves == 0
    writer.checkpoint_done()
    ticks = page_of(pages, 0).ticks
    writer.set_held(True)
    assert page_of(pages, 0).held and page_of(pages, 0).ticks == ticks + 1 and writer.saves == 1
    writer.set_held(False)
    assert not page_of(pages, 0).held


def test_whether_a_neighbour_is_inside(pages):
    ours, theirs = two(pages)
    theirs.step_done(3)
    assert ours.step_of(1) == 1
    position = ours.world_position + 1
    assert not ours.is_inside(1, position)
    token = theirs.collective_enter(1, 0, ALL_REDUCE, FLOAT32, 4, 0, 0)
    assert ours.is_inside(1, position) and not ours.is_inside(1, position + 1)
    theirs.collective_exit(token)
    assert not ours.is_inside(1, position)


def test_init_done(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    writer.init_done()
    assert page_of(pages, 0).init_done


def test_a_detached_writer_leaves_the_page_alone(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    writer.step_done(4)
    before = bytes(pages)
    writer.detach()
    writer.tick()
    writer.step_done(5)
    issue(writer, 1)
    writer.intern_file("/x.py")
    assert bytes(pages) == before
    assert writer.step == 2


def test_a_released_mapping_is_an_error_that_the_hooks_know(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    for view in (writer._own, writer._own_u32, writer._bytes, writer.all_words, writer.all_u32):
        view.release()
    for act in (
        writer.tick,
        lambda: writer.enter_phase(Phase.DATA),
        lambda: writer.step_done(1),
        lambda: issue(writer, 1),
        lambda: writer.collective_exit(0),
        lambda: writer.intern_file("/a"),
        lambda: writer.record_of(1, 0, 1),
    ):
        with pytest.raises((ValueError, TypeError), match=r"released memoryview|not memoryview"):
            act()


def test_numbers_that_do_not_fit_are_refused_and_leave_the_page_readable(pages):
    writer = PageWriter(pages, 0, 3, 0, 0)
    with pytest.raises(struct.error):
        writer.collective_enter(1, 0, ALL_REDUCE, FLOAT32, -1, 0, 0)
    issue(writer, 2)
    assert [c.seq for c in page_of(pages, 0).collectives] == [2]


# --- neighbours -------------------------------------------------------------------------------------


def two(pages):
    writers = PageWriter(pages, 0, 3, 0, 0), PageWriter(pages, 1, 3, 1, 0)
    for writer in writers:
        writer.begin_world()
    return writers


def test_a_neighbour_s_record_is_found_by_order_and_number(pages):
    ours, theirs = two(pages)
    issue(ours, 1)
    assert ours.neighbour_record(1, 1) is None  # not there yet
    issue(theirs, 1, numel=5, line=70)
    assert ours.neighbour_record(1, 1) == (ALL_REDUCE, FLOAT32, 5, 0, 70, 99)
    theirs.step_done(1)
    issue(theirs, 2, op=BROADCAST)
    issue(theirs, 3)
    assert ours.neighbour_record(1, 1) == (ALL_REDUCE, FLOAT32, 5, 0, 70, 99)  # it has gone on
    issue(ours, 2)
    assert ours.neighbour_record(1, 2) == (BROADCAST, FLOAT32, 4, 1, 7, 99)


def test_other_groups_and_calls_between_two_have_no_place_in_the_order(pages):
    ours, theirs = two(pages)
    issue(ours, 1)
    issue(theirs, 1, group=77)
    issue(theirs, 1, op=SEND)
    assert ours.neighbour_record(1, 1) is None
    issue(theirs, 1, numel=6)
    for seq in range(1, 20):
        issue(theirs, seq, group=77)
        issue(theirs, 2, op=SEND)
    assert ours.neighbour_record(1, 1)[2] == 6


def test_order_and_number_must_agree(pages):
    ours, theirs = two(pages)
    issue(ours, 5)
    issue(theirs, 4)
    assert ours.neighbour_record(1, 5) is None


def test_a_record_from_before_the_group_was_made_again_is_no_partner(pages):
    ours, theirs = two(pages)
    issue(theirs, 1)
    ours.begin_world()
    issue(ours, 1)
    assert ours.neighbour_record(1, 1) is None
    theirs.begin_world()
    assert ours.neighbour_record(1, 1) is None
    issue(theirs, 1)
    assert ours.neighbour_record(1, 1) is not None


def test_a_neighbour_too_far_ahead_is_not_read(pages):
    ours, theirs = two(pages)
    issue(ours, 1)
    for seq in range(1, COLLECTIVE_SLOTS + 2):
        issue(theirs, seq)
    assert ours.neighbour_record(1, 1) is None


records = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 31, 32]), st.sampled_from([ALL_REDUCE, BROADCAST, SEND])),
    max_size=300,
)


@settings(max_examples=60, deadline=None)
@given(records, st.integers(0, 90))
def test_any_history_gives_the_right_partner_or_none(history, back):
    mapping = mmap.mmap(-1, 3 * PAGE_BYTES)
    ours, theirs = two(mapping)
    world = []
    for group, op in history:
        ordered = group == 0 and op not in P2P_OPS
        seq = len(world) + 1
        issue(theirs, seq, group=group, op=op, numel=seq)
        if ordered:
            world.append((op, seq))
    wanted = len(world) - back
    if wanted < 1:
        return
    for seq in range(1, wanted + 1):
        issue(ours, seq)
    found = ours.neighbour_record(1, wanted)
    op, seq = world[wanted - 1]
    newer = len(history) - [i for i, (g, o) in enumerate(history) if g == 0 and o not in P2P_OPS][wanted - 1]
    if newer <= COLLECTIVE_SLOTS:
        assert found is not None and (found[0], found[2]) == (op, seq)
    else:
        assert found is None or (found[0], found[2]) == (op, seq)
