"""``closeranks agent`` as whoever writes an engine meets it: help, and errors that say what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GOOD = ["--controller", "127.0.0.1:4711", "--run-dir", "job"]


def agent(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "closeranks", "agent", *argv],
        capture_output=True, text=True, timeout=60, check=False, cwd=folder, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_help_says_what_each_flag_is(tmp_path: Path) -> None:
    done = agent(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for flag in ("--controller", "--credentials", "--run-dir", "--node", "--session", "--behind-proxy"):
        assert f"{flag}" in done.stdout
    assert "engines call this" in done.stdout and "example: closeranks agent" in done.stdout


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "--controller"),
        (["--controller", "h:1", "--", "t.py"], "--run-dir"),
        (["--controller", "nowhere", "--run-dir", "job", "--", "t.py"], "'nowhere' is neither HOST:PORT nor"),
        (["--controller", "h:0", "--run-dir", "job", "--", "t.py"], "'h:0' is neither HOST:PORT nor"),
        (GOOD, "RUN"),
        (
            [*GOOD, "--", "--nproc-per-node", "zero", "t.py"],
            "--nproc-per-node 'zero': want a number of ranks",
        ),
        ([*GOOD, "--", "--no-such-flag", "t.py"], "--no-such-flag"),
        ([*GOOD, "--", "--nnodes", "2", "t.py"], "--nnodes asks for 2 nodes"),
        ([*GOOD, "--colour", "red", "--", "t.py"], "--colour"),
    ],
)
def test_bad_flags_are_named_and_start_nothing(tmp_path: Path, argv: list[str], told: str) -> None:
    done = agent(tmp_path, *argv)
    assert done.returncode == 2
    assert told in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_credentials_that_can_t_be_read_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    done = agent(tmp_path, *GOOD, "--credentials", "none.pem", "--", "t.py")
    assert done.returncode != 0
    assert "none.pem" in done.stderr and "Traceback" not in done.stderr


def test_a_run_directory_that_can_t_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("in the way")
    done = agent(tmp_path, *GOOD, "--", "t.py")
    assert done.returncode != 0
    assert "can't make" in done.stderr and "Traceback" not in done.stderr


def test_another_machine_is_never_spoken_to_without_credentials(tmp_path: Path) -> None:
    """192.0.2.1 is nobody's (RFC 5737)."""
    done = agent(tmp_path, "--controller", "192.0.2.1:4711", "--run-dir", "job", "--", "t.py")
    assert done.returncode != 0
    assert "give this agent the job's credentials" in done.stderr and "Traceback" not in done.stderr
