"""What Slurm starts in tests: writes down its command line and environment, and waits with a child.

    slurm_stand_in.py DIRECTORY -m closeranks agent|run ...

As an agent it ends on SIGTERM, with its child. As a run it does what DIRECTORY/run.json says:
``{"code": exit code, "excluded": [nodes], "wait_s": seconds}``, the first time; later it exits with 0.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def write(path: Path, value: object) -> None:
    path.with_suffix(".tmp").write_text(json.dumps(value))
    path.with_suffix(".tmp").rename(path)


def agent(directory: Path, argv: list[str]) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    node = os.environ.get("CLOSERANKS_NODE", "")
    facts = {"node": node, "pid": os.getpid(), "child": child.pid, "argv": argv, "env": dict(os.environ)}

    def end(*_: object) -> None:
        child.kill()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    write(directory / "agents" / f"{node}-{os.getpid()}.json", facts)
    print(f"agent of {node} is up", flush=True)
    while True:
        time.sleep(1000)


def run(directory: Path, argv: list[str]) -> None:
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    write(
        directory / "agents" / f"{restarts}.run",
        {"argv": argv, "env": dict(os.environ), "cwd": f"{Path.cwd()}"},
    )
    plan = json.loads((directory / "run.json").read_text())
    if restarts != "0":
        sys.exit(0)
    if plan.get("excluded"):
        run_dir = Path(os.environ["CLOSERANKS_SUBMITTED"])
        (run_dir / "excluded-nodes").write_text("".join(f"{node}\n" for node in plan["excluded"]))
    deadline = time.monotonic() + plan.get("wait_s", 0)
    while not told and time.monotonic() < deadline:
        time.sleep(0.05)
    sys.exit(143 if told else plan["code"])


if __name__ == "__main__":
    where, verb, rest = Path(sys.argv[1]), sys.argv[4], sys.argv[2:]
    assert rest[:2] == ["-m", "closeranks"], rest
    {"agent": agent, "run": run}[verb](where, rest)
