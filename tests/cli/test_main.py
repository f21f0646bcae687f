"""The command itself, as a process: verbs, help, errors, and how little it loads."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from closeranks import __version__
from closeranks.cli import main as cli
from closeranks.cli.parser import Parser
from closeranks.errors import CloseranksError, UsageError

# What a page of help has no use for, and what would make it slow.
HEAVY = {
    "torch", "numpy", "asyncio", "sqlite3", "http", "socket", "ssl", "subprocess", "multiprocessing",
    "dataclasses", "inspect", "argparse", "json", "logging", "concurrent", "email", "urllib",
}  # fmt: skip


def closeranks(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "closeranks", *argv],
        capture_output=True, text=True, timeout=60, check=False, **options,  # type: ignore[call-overload]
    )  # fmt: skip


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help_names_every_verb(argv: list[str]) -> None:
    done = closeranks(*argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: closeranks VERB")
    for verb, (_, text) in cli.VERBS.items():
        assert f"  {verb} " in done.stdout
        assert text in done.stdout


def test_version() -> None:
    done = closeranks("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"closeranks {__version__}\n", "")


def test_nothing_to_do_shows_help_on_stderr() -> None:
    done = closeranks()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: closeranks VERB")


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["rnu"], "there is no verb rnu; did you mean closeranks run?"),
        (["reports"], "did you mean closeranks report?"),
        (["frobnicate"], "there is no verb frobnicate; there are run, demo,"),
        (["train.py"], "to run a script say closeranks run train.py"),
        (["--nproc-per-node", "2", "t.py"], "flags follow their verb: closeranks run --nproc-per-node ..."),
        (["help", "rnu"], "did you mean closeranks run?"),
        (["a\x1b[31mb"], r"there is no verb a\x1b[31mb"),
    ],
)  # fmt: skip
def test_unknown_verbs(argv: list[str], wanted: str) -> None:
    done = closeranks(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("closeranks: error: ")
    assert done.stderr.count("\n") == 1
    assert wanted in done.stderr


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["run", "--help"], ["rnu"]])
def test_start_loads_next_to_nothing(argv: list[str]) -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        f"from closeranks.cli.main import main; main({argv!r})\n"
        "print(*sorted(set(sys.modules) - before), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stderr.split("\n")[-2].split())
    assert "closeranks.cli.main" in loaded
    assert not {name.partition(".")[0] for name in loaded} & HEAVY
    assert len(loaded) < 60


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_is_there_and_helps(verb: str) -> None:
    module = importlib.import_module(cli.VERBS[verb][0])
    assert module.HELP
    assert callable(module.main)
    done = closeranks(verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: closeranks {verb}" in done.stdout
    assert closeranks("help", verb).stdout == done.stdout


# --- verbs under our control ------------------------------------------------------------------------


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A verb called ``try`` whose ``main`` a test sets."""
    module = types.ModuleType("closeranks_test_verb")
    module.HELP = "a verb for tests"
    module.configure = lambda parser: parser.add_argument("--number", type=int, default=0)
    module.main = lambda args: args.number
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.VERBS, "try", (module.__name__, "a verb for tests"))
    return module


def test_a_verb_with_a_parser(verb: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["try", "--number", "7"]) == 7
    assert cli.main(["try", "--help"]) == 0
    assert "usage: closeranks try" in capsys.readouterr().out
    assert cli.main(["try", "--numer", "7"]) == 2
    assert "there is no argument --numer; did you mean --number?" in capsys.readouterr().err
    assert cli.main(["try", "--number", "x"]) == 2
    assert "invalid int value: 'x'; see closeranks try --help" in capsys.readouterr().err


def test_a_raw_verb_gets_its_command_line_untouched(verb: types.ModuleType) -> None:
    got: list[list[str]] = []
    verb.RAW = True
    verb.main = lambda argv: got.append(argv) or 3
    assert cli.main(["try", "--", "--help", "x"]) == 3
    assert got == [["--", "--help", "x"]]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UsageError("no such thing; do that"), 2, "closeranks: error: no such thing; do that\n"),
        (CloseranksError("broke"), 1, "closeranks: error: broke\n"),
        (UsageError("bad \x1b]0;title\x07 name\nline two"), 2,
         "closeranks: error: bad \\x1b]0;title\\x07 name\nline two\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)  # fmt: skip
def test_errors_become_exit_codes(
    verb: types.ModuleType,
    error: BaseException,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "_forget_stdout", lambda: None)  # this process still needs its own

    def fail(args: object) -> int:
        raise error

    verb.main = fail
    assert cli.main(["try"]) == code
    assert capsys.readouterr().err == text


def test_a_bug_keeps_its_traceback(verb: types.ModuleType) -> None:
    def fail(args: object) -> int:
        raise ZeroDivisionError

    verb.main = fail
    with pytest.raises(ZeroDivisionError):
        cli.main(["try"])


def test_parser_errors_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="see x --help"):
        Parser(prog="x").parse_args(["--what-is-this"])


# --- streams ----------------------------------------------------------------------------------------


def test_a_reader_that_goes_away_is_no_error() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "closeranks", "run", "--help"],
            stdout=write_fd, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(write_fd)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_said(unbuffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "closeranks", "--help"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "closeranks: error: the disk is full: can't write to stdout, or a file of the run\n"


@pytest.mark.parametrize("argv", ["--help", "run --help", "config show", "rnu", ""])
def test_closed_streams_are_no_error(argv: str) -> None:
    command = f"exec {sys.executable} -m closeranks {argv} >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], timeout=60, check=False)
    assert done.returncode == (0 if "--help" in argv or "config" in argv else 2)


def test_interrupt_while_a_verb_works() -> None:
    code = (
        "import sys, types\n"
        "from closeranks.cli import main as cli\n"
        "module = types.ModuleType('verb'); module.RAW = True\n"
        "def work(argv):\n"
        "    import time; print('ready', flush=True); time.sleep(60)\n"
        "module.main = work; sys.modules['verb'] = module; cli.VERBS['try'] = ('verb', '')\n"
        "sys.exit(cli.main(['try']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "")
