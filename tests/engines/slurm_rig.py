"""A Slurm cluster of several nodes on this host: real daemons, a directory and ports of its own.

Needs root (slurmctld and slurmd run as it, and fake GPUs are device nodes) and Debian's packages slurmctld,
slurmd, slurm-client and munge, or their like. Every daemon is stopped by the pid that it recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from conftest import eventually

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "srun",
    "sbatch",
    "salloc",
    "scancel",
    "squeue",
    "scontrol",
    "sinfo",
)
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0

_CONF = """\
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={dir}/munge/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
SlurmdTimeout=6
SlurmctldTimeout=10
KillWait=2
MinJobAge=300
JobRequeue=1
SlurmdParameters=config_overrides
GresTypes=gpu
TreeWidth=64
{extra}
NodeName=node[0-{last}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{end}] \
CPUs=8 RealMemory=1000 Gres=gpu:8 State=UNKNOWN
PartitionName=train Nodes=node[0-{last}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def missing() -> str:
    """Why there can't be a real Slurm here, or ""."""
    if os.geteuid() != 0:
        return "real Slurm NOT tested: it takes root to start its daemons here"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return (
            f"real Slurm NOT tested: {', '.join(absent)} not installed "
            "(Debian, Ubuntu: apt-get install slurmctld slurmd slurm-client munge)"
        )
    return ""


def _free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens on.

    Below those that the kernel gives to outgoing connections, which come and go.
    """
    for _ in range(200):
        base = 10000 + secrets.randbelow(22000 - count)
        with contextlib.ExitStack() as held:
            try:
                for port in range(base, base + count):
                    probe = held.enter_context(socket.socket())
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return base
    raise AssertionError(f"no {count} free ports in a row")


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
                found.setdefault(parent, []).append(int(entry.name))
    return found


def _kill(pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@dataclass(slots=True)
class Agent:
    """What a stand-in for an agent wrote down about itself."""

    node: str
    pid: int
    child: int
    argv: list[str]
    env: dict[str, str]

    @property
    def lives(self) -> bool:
        return alive(self.pid) or alive(self.child)


@dataclass(slots=True)
class SlurmCluster:
    """Six nodes, unless told otherwise: node0, node1, ..."""

    directory: Path
    nodes: int
    conf_extra: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def start(self) -> None:
        for name in ("munge", "state", "spool", "dev", "agents", "home"):
            (self.directory / name).mkdir(mode=0o755)
        key = self.directory / "munge" / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        for number in range(8):
            os.mknod(self.directory / "dev" / f"gpu{number}", 0o020666, os.makedev(1, 3))
        (self.directory / "gres.conf").write_text(f"Name=gpu File={self.directory}/dev/gpu[0-7]\n")
        (self.directory / "cgroup.conf").write_text("CgroupAutomount=no\n")
        port = _free_ports(self.nodes + 1)
        last, end = self.nodes - 1, port + self.nodes
        text = _CONF.format(
            dir=self.directory, port=port, last=last, first=port + 1, end=end, extra=self.conf_extra
        )
        (self.directory / "slurm.conf").write_text(text)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))},
            "SLURM_CONF": str(self.directory / "slurm.conf"),
        }
        munge = self.directory / "munge"
        self.run(
            "munged", "--force", f"--key-file={key}", f"--socket={munge}/munge.sock",
            f"--seed-file={munge}/seed", f"--pid-file={munge}/munged.pid", f"--log-file={munge}/munged.log",
        )  # fmt: skip
        self.start_controller()
        for number in range(self.nodes):
            self.start_slurmd(f"node{number}")
        assert eventually(
            lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == str(self.nodes), 30.0
        ), f"not {self.nodes} idle nodes:\n{self.ask('sinfo')}\n{self.logs()}"

    def run(self, *argv: str, timeout_s: float = 60.0) -> str:
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False,
            stdin=subprocess.DEVNULL, cwd=self.directory / "home",
        )  # fmt: skip
        assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def ask(self, *argv: str) -> str:
        """The same for a question that may fail meanwhile."""
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.strip()

    def logs(self) -> str:
        found = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in found)

    # --- daemons ---

    def start_controller(self) -> None:
        self.run("slurmctld", "-f", str(self.directory / "slurm.conf"))

    def start_slurmd(self, node: str) -> None:
        # A slurmd that was killed leaves its pid file, and its successor would be stopped by the wrong one.
        (self.directory / f"slurmd-{node}.pid").unlink(missing_ok=True)
        self.run("slurmd", "-N", node, "-f", str(self.directory / "slurm.conf"))
        assert eventually(lambda: self._pid(f"slurmd-{node}.pid") is not None, 10.0), self.logs()

    def _pid(self, name: str) -> int | None:
        """The daemon of that pid file, if it is still one of this cluster's."""
        try:
            pid = int((self.directory / name).read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if os.fsencode(self.directory) in command else None

    def _stepds(self, node: str = "") -> list[int]:
        """The slurmstepds of this cluster (of one node), by their working directory."""
        found = []
        spool = self.directory / "spool" / node
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if (entry / "comm").read_text().strip() != "slurmstepd":
                    continue
                where = os.readlink(entry / "cwd")  # noqa: PTH115
                opened = [os.readlink(fd) for fd in (entry / "fd").iterdir()]  # noqa: PTH115
                is_there = where == str(spool) if node else where.startswith(f"{spool}/")
                logs = f"{self.directory}/slurmd-{node or 'node'}"
                if is_there or any(name.startswith(logs) for name in opened):
                    found.append(int(entry.name))
        return found

    def crash(self, node: str) -> None:
        """Power loss: slurmd, its stepds and all below them."""
        slurmd = self._pid(f"slurmd-{node}.pid")
        assert slurmd is not None
        doomed, children = [slurmd, *self._stepds(node)], _children()
        for pid in doomed:
            doomed += [child for child in children.get(pid, []) if child not in doomed]
        _kill(doomed)
        assert eventually(lambda: not any(alive(pid) for pid in doomed), 5.0)

    def kill_controller(self) -> None:
        pid = self._pid("slurmctld.pid")
        assert pid is not None
        _kill([pid])
        assert eventually(lambda: not alive(pid), 5.0)

    def stop(self) -> None:
        """Stop all daemons of this cluster, and what their steps have left."""
        daemons = [f"slurmd-node{number}.pid" for number in range(self.nodes)]
        pids = [pid for name in (*daemons, "slurmctld.pid") if (pid := self._pid(name)) is not None]
        _kill(pids, signal.SIGTERM)
        eventually(lambda: not any(alive(pid) for pid in pids), _STOP_TIMEOUT_S)
        doomed, children = [*pids, *self._stepds()], _children()
        for pid in doomed:
            doomed += [child for child in children.get(pid, []) if child not in doomed]
        doomed += [pid for agent in self.agents() if agent.lives for pid in (agent.pid, agent.child)]
        munged = self._pid("munge/munged.pid")
        _kill([*doomed, *([munged] if munged is not None else [])])
        eventually(lambda: not any(alive(pid) for pid in doomed), _STOP_TIMEOUT_S)

    # --- jobs ---

    def allocate(self, nodes: int, *options: str) -> dict[str, str]:
        """An allocation without a script; returns the environment of somebody inside of it."""
        done = subprocess.run(
            ["salloc", "--no-shell", f"--nodes={nodes}", "--ntasks-per-node=1", "--no-kill", *options],
            env=self.environment, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        job = next(word for word in done.stderr.split() if word.isdigit())
        wanted = f"squeue -h -j {job} -o %N".split()
        assert eventually(lambda: "node" in self.ask(*wanted), 10.0)
        return {**self.environment, "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": self.ask(*wanted)}

    def job(self, job: str, name: str) -> str:
        """A field of ``scontrol show job``."""
        for word in self.ask("scontrol", "show", "job", job).split():
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        return ""

    def state(self, job: str) -> str:
        return self.job(job, "JobState")

    def steps(self, job: str) -> list[str]:
        """The names of the steps that Slurm has of ``job``."""
        return self.ask("squeue", "-h", "-s", "-j", job, "-o", "%j").split()

    # --- stand-ins ---

    def stand_in(self) -> Path:
        """An interpreter that, asked for an agent or a run of closeranks, is a stand-in for it."""
        path = self.directory / "python stand-in"
        script = Path(__file__).with_name("slurm_stand_in.py")
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "{self.directory}" "$@"\n')
        path.chmod(0o755)
        return path

    def agents(self) -> list[Agent]:
        """All stand-ins for agents that ever were, in the order in which they came up."""
        paths = sorted((self.directory / "agents").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return [Agent(**json.loads(path.read_text())) for path in paths]

    def living(self) -> list[str]:
        """The nodes of living stand-ins, sorted, one entry for each."""
        return sorted(agent.node for agent in self.agents() if agent.lives)

    def runs(self) -> list[dict[str, Any]]:
        """What stand-ins for runs wrote down."""
        return [json.loads(path.read_text()) for path in sorted((self.directory / "agents").glob("*.run"))]


@contextlib.contextmanager
def slurm_cluster(nodes: int = 6, conf_extra: Callable[[Path], str] = lambda _: "") -> Iterator[SlurmCluster]:
    """A running cluster; skips the test, and says so, where there can't be one."""
    if why := missing():
        pytest.skip(why)
    # Not pytest's own directory: the path of a socket has to be short, and munge wants to see all of it.
    directory = Path(tempfile.mkdtemp(prefix="closeranks-slurm-", dir="/tmp"))
    directory.chmod(0o755)
    cluster = SlurmCluster(directory, nodes, conf_extra(directory))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(directory, ignore_errors=True)


def wait_until(condition: Callable[[], bool], timeout_s: float, say: Callable[[], object]) -> float:
    """Wait for ``condition``; returns how long it took. Fails with what ``say`` says."""
    began = time.monotonic()
    assert eventually(condition, timeout_s, 0.05), f"not within {timeout_s:g} s: {say()}"
    return time.monotonic() - began
