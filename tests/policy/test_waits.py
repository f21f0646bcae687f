"""Classification over plain strings. tests/agent/test_procfs.py runs it against real processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.evidence import ProcessFacts, ThreadFacts
from closeranks.policy.waits import (
    Wait,
    at_rest,
    blocked_forever,
    can_wake_itself,
    classify,
    parse_syscall,
    subject_of,
)

SP = 0x7FFF_0000_0000


def line(number: int, *args: int, sp: int = SP) -> str:
    padded = (*args, 0, 0, 0, 0, 0, 0)[:6]
    return " ".join([str(number), *(hex(value) for value in (*padded, sp, 0x7F00_0000_1000))])


NULL, POINTER, MINUS_ONE = 0, 0x7F12_3456_7890, 0xFFFFFFFF

X86 = [
    ("pause", line(34), "", Wait.FOREVER),
    ("sigsuspend", line(130, POINTER), "", Wait.FOREVER),
    ("wait4", line(61, MINUS_ONE), "", Wait.FOREVER),
    ("waitid", line(247), "", Wait.FOREVER),
    ("private futex", line(202, POINTER, 0x189, 0, NULL), "", Wait.FOREVER),
    ("private futex with a limit", line(202, POINTER, 0x189, 0, POINTER), "", Wait.TIMED),
    ("plain futex, private memory", line(202, POINTER, 0, 0, NULL), "private", Wait.FOREVER),
    ("plain futex, shared memory", line(202, POINTER, 0x109, 0, NULL), "shared", Wait.EXTERNAL),
    ("plain futex, unknown memory", line(202, POINTER, 0x109, 0, NULL), "", Wait.EXTERNAL),
    ("futex wake", line(202, POINTER, 0x81, 1, NULL), "", Wait.UNKNOWN),
    ("PI lock", line(202, POINTER, 0x86, 0, NULL), "", Wait.FOREVER),
    ("clock_nanosleep", line(230, 0, 0, POINTER), "", Wait.TIMED),
    ("restarted sleep", line(219), "", Wait.TIMED),
    ("poll 5 s", line(7, POINTER, 1, 5000), "", Wait.TIMED),
    ("poll for ever", line(7, POINTER, 1, MINUS_ONE), "", Wait.EXTERNAL),
    ("ppoll 64-bit minus one is a pointer", line(271, POINTER, 1, POINTER), "", Wait.TIMED),
    ("ppoll for ever", line(271, POINTER, 1, NULL), "", Wait.EXTERNAL),
    ("select with a limit", line(23, 5, POINTER, 0, 0, POINTER), "", Wait.TIMED),
    ("select for ever", line(23, 5, POINTER, 0, 0, NULL), "", Wait.EXTERNAL),
    ("pselect6 with a limit", line(270, 5, POINTER, 0, 0, POINTER), "", Wait.TIMED),
    ("epoll_wait 10 ms", line(232, 5, POINTER, 64, 10), "", Wait.TIMED),
    ("epoll_pwait for ever", line(281, 5, POINTER, 64, MINUS_ONE), "", Wait.EXTERNAL),
    ("sigwait", line(128, POINTER, 0, NULL), "", Wait.EXTERNAL),
    ("read own pipe", line(0, 5), "pipe:[77]", Wait.FOREVER),
    ("read a pipe others hold", line(0, 5), "outside pipe:[77]", Wait.EXTERNAL),
    ("read stdin pipe", line(0, 0), "pipe:[77]", Wait.EXTERNAL),
    ("read terminal", line(0, 5), "/dev/pts/3", Wait.EXTERNAL),
    ("read socket", line(0, 5), "socket:[78]", Wait.EXTERNAL),
    ("read eventfd", line(0, 5), "anon_inode:[eventfd]", Wait.FOREVER),
    ("read timerfd", line(0, 5), "anon_inode:[timerfd]", Wait.TIMED),
    ("read inotify", line(0, 5), "anon_inode:inotify", Wait.EXTERNAL),
    ("read a file of a user-space file system", line(0, 5), "/mnt/fuse/x", Wait.EXTERNAL),
    ("read something unreadable", line(0, 5), "", Wait.UNKNOWN),
    ("write log pipe", line(1, 1), "outside pipe:[79]", Wait.EXTERNAL),
    ("recvfrom", line(45, 5), "", Wait.EXTERNAL),
    ("accept4", line(288, 5), "", Wait.EXTERNAL),
    ("flock", line(73, 5), "", Wait.EXTERNAL),
    ("ioctl", line(16, 5), "", Wait.EXTERNAL),
    ("a call we don't know", line(999), "", Wait.UNKNOWN),
    ("a 32-bit process", line(34, sp=0xFFD0_0000), "", Wait.UNKNOWN),
    ("just now running", "running", "", Wait.RUNNING),
    ("blocked outside a call", "-1 0x7ffc00000000 0x7f0000000000", "", Wait.UNKNOWN),
    ("no permission", "", "", Wait.UNKNOWN),
    ("garbage", "202 zz 0x0 0x0 0x0 0x0 0x0 0x0 0x0", "", Wait.UNKNOWN),
]


@pytest.mark.parametrize(("text", "kind", "expected"), [row[1:] for row in X86], ids=[row[0] for row in X86])
def test_x86_64(text: str, kind: str, expected: Wait):
    assert classify("S", "", "", text, kind) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (line(98, POINTER, 0x189, 0, NULL), Wait.FOREVER),
        (line(98, POINTER, 0x189, 0, POINTER), Wait.TIMED),
        (line(133, POINTER), Wait.FOREVER),
        (line(260, MINUS_ONE), Wait.FOREVER),
        (line(115, 0, 0, POINTER), Wait.TIMED),
        (line(22, 5, POINTER, 64, 10), Wait.TIMED),
        (line(73, POINTER, 1, NULL), Wait.EXTERNAL),
        (line(34), Wait.UNKNOWN),  # x86's pause is mkdirat here
    ],
)
def test_aarch64_has_its_own_numbers(text: str, expected: Wait):
    assert classify("S", "", "", text, "", machine="aarch64") is expected


def test_a_machine_without_a_table_proves_nothing():
    assert classify("S", "", "", line(34), "", machine="riscv64") is Wait.UNKNOWN


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("R", Wait.RUNNING),
        ("D", Wait.DISK),
        ("T", Wait.STOPPED),
        ("t", Wait.TRACED),
        ("Z", Wait.ZOMBIE),
        ("X", Wait.ZOMBIE),
        ("I", Wait.UNKNOWN),
        ("", Wait.UNKNOWN),
    ],
)
def test_the_state_letter_comes_first(state: str, expected: Wait):
    assert classify(state, "", "", line(34), "") is expected


def test_a_handler_that_may_come_makes_any_endless_wait_a_timed_one():
    assert classify("S", "", "", line(34), "", has_alarm=True) is Wait.TIMED
    assert classify("S", "", "", line(45, 5), "", has_alarm=True) is Wait.EXTERNAL


@pytest.mark.parametrize("wchan", ["do_freezer_trap", "__refrigerator", "seccomp_do_user_notification"])
def test_a_thread_that_is_held_will_be_let_go(wchan: str):
    assert classify("S", "", wchan, line(34), "") is Wait.EXTERNAL


def test_wait_channels_help_where_calls_are_hidden_but_never_prove():
    assert classify("S", "", "hrtimer_nanosleep", "", "") is Wait.TIMED
    assert classify("S", "", "inet_csk_accept", "", "") is Wait.EXTERNAL
    assert classify("S", "", "futex_do_wait", "", "") is Wait.UNKNOWN
    assert classify("S", "", "do_wait", "", "") is Wait.UNKNOWN


@pytest.mark.parametrize(
    "name", ["gloo_tcp_loop", "pt_tcpstore_uv", "pt_nccl_watchdg", "cuda-EvtHandlr", "closeranks-ev"]
)
def test_pollers_are_infrastructure_whatever_they_do_unless_halted(name: str):
    for text in (line(232, 5, POINTER, 64, 10), line(232, 5, POINTER, 64, MINUS_ONE), "running"):
        assert classify("S", name, "", text, "") is Wait.INFRASTRUCTURE
    assert classify("R", name, "", "", "") is Wait.INFRASTRUCTURE
    assert classify("D", name, "", "", "") is Wait.DISK
    assert classify("T", name, "", "", "") is Wait.STOPPED


def test_a_pinning_thread_idles_with_a_limit():
    """The DataLoader's own; a thread of another name that polls may wake the one that waits for it."""
    poll, busy = line(7, POINTER, 1, 5000), line(45, 5)
    assert classify("S", "pt_data_pin", "", poll, "") is Wait.INFRASTRUCTURE
    assert classify("S", "pt_data_pin", "", busy, "") is Wait.EXTERNAL  # a batch is on its way
    assert classify("R", "pt_data_pin", "", "running", "") is Wait.RUNNING
    assert classify("S", "prefetch", "", poll, "") is Wait.TIMED


def test_worker_threads_are_infrastructure_only_while_they_idle():
    idle, busy = line(202, POINTER, 0x189, 0, NULL), line(202, POINTER, 0x189, 0, POINTER)
    assert classify("S", "pt_gloo_runloop", "", idle, "") is Wait.INFRASTRUCTURE
    assert classify("S", "pt_gloo_runloop", "", busy, "") is Wait.TIMED  # a collective is in flight
    assert classify("R", "pt_autograd_0", "", "", "") is Wait.RUNNING  # backward is at work
    assert classify("S", "cudatrainer", "", busy, "") is Wait.TIMED  # not a name of the CUDA runtime


def test_what_else_must_be_known():
    assert subject_of(line(0, 7)) == ("fd", 7)
    assert subject_of(line(63, 7), "aarch64") == ("fd", 7)
    assert subject_of(line(202, POINTER, 0x109, 0, NULL)) == ("address", POINTER)
    assert subject_of(line(202, POINTER, 0x189, 0, NULL)) is None  # private: no question
    assert subject_of(line(202, POINTER, 0x109, 0, POINTER)) is None  # timed: no question
    assert subject_of(line(34)) is None
    assert subject_of("running") is None


@given(
    st.text(max_size=2),
    st.text(max_size=16),
    st.text(max_size=16),
    st.text(max_size=80),
    st.text(max_size=20),
)
def test_hostile_texts_never_raise_and_never_prove(state: str, name: str, wchan: str, call: str, kind: str):
    parse_syscall(call)
    subject_of(call)
    assert classify(state, name, wchan, call, kind) is not Wait.FOREVER


# --- can it move on by itself? ------------------------------------------------------------------------


def thread(wait: Wait, tid: int = 1) -> ThreadFacts:
    return ThreadFacts(tid=tid, name="python", state="S", wchan="", syscall="", wait=wait.value)


def process(*waits: Wait, children: int = 0, child_waits: tuple[str, ...] = ()) -> ProcessFacts:
    return ProcessFacts(
        state="S",
        tracer_pid=0,
        cpu_s=1.0,
        io_bytes=0,
        rss_bytes=0,
        threads=tuple(thread(wait, tid) for tid, wait in enumerate(waits, 1)),
        children=children,
        child_waits=child_waits,
    )


def test_blocked_forever_needs_every_thread():
    assert blocked_forever(process(Wait.FOREVER))
    assert blocked_forever(process(Wait.FOREVER, Wait.FOREVER, Wait.INFRASTRUCTURE))
    assert not blocked_forever(process(Wait.INFRASTRUCTURE, Wait.FOREVER))  # that isn't a main thread's wait
    assert not blocked_forever(process())


@pytest.mark.parametrize(
    "wait", [Wait.RUNNING, Wait.TIMED, Wait.EXTERNAL, Wait.DISK, Wait.STOPPED, Wait.TRACED, Wait.UNKNOWN]
)
def test_one_thread_or_child_that_may_move_is_enough(wait: Wait):
    assert can_wake_itself([Wait.FOREVER, wait])
    assert not blocked_forever(process(wait))
    assert not blocked_forever(process(Wait.FOREVER, wait))
    assert not blocked_forever(process(Wait.FOREVER, children=2, child_waits=(Wait.FOREVER, wait)))


def test_children_must_have_been_looked_at():
    assert blocked_forever(process(Wait.FOREVER, children=1, child_waits=("forever",)))
    assert not blocked_forever(process(Wait.FOREVER, children=1))


def locked(number: int, name: str = "python", wait: Wait = Wait.FOREVER, flags: int = 0x189) -> ThreadFacts:
    limit = POINTER if wait is Wait.TIMED else NULL
    return ThreadFacts(number, name, "S", "futex_do_wait", line(202, POINTER, flags, 0, limit), wait.value)


BUSY_CHILDREN = (Wait.EXTERNAL, Wait.FOREVER, Wait.TIMED, Wait.RUNNING, Wait.DISK, Wait.UNKNOWN)


@pytest.mark.parametrize("wait", BUSY_CHILDREN)
def test_no_child_opens_a_lock_of_the_rank(wait: Wait):
    """A private futex: the kernel looks for who waits for it in the process's own memory alone."""
    rank = replace(process(children=2, child_waits=(wait.value,)), threads=(locked(1), locked(2)))
    assert blocked_forever(rank)
    assert at_rest(rank, main_forever=True)


@pytest.mark.parametrize("wait", BUSY_CHILDREN)
def test_a_child_may_wake_whoever_waits_elsewhere(wait: Wait):
    """One thread that reads a pipe is how a worker's data comes to the rank."""
    rank = process(children=2, child_waits=(wait.value,))
    pipe = replace(thread(Wait.FOREVER, 3), wchan="anon_pipe_read", syscall=line(0, 5))
    shared = locked(3, flags=0x109)
    for other in (pipe, shared, replace(pipe, wchan=""), replace(locked(3), syscall="")):
        for threads in ((locked(1), other), (other, locked(2))):
            assert blocked_forever(replace(rank, threads=threads)) is (wait is Wait.FOREVER)
            assert not at_rest(replace(rank, threads=threads), main_forever=True)


def test_a_handler_of_sigchld_may_open_a_lock():
    rank = replace(process(children=1, child_waits=("timed",)), threads=(locked(1),))
    assert blocked_forever(rank)
    assert not blocked_forever(replace(rank, heeds_children=True))
    assert not at_rest(replace(rank, heeds_children=True), main_forever=True)
    assert blocked_forever(replace(rank, heeds_children=True, child_waits=("forever",)))


def test_a_lock_with_a_limit_is_life_whoever_holds_it():
    rank = replace(
        process(children=1, child_waits=("timed",)), threads=(locked(1), locked(2, wait=Wait.TIMED))
    )
    assert not blocked_forever(rank)
    assert not at_rest(rank, main_forever=True)
    gloo = locked(2, "pt_gloo_runloop", Wait.TIMED)  # a collective in flight: what the main thread waits for
    assert at_rest(replace(rank, threads=(locked(1), gloo)), main_forever=True)


def test_a_traced_or_stopped_process_is_in_someone_elses_hands():
    assert not blocked_forever(replace(process(Wait.FOREVER), tracer_pid=7))
    assert not blocked_forever(replace(process(Wait.FOREVER), state="T"))


def test_a_wait_nobody_has_heard_of_is_a_doubt():
    assert can_wake_itself(["something new"])
