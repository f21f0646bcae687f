"""The control plane at 2,048 nodes: attach, steady load, and how long a lost node costs; beside c10d's.

    python benchmarks/control_plane.py                          # 3 interleaved rounds, TLS on and off
    python benchmarks/control_plane.py --rounds 1 --steady 5 --peers 32

The controller is the one of ``closeranks run``, in a process of its own, with its journal; the agents are
simulated in one other process, with real connections and messages and no ranks (benchmarks/workloads/). They
share the cores with the controller, so what they need themselves is told, too. Measured:

* *attach*: the first agent connects -> all are attached and have started the first generation;
* *steady*: the controller's share of one core and its resident memory, at the default heartbeat;
* *lost*: the engine says that a node is gone for certain -> all have acknowledged the next generation;
* *failed*: an agent reports a killed rank -> every node's evidence is heard, and all have acknowledged.

The peer: torchrun's rendezvous (c10d, TCPStore), all clients at once for the first time (*attach*), and again
(*lost*: what its agents do once they know), each client in a process of its own. Rounds are interleaved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

WORKLOADS = Path(__file__).parent / "workloads"
LIMIT_S = 120.0
Samples = dict[tuple[str, str], list[float]]  # by system and measure


class Child:
    """A process that prints lines of JSON and takes orders on stdin."""

    def __init__(self, *command: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=False
        )
        self._lines: list[dict[str, Any]] = []
        self._rest = b""

    def order(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n".encode())
        self._process.stdin.flush()

    def expect(self, what: str, generation: int | None = None, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """The next line about ``what``, and of that generation; older ones are forgotten."""
        deadline_s = time.monotonic() + limit_s
        while True:
            while self._lines:
                line = self._lines.pop(0)
                if line["what"] == what and generation in (None, line.get("generation")):
                    return line
            self._read(what, deadline_s)

    def _read(self, what: str, deadline_s: float) -> None:
        assert self._process.stdout is not None
        fd, left_s = self._process.stdout.fileno(), deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
            raise TimeoutError(f"nothing was heard of {what!r} in time")
        data = os.read(fd, 65536)
        if not data:
            raise RuntimeError(f"{self._process.args!r} ended early")
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._lines += map(json.loads, lines)

    def cpu_s(self) -> float:
        """Of all its threads, to the nanosecond: ``stat`` counts ticks of 10 ms."""
        threads = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def memory_mb(self, name: str) -> float:
        """``VmRSS``, or ``VmHWM``: the most it ever was."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition(f"{name}:")[2].split()[0]) * 1024 / 1e6

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.order("stop")
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def job(arguments: argparse.Namespace, nodes: int, tls: bool) -> Iterator[tuple[Child, Child]]:
    """A controller and its agents."""
    with tempfile.TemporaryDirectory(prefix="closeranks-bench-") as folder, contextlib.ExitStack() as stack:
        run_dir = Path(folder) / "control-plane"
        run_dir.mkdir()
        spares = arguments.faults
        flags = ["--tls"] if tls else []
        controller = Child(
            WORKLOADS / "lone_controller.py", run_dir, "--nodes", nodes, "--spares", spares, *flags
        )
        stack.callback(controller.end)
        endpoint = f"127.0.0.1:{controller.expect('listening')['port']}"
        flags = ["--credentials", str(run_dir / "credentials" / "agent.pem")] if tls else []
        count = ["--agents", nodes + spares, "--ranks", arguments.ranks]
        fleet = Child(WORKLOADS / "fleet.py", endpoint, run_dir.name, *count, *flags)
        stack.callback(fleet.end)
        yield controller, fleet


def measure(
    samples: Samples, arguments: argparse.Namespace, nodes: int, tls: bool, *, steady_s: float
) -> None:
    system = f"closeranks, {nodes:,} agents{', TLS' if tls else ''}"

    def found(what: str, value: float) -> None:
        samples[system, what].append(value)
        print(f"  {system}: {what} {value:.3f}", flush=True)

    with job(arguments, nodes, tls) as (controller, fleet):
        began_s = fleet.expect("connecting")["s"]
        found("attach, s", controller.expect("generation_started", 0)["s"] - began_s)
        found("controller's CPU to attach, s", controller.cpu_s())
        found("attempts to connect", fleet.expect("attached")["attempts"])
        controller.expect("first_step", 0)
        if steady_s:
            before_s, fleet_before_s = controller.cpu_s(), fleet.cpu_s()
            fleet.order("report")
            time.sleep(steady_s)
            found("steady: controller, % of a core", 100 * (controller.cpu_s() - before_s) / steady_s)
            found("steady: all agents, % of a core", 100 * (fleet.cpu_s() - fleet_before_s) / steady_s)
            found("steady: controller's memory, MB", controller.memory_mb("VmRSS"))
            fleet.expect("report")
            fleet.order("report")
            found("steady: slowest answer, ms", 1e3 * fleet.expect("report")["slowest_answer_s"])
        generation = 0
        for fault in range(arguments.faults):
            node = f"node{fault:04d}"
            fleet.order(f"vanish {node}")
            session = fleet.expect("vanished")["session"]
            controller.order(f"gone {node} {session}")
            generation += 1
            began_s = controller.expect("fact")["s"]
            cpu_s, fleet_cpu_s = controller.cpu_s(), fleet.cpu_s()
            found("lost, s", controller.expect("generation_started", generation)["s"] - began_s)
            found("lost: controller's CPU, s", controller.cpu_s() - cpu_s)
            found("lost: all agents' CPU, s", fleet.cpu_s() - fleet_cpu_s)
            controller.expect("first_step", generation)
            time.sleep(2.0)
            fleet.order(f"fail node{arguments.faults + fault:04d}")
            generation += 1
            began_s = fleet.expect("fact")["s"]
            found("failed, s", controller.expect("generation_started", generation)["s"] - began_s)
            controller.expect("first_step", generation)
            time.sleep(2.0)
        found("controller's most memory, MB", controller.memory_mb("VmHWM"))


def measure_peer(samples: Samples, clients: int, limit_s: float) -> bool:
    """Whether it came through."""
    command = [sys.executable, str(WORKLOADS / "c10d_clients.py"), "--clients", str(clients)]
    output = subprocess.run(
        [*command, "--limit", str(limit_s)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    ).stdout
    result = json.loads(output)
    system = f"c10d, {clients:,} clients"
    print(f"  {system}: {result}", flush=True)
    for key, what in (("join_s", "attach, s"), ("again_s", "lost, s")):
        if key in result:
            samples[system, what].append(result[key])
    return "again_s" in result


def report(samples: Samples) -> str:
    lines = ["| system | what | median [min-max], n |", "|---|---|---|"]
    for (system, what), values in samples.items():
        spread = f"{statistics.median(values):.3g} [{min(values):.3g}-{max(values):.3g}], {len(values)}"
        lines.append(f"| {system} | {what} | {spread} |")
    return "\n".join([*lines, "", *ratios(samples)])


def ratios(samples: Samples) -> Iterator[str]:
    """c10d's medians over ours, with as many clients, and with those that we were given at most."""
    ours = {key: statistics.median(values) for key, values in samples.items() if key[0].startswith("close")}
    for (system, what), values in samples.items():
        if system.startswith("c10d"):
            took_s = statistics.median(values)
            for (our_system, our_what), our_s in ours.items():
                if our_what == what:
                    yield f"- {what.partition(',')[0]}: {system} / {our_system} = {took_s / our_s:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=8, help="of one node")
    parser.add_argument("--faults", type=int, default=1, help="of each kind in a round")
    parser.add_argument("--steady", type=float, default=15.0, help="seconds")
    parser.add_argument("--peers", default="32,64,128", help="clients of c10d; what fails isn't tried again")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each step of c10d's")
    parser.add_argument("--tls", choices=("on", "off", "both"), default="both")
    arguments = parser.parse_args()
    peers = [int(count) for count in arguments.peers.split(",") if count]
    samples: Samples = defaultdict(list)
    modes = {"on": [True], "off": [False], "both": [False, True]}[arguments.tls]
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} {os.cpu_count()} CPUs ({platform.machine()})", flush=True)
    for number in range(arguments.rounds):
        print(f"round {number + 1}, load {os.getloadavg()[0]:.2f}", flush=True)
        for tls in modes:
            measure(samples, arguments, arguments.nodes, tls, steady_s=arguments.steady)
        for clients in tuple(peers):
            if not measure_peer(samples, clients, arguments.limit):
                peers.remove(clients)
            measure(samples, arguments, clients, True, steady_s=0.0)
    print(report(samples))


if __name__ == "__main__":
    main()
