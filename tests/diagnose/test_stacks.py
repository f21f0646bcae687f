"""faulthandler's text: the main thread is found in real dumps and in ruined ones, and reasons are told."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.diagnose import stacks
from closeranks.diagnose.stacks import (
    in_collective,
    is_raising,
    parse_faulthandler,
    parse_stacks,
    user_frame,
    why_blocked,
)
from closeranks.evidence import Frame

from .scenes import SCRIPT, STDLIB, TORCH

DUMP = """\
Thread 0x00007f0a37fff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap_inner
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0a6703eb80 (most recent call first):
  File "/home/user/job/train.py", line 18 in run
  File "/home/user/job/train.py", line 28 in <module>
"""

REAL = """
import faulthandler, os, signal, sys, threading, time
faulthandler.register(signal.SIGUSR1, file=sys.stdout, all_threads=True)
def worker():
    threading.Event().wait(20)
def hang():
    print(threading.main_thread().ident, flush=True)
    {how}
for _ in range({threads}):
    threading.Thread(target=worker, daemon=True).start()
time.sleep(0.2)
threading.Timer(0.1, lambda: None).start()
hang()
"""


@pytest.mark.parametrize("threads", [0, 1, 40, 150])
@pytest.mark.parametrize("current", ["main", "other"])
def test_a_real_dump(threads: int, current: str) -> None:
    """Even where another thread runs the handler, and where faulthandler stops after 100 threads."""
    how = "signal.raise_signal(signal.SIGUSR1)"
    if current == "other":
        how = "t = threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), 10))"
        how += "; t.start(); t.join()"
    script = REAL.format(how=how, threads=threads)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    ident, _, dump = done.stdout.partition("\n")
    assert len(parse_stacks(dump)) >= min(threads, 99)
    frames = parse_faulthandler(dump)
    if threads < 99:
        assert [f.function for f in frames][-2:] == ["hang", "<module>"]
        assert parse_faulthandler(dump, int(ident)) == frames
    else:
        assert all(f.function not in ("worker", "_bootstrap") for f in frames)
        assert parse_faulthandler(dump, int(ident)) == frames


def test_main_thread_is_the_last_or_the_one_asked_for() -> None:
    main = (Frame("/home/user/job/train.py", 18, "run"), Frame("/home/user/job/train.py", 28, "<module>"))
    assert parse_faulthandler(DUMP) == main
    assert parse_faulthandler(DUMP, 0x7F0A6703EB80) == main
    assert parse_faulthandler(DUMP, 0x7F0A37FFF6C0)[0].line == 982
    assert parse_faulthandler(DUMP, 1) == ()


def test_the_newest_of_several_dumps() -> None:
    newer = DUMP.replace("line 18 in run", "line 19 in run")
    assert parse_faulthandler(DUMP + "\n" + newer)[0].line == 19
    assert parse_faulthandler(DUMP + "\n" + newer, 0x7F0A6703EB80)[0].line == 19


def test_a_crash_dump_and_newer_pythons() -> None:
    crash = "Fatal Python error: Segmentation fault\n\n" + DUMP + "\nExtension modules: numpy (total: 1)\n"
    assert parse_faulthandler(crash)[0].function == "run"
    named = DUMP.replace("(most", "[python] (most").replace("Garbage", "")
    assert parse_faulthandler(named) == parse_faulthandler(DUMP)
    collecting = (
        "Current thread 0x1 (most recent call first):\n  Garbage-collecting\n"
        + '  File "a.py", line ??? in f\n'
    )
    (thread,) = parse_stacks(collecting)
    assert thread.collecting
    assert thread.frames == (Frame("a.py", 0, "f"),)
    assert why_blocked(thread.frames, collecting=True) == "collects garbage"


def test_ruined_dumps_yield_less_not_errors() -> None:
    assert parse_faulthandler("") == ()
    assert parse_faulthandler("Thread 0xzz (most recent call first):\n  File x\n") == ()
    for cut in range(len(DUMP)):
        frames = parse_faulthandler(DUMP[:cut])
        assert all(f.function != "_bootstrap" for f in frames)
        parse_faulthandler(DUMP[cut:])
    started_only = DUMP.split("\n\n")[0]
    assert parse_faulthandler(started_only) == ()


def test_bounds() -> None:
    block = 'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n\n'
    many = parse_stacks(block * 20_000)
    assert len(many) == stacks.MAX_THREADS
    deep = "Thread 0x1 (most recent call first):\n" + '  File "a.py", line 1 in f\n' * 5000
    assert len(parse_stacks(deep)[0].frames) == stacks.MAX_FRAMES
    long = f'Thread 0x1 (most recent call first):\n  File "{"a" * 590}", line 1 in {"f" * 590}\n'
    (frame,) = parse_stacks(long)[0].frames
    assert len(frame.file) == len(frame.function) == 500
    huge = 'Thread 0x1 (most recent call first):\n  File "' + "a" * 3_000_000
    assert parse_stacks(huge) in ((), (stacks.ThreadStack(1, False, ()),))


@given(st.text(max_size=300), st.integers(0, 2**64))
def test_any_text_is_taken(text: str, ident: int) -> None:
    parse_faulthandler(text, ident)
    parse_faulthandler(DUMP + text)
    parse_faulthandler(text.join(DUMP.partition("\n")))


def test_user_frame_is_the_innermost_of_the_users_own_code() -> None:
    mine = Frame(SCRIPT, 57, "train")
    foreign = [
        Frame(TORCH + "distributed/distributed_c10d.py", 3252, "all_reduce"),
        Frame("/opt/conda/lib/python3.12/queue.py", 171, "get"),
        Frame("/usr/lib/python3/dist-packages/yaml/loader.py", 1, "load"),
        Frame("<frozen importlib._bootstrap>", 1178, "_find_and_load"),
        Frame("/srv/x/src/closeranks/worker/faults.py", 10, "fire"),
        Frame("/build/pytorch/torch/nn/modules/module.py", 1500, "_call_impl"),
        Frame(stacks.__file__, 1, "f"),
    ]
    assert user_frame([*foreign, mine, Frame(SCRIPT, 80, "main")]) == mine
    assert user_frame(foreign) is None
    assert user_frame([]) is None
    at_home = Frame("/home/u/closeranks/examples/train_tiny.py", 99, "main")
    assert user_frame([*foreign, at_home]) == at_home


REASONS = [
    (
        [Frame(STDLIB + "queue.py", 171, "get"), Frame(TORCH + "utils/data/dataloader.py", 1, "_get_data")],
        "data loader",
    ),
    ([Frame(TORCH + "serialization.py", 850, "_save")], "checkpoint"),
    ([Frame(TORCH + "distributed/checkpoint/state_dict_saver.py", 85, "save")], "checkpoint"),
    ([Frame(SCRIPT, 31, "save_checkpoint")], "checkpoint"),
    ([Frame(STDLIB + "threading.py", 327, "wait")], "lock"),
    ([Frame(STDLIB + "threading.py", 1119, "_wait_for_tstate_lock")], "thread"),
    ([Frame(STDLIB + "socket.py", 718, "readinto")], "network"),
    ([Frame(STDLIB + "subprocess.py", 2053, "_try_wait")], "child process"),
    ([Frame(STDLIB + "multiprocessing/connection.py", 395, "_recv")], "another process"),
    ([Frame("<frozen importlib._bootstrap>", 1178, "_find_and_load")], "imports"),
    ([Frame(TORCH + "distributed/distributed_c10d.py", 3252, "all_reduce")], "collective"),
    ([Frame(TORCH + "distributed/distributed_c10d.py", 1800, "init_process_group")], "process group"),
    ([Frame(TORCH + "autograd/graph.py", 865, "_engine_run_backward")], "backward"),
    ([Frame(TORCH + "cuda/__init__.py", 1000, "synchronize")], "GPU"),
    ([Frame("/opt/app/util.py", 4, "sleep")], "sleeps"),
    ([Frame(SCRIPT, 57, "train")], ""),
    ([], ""),
]


@pytest.mark.parametrize(("frames", "words"), REASONS)
def test_why_blocked(frames: list[Frame], words: str) -> None:
    reason = why_blocked(frames)
    assert words in reason
    assert bool(reason) == bool(words)


def test_an_exception_that_is_just_being_written_down() -> None:
    ours = [
        Frame(STDLIB + "linecache.py", 136, "updatecache"),
        Frame(STDLIB + "traceback.py", 690, "__init__"),
        Frame("/opt/venv/lib/closeranks/worker/bootstrap.py", 311, "_report"),
    ]
    assert is_raising(ours)
    assert not is_raising([*ours[:2], Frame(SCRIPT, 57, "_report")])


def test_in_collective() -> None:
    wait = [Frame(TORCH + "distributed/distributed_c10d.py", 3252, "barrier"), Frame(SCRIPT, 57, "train")]
    assert in_collective(wait)
    assert not in_collective([Frame(TORCH + "distributed/distributed_c10d.py", 1, "init_process_group")])
    assert not in_collective([Frame(SCRIPT, 57, "train")])
    assert not in_collective([])
