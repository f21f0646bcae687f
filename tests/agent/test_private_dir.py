"""The job's private directory, and those that killed jobs have left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from closeranks.agent import private_dir
from closeranks.agent.private_dir import PrivateDir
from closeranks.errors import ConfigError

OWNER = """
import sys, time
from closeranks.agent import private_dir
private_dir.bases = lambda: [sys.argv[1]]
print(private_dir.PrivateDir.make("20261201-job-abcd").path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(private_dir, "bases", lambda: [str(tmp_path)])
    return tmp_path


def age(directory: Path) -> None:
    os.utime(directory / "lock", (0, 0))


def test_made_for_one_job_and_removed_with_all_in_it(base: Path) -> None:
    made = PrivateDir.make("20261201-042655-train-a1b2")
    assert made.path.parent == base
    assert made.path.name.startswith("closeranks-1201-042655-train-a1b2"[:11])
    assert made.path.stat().st_mode & 0o777 == 0o700
    (made.path / "g0").mkdir()
    (made.path / "g0/store").write_text("x")
    made.remove()
    made.remove()
    assert list(base.iterdir()) == []


def test_it_stays_while_its_owner_lives_and_goes_with_the_next_job(base: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, base], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        age(theirs)
        PrivateDir.make("a").remove()
        assert theirs.exists()
        owner.send_signal(signal.SIGKILL)
    PrivateDir.make("b").remove()
    assert not theirs.exists()


def test_a_fork_keeps_it(base: Path) -> None:
    """Guard, keeper and agent: the last of them to live counts."""
    made = PrivateDir.make("a")
    age(made.path)
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    os.close(made._lock_fd)
    try:
        PrivateDir.make("b").remove()
        assert made.path.exists()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    PrivateDir.make("c").remove()
    assert not made.path.exists()


def test_what_isnt_surely_abandoned_is_left_alone(base: Path) -> None:
    left = {}
    for name in ("young", "unlocked", "linked", "elsewhere"):
        left[name] = base / f"closeranks-{name}"
        left[name].mkdir()
    lock = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    (left["young"] / "lock").write_bytes(lock)
    (left["linked"] / "lock").symlink_to(left["young"] / "lock")
    (left["elsewhere"] / "lock").write_text("another host's boot")
    age(left["elsewhere"])
    os.utime(left["linked"] / "lock", (0, 0), follow_symlinks=False)
    (base / "closeranks-file").write_text("no directory")
    PrivateDir.make("a").remove()
    assert all(path.exists() for path in left.values())
    age(left["young"])
    PrivateDir.make("b").remove()
    assert not left["young"].exists()


def test_the_first_place_that_has_room(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [base / "full", base / "missing", base / "roomy"]
    for place in (places[0], places[2]):
        place.mkdir()
    monkeypatch.setattr(private_dir, "bases", lambda: list(map(str, places)))
    monkeypatch.setattr(private_dir, "_has_room", lambda directory: "full" not in directory)
    made = PrivateDir.make("a")
    assert made.path.parent == places[2]
    made.remove()
    places[2].rmdir()
    made = PrivateDir.make("a")
    assert made.path.parent == places[0], "the last resort"
    made.remove()


def test_no_place_at_all(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_dir, "bases", lambda: [str(base / "a"), str(base / "b")])
    with pytest.raises(ConfigError, match=r"no place for the ranks to meet: can't write to .*/a nor .*/b$"):
        PrivateDir.make("a")
