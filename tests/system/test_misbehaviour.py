"""Scripts that do to their process what scripts should not do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from closeranks.controller.journal import read
from conftest import Launcher, eventually
from system.rig import SOON_S, Run, Start, command, is_alive, no_torch, script

# A step of data-parallel training, as small as it gets; hooks, evidence thread and store are all at work.
TRAIN = """
    import os, sys, time
    import torch, torch.distributed as dist

    def train(steps, each=lambda step: None):
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            each(step)
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        dist.barrier()
        dist.destroy_process_group()
        print("trained", flush=True)
"""


def test_a_daemon_lives_as_long_as_the_job(run: Run, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 4096)
                with open(f"pid-{os.environ['RANK']}", "w") as file:
                    file.write(str(os.getpid()))
                while True:
                    time.sleep(0.01)
                    os.utime(f"pid-{os.environ['RANK']}")
            os._exit(0)
        os.wait()
        time.sleep(0.3)
        name = f"pid-{os.environ['RANK']}"
        before = os.stat(name).st_mtime_ns
        time.sleep(0.3)
        assert os.stat(name).st_mtime_ns > before, "the daemon died with its parent"
        print("done")
        """,
    )
    done, _ = run("--nproc-per-node", 2, path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [done.by_rank[rank] for rank in (0, 1)] == ["done\n"] * 2
    assert not any(is_alive(int((tmp_path / f"pid-{rank}").read_text())) for rank in (0, 1))


def test_a_script_that_goes_into_the_background_itself(run: Run, tmp_path: Path) -> None:
    """The rank's own process ends at once with 0, so the job is done, and the daemon is not left behind."""
    path = script(
        tmp_path,
        """
        import os, time
        if os.fork():
            os._exit(0)
        os.setsid()
        if os.fork():
            os._exit(0)
        while True:
            time.sleep(1)
        """,
    )
    done, _ = run("--nproc-per-node", 2, path)
    assert done.returncode == 0


@pytest.mark.torch
def test_descriptors_closed_under_the_training(run: Run, tmp_path: Path) -> None:
    """Progress, evidence and restart go on; a file the script opens at a number of ours is its own."""
    source = """
    os.closerange(3, 256)
    with open("/dev/null") as kept:
        train(5)
    unclosed = open(f"out-{os.environ['RANK']}", "w")
    unclosed.write("buffered until the end")
    if os.environ["CLOSERANKS_GENERATION"] == "0" and os.environ["RANK"] == "0":
        os.kill(os.getpid(), 9)
    """
    done, job = run("--nproc-per-node", 2, script(tmp_path, TRAIN, source), torch=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert job.text("out", 0, 1) == job.text("out", 1, 1) == "trained\n"
    assert (tmp_path / "out-1").read_text() == "buffered until the end"
    assert "first step" in done.stderr


@pytest.mark.torch
def test_all_descriptors_closed_but_the_standard_ones(run: Run, tmp_path: Path) -> None:
    """Our channel too: that rank can't be asked for evidence, and trains and restarts all the same."""
    source = """
    os.closerange(3, 65536)
    train(5)
    if os.environ["CLOSERANKS_GENERATION"] == "0" and os.environ["RANK"] == "1":
        raise ValueError("after the training")
    """
    done, job = run("--nproc-per-node", 2, script(tmp_path, TRAIN, source), torch=True)
    assert done.returncode == 0, done.stderr
    assert "ValueError: after the training" in job.text("err", 1, 0)
    assert job.text("out", 0, 1) == job.text("out", 1, 1) == "trained\n"


@pytest.mark.torch
def test_another_directory_another_umask_and_handlers_of_its_own(run: Run, tmp_path: Path) -> None:
    source = """
    import shutil, signal, tempfile
    mine = tempfile.mkdtemp()
    os.chdir(mine)
    os.umask(0o777)
    for number in range(1, signal.SIGRTMAX + 1):
        try:
            signal.signal(number, lambda *_: None)
        except (OSError, ValueError):
            pass
    sys.excepthook = lambda *_: print("my hook", flush=True)
    shutil.rmtree(mine)
    train(5)
    if os.environ["CLOSERANKS_GENERATION"] == "0":
        raise ValueError
    """
    done, job = run("--nproc-per-node", 2, "train.py", torch=True, cwd=script(tmp_path, TRAIN, source).parent)
    assert done.returncode == 0, done.stderr
    assert "my hook" in job.text("out", 0, 0) + job.text("out", 1, 0)
    assert job.text("out", 1, 1) == "trained\n"


def test_a_current_directory_that_is_gone_at_a_restart(run: Run, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os
        if os.environ["CLOSERANKS_GENERATION"] == "0":
            os.rmdir(os.getcwd())
            os.kill(os.getpid(), 9)
        print("again", __file__)
        """,
    )
    (tmp_path / "gone").mkdir()
    done, job = run("../train.py", cwd=tmp_path / "gone")
    assert done.returncode == 0, done.stderr
    assert job.text("out", 0, 1) == f"again {path}\n"


@pytest.mark.torch
def test_a_child_that_exits_otherwise_is_not_the_rank(run: Run, tmp_path: Path) -> None:
    source = """
    def fork(step):
        if step in (1, 2, 3):
            pid = os.fork()
            if pid == 0:
                if step == 1:
                    os._exit(5)
                if step == 2:
                    os.execvp("false", ["false"])
                os.kill(os.getpid(), 11)
            assert os.waitpid(pid, 0)[1] != 0

    train(5, fork)
    """
    done, job = run("--nproc-per-node", 2, script(tmp_path, TRAIN, source), torch=True)
    assert done.returncode == 0, done.stderr
    assert "0 incidents" in done.stderr
    assert job.text("out", 0) == job.text("out", 1) == "trained\n"


def test_a_rank_that_is_done_early(run: Run, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, time
        rank = int(os.environ["RANK"])
        time.sleep(0.4 * rank)
        print("done", rank)
        """,
    )
    done, job = run("--nproc-per-node", 3, path)
    assert done.returncode == 0
    assert [job.text("out", rank) for rank in range(3)] == ["done 0\n", "done 1\n", "done 2\n"]
    assert "0 incidents" in done.stderr


def test_an_exit_code_ends_the_others(run: Run, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, time
        if os.environ["RANK"] == "1":
            os._exit(3)
        time.sleep(600)
        """,
    )
    done, _ = run("--nproc-per-node", 3, path)
    assert done.returncode == 3
    assert "rank 1 exited with code 3" in done.stderr


@pytest.mark.torch
def test_the_place_of_an_error_is_in_the_script(run: Run, tmp_path: Path) -> None:
    """Not in torch, where it was raised, nor in the wrappers through which the call went."""
    path = script(
        tmp_path,
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce("no tensor")
        """,
    )
    done, _ = run(path, torch=True)
    assert done.returncode == 1
    assert f"TypeError at {path}:4" in done.stderr


def test_an_exception_behind_which_threads_run_on(run: Run, tmp_path: Path) -> None:
    """The interpreter waits for them; the others can't. After a grace the rank is taken for failed."""
    path = script(
        tmp_path,
        """
        import os, threading, time
        if os.environ["RANK"] == "1":
            threading.Thread(target=time.sleep, args=(600,)).start()
            raise ValueError("main is gone")
        time.sleep(600)
        """,
    )
    done, _ = run("--nproc-per-node", 2, path)
    assert done.returncode == 1
    assert "ValueError: main is gone" in done.stderr


# --- output -----------------------------------------------------------------------------------------

FLOOD = """
    import os, sys, time
    if os.environ["RANK"] == "0":
        line = "x" * 99 + "\\n"
        for _ in range(int(sys.argv[1]) // 100):
            sys.stdout.write(line)
    else:
        slowest = 0.0
        for tick in range(50):
            before = time.monotonic()
            print("tick", tick, flush=True)
            slowest = max(slowest, time.monotonic() - before)
            time.sleep(0.01)
        assert slowest < 2.0, slowest
    print("done", flush=True)
"""


@pytest.mark.parametrize(
    "size_bytes", [200_000_000, pytest.param(1_000_000_000, marks=pytest.mark.slow)], ids=["200MB", "1GB"]
)
def test_a_flood(run: Run, tmp_path: Path, size_bytes: int) -> None:
    """Bounded on disk, with its beginning and its end; the other rank's prints don't wait."""
    path = script(tmp_path, FLOOD)
    done, job = run("--nproc-per-node", 2, "--redirects", 3, path, size_bytes, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert job.text("out", 1).count("tick") == 50
    files = list((job.run_dir / "logs/0").glob("0.out*"))
    limit_bytes = 256 * 1024 * 1024
    total_bytes = sum(file.stat().st_size for file in files)
    assert min(size_bytes, limit_bytes // 2) < total_bytes <= limit_bytes * 1.01
    with (job.run_dir / "logs/0/0.out").open("rb") as file:
        assert file.read(100) == b"x" * 99 + b"\n"
    newest = max(files, key=lambda file: file.stat().st_mtime_ns)
    with newest.open("rb") as file:
        file.seek(-5, os.SEEK_END)
        assert file.read() == b"done\n"


@pytest.mark.parametrize("reader", ["comes late", "leaves"])
def test_nobody_reads_the_console(launcher: Launcher, tmp_path: Path, reader: str) -> None:
    """``closeranks run | less``, or ``| head -1``: no rank waits or dies for it; the files get all."""
    path = script(tmp_path, FLOOD)
    process = subprocess.Popen(
        command(tmp_path / "runs", "--nproc-per-node", 2, path, 20_000_000),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=launcher.environment(no_torch(tmp_path)),
    )
    assert process.stdout is not None
    process.stdout.readline()
    if reader == "leaves":
        process.stdout.close()
        assert process.wait(90) == 0
    else:
        time.sleep(6)  # the ranks are done long before
        out, _ = process.communicate(timeout=90)
        assert process.returncode == 0
        assert b"not shown here" in out and b"all ranks finished" in out
    assert (tmp_path / "runs/latest/logs/0/0.out").stat().st_size == 20_000_000 + 5


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk(run: Run, tmp_path: Path) -> None:
    small = tmp_path / "runs"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=1m tmpfs '{small}' 2>/dev/null") != 0:
        pytest.skip("may not mount")
    try:
        path = script(tmp_path, FLOOD.replace("slowest < 2.0", "True"))
        done, _ = run("--nproc-per-node", 2, path, 8_000_000)
        assert done.returncode == 0, done.stderr
        assert "logs can't be written (No space left on device)" in done.stderr
        assert done.stdout.count("x" * 99) == 80_000, "the console has all of it"
    finally:
        os.system(f"umount '{small}'")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_read_only_disk(run: Run, tmp_path: Path) -> None:
    frozen = tmp_path / "runs"
    frozen.mkdir()
    if os.system(f"mount -t tmpfs -o ro tmpfs '{frozen}' 2>/dev/null") != 0:
        pytest.skip("may not mount")
    try:
        path = script(tmp_path, "print('ran')")
        done = run("--nproc-per-node", 2, path, env={"TMPDIR": str(tmp_path)})[0]
    finally:
        os.system(f"umount '{frozen}'")
    assert done.returncode == 0, done.stderr
    assert "can't be written to (read-only file system); this run goes to" in done.stderr
    assert list((tmp_path / f"closeranks-runs-{os.getuid()}").glob("*/journal.db"))


def test_a_long_path_for_temporary_files(run: Run, tmp_path: Path) -> None:
    """A Unix socket's path may have 107 bytes."""
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    done, _ = run(script(tmp_path, "print('ran')"), env={"TMPDIR": str(deep)})
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


# --- memory, stopping itself -------------------------------------------------------------------------


@pytest.mark.torch
def test_a_rank_that_stops_itself_is_found(run: Run, tmp_path: Path) -> None:
    source = """
    import signal

    def stop(step):
        if step == 20 and os.environ["CLOSERANKS_GENERATION"] == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.01)

    train(30, stop)
    """
    done, job = run("--nproc-per-node", 2, script(tmp_path, TRAIN, source), torch=True)
    assert done.returncode == 0, done.stderr
    assert job.text("out", 0, 1) == job.text("out", 1, 1) == "trained\n"
    assert "rank 1" in done.stderr
    assert "1 incident " in done.stderr


def test_a_crash_while_it_exits(run: Run, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import atexit, ctypes, os
        atexit.register(ctypes.string_at, 0)
        print("trained", flush=True)
        """,
    )
    done, _ = run("--max-restarts", 0, path)
    assert done.returncode == 128 + signal.SIGSEGV
    assert "SIGSEGV" in done.stderr


def test_processes_that_fork_without_end_are_stopped(start: Start, tmp_path: Path) -> None:
    """Children that have children faster than one can look: the kill still gets all of them."""
    path = script(
        tmp_path,
        """
        import os, time
        print("ready", flush=True)
        for _ in range(3):
            if os.fork() == 0:
                while True:
                    if os.fork():
                        os._exit(0)
                    os.setsid()
                    time.sleep(0.002)
        time.sleep(600)
        """,
    )
    job = start(path)
    job.running.wait_for("ready")
    time.sleep(0.5)
    os.kill(job.guard, signal.SIGTERM)
    assert job.running.wait(SOON_S).returncode == 143
    job.assert_gone()
    assert eventually(lambda: not job.running.pids(), SOON_S)


def test_a_run_directory_deleted_under_the_job(start: Start, tmp_path: Path) -> None:
    """Said once; the job goes on, survives a fault, and ends well."""
    path = script(
        tmp_path,
        """
        import os, time
        print("ready", flush=True)
        while not os.path.exists("end"):
            time.sleep(0.05)
        """,
    )
    job = start("--nproc-per-node", 2, path, cwd=tmp_path)
    job.running.wait_for("ready")
    run_dir = job.run_dir
    shutil.rmtree(run_dir)
    job.running.wait_for("was deleted or replaced while the job runs")
    os.kill(job.ranks()[1], 9)
    job.running.wait_for("incident 0001")
    (tmp_path / "end").touch()
    done = job.running.wait()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was deleted or replaced") == 1
    assert "closeranks report" not in done.stderr.splitlines()[-1], "there is nothing to report from"


def test_a_signal_ends_the_wait_for_a_reader(launcher: Launcher, tmp_path: Path) -> None:
    """The job is over, nobody reads what is left, and someone presses Ctrl-C."""
    path = script(tmp_path, "print('x' * 99 + chr(10), end='')\n" * 4000)
    process = subprocess.Popen(
        command(tmp_path / "runs", path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=launcher.environment(no_torch(tmp_path)),
    )
    assert process.stdout is not None
    journal = tmp_path / "runs/latest/journal.db"
    assert eventually(lambda: journal.exists() and any(r.kind == "finished" for r in read(journal)), SOON_S)
    time.sleep(1.0)
    assert process.poll() is None, "it waited for no reader"
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(SOON_S) == 0, "the job had ended well before"
    assert time.monotonic() - began_s < SOON_S / 2
    process.stdout.close()
