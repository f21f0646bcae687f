"""How long a fault costs: closeranks, torchrun and NVIDIA's resiliency extension on one unmodified script.

    python benchmarks/launch.py                      # 7 interleaved rounds, 2 and 4 ranks
    python benchmarks/launch.py --kills 200          # our own distribution over 200 kills in a row
    python benchmarks/launch.py --scenario stop      # SIGSTOP instead of SIGKILL

Measured per job, all by the script's own log: *cold* = start of the command -> every rank past its first
step; *recovery* = ``kill -9`` of one rank -> every rank past a step beyond the last one before the kill, with
its new process, resumed from its checkpoint. Rounds are interleaved, so that a noisy machine is noisy for
all; the ratio is taken round by round. Peers are used as their documentation says:

* ``torchrun``: default settings, and ``fair``: ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``, without which its
  restarts read the dead generation's keys on gloo (pytorch#135712);
* ``nvrx``: ``ft_launcher`` of nvidia-resiliency-ext 0.4.1, where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from closeranks.controller.journal import read

HERE = Path(__file__).parent
WORKLOAD = HERE / "workloads" / "steps.py"
SYSTEMS = ("closeranks", "torchrun", "torchrun-fair", "nvrx")
START_LIMIT_S = 60.0
RECOVERY_LIMIT_S = 18.0


@dataclass
class Sample:
    system: str
    ranks: int
    cold_s: float | None = None
    recovery_s: float | None = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(system: str, ranks: int, folder: Path, runs: Path) -> tuple[list[str], dict[str, str]]:
    """The command line of one system, and what it needs in the environment."""
    script = [str(WORKLOAD), "--dir", str(folder)]
    many = ["--nproc-per-node", str(ranks), "--max-restarts", "1000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if system == "closeranks":
        return [
            sys.executable,
            "-m",
            "closeranks",
            "run",
            *many,
            "--log-dir",
            str(runs),
            *script,
        ], environment
    if system.startswith("torchrun"):
        if system.endswith("fair"):
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", *many, *script], environment
    module = "nvidia_resiliency_ext.fault_tolerance.launcher"
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--nnodes", "1"]
    return [sys.executable, "-m", module, *where, *many, *script], environment


def last_records(folder: Path, ranks: int) -> list[tuple[int, int, int]] | None:
    """(monotonic_ns, pid, step) of each rank's newest line; None until every rank has one."""
    records = []
    for rank in range(ranks):
        try:
            with (folder / f"rank{rank}.log").open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 256))
                lines = [line for line in file.read().split(b"\n")[:-1] if line.count(b" ") == 2]
        except OSError:
            return None
        if not lines:
            return None
        records.append(tuple(int(part) for part in lines[-1].split()))
    return records  # type: ignore[return-value]


def wait_for(folder: Path, ranks: int, step: int, strangers: set[int], limit_s: float) -> int | None:
    """Wait until every rank is past ``step`` in a process not in ``strangers``; when that was, in ns."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        records = last_records(folder, ranks)
        if records and all(pid not in strangers and at > step for _, pid, at in records):
            return max(first_after(folder, rank, step, strangers) for rank in range(ranks))
        time.sleep(0.005)
    return None


def first_after(folder: Path, rank: int, step: int, strangers: set[int]) -> int:
    """When this rank first wrote a step beyond ``step`` from a new process."""
    for line in (folder / f"rank{rank}.log").read_text().splitlines():
        when, pid, at = (int(part) for part in line.split())
        if at > step and pid not in strangers:
            return when
    raise AssertionError("wait_for saw it")


def descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        for child in parents.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """End the whole tree, whatever it is."""
    pids = [process.pid, *descendants(process.pid)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.3)


@dataclass
class Fault:
    """By the monotonic clock, in ns: sent; victim dead (a kill; by a pidfd of our own); recovered."""

    sent_ns: int
    dead_ns: int | None
    recovered_ns: int | None


def strike(pid: int, scenario: str) -> tuple[int, int | None]:
    """Send the fault; returns when, and when the victim was dead."""
    with contextlib.closing(os.fdopen(os.pidfd_open(pid), closefd=True)) as watched:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        sent_ns = time.monotonic_ns()
        os.kill(pid, signal.SIGSTOP if scenario == "stop" else signal.SIGKILL)
        if scenario == "stop":
            return sent_ns, None
        poll.poll(5000)
        return sent_ns, time.monotonic_ns()


def one_fault(folder: Path, ranks: int, scenario: str, victim: int) -> Fault:
    before = last_records(folder, ranks)
    assert before is not None
    pids = {pid for _, pid, _ in before}
    sent_ns, dead_ns = strike(before[victim][1], scenario)
    limit_s = RECOVERY_LIMIT_S * (2 if scenario == "stop" else 1)
    step = max(at for _, _, at in before)
    return Fault(sent_ns, dead_ns, wait_for(folder, ranks, step, pids, limit_s))


def measure(system: str, ranks: int, scenario: str, kills: int = 1) -> tuple[Sample, dict[str, list[float]]]:
    """One job: its cold start, then ``kills`` faults, each recovered before the next.

    Returns the sample, and for closeranks the stages of its recoveries in seconds.
    """
    sample, faults = Sample(system, ranks), list[Fault]()
    stages: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="launch-", dir="/dev/shm") as name:
        folder = Path(name)
        arguments, environment = command(system, ranks, folder, folder / "runs")
        with (folder / "output").open("wb") as output:
            began_ns = time.monotonic_ns()
            process = subprocess.Popen(
                arguments, env=environment, stdout=output, stderr=output, start_new_session=True, cwd=folder
            )
            try:
                first_ns = wait_for(folder, ranks, -1, set(), START_LIMIT_S)
                if first_ns is None:
                    return sample, stages
                sample.cold_s = (first_ns - began_ns) / 1e9
                for number in range(kills):
                    time.sleep(0.6 if kills == 1 else 0.35)
                    faults.append(one_fault(folder, ranks, scenario, victim=(number + 1) % ranks))
                    if faults[-1].recovered_ns is None:
                        break
                    if number == 0:
                        sample.recovery_s = (faults[0].recovered_ns - faults[0].sent_ns) / 1e9
                if system == "closeranks":
                    stages = stages_of(faults, folder / "runs")
            finally:
                if "-v" in sys.argv:
                    print((folder / "output").read_text("utf-8", "replace")[-3000:])
                end(process)
    return sample, stages


def stages_of(faults: list[Fault], runs: Path) -> dict[str, list[float]]:
    """Seconds from stage to stage of each recovered fault, by our clock and the agent's journal.

    *named* is when evidence and verdict are there, which is when policy is asked.
    """
    (journal,) = [path for path in runs.glob("*/journal.db") if not path.parent.is_symlink()]
    records = [(record.kind, record.mono_ns) for record in read(journal)]
    stages: dict[str, list[float]] = {}
    for fault in faults:
        if fault.recovered_ns is None:
            continue
        knew = next(ns for kind, ns in records if kind in ("rank_exited", "detected") and ns > fault.sent_ns)
        named = next(ns for kind, ns in records if kind == "evidence" and ns > fault.sent_ns)
        spans = {
            "fault to next step": (fault.sent_ns, fault.recovered_ns),
            "fault to named": (fault.sent_ns, named),
            "named to next step": (named, fault.recovered_ns),
        }
        if fault.dead_ns is not None:
            spans["kill to death, by a pidfd of the benchmark"] = (fault.sent_ns, fault.dead_ns)
            spans["death to agent knows"] = (fault.dead_ns, max(knew, fault.dead_ns))
        for what, (start_ns, end_ns) in spans.items():
            stages.setdefault(what, []).append((end_ns - start_ns) / 1e9)
    return stages


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]


def table(samples: list[Sample], ranks: int, field: str) -> list[str]:
    """Median [min-max] of each system, and the median over rounds of peer / closeranks."""
    by_system = {
        s: [getattr(x, field) for x in samples if x.system == s and x.ranks == ranks] for s in SYSTEMS
    }
    ours = by_system["closeranks"]
    lines = []
    for system, values in by_system.items():
        good = [value for value in values if value is not None]
        if not values:
            continue
        if not good:
            lines.append(f"| {system} | {ranks} | {field[:-2]} | none of {len(values)} within the limit | |")
            continue
        ratios = [v / o for v, o in zip(values, ours, strict=False) if v is not None and o]
        ratio = f"{statistics.median(ratios):.1f}x" if system != "closeranks" and ratios else ""
        spread = f"{statistics.median(good):.3f} s [{min(good):.3f}-{max(good):.3f}]"
        lines.append(
            f"| {system} | {ranks} | {field[:-2]} | {spread}, {len(good)} of {len(values)} | {ratio} |"
        )
    return lines


def compare(args: argparse.Namespace) -> tuple[list[str], list[Sample]]:
    present = [
        s for s in args.systems.split(",") if s != "nvrx" or importlib.util.find_spec("nvidia_resiliency_ext")
    ]
    samples: list[Sample] = []
    for number in range(args.rounds):
        for ranks in args.ranks:
            for system in present:
                sample, _ = measure(system, ranks, args.scenario)
                samples.append(sample)
                print(f"round {number + 1}/{args.rounds}  {sample}", file=sys.stderr, flush=True)
    lines = ["| system | ranks | what | median [min-max], n | peer / closeranks |", "|---|---|---|---|---|"]
    for ranks in args.ranks:
        for field in ("cold_s", "recovery_s"):
            lines += table(samples, ranks, field)
    return lines, samples


def endurance(args: argparse.Namespace) -> tuple[list[str], dict[str, dict[str, list[float]]]]:
    lines = ["| ranks | faults recovered | what | p50 | p90 | p99 | max |", "|---|---|---|---|---|---|---|"]
    by_ranks = {}
    for ranks in args.ranks:
        _, stages = measure("closeranks", ranks, args.scenario, kills=args.kills)
        by_ranks[str(ranks)] = stages
        recovered = f"{len(stages.get('fault to next step', []))} of {args.kills}"
        for what, values in stages.items():
            cells = [f"{quantile(values, q) * 1e3:.0f} ms" for q in (0.5, 0.9, 0.99, 1.0)]
            lines.append("| " + " | ".join((str(ranks), recovered, what, *cells)) + " |")
    return lines, by_ranks


def header(args: argparse.Namespace) -> list[str]:
    import torch

    commit = "unknown"
    if shutil.which("git"):
        found = subprocess.run(
            ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        commit = found.stdout.strip() or commit
    return [
        f"# Launch and recovery, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python benchmarks/launch.py {' '.join(args.given)}` at commit {commit}, {os.cpu_count()} CPUs "
        f"({platform.machine()}), Python {platform.python_version()}, torch {torch.__version__}, gloo. "
        f"Scenario: {args.scenario}.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4])
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--scenario", choices=("kill", "stop"), default="kill")
    parser.add_argument("--kills", type=int, default=0, help="only closeranks, this many faults in a row")
    parser.add_argument(
        "--out", type=Path, help="write the result here too (.md), with the samples beside it (.json)"
    )
    parser.add_argument("-v", action="store_true", help="show the end of each job's output")
    args = parser.parse_args()
    args.given = sys.argv[1:]
    lines, data = endurance(args) if args.kills else compare(args)
    text = "\n".join(header(args) + lines) + "\n"
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
        raw = data if isinstance(data, dict) else [vars(sample) for sample in data]
        args.out.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
