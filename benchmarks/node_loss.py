"""A node vanishes from the network: how long until the training makes its next step, beside torchrun.

Run (root, nftables): ``python benchmarks/node_loss.py [--rounds 3] [--keep DIR]``. Four nodes with one rank
each, and a fifth that waits, on isolated hosts (network namespaces); the same unmodified script, which saves
after each step; interleaved. In each round the link of the node with rank 2 is cut, which is neither rank 0's
nor the store's. Counted is from the cut to the end of the next step that wasn't made before.

torchrun as its documentation has elastic jobs: ``--nnodes 3:4``, c10d, ``--max-restarts 3``; it has no
spares, so the fifth node is left out there. Nothing on its side is tuned, and nothing on ours.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isolated_hosts import Hosts, why_not

NODES = 4
START_S, RECOVER_S = 120.0, 240.0
SCRIPT = """
import os, time
from pathlib import Path
import torch
import torch.distributed as dist

folder = Path(os.environ["BENCH_FOLDER"])
dist.init_process_group("gloo")
rank = dist.get_rank()
saved = folder / "checkpoint.pt"
step = torch.load(saved)["step"] if saved.exists() else 0
while True:
    time.sleep(0.05)
    dist.all_reduce(torch.ones(1))
    step += 1
    if rank == 0:
        torch.save({"step": step}, folder / "new.pt")
        os.replace(folder / "new.pt", saved)
        with (folder / "steps").open("a") as file:
            file.write(f"{step} {time.monotonic()} {dist.get_world_size()}\\n")
    if rank == 2:
        (folder / "rank2").write_text(os.readlink("/proc/self/ns/net"))
    dist.barrier()
"""


def steps(folder: Path) -> list[tuple[int, float, int]]:
    """(step, when, world size) of every step of rank 0."""
    try:
        rows = [line.split() for line in (folder / "steps").read_text().splitlines()]
    except OSError:
        return []
    return [(int(row[0]), float(row[1]), int(row[2])) for row in rows if len(row) == 3]


def wait_for(folder: Path, step: int, timeout_s: float) -> tuple[int, float, int] | None:
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        found = next((row for row in steps(folder) if row[0] >= step), None)
        if found is not None:
            return found
        time.sleep(0.02)
    return None


@contextmanager
def started(commands: list[list[str]], folder: Path) -> Iterator[None]:
    environment = {**os.environ, "BENCH_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("wb") as output:
        processes = [
            subprocess.Popen(
                command, env=environment, cwd=folder, stdout=output, stderr=output, start_new_session=True
            )
            for command in commands
        ]
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                for process in processes:
                    if process.poll() is None:
                        os.killpg(process.pid, number)
                until_s = time.monotonic() + 15
                while time.monotonic() < until_s and any(p.poll() is None for p in processes):
                    time.sleep(0.1)
            for process in processes:
                process.wait()


def ours(hosts: Hosts, folder: Path, script: Path) -> list[list[str]]:
    return [
        [
            *hosts.inside(hosts.hub), sys.executable, "-m", "closeranks", "run", "--engine", "local",
            "--nnodes", str(NODES), "--spares", "1", "--engine-option", "hosts=" + ",".join(hosts.names),
            "--engine-option", "prefix=nsenter --net=/run/netns/{node}",
            "--engine-option", f"listen={hosts.hub_address}", "--log-dir", str(folder / "runs"), str(script),
        ]
    ]  # fmt: skip


def torchruns(hosts: Hosts, script: Path) -> list[list[str]]:
    endpoint = f"{hosts.address(hosts.names[0])}:29500"
    return [
        [
            *hosts.inside(host), "env", "GLOO_SOCKET_IFNAME=eth0", sys.executable, "-m",
            "torch.distributed.run", "--nnodes", f"{NODES - 1}:{NODES}", "--nproc-per-node", "1",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "bench",
            "--rdzv-conf", f"is_host={int(host == hosts.names[0])}",  # there are no names to tell it by
            "--local-addr", hosts.address(host), "--max-restarts", "3", str(script),
        ]
        for host in hosts.names[:NODES]
    ]  # fmt: skip


def round_of(kind: str, folder: Path, script: Path) -> tuple[float | None, int]:
    """(seconds from the cut to the next new step, world size then); None: it never came."""
    folder.mkdir(parents=True)
    with Hosts(NODES + 1) as hosts:
        commands = ours(hosts, folder, script) if kind == "closeranks" else torchruns(hosts, script)
        with started(commands, folder):
            if wait_for(folder, 20, START_S) is None:
                raise SystemExit(f"{kind} did not start:\n{(folder / 'output').read_text()[-3000:]}")
            victim = hosts.of_namespace((folder / "rank2").read_text())
            if victim == hosts.names[0] and kind == "torchrun":
                raise SystemExit("rank 2 is on the node that has torchrun's store; run it again")
            hosts.link(victim, up=False)
            cut_s, last = time.monotonic(), steps(folder)[-1][0]
            found = wait_for(folder, last + 2, RECOVER_S)
            return (None, 0) if found is None else (found[1] - cut_s, found[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="keep outputs in this directory")
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"isolated hosts: {reason}")
    found: dict[str, list[float | None]] = {"closeranks": [], "torchrun": []}
    with tempfile.TemporaryDirectory() as temporary:
        place = args.keep or Path(temporary)
        script = place / "train.py"
        place.mkdir(parents=True, exist_ok=True)
        script.write_text(SCRIPT)
        for number in range(args.rounds):
            for kind, times in found.items():
                seconds, world_size = round_of(kind, place / f"{kind}-{number}", script)
                times.append(seconds)
                shown = "never" if seconds is None else f"{seconds:6.2f} s, with {world_size} ranks"
                print(f"round {number}  {kind:10}  next step after {shown}", flush=True)
    medians = {}
    for kind, times in found.items():
        known = [seconds for seconds in times if seconds is not None]
        medians[kind] = statistics.median(known) if known else None
        lost = len(times) - len(known)
        print(f"{kind:10}  median {medians[kind]} of {len(known)}" + (f", never: {lost}" if lost else ""))
    if medians["closeranks"] and medians["torchrun"]:
        print(f"ratio       {medians['torchrun'] / medians['closeranks']:.1f}")


if __name__ == "__main__":
    main()
