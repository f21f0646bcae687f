"""What errors say about their own rank. The texts are those that torch, gloo, NCCL and Python print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.diagnose.messages import (
    Blame,
    named_absentees,
    parse_traceback,
    read_error,
    read_text,
)
from closeranks.taxonomy import LEAVES

from .scenes import CLOSED, GLOO_ABORT, RESET, TIMED_OUT

OWN = [
    ("ModuleNotFoundError", "No module named 'apex'", "app.env_import"),
    ("ImportError", "/lib/libx.so: undefined symbol: _ZN2at", "app.env_import"),
    ("OSError", "libcudart.so.12: cannot open shared object file: No such file", "app.env_import"),
    ("FileNotFoundError", "[Errno 2] No such file or directory: 'data.bin'", "app.config"),
    ("PermissionError", "[Errno 13] Permission denied: '/ckpt'", "app.config"),
    ("argparse.ArgumentError", "argument --lr: invalid float value", "app.config"),
    ("SystemExit", "2", "app.config"),
    ("SystemExit", "3", "app.exception"),
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", "app.cuda_oom"),
    ("torch.cuda.OutOfMemoryError", "HIP out of memory", "app.cuda_oom"),
    ("RuntimeError", "CUDA out of memory. Tried to allocate", "app.cuda_oom"),
    ("MemoryError", "", "app.host_oom"),
    ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "app.host_oom"),
    ("OSError", "[Errno 28] No space left on device", "storage.full"),
    ("RuntimeError", "unable to write to file </torch_1>: No space left on device /dev/shm", "app.shm"),
    ("RuntimeError", "DataLoader worker (pid 8) is killed by signal: Bus error. It is", "app.shm"),
    ("RuntimeError", "DataLoader worker (pid(s) 12) exited unexpectedly", "app.exception"),
    ("RuntimeError", "DataLoader worker (pid 12) is killed by signal: Killed.", "app.host_oom"),
    ("RuntimeError", "DataLoader timed out after 30 seconds", "data.stall"),
    ("OSError", "[Errno 5] Input/output error: '/mnt/ckpt'", "storage.io_error"),
    ("OSError", "[Errno 116] Stale file handle", "storage.stale_handle"),
    ("RuntimeError", "The server socket has failed to listen: EADDRINUSE, errno 98", "comm.port_in_use"),
    ("OSError", "[Errno 98] Address already in use", "comm.port_in_use"),
    ("torch.AcceleratorError", "CUDA error: device-side assert triggered", "app.device_assert"),
    ("RuntimeError", "CUDA error: an illegal memory access was encountered", "app.cuda_memfault"),
    ("RuntimeError", "CUDA error: uncorrectable ECC error encountered", "gpu.hbm"),
    ("RuntimeError", "PytorchStreamReader failed: failed finding central directory", "storage.ckpt_corrupt"),
    ("AssertionError", "loss is nan at step 12", "app.numerics_nan"),
    ("RuntimeError", "Function 'MulBackward0' returned nan values in its 0th output.", "app.numerics_nan"),
    ("KeyError", "'nan'", "app.exception"),
    ("ValueError", "bad batch", "app.exception"),
    ("RuntimeError", "banana", "app.exception"),
    ("", "", "app.exception"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "leaf"), OWN)
def test_own_faults(kind: str, message: str, leaf: str) -> None:
    reading = read_error(kind, message)
    assert (reading.leaf, reading.blame) == (leaf, Blame.OWN)
    assert reading.leaf in LEAVES


LOST = [
    CLOSED, RESET, "Broken pipe", "[Errno 32] Broken pipe", "Connection reset by peer",
    "NCCL error in: x.cpp:1, remote process exited or there was a network error, NCCL version 2.27.3",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "recvValue failed on SocketImpl(fd=12, addr=[localhost]:1): failed to recv, got 0 bytes",
    "[Rank 3] NCCL communicator was aborted on rank 3.",
    "Connection was likely closed. Did the remote server shutdown or crash?",
]  # fmt: skip
WAITED = [
    TIMED_OUT, "store->get('0') got error: Socket Timeout", "Socket Timeout",
    "wait timeout after 300000ms, keys: /default_pg/0//cpu//0/0",
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)",
    "The client socket has timed out after 60000ms while trying to connect to (127.0.0.1, 29500).",
    "Rank 1 failed to pass monitoredBarrier in 5000 ms",
    "Application timeout caused pair closure",
]  # fmt: skip


@pytest.mark.parametrize("message", LOST)
def test_lost_peers(message: str) -> None:
    reading = read_error("torch.distributed.DistBackendError", message)
    assert (reading.blame, reading.timeout) == (Blame.PEER, False)


@pytest.mark.parametrize("message", WAITED)
def test_waits_in_vain(message: str) -> None:
    reading = read_error("RuntimeError", message)
    assert (reading.blame, reading.timeout) == (Blame.PEER, True)


def test_mismatches() -> None:
    assert read_text(GLOO_ABORT) is not None
    for text in (
        GLOO_ABORT,
        "Detected mismatch between collectives on ranks. Rank 0 is running collective: ...",
    ):
        assert read_error("RuntimeError", text).blame is Blame.MISMATCH


WRAPPED = """Traceback (most recent call last):
  File "/home/user/job/train.py", line 52, in step
    dist.all_reduce(x)
RuntimeError: {first}

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/user/job/train.py", line 90, in <module>
    main()
  File "/home/user/job/train.py", line 55, in step
    raise TrainingAborted("giving up")
job.TrainingAborted: giving up
"""


def test_the_cause_of_a_chain_decides() -> None:
    assert read_error("job.TrainingAborted", "giving up", WRAPPED.format(first=CLOSED)).blame is Blame.PEER
    full = read_error("job.TrainingAborted", "giving up", WRAPPED.format(first="No space left on device"))
    assert (full.leaf, full.blame) == ("storage.full", Blame.OWN)
    own = read_error("job.TrainingAborted", "giving up", WRAPPED.format(first="bad batch"))
    assert (own.leaf, own.blame) == ("app.exception", Blame.OWN)
    late = read_error("RuntimeError", CLOSED, WRAPPED.format(first="CUDA out of memory"))
    assert (late.leaf, late.blame) == ("app.cuda_oom", Blame.OWN)


def test_a_lost_server_is_not_a_lost_rank() -> None:
    inside = (
        'Traceback (most recent call last):\n  File "/opt/lib/python3/site-packages/{}/x.py", line 1, in f\n'
    )
    for library in ("urllib3", "requests", "botocore", "huggingface_hub"):
        reading = read_error("ConnectionResetError", "Connection reset by peer", inside.format(library))
        assert (reading.leaf, reading.blame) == ("app.exception", Blame.OWN)
    assert (
        read_error("ConnectionResetError", "Connection reset by peer", inside.format("torch")).blame
        is Blame.PEER
    )


def test_parse_traceback() -> None:
    parsed = parse_traceback(WRAPPED.format(first="a: b"))
    assert parsed.exceptions == ("RuntimeError: a: b", "job.TrainingAborted: giving up")
    assert parsed.places[-1] == ("/home/user/job/train.py", 55)
    assert parse_traceback("").exceptions == ()
    assert parse_traceback("Traceback (most recent call last):\nKeyboardInterrupt").exceptions == (
        "KeyboardInterrupt",
    )
    assert len(parse_traceback(WRAPPED * 1000).exceptions) <= 32


def test_named_absentees() -> None:
    assert named_absentees("[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 5000 ms") == (1, 3)
    assert named_absentees("Rank 12 failed to pass monitoredBarrier") == (12,)
    assert named_absentees("nothing of the kind") == ()


@given(st.text(), st.text(), st.text())
def test_any_text_is_taken(kind: str, message: str, traceback: str) -> None:
    assert read_error(kind, message, traceback).leaf in LEAVES
    assert read_error("RuntimeError", message * 50, WRAPPED.format(first=message) + traceback).leaf in LEAVES


def test_long_texts_take_no_time() -> None:
    """Patterns with a bounded look-ahead: a log of megabytes is cut before it is searched."""
    for text in (
        "a" * 5_000_000,
        "/dev/shm" * 500_000,
        "peer " * 1_000_000,
        "Rank 1, " * 500_000,
        "\n" * 3_000_000,
    ):
        read_error(text, text, text)
        named_absentees(text)
