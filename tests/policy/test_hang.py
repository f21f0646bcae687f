"""Hang detection: what must never be killed, and what must be found, at every rank of 2, 4 and 8."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hang_jobs import LOCK, Job, Rank, thread
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.config import HangConfig
from closeranks.evidence import GroupStatus
from closeranks.policy import hang
from closeranks.policy.hang_learn import p99_s, suspect_bound_s
from closeranks.policy.waits import Wait
from closeranks.progress import Phase

FLOOR_S = HangConfig().suspect_floor_s
EVERY_RANK = [(size, rank) for size in (2, 4, 8) for rank in range(size)]


def trained(size: int = 4, steps: int = 10, config: HangConfig | None = None, step_s: float = 0.1) -> Job:
    job = Job(size, config or HangConfig())
    job.train(steps, step_s)
    assert job.findings == []
    return job


def assert_never_acted(job: Job) -> None:
    assert "act" not in job.levels(), job.findings


# --- a slow job is never killed -----------------------------------------------------------------------


@pytest.mark.parametrize("wait", [Wait.RUNNING, Wait.TIMED, Wait.EXTERNAL])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_rank_0_alone_evaluates_for_a_minute(size: int, wait: Wait):
    job = trained(size)
    job.all_enter("barrier", but=(0,))
    job.ranks[0].go(wait)
    job.run(60)
    assert job.levels() == ["suspect"]
    suspect = job.findings[0][1].trigger
    assert suspect.kind == "suspect"
    assert suspect.ranks == (0,)
    assert "rank 0 has given no sign of life" in suspect.detail
    job.all_leave()
    job.ranks[0].tick()
    job.train(5)
    assert job.levels() == ["suspect", "clear"]


def test_a_suspicion_names_the_line_where_all_suspects_are():
    job = trained(4)
    job.all_enter(but=(1, 2))
    for rank in job.ranks[1:3]:
        rank.go(Wait.TIMED)
        rank.where = "train.py:65 load"
    job.run(5)
    assert "(train.py:65 load) while 2 ranks wait" in job.findings[0][1].trigger.detail
    job = trained(4)
    job.all_enter(but=(1, 2))
    for rank in job.ranks[1:3]:
        rank.go(Wait.TIMED)
        rank.where = f"train.py:{60 + rank.number} load"
    job.run(5)
    assert "train.py" not in job.findings[0][1].trigger.detail


def test_what_was_long_once_is_not_suspect_again():
    job = trained()
    for _ in range(2):
        job.all_enter(but=(0,))
        job.ranks[0].go()
        job.run(20)
        job.all_leave()
        job.ranks[0].tick()
        job.train(200)
    assert job.levels() == ["suspect", "clear"]


def test_a_checkpoint_of_half_a_minute():
    job = trained()
    job.all_enter("barrier", but=(0,))
    job.ranks[0].go(Wait.DISK, Phase.CHECKPOINT)
    job.run(30)
    assert job.levels() == ["suspect"]
    assert "uninterruptible in nfs_wait_bit_killable (state D)" in job.findings[0][1].trigger.detail
    assert "3 ranks wait" in job.findings[0][1].trigger.detail


def test_the_first_step_compiles_for_two_minutes():
    job = Job(4)
    job.start()
    job.run(120)
    assert job.levels() == ["suspect"]
    assert 30.0 <= job.findings[0][0] <= 31.0
    job.train(3)
    assert job.levels() == ["suspect", "clear"]


def test_compile_workers_in_other_processes():
    job = Job(2)
    job.start()
    for rank in job.ranks:
        rank.go(Wait.FOREVER)
        rank.children, rank.child_waits = 8, ("running",)
    job.run(25)
    assert job.findings == []


def test_data_comes_late_over_the_network():
    job = trained()
    job.all_enter(but=(1,))
    job.ranks[1].go(Wait.FOREVER, Phase.DATA)
    job.ranks[1].children, job.ranks[1].child_waits = 2, ("external", "forever")
    job.run(60)
    assert job.levels() == ["suspect"]
    assert job.findings[0][1].trigger.ranks == (1,)


@pytest.mark.parametrize("wait", [Wait.TIMED, Wait.EXTERNAL, Wait.FOREVER])
def test_data_of_workers_comes_late_through_a_thread_of_the_rank(wait: Wait):
    """The main thread waits for a queue without a limit; who fills it waits for the workers' pipe."""
    job = trained()
    job.all_enter(but=(1,))
    rank = job.ranks[1]
    rank.go(Wait.FOREVER, Phase.DATA)
    rank.syscall, rank.children, rank.child_waits = LOCK, 2, ("external", "forever", "timed")
    rank.threads = [thread(wait, wchan="anon_pipe_read" if wait is Wait.FOREVER else None)]
    job.run(60)
    assert job.levels() == ["suspect"]


def test_a_prefetch_thread_of_the_rank_itself():
    job = trained()
    job.all_enter(but=(1,))
    job.ranks[1].go(Wait.FOREVER, Phase.DATA)
    job.ranks[1].threads = [thread(Wait.EXTERNAL, wchan="sk_wait_data")]
    job.run(60)
    assert_never_acted(job)


@pytest.mark.parametrize("wait", [Wait.TRACED, Wait.FOREVER, Wait.STOPPED])
def test_a_debugger_is_attached(wait: Wait):
    job = trained(config=HangConfig(hang_timeout_s=30))
    job.all_enter(but=(1,))
    job.ranks[1].go(wait)
    job.ranks[1].tracer = 4711
    job.run(90)
    assert_never_acted(job)
    job.ranks[1].tracer = 0  # detached, and whatever it does now is its own doing
    job.ranks[1].go(Wait.RUNNING)
    job.run(20)
    assert_never_acted(job)
    job.run(15)
    assert job.levels()[-1] == "act"


def test_what_a_debugger_held_up_is_not_learned():
    job = trained(2)
    job.ranks[1].go(Wait.TRACED)
    job.all_enter(but=(1,))
    job.run(60)
    job.ranks[1].go(Wait.RUNNING)
    job.all_leave()
    job.train(3)
    p99 = hang.step_p99_s(job.state)
    assert p99 is not None
    assert p99 < 1.0
    assert job.findings == []


def test_a_debugger_that_has_gone_no_longer_protects():
    """Where only the state letter could be read, a sign of life ends it."""
    job = trained(2)
    for rank in job.ranks:
        rank.has_proc = False
    job.ranks[1].go(Wait.TRACED)
    job.run(5)
    job.ranks[1].go(Wait.RUNNING)
    job.train(2)
    since = job.now_s
    job.ranks[1].go(Wait.STOPPED)
    job.all_enter(but=(1,))
    assert job.acted_on(since, 3 * FLOOR_S).trigger.kind == "stopped"


def test_breakpoint_waits_for_a_person():
    job = trained()
    job.all_enter(but=(0,))
    job.ranks[0].go(Wait.EXTERNAL)
    job.run(120)
    assert job.levels() == ["suspect"]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_whole_job_is_suspended(size: int):
    job = trained(size, config=HangConfig(hang_timeout_s=20))
    for rank in job.ranks:
        rank.go(Wait.STOPPED)
    job.run(60)
    assert job.levels() == ["suspect"]
    assert "suspended from outside" in job.findings[0][1].trigger.detail
    for rank in job.ranks:  # continued one after the other
        rank.go(Wait.RUNNING)
        job.run(0.2)
    job.train(3)
    assert job.levels() == ["suspect", "clear"]


def test_suspended_one_after_the_other():
    job = trained(4)
    for rank in job.ranks:
        rank.go(Wait.STOPPED)
        job.run(0.2)
    job.run(60)
    assert_never_acted(job)


def test_a_short_stop_is_nothing():
    job = trained(4)
    for _ in range(5):
        job.ranks[1].go(Wait.STOPPED)
        job.run(FLOOR_S * 0.7)
        job.ranks[1].go(Wait.RUNNING)
        job.train(2)
    assert_never_acted(job)


def test_the_agent_was_frozen_for_an_hour():
    job = trained(4)
    job.all_enter(but=(2,))
    job.ranks[2].go(Wait.RUNNING)
    job.run(0.3)
    job.now_s += 3600
    job.look(0.25)  # the caller counts no more than this
    job.run(0.3)
    assert job.findings == []


@pytest.mark.parametrize("observed_s", [-1e9, float("nan"), float("inf"), 0.0])
def test_a_clock_that_jumps_adds_nothing(observed_s: float):
    job = trained(2)
    for _ in range(1000):
        job.look(observed_s)
    assert job.findings == []
    job.ranks[1].go(Wait.STOPPED)
    assert job.acted_on(job.now_s, FLOOR_S + 0.3).trigger.kind == "stopped"


def test_a_page_with_a_jump_of_the_clock_is_not_learned_from():
    job = trained(2)
    for rank in job.ranks:
        rank.step += 1
        rank.step_s = 1e6
        rank.tick()
    job.run(0.1)
    p99 = hang.step_p99_s(job.state)
    assert p99 is not None
    assert p99 < 0.5


def test_uneven_steps():
    job = Job(4)
    for _ in range(30):
        job.train(9, 0.0)
        job.run(0.01)
        job.train(1, 2.0)
    assert_never_acted(job)
    assert len(job.findings) <= 2  # suspect at the first long one, perhaps, and clear; then it is known


def test_a_minute_in_state_d():
    job = trained(4)
    job.all_enter(but=(3,))
    job.ranks[3].go(Wait.DISK)
    job.run(60)
    assert job.levels() == ["suspect"]


def test_all_ranks_in_the_same_collective_is_the_network():
    job = trained(4)
    job.all_enter()
    job.run(120)
    assert job.levels() == ["suspect"]
    assert "all in a collective" in job.findings[0][1].trigger.detail


def test_a_large_transfer_with_one_rank_already_at_the_next_collective():
    job = trained(4)
    job.seq += 1
    for rank in job.ranks:
        rank.enter(job.seq)
    job.ranks[0].leave()  # issued asynchronously
    job.ranks[0].enter(job.seq + 1, "barrier")
    job.run(60)
    assert_never_acted(job)


def test_background_threads_may_still_come():
    """Rank 1 waits for a group that rank 0's other thread will join after its upload."""
    job = trained(2)
    job.groups = {7: ("ckpt", (0, 1))}
    job.ranks[0].enter(job.seq + 1)
    job.ranks[0].threads = [thread(Wait.TIMED, wchan="do_sys_poll")]
    job.ranks[1].enter(1, "gather_object", group=7)
    job.run(60)
    assert_never_acted(job)


def test_a_collective_in_flight_while_its_rank_computes():
    """The flight recorder has rank 0 in a collective, but it was issued ahead: the rank is at work."""
    job = trained(2)
    ahead = GroupStatus("0", last_enqueued=12, last_completed=11, pending_op="all_reduce")
    behind = GroupStatus("0", last_enqueued=11, last_completed=11)
    other = (GroupStatus("5", 3, 2, "all_reduce"), GroupStatus("5", 2, 2))
    for rank, groups in zip(job.ranks, ((ahead, other[1]), (behind, other[0])), strict=True):
        rank.groups = groups
    job.ranks[0].go(Wait.RUNNING)
    job.ranks[1].go(Wait.FOREVER)
    job.run(60)
    assert_never_acted(job)
    job.ranks[0].go(Wait.FOREVER)  # now it waits, but for a thread that fetches something
    for busy in (thread(Wait.EXTERNAL), thread(Wait.TIMED), thread(Wait.RUNNING)):
        job.ranks[0].threads = [busy]
        job.run(20)
        assert_never_acted(job)
    job.ranks[0].threads, job.ranks[0].children = [], 1  # or for a child
    job.run(20)
    assert_never_acted(job)


def test_a_rank_at_work_is_not_waiting_whatever_the_flight_recorder_counts():
    """Rank 1 is blocked for ever, but rank 0 computes: nobody waits."""
    job = trained(2)
    job.ranks[0].go(Wait.RUNNING)
    job.ranks[0].groups = (GroupStatus("0", 12, 11, "all_reduce"),)
    job.ranks[1].go(Wait.FOREVER)
    job.ranks[1].groups = (GroupStatus("0", 11, 11),)
    job.run(60)
    assert_never_acted(job)


def test_between_two_ranks_nothing_is_proved():
    job = trained(2)
    job.ranks[0].enter(5, "recv")
    job.ranks[1].enter(5, "send")
    job.run(60)
    assert_never_acted(job)


def test_the_last_rank_saves_for_a_minute():
    job = trained(4)
    for rank in job.ranks[1:]:
        rank.leave_job()
    job.ranks[0].go(Wait.RUNNING, Phase.CHECKPOINT)
    job.run(60)
    assert_never_acted(job)


def test_an_exited_rank_had_done_its_part():
    job = trained(4)
    job.all_enter("broadcast")
    job.ranks[0].leave()
    job.ranks[0].leave_job()
    job.run(60)
    assert_never_acted(job)


def test_a_page_whose_rings_were_not_read_is_not_one_without_collectives():
    job = trained(4)
    job.all_enter()
    job.ranks[0].leave()
    job.ranks[0].leave_job()
    page = job.page
    job.page = lambda rank, rings: page(rank, rings and rank.number != 0)
    job.run(20)
    assert_never_acted(job)


def test_a_program_without_process_group_or_steps():
    job = Job(2, HangConfig(hang_timeout_s=10))
    job.run(100)
    assert_never_acted(job)


def test_a_command_without_pages():
    job = Job(4, HangConfig(hang_timeout_s=10))
    for rank in job.ranks:
        rank.has_page = False
        rank.wait = Wait.FOREVER
    job.run(100)
    assert job.findings == []


def test_slow_init_on_some_ranks():
    job = Job(4)
    for rank in job.ranks[1:]:
        rank.phase, rank.wait = Phase.INIT, Wait.TIMED
    job.run(40)  # rank 0 still imports
    assert_never_acted(job)
    job.ranks[0].phase = Phase.INIT  # all there, and busy: connections of many groups, say
    for rank in job.ranks:
        rank.cpu_per_s = 0.5
        rank.tick()
    job.run(40)
    assert_never_acted(job)


def test_one_node_of_several_proves_nothing_about_ranks_elsewhere():
    job = trained(4)
    job.state = replace(job.state, world_size=8)
    job.all_enter(but=(1,))
    job.ranks[1].go(Wait.FOREVER)
    job.run(60)
    assert_never_acted(job)


def test_switched_off():
    job = Job(2, HangConfig(enabled=False, hang_timeout_s=1))
    job.train(5)
    job.ranks[0].desync = 1
    job.ranks[1].go(Wait.STOPPED)
    job.run(30)
    assert job.findings == []
    assert job.details_asked == 0
    assert hang.wants_state(job.state) == frozenset()


def test_a_healthy_job_costs_no_detail():
    job = Job(8)
    job.train(100, 0.05)
    assert job.details_asked == 0
    assert hang.wants_state(job.state) == frozenset()


def wait_in_ddp(rank: Rank, enqueued: int, completed: int) -> None:
    """In a collective that C++ issued, or past it: only the flight recorder knows."""
    rank.groups = (GroupStatus("0", enqueued, completed, "all_reduce" if enqueued > completed else ""),)
    rank.threads = [thread(Wait.TIMED, "pt_gloo_runloop")] if enqueued > completed else []
    rank.go(Wait.FOREVER if enqueued > completed else Wait.RUNNING)


def a_step(
    job: Job, late: dict[int, Wait], phase: Phase, pause_s: float, transfer_s: float, native: bool
) -> None:
    """Some ranks are late, doing something; the others wait for them; then the collective takes its time."""
    job.seq += 1

    def enter(rank: Rank) -> None:
        if native:
            wait_in_ddp(rank, job.seq, job.seq - 1)
        else:
            rank.enter(job.seq)

    for rank in job.ranks:
        if rank.number in late:
            rank.go(late[rank.number], phase)
        else:
            enter(rank)
    job.run(pause_s)
    for number in late:
        enter(job.ranks[number])
    job.run(transfer_s)
    for rank in job.ranks:
        if native:
            wait_in_ddp(rank, job.seq, job.seq)
        else:
            rank.leave()
        rank.phase = Phase.TRAIN
        rank.step += 1
        rank.step_s = job.now_s
        rank.tick()


def a_subgroup(job: Job, members: tuple[int, ...], pause_s: float) -> None:
    """Some ranks work on in a group of their own, while the rest already waits for them."""
    job.groups = {7: ("part", members)}
    job.seq += 1
    for rank in job.ranks:
        if rank.number not in members:
            rank.enter(job.seq)
    seq = 1 + max((r.seq for n in members for r in job.ranks[n].records if r.group == 7), default=0)
    job.ranks[members[0]].go(Wait.RUNNING)
    for number in members[1:]:
        job.ranks[number].enter(seq, "broadcast", group=7)
    job.run(pause_s)
    job.ranks[members[0]].enter(seq, "broadcast", group=7)
    job.run(0.3)
    for number in members:
        job.ranks[number].leave()
        job.ranks[number].enter(job.seq)
    job.run(0.3)
    job.all_leave()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_healthy_jobs_of_any_rhythm_are_never_killed(data: st.DataObject):
    size = data.draw(st.sampled_from([1, 2, 3, 4]))
    job = Job(size, HangConfig(hang_timeout_s=40), tick_s=0.1)
    job.start()
    waits = st.sampled_from([Wait.RUNNING, Wait.TIMED, Wait.EXTERNAL, Wait.DISK])
    phases = st.sampled_from([Phase.TRAIN, Phase.DATA, Phase.CHECKPOINT, Phase.USER, Phase.BACKWARD])
    pauses = st.one_of(st.floats(0.05, 0.5), st.floats(0.5, 30.0))
    for _ in range(data.draw(st.integers(1, 10))):
        if size > 2 and data.draw(st.booleans()):
            a_subgroup(job, data.draw(st.sampled_from([(0, 1), (1, 2), (2, 0)])), data.draw(pauses))
        late = data.draw(st.dictionaries(st.integers(0, size - 1), waits, max_size=size))
        native = data.draw(st.booleans())
        transfer_s = data.draw(st.floats(0.0, 5.0))
        a_step(job, late, data.draw(phases), data.draw(pauses), transfer_s, native)
    assert_never_acted(job)


# --- what must be found -------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "culprit"), EVERY_RANK)
def test_p1_stopped(size: int, culprit: int):
    job = trained(size)
    since = job.now_s
    job.ranks[culprit].go(Wait.STOPPED)
    job.all_enter(but=(culprit,))
    found = job.acted_on(since, FLOOR_S + 0.3)
    assert found.trigger.kind == "stopped"
    assert found.trigger.ranks == (culprit,)
    waits = "1 rank waits" if size == 2 else f"{size - 1} ranks wait"
    assert found.trigger.detail.startswith(f"rank {culprit} has been stopped (state T) for 1.")
    assert found.trigger.detail.endswith(f"while {waits} for it")


def test_p1_only_once_the_others_stand_still():
    job = trained(4)
    job.ranks[1].go(Wait.STOPPED)
    job.each_look = job.ranks[0].tick
    job.run(10)
    assert_never_acted(job)
    job.each_look = None
    assert job.acted_on(job.now_s, 0.3).trigger.ranks == (1,)


def test_p1_before_anything_is_learned():
    job = Job(2)
    job.start()
    job.run(0.5)
    since = job.now_s
    job.ranks[1].go(Wait.STOPPED)
    assert job.acted_on(since, FLOOR_S + 0.3).trigger.kind == "stopped"


def test_p1_waits_longer_where_steps_are_longer():
    job = trained(2, 10, step_s=0.5)
    job.ranks[1].go(Wait.STOPPED)
    job.all_enter(but=(1,))
    job.run(4.9)
    assert_never_acted(job)
    assert job.acted_on(job.now_s, 0.5).trigger.kind == "stopped"


def test_p1_in_a_process_we_know_nothing_else_of():
    job = Job(2)
    for rank in job.ranks:
        rank.has_page = rank.has_proc = False
    job.run(1)
    job.ranks[1].go(Wait.STOPPED)
    assert job.acted_on(job.now_s, FLOOR_S + 0.3).trigger.ranks == (1,)


def test_p1_with_letters_only_in_the_details():
    """A caller that doesn't read state letters on their own finds it too, a little later."""
    job = trained(2)
    since = job.now_s
    job.ranks[1].go(Wait.STOPPED)
    job.all_enter(but=(1,))
    sample = job.sample
    job.sample = lambda rank, detail, letter: sample(rank, detail, False)
    assert job.acted_on(since, 2 * FLOOR_S).trigger.kind == "stopped"


@pytest.mark.parametrize(("size", "culprit"), EVERY_RANK)
def test_p2_desync_seen_by_the_worker(size: int, culprit: int):
    job = trained(size)
    since = job.now_s
    neighbour = (culprit + 1) % size
    job.all_enter()
    job.ranks[culprit].desync = neighbour
    found = job.acted_on(since, 0.1)
    assert found.trigger.kind == "desync"
    assert set(found.trigger.ranks) == {culprit, neighbour}


def test_p2_even_while_others_go_on():
    job = trained(4)
    job.ranks[2].desync = 3
    job.each_look = job.ranks[0].tick
    assert job.acted_on(job.now_s, 0.2).trigger.kind == "desync"


def test_p2_never_under_a_debugger_and_never_from_garbage():
    job = trained(4)
    for rank in job.ranks:
        rank.tracer = 9
    job.ranks[2].desync = 3
    job.run(20)
    assert_never_acted(job)
    job = trained(4)
    job.ranks[2].desync = 2
    job.ranks[1].desync = 1 << 40
    job.run(5)
    assert_never_acted(job)


@pytest.mark.parametrize(("size", "culprit"), EVERY_RANK)
def test_p3_deadlock_over_a_subgroup(size: int, culprit: int):
    """The culprit waits in a subgroup for a rank that waits in the default group for the culprit."""
    job = trained(size)
    other = (culprit + 1) % size
    job.groups = {7: ("pair", (culprit, other))}
    since = job.now_s
    job.all_enter(but=(culprit,))
    job.ranks[culprit].enter(1, "all_reduce", group=7)
    found = job.acted_on(since, FLOOR_S + 0.5)
    assert found.trigger.kind == "deadlock"
    assert found.trigger.ranks == tuple(range(size))
    assert f"rank {culprit} in all_reduce 1 of group pair" in found.trigger.detail


@pytest.mark.parametrize("sign", ["cpu", "io"])
def test_p3_not_while_somebody_is_at_work(sign: str):
    job = trained(4)
    job.groups = {7: ("pair", (0, 1))}
    job.all_enter(but=(0,))
    job.ranks[0].enter(1, group=7)
    if sign == "cpu":
        job.ranks[1].cpu_per_s = 0.3
    else:
        job.ranks[1].io_per_s = 1e6
    job.run(30)
    assert_never_acted(job)


@pytest.mark.parametrize(("size", "culprit"), EVERY_RANK)
def test_p3_desync_by_operation(size: int, culprit: int):
    job = trained(size)
    since = job.now_s
    job.all_enter("all_reduce", but=(culprit,))
    job.ranks[culprit].enter(job.seq, "barrier")
    found = job.acted_on(since, FLOOR_S + 0.5)
    assert found.trigger.kind == "desync"
    assert found.trigger.ranks == ((0, 1) if size == 2 else (culprit,))
    assert job.now_s - since >= FLOOR_S


@pytest.mark.parametrize("change", [{"numel": 9}, {"dtype": "float64"}])
def test_p3_desync_by_size_and_type(change: dict[str, object]):
    job = trained(4)
    since = job.now_s
    job.all_enter()
    job.ranks[2].records[-1] = replace(job.ranks[2].records[-1], **change)
    found = job.acted_on(since, FLOOR_S + 0.5)
    assert (found.trigger.kind, found.trigger.ranks) == ("desync", (2,))


def test_p3_where_a_broadcasts_source_went_ahead():
    """Rank 0 left its broadcast at once; the others met rank 1's barrier instead."""
    job = trained(4)
    job.seq += 1
    for rank in job.ranks:
        rank.enter(job.seq, "barrier" if rank.number == 1 else "broadcast")
    job.ranks[0].leave()
    job.ranks[0].enter(job.seq + 1, "all_reduce")
    found = job.acted_on(job.now_s, FLOOR_S + 0.6)
    assert (found.trigger.kind, found.trigger.ranks) == ("desync", (1,))


def test_p3_from_the_flight_recorder_alone():
    """DDP's collectives are issued from C++: the pages show nothing, the counters do."""
    job = trained(2)
    since = job.now_s
    for rank in job.ranks:
        rank.go(Wait.FOREVER)
        rank.threads = [thread(Wait.TIMED, "pt_gloo_runloop")]
    job.ranks[0].groups = (GroupStatus("0", 30, 29, "all_reduce"), GroupStatus("5", 2, 2))
    job.ranks[1].groups = (GroupStatus("0", 29, 29), GroupStatus("5", 3, 2, "all_reduce"))
    found = job.acted_on(since, FLOOR_S + 0.7)
    assert found.trigger.kind == "deadlock"
    assert found.trigger.ranks == (0, 1)


def test_p3_not_while_the_flight_recorder_says_they_all_came():
    job = trained(2)
    job.groups = {7: ("5", (0, 1))}
    job.ranks[0].enter(job.seq + 1)
    job.ranks[1].enter(1, "all_reduce", group=7)
    for rank in job.ranks:  # C++ issued what the hooks couldn't see
        rank.groups = (GroupStatus("0", job.seq + 1, job.seq), GroupStatus("5", 1, 0))
    job.run(60)
    assert_never_acted(job)


def unequal(size: int, culprit: int, op: str = "all_reduce") -> Job:
    """``culprit`` skipped one collective and is in one from C++ in its place; gloo let the others through it,
    and they are in the next."""
    job = trained(size)
    at = job.seq + 1
    for rank in job.ranks:
        rank.go(Wait.FOREVER)
        rank.threads = [thread(Wait.TIMED, "pt_gloo_runloop")]
        done = rank.number != culprit
        rank.groups = (GroupStatus("0", at + done, at - 1 + done, op),)
    return job


@pytest.mark.parametrize(("size", "culprit"), EVERY_RANK)
def test_p3_left_in_what_the_others_completed(size: int, culprit: int):
    job = unequal(size, culprit)
    found = job.acted_on(job.now_s, 2 * FLOOR_S)
    assert (found.trigger.kind, found.trigger.ranks) == ("desync", (culprit,))
    assert "left in what others completed" in found.trigger.detail


@pytest.mark.parametrize("busy", ["cpu", "io", "another thread"])
def test_p3_not_while_what_the_others_completed_may_still_come(busy: str):
    """A large one whose last bytes are on their way to one of the ranks."""
    job = unequal(4, 2)
    rank = job.ranks[2]
    if busy == "cpu":
        rank.cpu_per_s = 0.5
    elif busy == "io":
        rank.io_per_s = 50e6
    else:
        rank.threads = [thread(Wait.RUNNING, "copies")]
    job.run(60)
    assert_never_acted(job)


def test_p3_not_for_a_broadcast_whose_source_has_left_it():
    job = unequal(4, 2, "broadcast")
    for rank in job.ranks:
        if rank.number != 2:
            rank.groups = (GroupStatus("0", job.seq + 1, job.seq + 1),)
            rank.go(Wait.TIMED)
    job.run(60)
    assert_never_acted(job)


@pytest.mark.parametrize(("size", "culprit"), EVERY_RANK)
def test_p4_blocked_outside_any_collective(size: int, culprit: int):
    job = trained(size)
    since = job.now_s
    job.all_enter(but=(culprit,))
    job.ranks[culprit].go(Wait.FOREVER, cpu_per_s=0.02)  # its service threads poll
    job.ranks[culprit].threads = [
        thread(Wait.FOREVER, "python"),
        thread(Wait.INFRASTRUCTURE, "closeranks-ev"),
    ]
    found = job.acted_on(since, 3 * FLOOR_S)
    assert found.trigger.kind == "blocked"
    assert found.trigger.ranks == (culprit,)
    assert job.levels() == ["suspect", "act"]
    assert job.findings[0][1].trigger.ranks == (culprit,)


def test_p4_with_the_gil_held():
    job = trained(4)
    since = job.now_s
    job.all_enter(but=(2,))
    job.ranks[2].go(Wait.FOREVER)
    job.ranks[2].answers = False
    assert job.acted_on(since, 3 * FLOOR_S).trigger.ranks == (2,)


def test_p4_where_the_others_wait_in_ddp():
    job = trained(4)
    since = job.now_s
    for rank in job.ranks:
        rank.go(Wait.FOREVER)
        rank.groups = (GroupStatus("0", 31, 30, "all_reduce"),)
        rank.threads = [thread(Wait.TIMED, "pt_gloo_runloop")]
    job.ranks[3].groups = (GroupStatus("0", 30, 30),)
    job.ranks[3].threads = []
    found = job.acted_on(since, 3 * FLOOR_S)
    assert (found.trigger.kind, found.trigger.ranks) == ("blocked", (3,))
    suspect = job.findings[0][1].trigger
    assert suspect.ranks == (3,)
    assert suspect.detail.endswith(
        "(phase train, in a wait without a time limit) while 3 ranks wait in a collective"
    )


@pytest.mark.parametrize(("size", "culprit"), EVERY_RANK)
def test_p4_before_init(size: int, culprit: int):
    job = Job(size)
    for rank in job.ranks:
        rank.phase, rank.wait = Phase.INIT, Wait.TIMED
    job.ranks[culprit].phase, job.ranks[culprit].wait = Phase.START, Wait.FOREVER
    found = job.acted_on(0.0, 3 * FLOOR_S)
    assert (found.trigger.kind, found.trigger.ranks) == ("blocked", (culprit,))


def test_p4_two_of_them():
    job = trained(4)
    job.all_enter(but=(1, 2))
    job.ranks[1].go(Wait.FOREVER)
    job.ranks[2].go(Wait.FOREVER)
    assert job.acted_on(job.now_s, 3 * FLOOR_S).trigger.ranks == (1, 2)


def with_data_workers(rank: Rank) -> None:
    """As they idle: each waits for an index for 5 s at a time, and serves its shared memory at a socket."""
    rank.syscall, rank.children, rank.child_waits = LOCK, 2, ("external", "forever", "timed")
    rank.threads = [thread(Wait.FOREVER, syscall=LOCK), thread(Wait.INFRASTRUCTURE, "pt_data_pin")]


@pytest.mark.parametrize(("size", "culprit"), [(2, 0), (4, 3)])
def test_p4_blocked_for_ever_beside_data_workers(size: int, culprit: int):
    job = trained(size)
    since = job.now_s
    job.all_enter(but=(culprit,))
    for rank in job.ranks:
        with_data_workers(rank)
    job.ranks[culprit].go(Wait.FOREVER)
    found = job.acted_on(since, 3.5 * FLOOR_S + 0.5)
    assert (found.trigger.kind, found.trigger.ranks) == ("blocked", (culprit,))


def test_a_sync_skipped_in_cpp_beside_data_workers():
    """Only the flight recorder knows where these ranks wait."""
    job = trained(4)
    for rank in job.ranks:
        done = 10 if rank.number == 1 else 11
        wait_in_ddp(rank, done + 1, done)
        gloo = thread(Wait.TIMED, "pt_gloo_runloop", "futex_do_wait", syscall=LOCK)
        with_data_workers(rank)
        rank.threads.append(gloo)
    found = job.acted_on(job.now_s, 5 * FLOOR_S)
    assert (found.trigger.kind, found.trigger.ranks) == ("desync", (1,))


def test_workers_that_compute_are_waited_for():
    """They use CPU of the rank's tree, whatever for."""
    job = trained(2)
    job.all_enter(but=(1,))
    with_data_workers(job.ranks[1])
    job.ranks[1].go(Wait.FOREVER, cpu_per_s=0.9)
    job.run(60)
    assert job.levels() == ["suspect"]


@pytest.mark.parametrize("sign", ["cpu", "io", "stack", "children unread", "nobody waits"])
def test_p4_not_with_a_sign_of_life(sign: str):
    job = trained(4)
    job.all_enter(but=(1,))
    rank = job.ranks[1]
    rank.go(Wait.FOREVER)
    if sign == "cpu":
        rank.cpu_per_s = 0.3
    elif sign == "io":
        rank.io_per_s = 1e6
    elif sign == "children unread":
        rank.children = 3
    elif sign == "nobody waits":
        for other in job.ranks[2:]:
            other.leave_job()
        job.ranks[0].leave()
    else:

        def change_stack() -> None:
            rank.stack = f"line {int(job.now_s)}"

        job.each_look = change_stack
    job.run(60)
    assert_never_acted(job)


def test_p4_not_for_a_group_that_needs_others_only():
    job = trained(4)
    job.groups = {7: ("rest", (0, 2, 3))}
    for number in (0, 2, 3):
        job.ranks[number].enter(1, group=7)
    job.ranks[1].go(Wait.FOREVER)
    job.run(30)
    assert_never_acted(job)


@pytest.mark.parametrize(("size", "culprit"), EVERY_RANK)
def test_p5_early_exit(size: int, culprit: int):
    job = trained(size)
    since = job.now_s
    job.ranks[culprit].leave_job(0)
    job.all_enter(but=(culprit,))
    found = job.acted_on(since, FLOOR_S + 0.3)
    assert (found.trigger.kind, found.trigger.ranks) == ("early_exit", (culprit,))
    waits = "1 rank waits" if size == 2 else f"{size - 1} ranks wait"
    assert found.trigger.detail.startswith(f"rank {culprit} exited with code 0 while {waits} for it")


def test_p5_is_not_for_a_rank_that_crashed():
    job = trained(4)
    job.ranks[1].leave_job(1)
    job.all_enter()
    job.run(30)
    assert_never_acted(job)  # its exit is an incident already


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_p6_init_stall(size: int):
    job = Job(size)
    for rank in job.ranks:
        rank.phase, rank.wait, rank.cpu_per_s = Phase.INIT, Wait.TIMED, 0.01
    found = job.acted_on(0.0, HangConfig().init_stall_s + 1.5)
    assert found.trigger.kind == "init_stall"
    assert found.trigger.ranks == tuple(range(size))
    assert job.now_s >= HangConfig().init_stall_s


@pytest.mark.parametrize(("size", "culprit"), EVERY_RANK)
def test_p7_hang_timeout(size: int, culprit: int):
    job = trained(size, config=HangConfig(hang_timeout_s=5))
    since = job.now_s
    job.all_enter(but=(culprit,))
    job.ranks[culprit].go(Wait.RUNNING)
    found = job.acted_on(since, 5.3)
    assert job.now_s - since >= 5
    assert (found.trigger.kind, found.trigger.ranks) == ("hang_timeout", (culprit,))


def test_p7_the_whole_half_hour_by_default():
    job = trained(2)
    job.tick_s = 0.25
    since = job.now_s
    job.all_enter(but=(1,))
    job.run(1795)
    assert job.levels() == ["suspect"]
    assert job.acted_on(since, 1801).trigger.kind == "hang_timeout"


def test_p7_for_one_rank_that_others_wait_for_while_a_third_moves():
    job = trained(4, config=HangConfig(hang_timeout_s=20))
    since = job.now_s
    job.all_enter(but=(1, 3))
    job.ranks[1].go(Wait.TIMED)
    job.each_look = job.ranks[3].tick
    found = job.acted_on(since, 20.3)
    assert (found.trigger.kind, found.trigger.ranks) == ("hang_timeout", (1,))


def test_p7_not_for_that_rank_under_a_debugger():
    job = trained(4, config=HangConfig(hang_timeout_s=20))
    job.all_enter(but=(1, 3))
    job.ranks[1].go(Wait.TIMED)
    job.ranks[1].tracer = 9
    job.each_look = job.ranks[3].tick
    job.run(60)
    assert_never_acted(job)


def test_p7_not_for_a_silent_rank_that_nobody_waits_for():
    job = trained(4, config=HangConfig(hang_timeout_s=20))

    def others_move() -> None:
        for rank in job.ranks[1:]:
            rank.tick()

    job.each_look = others_move
    job.ranks[0].go(Wait.TIMED)
    job.run(60)
    assert_never_acted(job)


def test_p7_zero_means_never():
    job = trained(2, config=HangConfig(hang_timeout_s=0))
    job.tick_s = 0.25
    job.all_enter(but=(1,))
    job.run(300)
    assert_never_acted(job)


# --- what is said, learned, and asked for ---------------------------------------------------------------


def test_nothing_more_is_said_after_an_act():
    job = trained(2)
    job.ranks[1].go(Wait.STOPPED)
    job.all_enter(but=(1,))
    job.run(20)
    assert job.levels()[-1] == "act"
    assert job.levels().count("act") == 1
    assert hang.wants_detail(job.state) == hang.wants_state(job.state) == frozenset()


def test_a_proof_must_hold_without_a_break():
    """The blocked rank stirs every two seconds: never long enough still."""
    job = trained(4)
    job.all_enter(but=(1,))
    job.ranks[1].go(Wait.FOREVER)
    looks = 0

    def stir() -> None:
        nonlocal looks
        looks += 1
        if looks % 80 == 0:
            job.ranks[1].tick()

    job.each_look = stir
    job.run(60)
    assert_never_acted(job)


def test_all_details_or_none_and_not_at_every_look():
    job = trained(4)
    job.all_enter(but=(1,))
    job.run(0.4)
    assert hang.wants_detail(job.state) == frozenset()
    job.run(0.2)
    job.run(10)
    assert 60 <= job.details_asked <= 100  # ten a second
    job.details_asked = 0
    job.run(30)
    asked = job.details_asked
    job.details_asked = 0
    job.run(30)
    assert 25 <= job.details_asked <= 31 < asked  # then one a second
    job.ranks[0].leave_job()
    job.run(1.1)
    job.run(1.1)
    assert hang.wants_state(job.state) == {1, 2, 3}


def test_the_percentile_is_of_the_slowest_rank():
    assert p99_s([]) is None
    assert p99_s([(), ()]) is None
    assert p99_s([(1.0,), (2.0, 3.0)]) == 3.0
    window = (0.1,) * 511 + (60.0,)
    assert p99_s([window, window]) == 0.1  # one pause is no habit


def test_bounds():
    config, job = HangConfig(), Job(1)

    def bound_s(p99: float | None, phase: Phase, longest_s: tuple[tuple[str, float], ...] = ()) -> float:
        job.ranks[0].phase = phase
        return suspect_bound_s(config, p99, longest_s, job.page(job.ranks[0], rings=False))

    assert bound_s(None, Phase.TRAIN) == 30.0
    assert bound_s(0.01, Phase.TRAIN) == 1.0
    assert bound_s(0.5, Phase.TRAIN) == 5.0
    assert bound_s(0.5, Phase.TRAIN, (("train", 10.0),)) == 15.0
    assert bound_s(0.5, Phase.TRAIN, (("data", 10.0),)) == 5.0
    assert bound_s(0.01, Phase.EXIT) == 30.0
    assert bound_s(5.0, Phase.EXIT) == 50.0


def test_interpreters_take_a_while_to_shut_down():
    job = trained(2)
    for rank in job.ranks:
        rank.phase = Phase.EXIT
        rank.tick()
    job.run(20)
    assert job.findings == []


def test_what_is_remembered_is_bounded():
    job = Job(2, tick_s=0.2)
    for number in range(60):
        job.train(20, 0.01)
        for rank in job.ranks:
            rank.phase, rank.user_phase = Phase.USER, f"phase {number}"
            rank.tick()
        job.run(1.2)
    assert len(job.state.longest_s) == 32
    assert all(len(track.intervals_s) <= 512 for track in job.state.tracks)
    assert all(len(track.intervals_s) > 400 for track in job.state.tracks)


def test_the_same_samples_give_the_same_findings():
    def play() -> list[tuple[float, hang.Finding]]:
        job = trained(4)
        job.all_enter(but=(1,))
        job.ranks[1].go(Wait.FOREVER)
        job.run(10)
        return job.findings

    assert play() == play()
