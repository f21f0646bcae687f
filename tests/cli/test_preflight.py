"""Checks before the start that need a machine we haven't got: given as numbers and files."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from closeranks.cli import preflight, preflight_limits, preflight_port
from closeranks.cli.preflight_limits import Limits, check_ranks, read_limits
from closeranks.errors import ConfigError

MIB = 2**20
AMPLE = Limits(cores=64, memory_bytes=1024 * 1024 * MIB, tasks=1_000_000, files=1_000_000)

# --- how many ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "most", "names"),
    [
        (AMPLE._replace(memory_bytes=300 * MIB), 10, "0.3 GiB is available"),
        (AMPLE._replace(tasks=100), 20, "100 are allowed (cgroup pids.max"),
        (AMPLE._replace(files=60), 10, "60 are allowed (ulimit -Hn)"),
    ],
)
def test_exactly_what_fits_is_taken(limits: Limits, most: int, names: str) -> None:
    assert check_ranks(most, limits, forked=True) == []
    with pytest.raises(ConfigError) as refused:
        check_ranks(most + 1, limits, forked=True)
    assert names in str(refused.value)
    assert f"at most {most} would fit: lower --nproc-per-node" in str(refused.value)


def test_new_interpreters_need_more() -> None:
    limits = AMPLE._replace(memory_bytes=10 * 100 * MIB)
    assert check_ranks(10, limits, forked=True) == []
    with pytest.raises(ConfigError, match=r"210 MiB each.*at most 4 would fit"):
        check_ranks(10, limits, forked=False)


def test_a_thousand_ranks_on_two_cores() -> None:
    small = Limits(cores=2, memory_bytes=22 * 1024 * MIB, tasks=32768, files=20000)
    with pytest.raises(ConfigError, match=r"1,000 ranks need about 29\.3 GiB of memory"):
        check_ranks(1000, small, forked=True)
    (notice,) = check_ranks(1000, AMPLE._replace(cores=2), forked=True)
    assert notice.startswith("1,000 ranks share 2 cores: ")


def test_eight_ranks_a_core_pass_in_silence() -> None:
    assert check_ranks(16, AMPLE._replace(cores=2), forked=True) == []
    assert len(check_ranks(17, AMPLE._replace(cores=2), forked=True)) == 1


def test_no_limits_no_refusal() -> None:
    assert check_ranks(5000, Limits(1024, None, None, None), forked=True) == []


def test_this_machines_limits_make_sense() -> None:
    limits = read_limits()
    assert limits.cores == len(os.sched_getaffinity(0))
    assert limits.memory_bytes is not None
    assert limits.memory_bytes > MIB
    assert limits.tasks is not None
    assert limits.tasks > 10
    check_ranks(1, limits, forked=True)


def _files(root: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _proc(root: Path, cgroup: str) -> Path:
    _files(root, meminfo="MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n", self__cgroup=cgroup)
    (root / "sys/kernel").mkdir(parents=True)
    (root / "sys/kernel/pid_max").write_text("32768\n")
    return root


def test_cgroup_v2_limits_count_page_cache_as_free(tmp_path: Path) -> None:
    proc = _proc(tmp_path / "proc", "0::/job/step\n")
    job = tmp_path / "cg/job"
    (job / "step").mkdir(parents=True)
    (job / "step/memory.max").write_text("max\n")
    (job / "step/pids.max").write_text("max\n")
    (job / "memory.max").write_text(f"{1000 * MIB}\n")
    (job / "memory.current").write_text(f"{900 * MIB}\n")
    (job / "memory.stat").write_text(f"anon 5\nactive_file {100 * MIB}\ninactive_file {300 * MIB}\n")
    (job / "pids.max").write_text("200\n")
    (job / "pids.current").write_text("50\n")
    limits = read_limits(proc, tmp_path / "cg")
    assert limits.memory_bytes == 500 * MIB
    assert limits.tasks == 150


def test_cgroup_v1_limits(tmp_path: Path) -> None:
    proc = _proc(tmp_path / "proc", "8:pids:/job\n4:memory:/job\n1:cpu:/job\n0::/\n")
    memory, pids = tmp_path / "cg/memory", tmp_path / "cg/pids/job"
    (memory / "job").mkdir(parents=True)
    pids.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (memory / "job/memory.limit_in_bytes").write_text(f"{400 * MIB}\n")
    (memory / "job/memory.usage_in_bytes").write_text(f"{300 * MIB}\n")
    (memory / "job/memory.stat").write_text(f"total_inactive_file {50 * MIB}\nactive_file 7\n")
    (pids / "pids.max").write_text("64\n")
    (pids / "pids.current").write_text("70\n")
    limits = read_limits(proc, tmp_path / "cg")
    assert limits.memory_bytes == 150 * MIB
    assert limits.tasks == 0


def test_a_container_sees_its_cgroup_at_the_mount(tmp_path: Path) -> None:
    proc = _proc(tmp_path / "proc", "0::/docker/0123abcd\n")
    (tmp_path / "cg").mkdir()
    (tmp_path / "cg/memory.max").write_text(f"{64 * MIB}\n")
    assert read_limits(proc, tmp_path / "cg").memory_bytes == 64 * MIB


@pytest.mark.parametrize("junk", ["", "max", "x" * 1000, "-5", "9" * 400, "\0\xff"])
def test_unreadable_limits_are_no_limits(tmp_path: Path, junk: str) -> None:
    proc = _proc(tmp_path / "proc", "0::/\ngarbage\n::\n")
    (tmp_path / "cg").mkdir()
    (tmp_path / "cg/memory.max").write_text(junk)
    assert read_limits(proc, tmp_path / "cg").memory_bytes == 8_000_000 * 1024
    assert read_limits(tmp_path / "nothing", tmp_path / "nowhere").memory_bytes is None


# --- /dev/shm ---------------------------------------------------------------------------------------


def _with_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    real = os.statvfs("/")
    fields = [4096, 4096, free_bytes // 4096, free_bytes // 4096, free_bytes // 4096, *real[5:]]
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))


def test_small_shm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_free(monkeypatch, 64 * MIB)
    assert preflight.shm_notice(Path("/dev/shm")) == ""
    _with_free(monkeypatch, 64 * MIB - 4096)
    notice = preflight.shm_notice(Path("/dev/shm"))
    assert notice.startswith("/dev/shm has 64 MiB free: DataLoader workers may die with a bus error")
    assert "--shm-size" in notice


def test_no_shm_is_said(tmp_path: Path) -> None:
    assert "can't be used: DataLoader workers may die" in preflight.shm_notice(tmp_path / "none")


# --- where runs go ----------------------------------------------------------------------------------


def test_a_usable_directory_is_made_and_left_empty(tmp_path: Path) -> None:
    wanted = tmp_path / "a/b"
    assert preflight.usable_runs_dir(str(wanted)) == (str(wanted), "")
    assert list(wanted.iterdir()) == []
    assert preflight.usable_runs_dir(str(wanted)) == (str(wanted), "")


def test_a_fallback_that_is_not_ours_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    trap = tmp_path / "elsewhere"
    trap.mkdir()
    (tmp_path / f"closeranks-runs-{os.getuid()}").symlink_to(trap)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(ConfigError, match="belongs to someone else"):
        preflight.usable_runs_dir(str(tmp_path / "file/runs"))


def _as_root_of_a_namespace(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "reason"), [("ro", "read-only file system"), ("size=4k", "no space left")]
)
def test_a_read_only_or_full_disk(tmp_path: Path, options: str, reason: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o {options} none {disk}"
    if _as_root_of_a_namespace(mount).returncode:
        pytest.skip("this user may not mount anything, not even in a namespace of its own")
    code = f"from closeranks.cli.preflight import usable_runs_dir as f; print(f('{disk}/runs'))"
    done = _as_root_of_a_namespace(f'{mount} && TMPDIR={tmp_path} {sys.executable} -c "{code}"')
    assert done.returncode == 0, done.stderr
    assert reason in done.stdout
    assert f"this run goes to {tmp_path}/closeranks-runs-" in done.stdout


def _without_privileges(code: str) -> str:
    """stderr of a Python that owns its files and may do nothing else; root steps down to that first."""
    down = ["unshare", "--user"] if os.geteuid() == 0 else []
    if down and subprocess.run([*down, "true"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("root may not step down into a namespace of its own")
    command = [*down, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr


def test_an_unreadable_script(tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text("x = 1\n")
    script.chmod(0)
    code = f"from closeranks.cli.main import main; main(['run', {str(script)!r}])"
    assert _without_privileges(code) == f"closeranks: error: can't read {script}: permission denied\n"


# --- ports ------------------------------------------------------------------------------------------


def test_a_free_port_passes_and_stays_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    preflight_port.check(port)
    preflight_port.check(port)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_listener_on_any_address_counts(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as taken:
        try:
            taken.bind((address, 0))
        except OSError:
            pytest.skip(f"no {address} here")
        taken.listen(1)
        port = taken.getsockname()[1]
        assert preflight_port.holder(port).startswith(f"pid {os.getpid()} (")
        with pytest.raises(ConfigError, match=f"port {port} is in use by pid {os.getpid()}"):
            preflight_port.check(port)


def test_a_holder_nobody_can_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    assert preflight_port.holder(29500, tmp_path) == ""
    row = "0: 0100007F:733C 00000000:0000 0A 0:0 0:0 0 0 0 4242 1"
    (tmp_path / "net/tcp").write_text(f"header\n{row}\n")
    (tmp_path / "17").mkdir()
    assert preflight_port.holder(29500, tmp_path) == ""
    (tmp_path / "17/fd").mkdir()
    (tmp_path / "17/fd/3").symlink_to("socket:[4242]")
    assert preflight_port.holder(29500, tmp_path) == "pid 17 (unknown command)"
    (tmp_path / "17/cmdline").write_bytes(b"python\0train.py\0" + b"x" * 5000)
    assert preflight_port.holder(29500, tmp_path).startswith("pid 17 (python train.py xxx")
    assert len(preflight_port.holder(29500, tmp_path)) < 140
    monkeypatch.setattr(preflight_port, "holder", lambda port: "")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        with pytest.raises(ConfigError, match="by a process this user can't look into"):
            preflight_port.check(taken.getsockname()[1])


def test_a_privileged_port() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    if first < 2:
        pytest.skip("every port is everyone's here")
    code = f"from closeranks.cli import preflight_port; preflight_port.check({first - 1})"
    assert f"port {first - 1} is for privileged users" in _without_privileges(code)


def test_limits_are_those_of_a_rank() -> None:
    assert preflight_limits._FORKED_RANK_BYTES == 30 * MIB  # docs/reference/torchrun-flags.md says so
    assert preflight_limits._NEW_RANK_BYTES == 210 * MIB
