"""What a thread waits for, told from /proc texts alone, and whether a process can ever move on by itself.

The question behind it: may a silent rank be killed? Only when no thread below it runs, sleeps with a time
limit, or waits for something that anybody outside may still send. Every doubt therefore ends in a value
other than FOREVER, and FOREVER alone counts as proof.

Syscall numbers are the kernel's own tables: arch/x86/entry/syscalls/syscall_64.tbl for x86_64,
include/uapi/asm-generic/unistd.h for aarch64. The format of /proc/PID/syscall is in proc(5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from closeranks.evidence import ProcessFacts, ThreadFacts

__all__ = [
    "EVIDENCE_THREAD",
    "SyscallRecord",
    "Wait",
    "at_rest",
    "blocked_forever",
    "can_wake_itself",
    "classify",
    "parse_syscall",
    "subject_of",
    "thread_waits",
]


class Wait(StrEnum):
    """Why a thread doesn't move."""

    RUNNING = "running"
    TIMED = "timed"  # a wait with a time limit, or a timer that may end it
    FOREVER = "forever"  # no time limit, and only a process of its own tree can end it
    EXTERNAL = "external"  # someone or something outside may end it: network, terminal, device, another job
    DISK = "disk"  # uninterruptible: storage or a driver
    STOPPED = "stopped"
    TRACED = "traced"
    INFRASTRUCTURE = "infrastructure"  # a library's service thread that idles like this all day
    ZOMBIE = "zombie"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class SyscallRecord:
    """/proc/PID/syscall of a thread inside a system call."""

    number: int
    args: tuple[int, ...]
    stack_pointer: int


# name: (x86_64, aarch64, rule). A rule is what the sleep means: a Wait; "fd" = depends on the descriptor in
# the first argument; "futex"; or "ms N" / "ptr N" = argument N is the time limit (a negative int, or a null
# pointer, for none) and without one the wait is for someone outside.
_SYSCALLS: dict[str, tuple[int | None, int | None, str]] = {
    "read": (0, 63, "fd"),
    "write": (1, 64, "fd"),
    "readv": (19, 65, "fd"),
    "writev": (20, 66, "fd"),
    "futex": (202, 98, "futex"),
    "pause": (34, None, Wait.FOREVER),
    "rt_sigsuspend": (130, 133, Wait.FOREVER),
    "wait4": (61, 260, Wait.FOREVER),  # children are below us, so they are asked themselves
    "waitid": (247, 95, Wait.FOREVER),
    "nanosleep": (35, 101, Wait.TIMED),
    "clock_nanosleep": (230, 115, Wait.TIMED),
    "restart_syscall": (219, 128, Wait.TIMED),  # how the kernel continues a timed wait after a signal
    "poll": (7, None, "ms 2"),
    "ppoll": (271, 73, "ptr 2"),
    "select": (23, None, "ptr 4"),
    "pselect6": (270, 72, "ptr 4"),
    "epoll_wait": (232, None, "ms 3"),
    "epoll_pwait": (281, 22, "ms 3"),
    "epoll_pwait2": (441, 441, "ptr 3"),
    "futex_waitv": (449, 449, "ptr 3"),
    "rt_sigtimedwait": (128, 137, "ptr 2"),  # sigwait(): whoever waits for a signal expects a sender
    "open": (2, None, Wait.EXTERNAL),  # a FIFO's other end, a user-space file system
    "openat": (257, 56, Wait.EXTERNAL),
    "openat2": (437, 437, Wait.EXTERNAL),
    "accept": (43, 202, Wait.EXTERNAL),
    "accept4": (288, 242, Wait.EXTERNAL),
    "connect": (42, 203, Wait.EXTERNAL),
    "sendto": (44, 206, Wait.EXTERNAL),
    "recvfrom": (45, 207, Wait.EXTERNAL),
    "sendmsg": (46, 211, Wait.EXTERNAL),
    "recvmsg": (47, 212, Wait.EXTERNAL),
    "recvmmsg": (299, 243, Wait.EXTERNAL),
    "sendmmsg": (307, 269, Wait.EXTERNAL),
    "sendfile": (40, 71, Wait.EXTERNAL),
    "splice": (275, 76, Wait.EXTERNAL),
    "fcntl": (72, 25, Wait.EXTERNAL),  # a file lock: its owner may be any process of any host
    "flock": (73, 32, Wait.EXTERNAL),
    "fsync": (74, 82, Wait.EXTERNAL),
    "fdatasync": (75, 83, Wait.EXTERNAL),
    "ioctl": (16, 29, Wait.EXTERNAL),  # a device, GPUs included
    "semop": (65, 193, Wait.EXTERNAL),  # System V and POSIX queues have names that others may open
    "semtimedop": (220, 192, Wait.EXTERNAL),
    "msgsnd": (69, 189, Wait.EXTERNAL),
    "msgrcv": (70, 188, Wait.EXTERNAL),
    "mq_timedsend": (242, 182, Wait.EXTERNAL),
    "mq_timedreceive": (243, 183, Wait.EXTERNAL),
    "io_getevents": (208, 4, Wait.EXTERNAL),
    "io_pgetevents": (333, 292, Wait.EXTERNAL),
    "io_uring_enter": (426, 426, Wait.EXTERNAL),
}
_RULES: dict[str, dict[int, str]] = {
    "x86_64": {x86: rule for x86, _, rule in _SYSCALLS.values() if x86 is not None},
    "aarch64": {arm: rule for _, arm, rule in _SYSCALLS.values() if arm is not None},
}

_FUTEX_PRIVATE = 128
_FUTEX_CLOCK_REALTIME = 256
_FUTEX_WAITS = {0, 6, 9, 11, 13}  # WAIT, LOCK_PI, WAIT_BITSET, WAIT_REQUEUE_PI, LOCK_PI2

# Threads that serve others and poll or sleep all day: a socket loop, a watchdog, a store, our own.
EVIDENCE_THREAD = "closeranks-ev"  # the worker's own thread (worker/hooks_evidence.py)
_POLLERS = re.compile(r"gloo_|pt_tcpstore|pt_nccl_|NCCL |pt_elastic|cuda-EvtHandlr|cuda\d|closeranks-ev")
# Threads that do the script's own work when there is some: idle only while they wait without a limit. A gloo
# worker with a collective in flight waits with the group's timeout instead, which is no proof of anything.
_WORKERS = re.compile(r"pt_gloo_runloop|pt_autograd_")
# The DataLoader's thread that pins what its workers send. It looks for that in turns of 5 s; who waits for it
# does so with the same limit, so that it wakes nobody who waits for ever.
_PINNING = "pt_data_pin"

# Someone holds the thread where it is and will let it go: cgroup freezer, suspend, seccomp supervisor.
_HELD = re.compile(r"freez|refrigerator|seccomp")

_BY_STATE = {
    "R": Wait.RUNNING,
    "D": Wait.DISK,
    "T": Wait.STOPPED,
    "t": Wait.TRACED,
    "Z": Wait.ZOMBIE,
    "X": Wait.ZOMBIE,
    "x": Wait.ZOMBIE,
}
# What a wait channel says where the kernel shows no system call (no ptrace permission). Never FOREVER.
_BY_WCHAN = {
    "hrtimer_nanosleep": Wait.TIMED,
    "do_nanosleep": Wait.TIMED,
    "inet_csk_accept": Wait.EXTERNAL,
    "sk_wait_data": Wait.EXTERNAL,
    "wait_woken": Wait.EXTERNAL,
    "n_tty_read": Wait.EXTERNAL,
    "inotify_read": Wait.EXTERNAL,
    "unix_stream_read_generic": Wait.EXTERNAL,
}


def parse_syscall(line: str) -> SyscallRecord | None:
    """Parse ``nr 0xarg0 .. 0xarg5 0xsp 0xpc``; None for "running", "-1 sp pc" and anything odd."""
    fields = line.split()
    if len(fields) != 9:
        return None
    try:
        number = int(fields[0])
        values = [int(field, 16) for field in fields[1:]]
    except ValueError:
        return None
    return SyscallRecord(number, tuple(values[:6]), values[6])


def subject_of(syscall_line: str, machine: str = "x86_64") -> tuple[str, int] | None:
    """What more must be known to classify this wait: ("fd", number), ("address", pointer), or None."""
    record = parse_syscall(syscall_line)
    if record is None:
        return None
    rule = _RULES.get(machine, {}).get(record.number)
    if rule == "fd":
        return "fd", record.args[0] & 0xFFFFFFFF
    if rule == "futex" and record.args[3] == 0 and not record.args[1] & _FUTEX_PRIVATE:
        return "address", record.args[0]
    return None


def _of_descriptor(fd: int, kind: str) -> Wait:
    if not kind:
        return Wait.UNKNOWN
    if fd == 0:
        return Wait.EXTERNAL  # stdin: whoever is at the other end, we don't know them
    if kind.startswith("anon_inode:[timerfd]"):
        return Wait.TIMED
    if kind.startswith(("pipe:", "anon_inode:[eventfd]")):
        return Wait.FOREVER
    return Wait.EXTERNAL


def _of_futex(args: tuple[int, ...], kind: str) -> Wait:
    if args[1] & ~(_FUTEX_PRIVATE | _FUTEX_CLOCK_REALTIME) not in _FUTEX_WAITS:
        return Wait.UNKNOWN
    if args[3] != 0:
        return Wait.TIMED
    if args[1] & _FUTEX_PRIVATE or kind == "private":
        return Wait.FOREVER
    return Wait.EXTERNAL  # in shared memory: a semaphore that any process may post


def _of_syscall(record: SyscallRecord, kind: str, machine: str) -> Wait:
    rule = _RULES.get(machine, {}).get(record.number)
    if rule is None or record.stack_pointer < 1 << 32:
        return Wait.UNKNOWN  # a stack below 4 GiB: a 32-bit process, whose numbers mean other calls
    if rule == "fd":
        return _of_descriptor(record.args[0] & 0xFFFFFFFF, kind)
    if rule == "futex":
        return _of_futex(record.args, kind)
    how, _, index = rule.partition(" ")
    if how == "ms":
        return Wait.EXTERNAL if record.args[int(index)] & 0x80000000 else Wait.TIMED
    if how == "ptr":
        return Wait.EXTERNAL if record.args[int(index)] == 0 else Wait.TIMED
    return Wait(rule)


def classify(
    state: str,
    name: str,
    wchan: str,
    syscall_line: str,
    fd_kind: str,
    *,
    machine: str = "x86_64",
    has_alarm: bool = False,
) -> Wait:
    """Why a thread waits, from its texts under /proc/PID/task/TID.

    ``name`` is its own comm, "" for a main thread or a name merely inherited from it. ``fd_kind`` is what
    ``subject_of`` asked for: the readlink text of a descriptor, with "outside " before it when processes
    beyond the rank's own tree hold the same pipe; or "private" / "shared", the mapping an address lies in;
    "" where it could not be read. ``has_alarm``: a signal handler or timer of the process may end any wait.
    """
    by_state = _BY_STATE.get(state)
    if by_state is not None and by_state is not Wait.RUNNING:
        return by_state
    if name and _POLLERS.match(name):
        return Wait.INFRASTRUCTURE
    if by_state is not None or syscall_line.startswith("running"):
        return Wait.RUNNING
    if state != "S":
        return Wait.UNKNOWN
    if _HELD.search(wchan):
        return Wait.EXTERNAL
    record = parse_syscall(syscall_line)
    if record is None:
        return _BY_WCHAN.get(wchan, Wait.UNKNOWN)
    wait = _of_syscall(record, fd_kind, machine)
    if wait is Wait.FOREVER and has_alarm:
        return Wait.TIMED
    if wait is Wait.FOREVER and name and _WORKERS.match(name):
        return Wait.INFRASTRUCTURE
    if wait is Wait.TIMED and name == _PINNING:
        return Wait.INFRASTRUCTURE
    return wait


_INERT = frozenset({Wait.FOREVER, Wait.INFRASTRUCTURE, Wait.ZOMBIE})


def can_wake_itself(waits: Iterable[str]) -> bool:
    """Whether any of these threads might move on without help from the others. Doubt counts as yes."""
    return any(wait not in _INERT for wait in waits)


def thread_waits(threads: Sequence[ThreadFacts]) -> list[str]:
    """The threads' waits, where waiting for the GIL counts as FOREVER: only its holder can end that.

    CPython waits for the GIL in slices of 5 ms, which looks like a wait with a limit. Our evidence thread
    never waits in a futex for anything else, so its address tells the GIL's.
    """
    gil = {thread.syscall.split()[1] for thread in threads if _is_evidence(thread)}
    return [
        Wait.FOREVER if thread.wait == Wait.TIMED and _in_futex(thread) and thread.syscall.split()[1] in gil
        else thread.wait
        for thread in threads
    ]  # fmt: skip


def _is_evidence(thread: ThreadFacts) -> bool:
    return thread.name == EVIDENCE_THREAD and _in_futex(thread)


def _in_futex(thread: ThreadFacts) -> bool:
    return thread.wchan.startswith("futex") and len(thread.syscall.split()) > 1


def _within_itself(thread: ThreadFacts) -> bool:
    """Whether only threads of the same process can end this wait: a futex of private memory.

    The kernel finds the waiters of such a futex by the process's own memory. No other process can wake them,
    children included, but by a signal.
    """
    record = parse_syscall(thread.syscall) if thread.wchan.startswith("futex") else None
    if record is None or not record.args[1] & _FUTEX_PRIVATE:
        return False
    return record.args[1] & ~(_FUTEX_PRIVATE | _FUTEX_CLOCK_REALTIME) in _FUTEX_WAITS


def _out_of_reach(process: ProcessFacts) -> bool:
    """Whether no child can wake any thread of the rank that isn't a library's: whatever DataLoader workers
    do, a rank that waits for a lock of its own gets nothing from them.

    Data of a worker comes through a pipe or socket, and some thread of the rank waits there for it; that
    thread isn't out of reach.
    """
    return not process.heeds_children and all(
        thread.wait in (Wait.INFRASTRUCTURE, Wait.ZOMBIE) or _within_itself(thread)
        for thread in process.threads
    )


def blocked_forever(process: ProcessFacts) -> bool:
    """Whether nothing in the rank's process tree can ever move it again.

    True only if the main thread (the first of ``threads``) waits without a limit for its own tree, every
    other thread of the rank does too or is a library's idle service thread, and all of them could be read.
    Children must be as idle, unless the rank is out of their reach.
    """
    if process.state != "S" or process.tracer_pid != 0 or not process.threads:
        return False
    if process.threads[0].wait != Wait.FOREVER or can_wake_itself(thread_waits(process.threads)):
        return False
    if not process.children or _out_of_reach(process):
        return True
    return bool(process.child_waits) and not can_wake_itself(process.child_waits)


# Where a thread sleeps that waits for a lock or for a time, and not for data that may be on its way.
_LOCK_OR_TIME = re.compile(r"futex_|.*n(ano)?sleep")


def _rests(thread: ThreadFacts) -> bool:
    return thread.wait in _INERT or (thread.wait == Wait.TIMED and bool(_LOCK_OR_TIME.match(thread.wchan)))


def at_rest(process: ProcessFacts, *, main_forever: bool) -> bool:
    """Whether no thread of the rank seems to work on anything: weaker than ``blocked_forever``.

    Threads that wake up now and then (a progress bar's) count as resting; threads that compute, or wait for
    a disk, a child or the network, don't. With ``main_forever`` the main thread must wait without a limit,
    nothing else may have one but a gloo worker (its collective's), and no child may be able to wake any.
    """
    if process.state != "S" or process.tracer_pid != 0 or not process.threads:
        return False
    if not main_forever:
        return all(_rests(thread) for thread in process.threads)
    if process.threads[0].wait != Wait.FOREVER or (process.children and not _out_of_reach(process)):
        return False
    return all(
        thread.wait in _INERT or (thread.wait == Wait.TIMED and thread.name.startswith("pt_gloo_runloop"))
        for thread in process.threads
    )
