"""What ranks inherit: environment, standard input, a terminal. torchrun is the yardstick."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Launcher, eventually
from system.rig import SOON_S, Run, command, no_torch, script

DUMP = """
    import json, os
    with open(f"{os.environ['DUMP']}-{os.environ['RANK']}.json", "w") as file:
        json.dump(dict(os.environ), file)
"""


@pytest.mark.torch
def test_the_environment_is_torchruns(run: Run, launcher: Launcher, tmp_path: Path) -> None:
    """The same variables, and the same values where they don't name a port, a path or an id."""
    path = script(tmp_path, DUMP)
    flags = ["--nproc-per-node", "2", "--max-restarts", "3", "--role", "trainer", "--rdzv-id", "job-7"]
    done, _ = run(*flags, path, torch=True, env={"DUMP": str(tmp_path / "ours")})
    assert done.returncode == 0, done.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    subprocess.run(
        [*torchrun, "--rdzv-endpoint", "localhost:0", *flags, path],
        env=launcher.environment({"DUMP": str(tmp_path / "theirs")}),
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    for rank in (0, 1):
        ours = json.loads((tmp_path / f"ours-{rank}.json").read_text())
        theirs = json.loads((tmp_path / f"theirs-{rank}.json").read_text())
        added = {name for name in ours.keys() - theirs.keys() if not name.startswith("CLOSERANKS_")}
        assert added <= {"GLOO_SOCKET_IFNAME", "TORCH_FR_BUFFER_SIZE"}
        assert theirs.keys() - ours.keys() == set()
        differ = {name for name in theirs if ours[name] != theirs[name]}
        assert differ <= {
            "DUMP", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE",
        }  # fmt: skip


def test_what_the_user_set_stays(run: Run, tmp_path: Path) -> None:
    env = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9", "RANK": "99", "DUMP": str(tmp_path / "ours")}
    done, _ = run("--nproc-per-node", 2, script(tmp_path, DUMP), env=env)
    assert done.returncode == 0, done.stderr
    ours = json.loads((tmp_path / "ours-1.json").read_text())
    assert (ours["OMP_NUM_THREADS"], ours["GLOO_SOCKET_IFNAME"], ours["RANK"]) == ("7", "eth9", "1")


def test_each_generation_has_a_port_of_its_own_but_a_chosen_one_stays(run: Run, tmp_path: Path) -> None:
    source = """
        import os
        print(os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        if os.environ["CLOSERANKS_GENERATION"] == "0":
            os.kill(os.getpid(), 9)
    """
    done, job = run("--master-port", 29_876, script(tmp_path, source))
    assert done.returncode == 0, done.stderr
    assert [job.text("out", 0, generation) for generation in (0, 1)] == ["29876 0\n", "29876 1\n"]
    done, job = run(script(tmp_path, source))
    ports = [int(job.text("out", 0, generation).split()[0]) for generation in (0, 1)]
    assert all(1024 < port < 65536 for port in ports)


# --- standard input ---------------------------------------------------------------------------------

READS = """
    import os, sys
    if os.environ["RANK"] == "0":
        print("read", len(sys.stdin.read()), flush=True)
"""


def with_streams(
    closed: str, launcher: Launcher, folder: Path, *arguments: object
) -> subprocess.CompletedProcess[str]:
    """``closeranks run`` from a shell that closes some of its standard streams."""
    return subprocess.run(
        ["bash", "-c", f'exec "$@" {closed}', "bash", *command(folder / "runs", *arguments)],
        env=launcher.environment(no_torch(folder)),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_input_from_a_pipe(run: Run, tmp_path: Path) -> None:
    done, _ = run("--nproc-per-node", 2, script(tmp_path, READS), stdin="x" * 300_000)
    assert (done.returncode, done.by_rank[0]) == (0, "read 300000\n")


def test_no_input_at_all(launcher: Launcher, tmp_path: Path) -> None:
    """``closeranks run <&-``, as daemons start things."""
    path = script(tmp_path, "import sys, os\nprint('ran', sys.stdin is None or sys.stdin.read() == '')")
    done = with_streams("<&-", launcher, tmp_path, "--nproc-per-node", 2, path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] ran True", "[1] ran True"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_consoles(launcher: Launcher, tmp_path: Path, closed: str) -> None:
    """Descriptors 0 to 2 then belong to whatever is opened first; it must not be a log or a socket."""
    path = script(tmp_path, "import sys\nprint('out')\nprint('err', file=sys.stderr)")
    done = with_streams(closed, launcher, tmp_path, path)
    assert done.returncode == 0, (done.stdout, done.stderr)
    logs = tmp_path / "runs/latest/logs/0"
    assert ((logs / "0.out").read_text(), (logs / "0.err").read_text()) == ("out\n", "err\n")


def test_a_terminal_as_input(launcher: Launcher, tmp_path: Path) -> None:
    """Ranks may read from it (a debugger's prompt); their output is a pipe, as under torchrun."""
    path = script(
        tmp_path,
        """
        import sys
        print("tty", [stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)], flush=True)
        print("read", input(), flush=True)
        """,
    )
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        words = command(tmp_path / "runs", path)
        os.execvpe(words[0], words, launcher.environment())
    shown = ""

    def until(text: str) -> bool:
        nonlocal shown
        os.set_blocking(fd, False)
        with contextlib.suppress(OSError):
            shown += os.read(fd, 65536).decode()
        return text in shown

    assert eventually(lambda: until("tty [True, False, False]"), SOON_S * 2), shown
    os.write(fd, b"a line\n")
    assert eventually(lambda: until("read a line"), SOON_S), shown
    assert eventually(lambda: until("all ranks finished"), SOON_S), shown
    assert os.waitpid(pid, 0)[1] == 0
    os.close(fd)
