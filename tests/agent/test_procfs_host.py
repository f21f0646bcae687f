"""OOM counters of both cgroup versions, the kernel log, and hosts that tell nothing."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from closeranks.agent import procfs_host


def test_host_facts_of_this_host():
    facts = procfs_host.host_facts(procfs_host.oom_baseline())
    assert facts.oom_kills == 0
    assert facts.oom_victims == ()
    assert facts.shm_free_bytes is None or facts.shm_free_bytes >= 0


def fake_host(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


V2 = {
    "proc/self/mountinfo": "40 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n",
    "proc/self/cgroup": "0::/slurm/job_7\n",
    "proc/vmstat": "nr_free_pages 1\noom_kill 10\n",
    "sys/fs/cgroup/slurm/job_7/memory.events": "low 0\noom 2\noom_kill 3\n",
    "sys/fs/cgroup/slurm/job_7/memory.max": "max\n",
    "sys/fs/cgroup/slurm/memory.events": "oom_kill 3\n",
    "sys/fs/cgroup/slurm/memory.max": "4294967296\n",
}


def test_cgroup_v2_counts_this_job_alone(tmp_path: Path):
    fake_host(tmp_path, V2)
    baseline = procfs_host.oom_baseline(root=tmp_path)
    fake_host(tmp_path, {"proc/vmstat": "oom_kill 99\n"})
    facts = procfs_host.host_facts(baseline)
    assert facts.oom_kills == 0  # the host's other jobs are not ours
    assert facts.memory_limit_bytes == 4 << 30  # of the cgroup above
    fake_host(tmp_path, {"sys/fs/cgroup/slurm/job_7/memory.events": "oom_kill 5\n"})
    assert procfs_host.host_facts(baseline).oom_kills == 2


def test_cgroup_v1_in_a_container(tmp_path: Path):
    fake_host(
        tmp_path,
        {
            "proc/self/mountinfo": (
                "40 31 0:38 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                "41 31 0:39 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
            ),
            "proc/self/cgroup": "4:memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
        },
    )
    baseline = procfs_host.oom_baseline(root=tmp_path)
    fake_host(
        tmp_path, {"sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 1\noom_kill 2\n"}
    )
    facts = procfs_host.host_facts(baseline)
    assert facts.oom_kills == 1
    assert facts.memory_limit_bytes == 1 << 30


def test_without_a_memory_cgroup_the_host_counts(tmp_path: Path):
    fake_host(tmp_path, {"proc/vmstat": "oom_kill 10\n", "proc/self/cgroup": "0::/\n"})
    baseline = procfs_host.oom_baseline(root=tmp_path)
    fake_host(tmp_path, {"proc/vmstat": "oom_kill 11\n"})
    facts = procfs_host.host_facts(baseline)
    assert facts.oom_kills == 1
    assert facts.memory_limit_bytes is None


def test_v1_without_a_limit(tmp_path: Path):
    fake_host(tmp_path, {**V2, "sys/fs/cgroup/slurm/memory.max": "9223372036854771712\n"})
    assert procfs_host.host_facts(procfs_host.oom_baseline(root=tmp_path)).memory_limit_bytes is None


def test_a_host_that_tells_nothing(tmp_path: Path):
    facts = procfs_host.host_facts(procfs_host.oom_baseline(root=tmp_path))
    assert facts.oom_kills == 0
    assert facts.shm_free_bytes is None


def kmsg(*texts: bytes, facility: int = 0) -> list[int]:
    """A packet socket stands for /dev/kmsg: one record a read, EAGAIN at the end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.setblocking(False)
        for number, text in enumerate(texts):
            ours.send(b"%d,%d,123456,-;%s\n" % (facility << 3 | 6, number, text))
        return procfs_host._new_victims(theirs.fileno())


def test_victims_in_the_kernel_log():
    assert kmsg(
        b"python invoked oom-killer: gfp_mask=0xcc0, order=0",
        b"Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB",
        b"Out of memory: Killed process 4243 (name) with ) parens",
        b"oom_reaper: reaped process 4242 (python), now anon-rss:0kB",
    ) == [4242, 4243]


def test_only_the_kernel_is_believed():
    text = b"Out of memory: Killed process 1 (python)"
    assert kmsg(text, facility=1) == []
    assert kmsg(b"\xff\x00garbage", text) == [1]


def test_the_kernel_log_is_read_in_bounds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(procfs_host, "_MAX_MESSAGES", 2)
    text = b"Out of memory: Killed process 1 (python)"
    assert kmsg(text, text, text) == [1, 1]


def test_a_baseline_gives_its_descriptor_back():
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        procfs_host.oom_baseline()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
