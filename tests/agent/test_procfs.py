"""Real processes in every kind of wait, and what /proc and policy.waits make of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from closeranks.agent import procfs
from closeranks.evidence import ProcessFacts
from closeranks.policy.waits import Wait, at_rest, blocked_forever

DEADLINE_S = 20.0


def until(check, what: str, deadline_s: float = DEADLINE_S):
    deadline = time.monotonic() + deadline_s
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {deadline_s} s for {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def child(code: str, *, args: tuple[str, ...] = (), threads: int = 1, **options) -> Iterator[int]:
    """A Python process that runs ``code`` after saying that it is about to; its whole group dies after."""
    options.setdefault("stdin", subprocess.DEVNULL)
    options.setdefault("env", {**os.environ, "OMP_NUM_THREADS": str(threads)})
    say = "import os, sys\nos.write(1, b'!')\n"
    with subprocess.Popen(
        [sys.executable, "-c", say + code, *args], stdout=subprocess.PIPE, start_new_session=True, **options
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(1) == b"!"
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def facts_with(pid: int, wait: Wait) -> ProcessFacts:
    """The facts once the main thread has got into ``wait`` and stayed there for two looks."""

    def look() -> ProcessFacts | None:
        first = procfs.read_process(pid)
        assert first is not None
        if first.threads and first.threads[0].wait == wait:
            second = procfs.read_process(pid)
            assert second is not None
            if second.threads and second.threads[0].wait == wait:
                return second
        return None

    seen = procfs.read_process(pid)
    return until(look, f"{wait} of {seen}")


CASES = {
    "time.sleep": ("import time; time.sleep(100)", Wait.TIMED),
    "double lock": ("import threading; l = threading.Lock(); l.acquire(); l.acquire()", Wait.FOREVER),
    "lock with a limit": (
        "import threading; l = threading.Lock(); l.acquire(); l.acquire(timeout=100)",
        Wait.TIMED,
    ),
    "event": ("import threading; threading.Event().wait()", Wait.FOREVER),
    "pause in C": ("import ctypes; ctypes.CDLL(None).pause()", Wait.FOREVER),
    "pause in C with the GIL held": ("import ctypes; ctypes.PyDLL(None).pause()", Wait.FOREVER),
    "busy": ("while True: pass", Wait.RUNNING),
    "network receive": (
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\n"
        "c = socket.create_connection(s.getsockname()); c.recv(1)",
        Wait.EXTERNAL,
    ),
    "network accept": (
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); s.accept()",
        Wait.EXTERNAL,
    ),
    "own pipe": ("r, w = os.pipe(); os.read(r, 1)", Wait.FOREVER),
    "own full pipe": ("r, w = os.pipe(); os.write(w, bytes(1 << 20))", Wait.FOREVER),
    "eventfd": ("os.read(os.eventfd(0), 8)", Wait.FOREVER) if hasattr(os, "eventfd") else None,
    "select with a limit": ("import select; select.select([], [], [], 100)", Wait.TIMED),
    "poll without a limit": (
        "import select; r, w = os.pipe(); p = select.poll(); p.register(r); p.poll()",
        Wait.EXTERNAL,
    ),
    "sigwait": (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {10}); signal.sigwait({10})",
        Wait.EXTERNAL,
    ),
    "file lock": (
        "import fcntl, tempfile; f = tempfile.NamedTemporaryFile(); fcntl.flock(f, fcntl.LOCK_EX)\n"
        "fcntl.flock(open(f.name), fcntl.LOCK_EX)",
        Wait.EXTERNAL,
    ),
    "semaphore in shared memory": (
        "import multiprocessing as m; l = m.get_context('fork').Semaphore(0); l.acquire()",
        Wait.EXTERNAL,
    ),
    "futex without the private flag, in private memory": (
        "import ctypes, platform\nn = {'x86_64': 202, 'aarch64': 98}[platform.machine()]\n"
        "w = ctypes.c_int(0); ctypes.CDLL(None).syscall(n, ctypes.byref(w), 0, 0, None)",
        Wait.FOREVER,
    ),
    "endless wait, but an alarm will come": (
        "import signal, threading; signal.signal(14, lambda *a: None); signal.alarm(1000)\n"
        "threading.Event().wait()",
        Wait.TIMED,
    ),
}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case])
def test_waits_of_real_processes(name: str):
    code, wait = CASES[name]
    with child(code) as pid:
        facts = facts_with(pid, wait)
        assert blocked_forever(facts) is (wait is Wait.FOREVER), facts


def test_reading_stdin_is_waiting_for_a_person():
    with child("sys.stdin.read()", stdin=subprocess.PIPE) as pid:
        assert not blocked_forever(facts_with(pid, Wait.EXTERNAL))


def test_breakpoint_at_a_terminal():
    leader, follower = pty.openpty()
    try:
        with child("breakpoint()\nimport time", stdin=follower) as pid:
            assert not blocked_forever(facts_with(pid, Wait.EXTERNAL))
    finally:
        os.close(leader)
        os.close(follower)


def test_a_pipe_whose_other_end_is_ours_may_still_be_written():
    read_fd, write_fd = os.pipe()
    try:
        with child(f"os.read({read_fd}, 1)", pass_fds=(read_fd,)) as pid:
            facts_with(pid, Wait.EXTERNAL)
    finally:
        os.close(read_fd)
        os.close(write_fd)


def test_a_unix_socket_may_lead_to_any_daemon():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        code = f"import socket; socket.socket(fileno={theirs.fileno()}).recv(1)"
        with child(code, pass_fds=(theirs.fileno(),)) as pid:
            facts_with(pid, Wait.EXTERNAL)


def test_a_stopped_process():
    with child("import time; time.sleep(100)") as pid:
        os.kill(pid, signal.SIGSTOP)
        facts = facts_with(pid, Wait.STOPPED)
        assert facts.state == "T"
        assert procfs.state_of(pid) == "T"
        assert not blocked_forever(facts)


def test_a_traced_process():
    libc = ctypes.CDLL(None, use_errno=True)
    attach, detach = 16, 17  # PTRACE_ATTACH, PTRACE_DETACH
    with child("import threading; threading.Event().wait()") as pid:
        facts_with(pid, Wait.FOREVER)
        if libc.ptrace(attach, pid, None, None) != 0:
            pytest.skip(f"ptrace is not permitted here: {os.strerror(ctypes.get_errno())}")
        try:
            facts = until(
                lambda: (seen := procfs.read_process(pid)) and seen.state == "t" and seen, "a tracing stop"
            )
            assert facts.tracer_pid == os.getpid()
            assert not blocked_forever(facts)
        finally:
            os.waitpid(pid, 0)
            libc.ptrace(detach, pid, None, None)


def test_waiting_for_a_child_that_sleeps_is_not_for_ever():
    with child("import subprocess; subprocess.run(['sleep', '100'])") as pid:
        facts = until(
            lambda: (seen := procfs.read_process(pid)) and seen.child_waits == (Wait.TIMED,) and seen,
            "a child that sleeps",
        )
        assert facts.children == 1
        assert not blocked_forever(facts)


def test_waiting_for_a_child_that_waits_for_ever_is():
    code = "pid = os.fork()\nif pid == 0:\n  import ctypes; ctypes.CDLL(None).pause()\nos.waitpid(pid, 0)"
    with child(code) as pid:
        facts = until(
            lambda: (seen := procfs.read_process(pid)) and blocked_forever(seen) and seen, "a blocked tree"
        )
        assert facts.children == 1


SLEEPER = "if os.fork() == 0:\n  import time; time.sleep(100)\n"
LOCKED = "import threading; l = threading.Lock(); l.acquire(); l.acquire()\n"


def test_no_child_opens_a_lock_of_its_parent():
    with child(SLEEPER + LOCKED) as pid:
        facts = until(
            lambda: (seen := procfs.read_process(pid)) and seen.child_waits == (Wait.TIMED,) and seen,
            "a lock beside a child that sleeps",
        )
        assert blocked_forever(facts)
        assert at_rest(facts, main_forever=True)


def test_a_handler_of_sigchld_may_open_it():
    handler = "import signal; signal.signal(signal.SIGCHLD, lambda *a: None)\n"
    with child(SLEEPER + handler + LOCKED) as pid:
        facts = facts_with(pid, Wait.FOREVER)
        assert facts.heeds_children
        assert not blocked_forever(facts)
        assert not at_rest(facts, main_forever=True)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_pythons_own_helpers_end_only_with_the_rank(method: str, tmp_path: Path):
    """Beside a handler such as the DataLoader's."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing as m, os, signal, threading, time\n"
        "NAME = 'import ctypes; ctypes.CDLL(None).prctl(15, b\"pt_data_worker\", 0, 0, 0)'\n"
        "def work():\n  exec(NAME); time.sleep(100)\n"
        "if __name__ == '__main__':\n"
        "  signal.signal(signal.SIGCHLD, lambda *a: None)\n"
        f"  c = m.get_context({method!r})\n"
        "  c.Process(target=work, daemon=True).start()\n"
        "  lock = threading.Lock(); lock.acquire(); lock.acquire()\n"
    )
    with child(f"os.execv(sys.executable, [sys.executable, {str(script)!r}])") as pid:
        facts = until(
            lambda: (
                (seen := procfs.read_process(pid)) and seen.children >= 2 and blocked_forever(seen) and seen
            ),
            "a lock beside a worker and the helpers that it needs",
        )
        assert not facts.heeds_children


# Each waits for another process's work in a way that looks, from its main thread, like a deadlock.
WAITING_FOR_CHILDREN = {
    "a pool": "import multiprocessing as m, time\nm.get_context('fork').Pool(1).apply(time.sleep, (100,))",
    "an executor": (
        "import time\nfrom concurrent.futures import ProcessPoolExecutor as E\n"
        "E(1).submit(time.sleep, 100).result()"
    ),
    "a thread that reads a pipe": (
        "import threading, queue, time\nr, w = os.pipe()\n"
        "if os.fork() == 0: time.sleep(100); os.write(w, b'x')\n"
        "os.close(w); q = queue.Queue()\n"
        "threading.Thread(target=lambda: q.put(os.read(r, 1)), daemon=True).start()\nq.get()"
    ),
    "a thread that waits for a child's end": (
        "import threading, subprocess\n"
        "t = threading.Thread(target=subprocess.run, args=(['sleep', '100'],), daemon=True)\n"
        "t.start()\nthreading.Event().wait()"
    ),
    "a queue of another process": (
        "import multiprocessing as m, time\nc = m.get_context('fork'); q = c.Queue()\n"
        "c.Process(target=lambda: (time.sleep(100), q.put(1)), daemon=True).start()\nq.get()"
    ),
    "a semaphore that another process posts": (
        "import multiprocessing as m, time\nc = m.get_context('fork'); s = c.Semaphore(0)\n"
        "c.Process(target=lambda: (time.sleep(100), s.release()), daemon=True).start()\ns.acquire()"
    ),
}


@pytest.mark.parametrize("name", WAITING_FOR_CHILDREN)
def test_who_waits_for_a_childs_work_is_never_blocked_for_ever(name: str):
    with child(WAITING_FOR_CHILDREN[name]) as pid:
        until(lambda: (seen := procfs.read_process(pid)) and seen.children, "a child")
        end = time.monotonic() + 0.7
        while time.monotonic() < end:
            facts = procfs.read_process(pid)
            assert facts is not None
            assert not blocked_forever(facts), facts
            assert not at_rest(facts, main_forever=True), facts
            time.sleep(0.02)


def test_a_busy_second_thread_is_life():
    code = (
        "import threading, time\n"
        "threading.Thread(target=lambda: [time.sleep(.001) for _ in iter(int, 1)], daemon=True).start()\n"
        "threading.Event().wait()"
    )
    with child(code) as pid:
        facts = facts_with(pid, Wait.FOREVER)
        assert len(facts.threads) == 2
        assert facts.threads[0].tid == pid
        assert not blocked_forever(facts)
        skipped = procfs.read_process(pid, skip_tids=frozenset({facts.threads[1].tid}))
        assert skipped is not None
        assert [thread.tid for thread in skipped.threads] == [pid]


NAME_THREAD = "import ctypes; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)\n"


def test_service_threads_are_told_by_a_name_of_their_own():
    code = (
        "import threading, time\ndef loop():\n  "
        + NAME_THREAD.format(name=b"gloo_tcp_loop")
        + "  while True: time.sleep(.01)\n"
        "threading.Thread(target=loop, daemon=True).start()\nthreading.Event().wait()"
    )
    with child(code) as pid:
        until(
            lambda: (seen := procfs.read_process(pid)) and blocked_forever(seen), "a rank with an idle loop"
        )


def test_a_name_inherited_from_the_process_says_nothing():
    code = (
        NAME_THREAD.format(name=b"cuda-EvtHandlr") + "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(100,), daemon=True).start()\nthreading.Event().wait()"
    )
    with child(code) as pid:
        until(
            lambda: (
                (seen := procfs.read_process(pid))
                and [thread.wait for thread in seen.threads] == [Wait.FOREVER, Wait.TIMED]
            ),
            "a second thread that is seen to sleep",
        )


def test_names_with_spaces_parentheses_and_newlines():
    code = NAME_THREAD.format(name=b"a) R 1 (b\n)") + "import time; time.sleep(100)"
    with child(code) as pid:
        facts = facts_with(pid, Wait.TIMED)
        assert facts.threads[0].name == "a) R 1 (b\n)"
        assert procfs.state_of(pid) == "S"
        assert procfs.parents()[pid] == os.getpid()


def test_trees_and_orphans():
    code = (
        "import time\n"
        "if os.fork() == 0:\n"
        "  if os.fork() == 0: time.sleep(100)\n"
        "  os._exit(0)\n"  # its child becomes an orphan
        "os.wait()\n"
        "if os.fork() == 0:\n"
        "  if os.fork() == 0: time.sleep(100)\n"
        "  time.sleep(100)\n"
        "time.sleep(100)"
    )
    with child(code) as pid:
        table = until(
            lambda: (
                (seen := procfs.ProcessTable.take())
                and len(seen.tree(pid)) == 3
                and 1 not in seen.tree(pid)
                and seen
            ),
            "two descendants and an orphan",
        )
        direct = procfs.descendants(pid, table.parent)
        assert len(direct) == 2
        assert table.parent[direct[0]] == pid
        assert table.parent[direct[1]] == direct[0]
        (orphan,) = set(table.tree(pid)) - set(direct)
        assert table.parent[orphan] != pid
        assert set(procfs.descendants(os.getpid())) >= {pid, *direct}


def test_a_table_with_a_loop_ends():
    assert procfs.descendants(1, {2: 1, 3: 2, 1: 3}) == [2, 3]


def test_cpu_and_io_grow_with_work_and_include_children():
    code = (
        "import subprocess\n"
        'subprocess.run([sys.executable, \'-c\', \'f = open("/dev/null", "wb", 0)\\n'
        "for _ in range(3000): f.write(bytes(10000))\\nfor _ in range(5000000): pass'])\n"
        "import threading; threading.Event().wait()"
    )
    with child(code) as pid:
        before = procfs.read_process(pid)
        assert before is not None
        done = until(
            lambda: (
                (seen := procfs.read_process(pid)) and seen.io_bytes > before.io_bytes + 30_000_000 and seen
            ),
            "30 MB of writes by a child",
        )
        final = until(
            lambda: (seen := procfs.read_process(pid)) and blocked_forever(seen) and seen,
            "the end of the child",
        )
        assert final.cpu_s > before.cpu_s
        assert final.io_bytes >= done.io_bytes
        assert final.rss_bytes > 1 << 20


def test_zombies_and_the_gone():
    with subprocess.Popen(["true"]) as process:
        until(lambda: procfs.state_of(process.pid) == "Z", "a zombie")
        facts = procfs.read_process(process.pid)
        assert facts is not None
        assert facts.state == "Z"
        assert not blocked_forever(facts)
    assert procfs.state_of(process.pid) is None
    assert procfs.read_process(process.pid) is None
    assert not procfs.catches(process.pid, signal.SIGTERM)


def test_handlers_are_seen():
    with child("import signal, time; signal.signal(10, print); os.write(1, b'!'); time.sleep(100)") as pid:
        facts_with(pid, Wait.TIMED)
        assert procfs.catches(pid, 10)
        assert not procfs.catches(pid, 12)


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user's process to look at: run as root")
def test_a_process_we_may_not_look_at_proves_nothing():
    probe = (
        "import os, sys\nfrom closeranks.agent import procfs\n"
        "from closeranks.policy.waits import blocked_forever\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "seen = procfs.read_process(int(sys.argv[1]))\n"
        "print(seen is not None and not blocked_forever(seen) and not seen.threads[0].syscall, seen)"
    )
    with child("import threading; threading.Event().wait()") as pid:
        facts_with(pid, Wait.FOREVER)
        source = str(Path(procfs.__file__).parents[2])
        result = subprocess.run(
            [sys.executable, "-c", probe, str(pid)],
            env={**os.environ, "PYTHONPATH": source},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.startswith("True"), result.stdout


def test_at_the_bounds(monkeypatch: pytest.MonkeyPatch):
    code = (
        "import threading\n"
        "for _ in range(4): threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "threading.Event().wait()"
    )
    with child(code) as pid:
        until(lambda: (seen := procfs.read_process(pid)) and len(seen.threads) == 5, "five threads")
        facts = facts_with(pid, Wait.FOREVER)
        assert blocked_forever(facts)
        monkeypatch.setattr(procfs, "_MAX_THREADS", 3)
        facts = facts_with(pid, Wait.FOREVER)
        assert len(facts.threads) == 4
        assert facts.threads[-1].name == "2 more threads"
        assert not blocked_forever(facts)
    with child("r, w = os.pipe(); os.read(r, 1)") as pid:
        facts_with(pid, Wait.FOREVER)
        monkeypatch.setattr(procfs, "_MAX_LINKS", 3)
        facts_with(pid, Wait.EXTERNAL)  # too many descriptors to know who holds the pipe


def test_more_children_than_we_look_at(monkeypatch: pytest.MonkeyPatch):
    code = (
        "import ctypes\nfor _ in range(3):\n  pid = os.fork()\n  if pid == 0: ctypes.CDLL(None).pause()\n"
        "os.waitpid(pid, 0)"
    )
    with child(code) as pid:
        until(lambda: (seen := procfs.read_process(pid)) and blocked_forever(seen), "a blocked tree")
        monkeypatch.setattr(procfs, "_MAX_DESCENDANTS", 2)
        facts = facts_with(pid, Wait.FOREVER)
        assert facts.children == 3
        assert not blocked_forever(facts)


GLOO = """
import threading, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512))
model(torch.randn(256, 512)).sum().backward()
if rank == 1:
    threading.Event().wait()
model(torch.randn(256, 512)).sum().backward()
"""


@pytest.mark.torch
def test_a_real_rank_that_blocks_and_one_that_waits_for_it_in_ddp(tmp_path: Path):
    """With all the threads that torch, gloo and OpenMP bring along."""
    with contextlib.ExitStack() as stack:
        waiter, blocked = (
            stack.enter_context(child(GLOO, args=(str(rank), str(tmp_path / "store")), threads=4))
            for rank in (0, 1)
        )
        facts = until(
            lambda: (
                (seen := procfs.read_process(blocked))
                and blocked_forever(seen)
                and len(seen.threads) > 3
                and seen
            ),
            "a rank that is blocked for ever",
            120.0,
        )
        assert not facts.children
        other = until(
            lambda: (seen := procfs.read_process(waiter)) and at_rest(seen, main_forever=True) and seen,
            "a rank that waits in a collective",
            120.0,
        )
        assert not blocked_forever(other)  # its collective has a time limit, so it is no proof
        assert blocked_forever(until(lambda: procfs.read_process(blocked), "the blocked rank"))
