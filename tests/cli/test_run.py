"""``closeranks run`` up to the moment something would start: real processes for what people get wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

from closeranks.cli import run
from closeranks.config import Entrypoint, RunConfig
from closeranks.errors import UsageError
from closeranks.events import RunExit

# Reads like `closeranks`, but shows the config instead of running it: what follows is another room's.
SHOW_CONFIG = """
import sys, types
module = types.ModuleType("closeranks.agent.launch")
module.launch = lambda config: print(repr(config)) or 42
sys.modules[module.__name__] = module
from closeranks.cli.main import main
sys.exit(main())
"""


def start(*argv: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SHOW_CONFIG, "run", *argv],
        cwd=cwd, env={**os.environ, **environ}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, errors="surrogateescape", timeout=60, check=False,
    )  # fmt: skip


def refused(*argv: str, cwd: Path, **environ: str) -> str:
    """The message of a command line that must end with exit code 2 and one clean error."""
    before = sorted(cwd.iterdir())
    done = start(*argv, cwd=cwd, **environ)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith("closeranks: error: ")
    assert "Traceback" not in done.stderr
    assert sorted(cwd.iterdir()) == before, "nothing may be left of a run that never was"
    return done.stderr.removeprefix("closeranks: error: ").rstrip("\n")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('ran')\n")
    return tmp_path


def test_a_good_command_line_is_launched(here: Path) -> None:
    done = start("--nproc-per-node", "2", "--rdzv-id", "j", "train.py", "--", "--lr", cwd=here)
    assert (done.returncode, done.stderr) == (42, "")
    expected = RunConfig(Entrypoint("script", "train.py", ("--", "--lr")), nproc_per_node="2", run_id="j")
    assert done.stdout == f"{expected!r}\n"
    assert (here / "closeranks-runs").is_dir()
    assert sorted(p.name for p in here.iterdir()) == ["closeranks-runs", "train.py"], "no .pyc, no probe left"


def test_launch_gets_the_config_and_gives_the_exit_code(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[RunConfig] = []
    module = types.ModuleType("closeranks.agent.launch")
    module.launch = lambda config: got.append(config) or 77
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(here)
    monkeypatch.setenv("PET_ROLE", "trainer")
    assert run.main(["train.py"]) == 77
    assert got[0].entrypoint == Entrypoint("script", "train.py")
    assert got[0].role == "trainer"


def test_help_anywhere_before_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["-h"], ["--nproc-per-node", "2", "--help", "no-such-script.py"], ["-mh"]):
        assert run.main(argv) == 0
        assert capsys.readouterr().out.startswith("usage: closeranks run")
    with pytest.raises(UsageError, match="no-such-script"):
        run.main(["no-such-script.py", "--help"])


# --- the script -------------------------------------------------------------------------------------


def test_missing_script_nearest_named(here: Path) -> None:
    assert refused("trian.py", cwd=here) == "there is no script 'trian.py'; did you mean train.py?"
    assert refused("train", cwd=here) == "there is no script 'train'; did you mean train.py?"
    assert refused("./Train.py", cwd=here) == "there is no script './Train.py'; did you mean train.py?"
    (here / "osexit.py").touch()
    assert refused("nope.py", cwd=here) == f"there is no script 'nope.py' in {here}", (
        "'.py' alone is not near"
    )
    assert refused("zzz.py", cwd=here) == f"there is no script 'zzz.py' in {here}"
    assert "there is no directory 'src' to hold the script x.py" in refused("src/x.py", cwd=here)
    assert "there is no script ''" in refused("", cwd=here)
    assert "say closeranks run -m json.tool" in refused("json.tool", cwd=here)
    assert "file name too long" in refused("x" * 5000, cwd=here)
    assert "it can't come from stdin" in refused("-", cwd=here)


def test_syntax_error_shown_as_python_does(here: Path) -> None:
    (here / "bad.py").write_text("import os\n\nif True:\n    print('a' 'b'))\n")
    assert refused("bad.py", cwd=here) == (
        "bad.py:4: SyntaxError: unmatched ')'\n    print('a' 'b'))\n                  ^"
    )
    (here / "worse.py").write_text("def f():\nreturn 1\n")
    message = refused("worse.py", cwd=here)
    assert message.startswith("worse.py:2: IndentationError: expected an indented block")
    assert "\n    return 1\n    ^^^^^^" in message
    (here / "late.py").write_text("x = 1\nreturn x\n")
    assert refused("late.py", cwd=here).startswith("late.py:2: SyntaxError: 'return' outside function")
    (here / "long.py").write_text(f"x = ({'1 + ' * 5000}\n")
    assert len(refused("long.py", cwd=here)) < 700


def test_encodings_are_pythons_own_matter(here: Path) -> None:
    (here / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    assert start("latin.py", cwd=here).returncode == 42
    (here / "bom.py").write_bytes(b"\xef\xbb\xbfx = 1\r\n")
    assert start("bom.py", cwd=here).returncode == 42


def test_undeclared_encoding_refused(here: Path) -> None:
    (here / "raw.py").write_bytes(b"x = '\xe9'\n")
    message = refused("raw.py", cwd=here)
    assert message.startswith("raw.py:1: SyntaxError: ")
    assert "utf-8" in message
    (here / "odd.py").write_bytes(b"# coding: klingon\n")
    assert "SyntaxError" in refused("odd.py", cwd=here)


def test_terminal_codes_in_a_script_are_not_passed_on(here: Path) -> None:
    (here / "esc.py").write_text("x = '\x1b]0;owned\x07' )\n")
    message = refused("esc.py", cwd=here)
    assert "\x1b" not in message
    assert r"\x1b]0;owned\x07" in message


def test_warnings_of_the_compiler_wait_for_the_run(here: Path) -> None:
    (here / "warn.py").write_text("x = 1\nif x is 1: pass\ny = '\\d'\n")
    done = start("warn.py", cwd=here, PYTHONWARNINGS="error")
    assert (done.returncode, done.stderr) == (42, "")


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"\x7fELF\x02\x01\x01" + bytes(64), "is a compiled program, not a Python script; start it with"),
        (b"#!/bin/bash\nset -e\npython train.py\n", "is a script for /bin/bash, not for Python; start"),
        (b"x = 1\0\n", "is a binary file, not a Python script"),
        (b"PK\x03\x04" + bytes(30), "is a zip application"),
        (b"#!/usr/bin/env python3\nPK\x03\x04" + bytes(30), "is a zip application"),
        (__import__("importlib.util").util.MAGIC_NUMBER + bytes(12), "is compiled Python; name its source"),
    ],
)  # fmt: skip
def test_not_a_python_script(here: Path, content: bytes, wanted: str) -> None:
    (here / "thing").write_bytes(content)
    assert wanted in refused("thing", cwd=here)


def test_a_shell_script_that_is_python_too_runs(here: Path) -> None:
    """As pip writes them where the path of the interpreter is too long for a #! line."""
    (here / "both.py").write_text("#!/bin/sh\n'''exec' python \"$0\" \"$@\"\n' '''\nprint(1)\n")
    assert start("both.py", cwd=here).returncode == 42


def test_directories(here: Path) -> None:
    (here / "app").mkdir()
    assert refused("app", cwd=here) == "app is a directory without __main__.py; name the script in it"
    (here / "app/__main__.py").write_text("x = (\n")
    assert refused("app/", cwd=here).startswith("app/__main__.py:1: SyntaxError")
    (here / "app/__main__.py").write_text("x = 1\n")
    assert start("app", cwd=here).returncode == 42


def test_what_is_no_file(here: Path) -> None:
    os.mkfifo(here / "pipe.py")
    assert "pipe.py is not a regular file, and every rank has to read it" in refused("pipe.py", cwd=here)
    (here / "loop.py").symlink_to("loop.py")
    assert "too many levels of symbolic links" in refused("loop.py", cwd=here)
    (here / "gone.py").symlink_to("nothing.py")
    assert "there is no script 'gone.py'" in refused("gone.py", cwd=here)


def test_hostile_names(here: Path) -> None:
    name = "a b'\"\n\x1b[31m;$(id).py"
    (here / name).write_text("x = 1\n")
    assert start(name, cwd=here).returncode == 42
    (here / name).write_text("x = (\n")
    assert "\x1b" not in refused(name, cwd=here)
    (here / "caf\udce9.py").write_text("x = (\n")
    assert "SyntaxError" in refused("caf\udce9.py", cwd=here)


def test_deep_nesting_is_left_to_python(here: Path) -> None:
    (here / "deep.py").write_text("x = " + "-" * 50_000 + "1\n")
    assert start("deep.py", cwd=here).returncode in (2, 42)


def test_nothing_of_the_script_is_executed(here: Path) -> None:
    (here / "train.py").write_text("open('executed', 'w')\n")
    (here / "pkg").mkdir()
    (here / "pkg/__init__.py").write_text("open('executed', 'w')\n")
    (here / "pkg/t.py").write_text("open('executed', 'w')\n")
    assert start("train.py", cwd=here).returncode == 42
    assert start("-m", "pkg.t", cwd=here).returncode == 42
    assert start("--preload", "pkg", "train.py", cwd=here).returncode == 42
    assert not (here / "executed").exists()
    assert not list(here.rglob("*.pyc"))


# --- modules and programs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "target", "expected"),
    [
        ("script", "jobs/train.py", "train"),
        ("script", "jobs/", "jobs"),
        ("script", ".hidden", ".hidden"),
        ("command", "/bin/true", "true"),
        ("module", "torch.utils.collect_env", "collect_env"),
        ("module", "jobs.train.__main__", "train"),
    ],
)
def test_what_a_run_is_called(kind: str, target: str, expected: str) -> None:
    assert Entrypoint(kind, target).name == expected


def test_modules(here: Path) -> None:
    assert start("-m", "train", cwd=here).returncode == 42
    assert start("-m", "json.tool", cwd=here).returncode == 42
    assert refused("-m", "trian", cwd=here) == "there is no module trian; did you mean train?"
    assert refused("-m", "trian.x", cwd=here) == "there is no module trian; did you mean train.x?"
    message = refused("-m", "zzz.qqq", cwd=here)
    assert message == f"there is no module zzz; it is neither installed for {sys.executable} nor in {here}"
    assert refused("-m", "train.py", cwd=here) == (
        "-m takes a module's name and train.py is a file; leave out -m"
    )
    (here / "parts").mkdir()
    (here / "parts" / "__init__.py").touch()
    assert refused("-m", "parts", cwd=here) == (
        "parts is a package without __main__.py; name a module in it: -m parts.NAME"
    )
    (here / "parts" / "training.py").touch()
    assert refused("-m", "parts.trainign", cwd=here) == (
        f"there is no module parts.trainign in {here}/parts; did you mean parts.training?"
    )
    assert refused("-m", "parts.nope.x", cwd=here) == f"there is no module parts.nope in {here}/parts"
    assert start("-m", "parts.training", cwd=here).returncode == 42
    assert refused("-m", "torch.nope", cwd=here).startswith("there is no module torch.nope in ")
    assert start("-m", "torch.utils.collect_env", cwd=here).returncode == 42
    (here / "parts" / "__init__.py").write_text("__path__.append('elsewhere')\n")
    assert start("-m", "parts.nope", cwd=here).returncode == 42, "its own code knows where its modules are"
    (here / "parts" / "__main__.py").touch()
    assert start("-m", "parts", cwd=here).returncode == 42
    assert "-m takes a module's name such as package.train" in refused("-m", "a/b", cwd=here)
    assert "-m takes a module's name such as package.train" in refused("-m", "a..b", cwd=here)


def test_preload_has_to_be_there(here: Path) -> None:
    assert refused("--preload", "json,nosuch.x", "train.py", cwd=here) == (
        "--preload nosuch.x: there is no module nosuch to import"
    )


def test_programs(here: Path) -> None:
    program = here / "go.sh"
    program.write_text("#!/bin/sh\nexit 0\n")
    assert refused("--no-python", "./go.sh", cwd=here) == (
        "./go.sh is not executable; chmod +x ./go.sh, or leave out --no-python for Python"
    )
    program.chmod(0o755)
    assert start("--no-python", "./go.sh", cwd=here).returncode == 42
    assert start("--no-python", "env", cwd=here).returncode == 42
    assert refused("--no-python", "go.sh", cwd=here) == (
        "go.sh is not on PATH; to run the one in this directory say ./go.sh"
    )
    assert refused("--no-python", "./gone.sh", cwd=here) == "there is no program './gone.sh'"
    assert refused("--no-python", ".", cwd=here) == ". is a directory, not a program"
    assert refused("--no-python", "unam", cwd=here, PATH="/bin") == (
        "there is no program 'unam' on PATH; did you mean uname?"
    )
    program.write_text("#!/no/such/interpreter -x\n")
    assert "asks for '/no/such/interpreter', which isn't there" in refused("--no-python", "./go.sh", cwd=here)
    program.write_bytes(b"#!/bin/sh\r\nexit 0\r\n")
    assert "has Windows line ends" in refused("--no-python", "./go.sh", cwd=here)


def test_another_interpreter(here: Path) -> None:
    (here / "future.py").write_text("match x:\n    case = broken for us\n")
    done = start("--rdzv-id", "j", "future.py", cwd=here, PYTHON_EXEC="/bin/sh")
    assert done.returncode == 42, "its syntax and modules are for the other one to judge"
    assert "python='/bin/sh'" in done.stdout
    assert start("-m", "only.there", cwd=here, PYTHON_EXEC="/bin/sh").returncode == 42
    assert "PYTHON_EXEC='/no/python' is no program" in refused("train.py", cwd=here, PYTHON_EXEC="/no/python")


# --- flags that reach this far ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--nproc-per-node", "0", "train.py"], "want at least 1 rank"),
        (["--nproc-per-nod3", "2", "train.py"], "--nproc-per-nod3; did you mean --nproc-per-node?"),
        (["--nnodes", "2", "train.py"], "--nnodes asks for 2 nodes; say with --engine where they come from"),
        ([], "nothing to run"),
        (["--nproc-per-node", "1000000", "train.py"], "1,000,000 ranks need about"),
        (["--inject", "nosuch", "train.py"], "nosuch"),
    ],
)  # fmt: skip
def test_bad_flags(here: Path, argv: list[str], wanted: str) -> None:
    assert wanted in refused(*argv, cwd=here)


def test_port_in_use_names_the_holder(here: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        message = refused("--master-port", str(port), "train.py", cwd=here)
    assert message.startswith(f"port {port} is in use by pid {os.getpid()} (")
    assert "name another --master-port" in message
    assert start("--master-port", str(port), "train.py", cwd=here).returncode == 42


def test_runs_go_elsewhere_where_they_cant_be_written(
    here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    temporary = tmp_path_factory.mktemp("tmp")
    done = start("--log-dir", "train.py/logs", "train.py", cwd=here, TMPDIR=str(temporary))
    fallback = temporary / f"closeranks-runs-{os.getuid()}"
    assert done.returncode == 42
    assert f"runs_dir='{fallback}'" in done.stdout
    assert (
        f"train.py/logs can't be written to (not a directory); this run goes to {fallback} instead."
        in done.stdout
    )
    assert fallback.stat().st_mode & 0o777 == 0o700
    message = refused("--log-dir", "train.py/logs", "train.py", cwd=here, TMPDIR="/proc/none")
    assert message.startswith("no place for logs and the journal: train.py/logs: not a directory; /proc/none")
    assert message.endswith("Name a writable directory with --log-dir")


def test_the_current_directory_may_be_gone(here: Path) -> None:
    def told(target: str) -> str:
        command = f"mkdir d && cd d && rmdir ../d && exec {sys.executable} -c '{SHOW_CONFIG}' run {target}"
        done = subprocess.run(
            ["sh", "-c", command], cwd=here, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        return done.stderr

    missing = "there is no script 'train.py' in the current directory, which was deleted"
    assert missing in told("train.py")
    assert "the current directory no longer exists; change to one that does" in told(f"{here}/train.py")


def test_every_exit_code_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/exit-codes.md").read_text()
    codes = {name: code for name, code in vars(RunExit).items() if name.isupper()}
    assert len(codes) > 5
    for name, code in codes.items():
        assert f"| {code} | `{name}` | " in page
