"""A job over many nodes under random faults: real agents, real ranks, real signals.

    python tests/chaos/rounds.py --rounds 500 --seed 7

starts a job on the local engine and does something to it, round by round, as the seed says: kills ranks,
agents, parts of agents and the controller, freezes them, drains nodes. After each round the job has to make
steps again. At the end it is told to stop, and then it must be so that every step was made in one world,
none was made twice with another result, none was skipped, and each world had each rank once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from closeranks.cli.inject import ask
from closeranks.errors import RunNotFound

HERE = Path(__file__).parent
MODULUS = 2**31 - 1
NODES, SPARES = 3, 1
RECOVER_S = 120.0
FAULTS = ("rank", "agent", "guard", "zygote", "freeze", "freeze_agent", "controller", "controllers",
          "freeze_controller", "drain", "two_ranks", "store", "rank_and_controller")  # fmt: skip


class BrokenPromise(AssertionError):
    """The job did something that it must never do."""


def tree() -> dict[int, list[int]]:
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(") ")[2].split()
                children[int(fields[1])].append(int(entry.name))
    return children


def below(pid: int) -> list[int]:
    children, found, left = tree(), [], [pid]
    while left:
        found += (more := children.get(left.pop(), []))
        left += more
    return found


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return ""


def arguments_of(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass
class Chaos:
    folder: Path
    chance: random.Random
    log: Any
    process: subprocess.Popen[bytes] | None = None
    did: Counter[str] = field(default_factory=Counter)

    def start(self, step_s: float) -> None:
        environment = {**os.environ, "CHAOS_FOLDER": str(self.folder), "CHAOS_STEP_S": str(step_s)}
        command = [
            sys.executable, "-m", "closeranks", "run", "--engine", "local", "--nnodes", str(NODES),
            "--spares", str(SPARES), "--nproc-per-node", "1", "--log-dir", str(self.folder / "runs"),
            "--lease", "0.5", "--max-restarts", "100000", str(HERE / "train.py"),
        ]  # fmt: skip
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=self.folder
            )

    # --- looking

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def guards(self) -> dict[str, int]:
        """node -> the pid of its agent's guard."""
        found = {}
        for pid in below(self.pid):
            arguments = arguments_of(pid)
            if arguments[2:4] == ["closeranks", "agent"] and "--node" in arguments:
                found[arguments[arguments.index("--node") + 1]] = pid
        return found

    def parts(self, guard: int, name: str) -> list[int]:
        return [pid for pid in below(guard) if name_of(pid) == name]

    def controllers(self) -> list[int]:
        return [pid for pid in below(self.pid) if name_of(pid) == "cr-controller"]

    def status(self) -> dict[str, Any]:
        for _ in range(200):
            runs = sorted((self.folder / "runs").glob("2*"))
            with contextlib.suppress(RunNotFound):
                if runs:
                    return ask(runs[0], {"type": "status"})
            self.assert_runs()
            time.sleep(0.1)
        raise BrokenPromise("the controller can't be asked any more")

    def assert_runs(self) -> None:
        assert self.process is not None
        if self.process.poll() is not None:
            raise BrokenPromise(f"the job ended with code {self.process.returncode}")

    def wait_for_steps(self, more_than: int) -> int:
        """Wait until the job has come farther than that; returns how far."""
        until_s = time.monotonic() + RECOVER_S
        while time.monotonic() < until_s:
            step = self.saved_step()
            if step > more_than:
                return step
            self.assert_runs()
            time.sleep(0.05)
        raise BrokenPromise(f"no step after {more_than} within {RECOVER_S:g} s: {self.status()}")

    def saved_step(self) -> int:
        last = 0
        for path in self.folder.glob("trace-*-0-*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                for line in path.read_text().splitlines()[-2:]:
                    if line.startswith("step"):
                        last = max(last, int(line.split()[1]))
        return last

    # --- doing

    def round(self) -> str:
        """One fault; returns what it was."""
        status = self.status()
        seated = [node["node"] for node in status["nodes"] if node["ranks"]]
        attached = [node["node"] for node in status["nodes"] if node["link"] == "attached"]
        guards = self.guards()
        running = [node for node in seated if node in guards]
        fault = self.chance.choice(FAULTS)
        node = self.chance.choice(sorted(running)) if running else None
        wait_s = self.chance.choice((0.1, 0.4, 1.2, 2.5))
        if node is None:
            return "nothing: no world"
        guard = guards[node]
        if fault in ("rank", "two_ranks", "rank_and_controller"):
            victims = [guard] if fault != "two_ranks" else [guards[name] for name in running[:2]]
            for victim in victims:
                for pid in self.ranks(victim):
                    send(pid, signal.SIGKILL)
            if fault == "rank_and_controller":
                time.sleep(self.chance.random() * 0.1)
                self.kill_controllers()
        elif fault == "agent":
            for pid in [guard, *below(guard)]:
                send(pid, signal.SIGKILL)
        elif fault == "guard":
            send(guard, signal.SIGKILL)
        elif fault == "zygote":
            for pid in self.parts(guard, "cr-zygote"):
                send(pid, signal.SIGKILL)
        elif fault in ("freeze", "freeze_agent"):
            pids = [guard, *below(guard)] if fault == "freeze" else self.parts(guard, "cr-agent")
            self.freeze(pids, wait_s)
        elif fault == "store":
            for pid in [pid for name in running for pid in self.parts(guards[name], "cr-store")]:
                send(pid, signal.SIGKILL)
        elif fault == "controller":
            self.kill_controllers()
        elif fault == "controllers":
            for _ in range(3):
                self.kill_controllers()
                time.sleep(self.chance.random())
        elif fault == "freeze_controller":
            self.freeze(self.controllers(), wait_s)
        elif fault == "drain":
            node = self.chance.choice(sorted(attached)) if attached else node
            runs = sorted((self.folder / "runs").glob("2*"))
            with contextlib.suppress(RunNotFound):
                ask(runs[0], {"type": "drain", "node": node, "deadline_s": 20.0, "reason": "chaos"})
        return f"{fault} {node} {wait_s if 'freeze' in fault else ''}".strip()

    def ranks(self, guard: int) -> list[int]:
        """Processes that have a trace: those that train."""
        traced = {int(path.name.split("-")[3]) for path in self.folder.glob("trace-*")}
        return [pid for pid in below(guard) if pid in traced]

    def kill_controllers(self) -> None:
        for pid in self.controllers():
            send(pid, signal.SIGKILL)

    def freeze(self, pids: list[int], for_s: float) -> None:
        for pid in pids:
            send(pid, signal.SIGSTOP)
        time.sleep(for_s)
        for pid in reversed(pids):
            send(pid, signal.SIGCONT)

    # --- the whole

    def run(self, rounds: int) -> int:
        """Returns the last step."""
        step = self.wait_for_steps(3)
        for number in range(rounds):
            what = self.round()
            self.did[what.split()[0]] += 1
            began_s = time.monotonic()
            step = self.wait_for_steps(self.saved_step() + self.chance.randrange(1, 30))
            print(f"{number:4} {what:32} step {step} after {time.monotonic() - began_s:.2f} s", file=self.log)
            self.log.flush()
        (self.folder / "stop").touch()
        assert self.process is not None
        code = self.process.wait(RECOVER_S)
        if code != 0:
            raise BrokenPromise(f"the job ended with code {code}")
        return step

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            for pid in [self.pid, *below(self.pid)]:
                send(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(RECOVER_S)


def check(folder: Path) -> dict[str, int]:
    """Every promise about what the ranks did, from their own notes. Raises BrokenPromise."""
    values: dict[int, int] = {0: 1}
    spans: dict[int, list[int]] = {}
    ranks: dict[int, list[int]] = defaultdict(list)
    made = 0
    for path in sorted(folder.glob("trace-*")):
        _, generation, rank, _ = path.name.split("-")
        ranks[int(generation)].append(int(rank))
        for line in path.read_text().splitlines():
            words = line.split()
            if words[0] == "begin":
                if int(words[3]) != NODES:
                    raise BrokenPromise(f"{path.name}: a world of {words[3]} ranks")
                continue
            if len(words) < 4:
                continue  # cut off by its rank's end
            step, value, at_ns = int(words[1]), int(words[2]), int(words[3])
            if values.setdefault(step, value) != value:
                raise BrokenPromise(f"{path.name}: step {step} was made twice, and differently")
            spans.setdefault(int(generation), []).append(at_ns)
            made += 1
    for generation, seen in ranks.items():
        if Counter(seen).most_common(1)[0][1] > 1:
            raise BrokenPromise(f"generation {generation} had a rank twice: {sorted(seen)}")
    check_order(spans)
    for step in range(1, max(values) + 1):
        if step not in values:
            raise BrokenPromise(f"step {step} was skipped")
        if values[step] != (values[step - 1] * 48271 + step * 7919) % MODULUS:
            raise BrokenPromise(f"step {step} has a result that doesn't follow from the one before")
    return {"generations": len(ranks), "steps": max(values), "steps_made": made // NODES}


def check_order(spans: dict[int, list[int]]) -> None:
    """One world at a time: each generation's last step comes before the next one's first."""
    order = sorted(spans)
    for earlier, later in itertools.pairwise(order):
        if max(spans[earlier]) > min(spans[later]):
            late_ms = (max(spans[earlier]) - min(spans[later])) / 1e6
            raise BrokenPromise(
                f"two worlds: generation {earlier} made a step {late_ms:.1f} ms after {later}'s first"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--keep", type=Path, help="keep everything in this directory")
    args = parser.parse_args()
    print(f"replay with: python {Path(__file__)} --rounds {args.rounds} --seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        chaos = Chaos(folder, random.Random(args.seed), sys.stdout)
        try:
            chaos.start(args.step_s)
            chaos.run(args.rounds)
            print(json.dumps({**check(folder), "did": dict(chaos.did)}))
        except BrokenPromise as error:
            print(f"BROKEN: {error}\n--- the job's last lines:")
            print("\n".join((folder / "output").read_text(errors="replace").splitlines()[-40:]))
            return 1
        finally:
            chaos.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
