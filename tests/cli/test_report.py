from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from closeranks.cli.main import main
from closeranks.controller.journal import Journal
from closeranks.controller.runs import create_run_dir, fallback_runs_dir

S = 10**9
WALL = 1_796_041_615 * S


def add(journal: Journal, t_s: int, kind: str, **data: object) -> None:
    journal.append(kind, data, generation=0, wall_ns=WALL + t_s * S, mono_ns=t_s * S)


def write_run(runs: Path, name: str = "train.py", *, finished: bool = True, argv0: str = "train.py") -> Path:
    """10 s of start-up, 80 s of steps, a kill of rank 1 that costs 5 s, 5 s more of steps."""
    run = create_run_dir(runs, name)
    with Journal.create(run / "journal.db") as journal:
        fill(journal, finished=finished, argv0=argv0)
    return run


def fill(journal: Journal, *, finished: bool, argv0: str = "train.py") -> None:
    add(journal, 0, "run_started", argv=[argv0], world_size=2, node="here", version="0.1.0")
    add(journal, 1, "generation_started", generation=0)
    add(journal, 10, "first_step", generation=0)
    add(journal, 90, "progress", generation=0, step=81, checkpoints=8, checkpoint_step=81)
    trigger = {"kind": "exit", "ranks": [1], "detail": "rank 1 was killed by SIGKILL"}
    add(journal, 91, "detected", generation=0, incident_id="a", trigger=trigger, broke_mono_ns=90 * S)
    add(journal, 92, "killed", generation=0, seconds=1.0)
    add(journal, 92, "generation_started", generation=1)
    add(journal, 95, "first_step", generation=1)
    add(journal, 100, "progress", generation=1, step=5, checkpoints=1, checkpoint_step=5)
    if finished:
        add(journal, 100, "finished", exit_code=0, reason="done")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # runs that this machine keeps there are not meant
    return tmp_path / "closeranks-runs"


def report(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from closeranks.cli.main import main; sys.exit(main())"]
    return subprocess.run(
        [*command, "report", *args], capture_output=True, text=True, check=False, env={**os.environ, **env}
    )


def test_the_newest_run_is_reported_by_default(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(runs, "other.py")
    run = write_run(runs)
    assert main(["report"]) == 0
    out = capsys.readouterr().out
    assert run.name in out
    assert "ETTR 85.0 %" in out
    assert "rank 1 was killed by SIGKILL" in out
    assert "\x1b" not in out, "no terminal, no colours"
    assert out.endswith("\n")
    assert not out.endswith("\n\n")


def test_a_run_by_prefix_by_path_and_with_runs_dir(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(runs)
    for args in (
        [run.name[:10]],
        [str(run)],
        [f"closeranks-runs/{run.name}"],
        ["--runs-dir", str(runs), "latest"],
    ):
        assert main(["report", *args]) == 0
        assert capsys.readouterr().out.split()[0] == run.name


def test_json_is_one_document_and_nothing_else(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(runs)
    assert main(["report", "--json"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert captured.err == ""
    assert (data["job"], data["outcome"], data["ettr"]) == (run.name, "finished", 0.85)
    assert data["buckets_s"]["detect"] == 1.0
    assert data["incidents"][0]["culprit_ranks"] == [1]


def test_a_live_run_is_running_and_one_whose_agent_died_is_interrupted(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create_run_dir(runs, "train.py")
    with Journal.create(run / "journal.db") as journal:
        fill(journal, finished=False)
        assert main(["report", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["outcome"] == "running"
    assert main(["report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "interrupted"


AGENT = """
import sys, time
from closeranks.controller.journal import Journal
journal = Journal.create(sys.argv[1])
journal.append("run_started", {"argv": ["train.py"]}, wall_ns=0, mono_ns=0)
journal.append("notice", {"level": "info", "text": "x"}, wall_ns=5 * 10**9, mono_ns=5 * 10**9)
print("ready", flush=True)
time.sleep(600)
"""


def test_another_process_is_seen_to_live_and_to_be_killed(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create_run_dir(runs, "train.py")
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(run / "journal.db")], stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "ready\n"
        assert main(["report", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["outcome"] == "running"
        agent.send_signal(signal.SIGKILL)
    assert main(["report", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["outcome"], data["elapsed_s"]) == ("interrupted", 5.0)


def test_list_shows_newest_first_and_what_cant_be_read(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for stamp, finished in (("20261130-000000-a-0001", True), ("20261201-000000-b-0002", False)):
        (runs / stamp).mkdir(parents=True)
        with Journal.create(runs / stamp / "journal.db") as journal:
            fill(journal, finished=finished)
    (runs / "20261202-000000-c-0003").mkdir()
    assert main(["report", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [f"2026{d}" for d in (
        "1202-000000-c-0003", "1201-000000-b-0002", "1130-000000-a-0001")]  # fmt: skip
    assert "unreadable" in lines[1]
    assert lines[3].split()[1:] == ["finished", "1m", "40s", "1", "85.0", "%"]
    assert main(["report", "--list", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row.get("outcome") for row in data["runs"]] == [None, "interrupted", "finished"]


def test_list_opens_the_newest_only(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(30):
        (runs / f"20261130-0000{n:02}-a-0001").mkdir(parents=True)
    assert main(["report", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 20 + 1
    assert lines[-1] == "and 10 older"
    assert main(["report", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 30


def test_list_without_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--list"]) == 0
    assert f"no runs under {runs}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing"], "no run 'nothing'"),
        (["latest"], "no runs under"),
        (["--json"], "no runs under"),
        (["--runs-dir", "/dev/null"], "can't list runs"),
        (["a\0b"], "no run"),
    ],
)
def test_bad_input_is_exit_2_one_line_and_nothing_on_stdout(
    args: list[str], message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_journal_that_is_none_is_exit_2(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = create_run_dir(runs, "train.py")
    assert main(["report"]) == 2
    assert "No such file" in capsys.readouterr().err
    (run / "journal.db").write_text("{}")
    assert main(["report", "--json"]) == 2
    captured = capsys.readouterr()
    assert "not a journal" in captured.err
    assert captured.out == ""


def test_a_journal_damaged_further_on_is_reported_as_far_as_it_goes(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create_run_dir(runs, "train.py")
    path = run / "journal.db"
    with Journal.create(path) as journal:
        fill(journal, finished=False)
        for n in range(2000):
            add(journal, 101 + n, "progress", generation=1, step=6 + n, pad="x" * 60)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 1024 * 1024
    content[middle : middle + 20 * 1024] = bytes(20 * 1024)
    path.write_bytes(content)
    assert main(["report"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "is damaged after record" in out
    assert "what followed is missing here" in out


def test_an_encoding_without_blocks_gets_ascii(runs: Path) -> None:
    write_run(runs, argv0="tr\u00e4in.py")
    done = report(PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "tr?in.py" in done.stdout
    assert "####" in done.stdout


def test_undecodable_names_do_not_stop_it(runs: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd\udcff"
    odd.mkdir()
    write_run(odd, argv0="x\udcff.py")
    for encoding in ("utf-8", "latin-1", "ascii"):
        done = report("--runs-dir", str(odd), PYTHONIOENCODING=encoding)
        assert (done.returncode, done.stderr) == (0, "")
        assert report("nope", "--runs-dir", str(odd), PYTHONIOENCODING=encoding).returncode == 2


def test_colours_on_a_terminal_unless_asked_not_to(runs: Path) -> None:
    write_run(runs)
    assert "\x1b[1m" in in_terminal(TERM="xterm")
    assert "\x1b" not in in_terminal(TERM="xterm", NO_COLOR="1")
    assert "\x1b" not in in_terminal(TERM="dumb")
    assert "\x1b[1m" in report(FORCE_COLOR="1").stdout


def in_terminal(**env: str) -> str:
    """What the report prints on a pseudo-terminal."""
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-c", "from closeranks.cli.main import main; main(['report'])"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, env={**clean, **env}) as process:
        os.close(theirs)
        out = b"".join(chunks(ours))
        os.close(ours)
    assert process.returncode == 0
    return out.decode()


def chunks(fd: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(fd, 65536)
        except OSError:  # EIO: the other side is closed
            return
        if not chunk:
            return
        yield chunk


def test_a_reader_that_leaves_early_is_no_traceback(runs: Path) -> None:
    write_run(runs)
    command = "import sys; from closeranks.cli.main import main; sys.exit(main(['report']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", command], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert "Traceback" not in done.stderr


def test_a_large_journal_takes_seconds(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = create_run_dir(runs, "train.py")
    with Journal.create(run / "journal.db") as journal:
        fill(journal, finished=False)
        for n in range(20_000):
            add(journal, 101 + n, "progress", generation=1, step=6 + n, checkpoints=1, checkpoint_step=n)
            assert n % 5000 or journal.flush(60)
    started = time.monotonic()
    assert main(["report"]) == 0
    assert time.monotonic() - started < 60
    assert "5h 35m" in capsys.readouterr().out


@pytest.mark.parametrize("here", ["nothing", "an empty directory", "a file"])
def test_a_run_that_had_to_go_elsewhere_is_found_where_there_is_none_here(
    runs: Path, here: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if here == "an empty directory":
        runs.mkdir()
    elif here == "a file":
        runs.touch()
    run = write_run(fallback_runs_dir())
    assert main(["report"]) == 0
    captured = capsys.readouterr()
    assert run.name in captured.out
    assert f"runs that had to go elsewhere: {fallback_runs_dir()}" in captured.err
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().err == "", "a path needs no place"


def test_runs_here_come_before_those_elsewhere(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(fallback_runs_dir(), "elsewhere.py")
    run = write_run(runs)
    assert main(["report"]) == 0
    captured = capsys.readouterr()
    assert run.name in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("verb", [["report"], ["inject", "kill"], ["drain", "node1"]], ids=lambda v: v[0])
def test_the_name_that_run_has_for_the_directory_is_taken_too(
    runs: Path, verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(runs.parent / "mine")
    code = main([*verb, "--log-dir", "mine"])
    captured = capsys.readouterr()
    if verb == ["report"]:
        assert (code, run.name in captured.out) == (0, True)
    else:
        assert code == 2
        assert f"no job is running in {run}" in captured.err
