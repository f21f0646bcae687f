"""``closeranks demo``: a real training run loses three ranks in three ways, and ends as if nothing had been.

Two runs of the same script on this machine, four ranks each: one undisturbed, one with a rank killed, a rank
frozen and a rank that skips a collective. Their final parameters must be equal to the last bit.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import closeranks
from closeranks.cli.runs_place import add_runs_dir
from closeranks.errors import ConfigError

__all__ = ["HELP", "configure", "main"]

HELP = "see a real training run survive three faults (less than a minute)"
_FAULTS = (
    ("kill:rank=1,step=25", "rank 1 is killed with SIGKILL", 1),
    ("stop:rank=2,step=20,generation=1", "rank 2 is frozen with SIGSTOP", 2),
    ("skip:rank=3,step=15,generation=2", "rank 3 skips a collective", 3),
)
_DIGEST = re.compile(rb"sha256[ =:]+([0-9a-f]{64})")


def configure(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.add_argument(
        "--nproc-per-node", type=int, default=4, metavar="N", help="ranks (default: 4, at least 4)"
    )
    parser.add_argument("--steps", type=int, default=120, help="training steps (default: 120, at least 80)")
    add_runs_dir(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document on stdout, the rest on stderr"
    )


def _script() -> Path:
    """The training script: shipped in the wheel, beside src/ in a checkout."""
    package = Path(closeranks.__file__).parent
    for path in (package / "_demo" / "train_tiny.py", package.parent.parent / "examples" / "train_tiny.py"):
        if path.is_file():
            return path
    raise ConfigError("the demo's training script is not installed; install closeranks again")


def _run(args: argparse.Namespace, checkpoint: Path, extra: list[str]) -> tuple[int, str]:
    """One run; returns its exit code and the digest of its final parameters ("" if it printed none)."""
    command = [
        *(sys.executable, "-m", "closeranks", "run", "--nproc-per-node", str(args.nproc_per_node)),
        *("--log-dir", args.runs_dir, "--job-name", "demo", *extra, str(_script())),
        *("--steps", str(args.steps), "--checkpoint", str(checkpoint), "--checkpoint-every", "1"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    digest = ""
    for line in process.stdout:
        shown = sys.stderr.buffer if args.json else sys.stdout.buffer
        shown.write(line)
        shown.flush()
        if found := _DIGEST.search(line):
            digest = found[1].decode()
    return process.wait(), digest


def _say(args: argparse.Namespace, text: str) -> None:
    print(text, file=sys.stderr if args.json else sys.stdout, flush=True)


def _culprits(run_dir: Path) -> list[list[int]]:
    """The ranks each incident's verdict names."""
    found = []
    for path in sorted(run_dir.glob("incidents/[0-9]*/verdict.json")):
        culprits = json.loads(path.read_text())["culprits"]
        found.append([culprit["rank"] for culprit in culprits if culprit.get("rank") is not None])
    return found


def main(args: argparse.Namespace) -> int:
    """Run the demo; 0 if every fault was survived, named rightly, and left no trace in the parameters."""
    from closeranks.controller.runs import find_run

    if args.nproc_per_node < 4 or args.steps < 80:
        raise ConfigError("the demo needs at least 4 ranks and 80 steps: --nproc-per-node 4 --steps 80")
    with tempfile.TemporaryDirectory(prefix="closeranks-demo-") as folder:
        _say(args, "── 1 of 2 · an undisturbed run ──")
        plain_code, plain = _run(args, Path(folder) / "plain.pt", ["--quiet"])
        _say(args, "\n── 2 of 2 · the same run, disturbed ──")
        for _, text, _ in _FAULTS:
            _say(args, f"   {text}")
        flags = [part for spec, _, _ in _FAULTS for part in ("--inject", spec)]
        code, disturbed = _run(args, Path(folder) / "disturbed.pt", flags)
    run_dir = find_run("latest", Path(args.runs_dir))
    culprits = _culprits(run_dir)
    right = culprits == [[rank] for _, _, rank in _FAULTS]
    same = bool(plain) and plain == disturbed
    ok = plain_code == code == 0 and same and right
    _say(args, "")
    report = [sys.executable, "-m", "closeranks", "report", str(run_dir)]
    subprocess.run(report, stdout=sys.stderr if args.json else None, check=False)
    _say(args, f"undisturbed  {plain or '(no digest)'}\ndisturbed    {disturbed or '(no digest)'}")
    _say(args, f"parameters   {'equal to the last bit' if same else 'DIFFERENT'}")
    _say(args, f"culprits     {culprits} {'as injected' if right else 'NOT as injected'}")
    if args.json:
        print(
            json.dumps({"ok": ok, "digests": [plain, disturbed], "culprits": culprits, "run": str(run_dir)})
        )
    return 0 if ok else 1
