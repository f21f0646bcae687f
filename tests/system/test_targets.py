"""What can be run, and how it is named; how workers come to be, and what happens when they can't."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Launcher, eventually
from system.rig import SOON_S, Run, Start, command, no_torch, script, settled_spares, wait_for_ranks

SHOW = """
    import hashlib, os, sys
    text = "\\0".join(sys.argv[1:]).encode("utf-8", "surrogateescape")
    print(len(sys.argv), len(text), hashlib.md5(text).hexdigest(), len(os.environ.get("BIG", "")))
    print(__name__, __file__, sys.path[0])
"""


def shown(*arguments: str) -> str:
    text = "\0".join(arguments).encode("utf-8", "surrogateescape")
    return f"{len(arguments) + 1} {len(text)} {hashlib.md5(text).hexdigest()}"


@pytest.mark.parametrize("name", ["a b.py", 'it\'s "odd"\n$(id).py', "é✓.py", "caf\udce9.py", "-dash.py"])
def test_script_names(run: Run, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "wh ere"
    path = script(folder, SHOW, name=name)
    done, job = run("--nproc-per-node", 2, f"./{name}", "x", cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = (job.run_dir / "logs/0/1.out").read_text(errors="surrogateescape").split("\n", 1)
    assert lines[0].startswith(shown("x"))
    assert lines[1] == f"__main__ {path} {folder}\n"


def test_modules_and_directories(run: Run, tmp_path: Path) -> None:
    show = "import sys\nprint(__name__, __spec__.name if __spec__ else None, sys.argv, sys.path[0])"
    script(tmp_path, show, name="pkg/mod.py")
    script(tmp_path, show, name="pkg/__main__.py")
    script(tmp_path, name="pkg/__init__.py")
    script(tmp_path, show, name="app/__main__.py")
    for arguments in (["-m", "pkg.mod"], ["-m", "pkg"], ["app"]):
        plain = subprocess.run(
            [sys.executable, *arguments, "a"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **no_torch(tmp_path)},
        )
        done, job = run(*arguments, "a", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert job.text("out") == plain.stdout


def test_programs(run: Run, tmp_path: Path) -> None:
    done, _ = run("--nproc-per-node", 2, "--no-python", "bash", "-c", 'echo "$RANK $0 $1"', "a", "b c")
    assert (done.returncode, sorted(done.by_rank.values())) == (0, ["0 a b c\n", "1 a b c\n"])
    done, _ = run("--nproc-per-node", 2, "--no-python", "bash", "-c", "sleep 600 & exit 7")
    assert done.returncode == 7
    assert "exit code 7" in done.stderr


@pytest.mark.parametrize("arguments", [["x" * 99] * 1000, ["\udce9" * 60_000], ["y" * 100_000] * 15], ids=len)
def test_long_command_lines(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    """100 KB, and more than a message holds; 1.5 MB, as shells make of ``data/*.bin``."""
    done, job = run("--nproc-per-node", 2, script(tmp_path, SHOW), *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert job.text("out", 1).startswith(shown(*arguments))


def test_a_large_environment(run: Run, tmp_path: Path) -> None:
    env = {"BIG": "z" * 120_000, **{f"VARIABLE_{n}": "v" * 1000 for n in range(1000)}}
    done, job = run(script(tmp_path, SHOW), env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert job.text("out").startswith(f"{shown()} 120000\n")


def test_encodings(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bom.py").write_bytes(b"\xef\xbb\xbfprint('\xc3\xa9')\r\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nprint('\xe9')\n")
    for name in ("bom.py", "latin.py"):
        done, job = run(tmp_path / name)
        assert (done.returncode, job.text("out")) == (0, "é\n")


def test_a_script_that_is_gone_at_a_restart(run: Run, tmp_path: Path) -> None:
    path = script(tmp_path, "import os\nos.remove(__file__)\nos.kill(os.getpid(), 9)")
    done, job = run(path)
    assert done.returncode != 0
    assert f"can't open file '{path}': [Errno 2] No such file or directory" in job.text("err", 0, 1)
    assert "bootstrap.py" not in done.stderr


# --- how workers come to be -------------------------------------------------------------------------

HELLO = """
    import os, sys
    print("hello", os.environ["RANK"], os.environ["CLOSERANKS_GENERATION"], os.getcwd(), flush=True)
    if os.environ["CLOSERANKS_GENERATION"] == "0" and "again" in sys.argv:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.torch
def test_without_a_zygote(run: Run, tmp_path: Path) -> None:
    done, job = run("--nproc-per-node", 2, "--no-zygote", script(tmp_path, HELLO), "again", torch=True)
    assert done.returncode == 0, done.stderr
    assert job.text("out", 1, 1).startswith("hello 1 1")
    assert "no zygote" not in done.stderr, "it was asked for"


PRELOADS = {
    "missing": ("", "can't preload json.missing: ModuleNotFoundError"),
    "raises": ("raise ZeroDivisionError('z')", "can't preload raises: ZeroDivisionError: z"),
    "exits": ("import sys; sys.exit(5)", "can't preload exits: SystemExit: 5"),
    "threads": (
        "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "no zygote, workers are started one by one: it has 2 threads after its imports",
    ),
    "ends": (
        "import os; os._exit(9)",
        "no zygote, workers are started one by one: the zygote did not become ready: it exited with code 9; "
        "without preloading ends",
    ),
    "crashes": (
        "import ctypes; ctypes.string_at(0)",
        "the zygote did not become ready: it was killed by SIGSEGV; without preloading crashes",
    ),
    "closes": ("import os; os.closerange(3, 1024)", ""),
    "forks": ("import os; os.fork() or os._exit(0)", ""),
    "moves": ("import os; os.chdir('/')", ""),
    "signals": ("import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); print('noise')", ""),
}


@pytest.mark.parametrize("name", PRELOADS)
def test_preloads(run: Run, tmp_path: Path, name: str) -> None:
    source, said = PRELOADS[name]
    script(tmp_path, source, name=f"no-torch/{name}.py")
    module = "json.missing" if name == "missing" else name
    path = script(tmp_path, HELLO)
    done, job = run("--nproc-per-node", 2, "--preload", module, "train.py", "again", cwd=path.parent)
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    for rank in (0, 1):
        assert job.text("out", rank, 1) == f"hello {rank} 1 {tmp_path}\n"


OTHERS = [
    path for path in map(shutil.which, ("python3.13", "python3.12", "python3.10", "/usr/bin/python3")) if path
]


@pytest.mark.parametrize("python", OTHERS)
def test_another_interpreter(run: Run, tmp_path: Path, python: str) -> None:
    """It need have neither torch nor closeranks."""
    source = "import sys\nprint(sys.version_info[:3])\nprint([p for p in sys.path if 'closeranks' in p])"
    plain = subprocess.run([python, "-c", source], capture_output=True, text=True, check=False)
    if plain.returncode:
        pytest.skip(f"{python} doesn't run")
    done, job = run(script(tmp_path, source), env={"PYTHON_EXEC": python, "PYTHONPATH": ""})
    if plain.stdout < "(3, 11":
        assert done.returncode == 95
        assert "ranks need Python 3.11 or newer" in done.stderr
    else:
        assert (done.returncode, job.text("out")) == (0, plain.stdout), done.stderr


@pytest.mark.torch
def test_what_the_script_imports_late_is_ready_at_the_restart(start: Start, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import sys, time
        print("ready", "torch.distributed.checkpoint" in sys.modules, flush=True)
        import closeranks
        import torch.distributed.checkpoint
        while True:
            closeranks.step()
            time.sleep(0.05)
        """,
    )
    job = start("--nproc-per-node", 2, path, torch=True)
    job.running.wait_for("ready False")
    for _ in range(4):  # the first spares are renewed with what was learned, some time after the first step
        settled_spares(job, 2)
        os.kill(wait_for_ranks(job, 2)[1], signal.SIGKILL)
        if eventually(lambda: "ready True" in job.running.stdout, 2.0):
            break
    assert "ready True" in job.running.stdout
    assert "can't" not in job.running.stderr
    os.kill(job.guard, signal.SIGTERM)
    assert job.running.wait(SOON_S).returncode == 143
    job.assert_gone()


def test_an_interpreter_without_torch(run: Run, tmp_path: Path) -> None:
    """A script that needs none runs; that it can't be preloaded is said."""
    script(tmp_path, "raise ImportError('no torch here')", name="broken/torch/__init__.py")
    done, job = run(script(tmp_path, HELLO), "again", env={"PYTHONPATH": str(tmp_path / "broken")})
    assert done.returncode == 0, done.stderr
    assert "can't preload torch: ImportError: no torch here" in done.stderr
    assert job.text("out", 0, 1).startswith("hello 0 1")


# --- how many ---------------------------------------------------------------------------------------


def test_no_ranks(run: Run, tmp_path: Path) -> None:
    done, _ = run("--nproc-per-node", 0, script(tmp_path, HELLO))
    assert done.returncode == 2
    assert "want at least 1 rank" in done.stderr


def test_many_ranks_on_few_cores(run: Run, tmp_path: Path) -> None:
    done, job = run("--nproc-per-node", 64, script(tmp_path, HELLO), "again")
    assert done.returncode == 0, done.stderr
    assert [job.text("out", rank, 1).split()[:2] for rank in range(64)] == [
        ["hello", str(n)] for n in range(64)
    ]


@pytest.mark.slow
def test_hundreds_of_ranks(run: Run, tmp_path: Path) -> None:
    done, job = run("--nproc-per-node", 300, script(tmp_path, HELLO), "again", timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert all(job.text("out", rank, 1).startswith(f"hello {rank} 1") for rank in range(300))


@pytest.mark.torch
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_dev_shm(launcher: Launcher, tmp_path: Path) -> None:
    """Ranks meet elsewhere then."""
    path = script(
        tmp_path,
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    mount = 'mount -t tmpfs -o size=4k tmpfs /dev/shm 2>/dev/null || exit 77; exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    done = subprocess.run(
        [*words, *command(tmp_path / "runs", "--nproc-per-node", 2, path)],
        env=launcher.environment({"TMPDIR": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("may not mount")
    assert done.returncode == 0, done.stderr
    assert "/dev/shm has 0 MiB free" in done.stderr
    assert list(tmp_path.glob("closeranks-*")) == []


def test_a_low_soft_limit_on_files(run: Run, tmp_path: Path) -> None:
    """The agent raises its own; scripts get what the user has."""
    path = script(tmp_path, "import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        done, job = run("--nproc-per-node", 32, path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert done.returncode == 0, done.stderr
    assert {job.text("out", rank) for rank in range(32)} == {"64\n"}


def test_a_low_hard_limit_on_files(tmp_path: Path) -> None:
    """Below what a run needs there is one clear line, whatever the first thing is that fails."""
    path = script(tmp_path, HELLO)
    for limit in (12, 20, 28, 36):
        words = command(tmp_path / "runs", "--nproc-per-node", 2, path)
        done = subprocess.run(
            ["bash", "-c", f'ulimit -n {limit}; exec "$@"', "bash", *words],
            cwd=tmp_path,
            env={**os.environ, **no_torch(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode in (0, 1, 2, 95), done.stderr
        assert "Traceback" not in done.stderr, f"limit {limit}\n{done.stderr}"
        if done.returncode:
            assert "open files" in done.stderr, f"limit {limit}\n{done.stderr}"


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit of util-linux")
def test_a_limit_that_falls_while_it_runs(start: Start, tmp_path: Path) -> None:
    """No descriptors for the next generation: a clean end, not a traceback."""
    path = script(tmp_path, "import os, time\nprint('ready', flush=True)\ntime.sleep(600)")
    job = start("--nproc-per-node", 4, path)
    job.running.wait_for("ready")
    used = len(list(Path(f"/proc/{job.agent}/fd").iterdir()))
    subprocess.run(["prlimit", "--pid", str(job.agent), f"--nofile={used - 4}"], check=True)
    os.kill(job.ranks()[0], 9)
    done = job.running.wait()
    assert "this is a bug" not in done.stderr
    assert "Traceback" not in done.stderr
    job.assert_gone()
