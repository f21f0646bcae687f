"""Run the compatibility scripts under torchrun and record what they print, as tests/compat/expected/*.txt.

    .venv/bin/python scripts/record_compat.py            # all of them
    .venv/bin/python scripts/record_compat.py ddp rng    # these
    .venv/bin/python scripts/record_compat.py --check    # write nothing; fail where torchrun has changed

Run it after adding a case, and when the pinned torch moves. A changed expectation is a change of what
torchrun does: say so in the commit.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from compat.cases import CASES, EXPECTED, SCRIPTS, Case, render

TIMEOUT_S = 300.0


def under_torchrun(case: Case) -> str:
    """The rendered output of one case. Raises RuntimeError when its exit code isn't the expected one."""
    with tempfile.TemporaryDirectory() as logs:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--log-dir", logs, "--redirects", "3", *case.launch),
        ]
        done = subprocess.run(
            command,
            cwd=SCRIPTS,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **case.environment},
            input=case.stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode != min(case.exit_code, 1):
            errors = "".join(file.read_text() for file in sorted(Path(logs).glob("*/*/*/stderr.log")))
            raise RuntimeError(f"{case.name}: torchrun ended with {done.returncode}:\n{done.stderr}{errors}")
        files = sorted(Path(logs).glob("*/attempt_0/*/stdout.log"))
        return render({int(file.parent.name): file.read_text() for file in files})


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Record what the compatibility scripts print under torchrun."
    )
    parser.add_argument("names", nargs="*", choices=[[], *(case.name for case in CASES)], metavar="CASE")
    parser.add_argument("--check", action="store_true", help="compare with what is recorded, write nothing")
    args = parser.parse_args()
    changed = 0
    for case in CASES:
        if args.names and case.name not in args.names:
            continue
        output = under_torchrun(case)
        same = case.expected.exists() and case.expected.read_text() == output
        changed += not same
        print(f"{case.name}: {'same' if same else 'changed' if args.check else 'recorded'}", flush=True)
        if not same and not args.check:
            EXPECTED.mkdir(exist_ok=True)
            case.expected.write_text(output)
    return 1 if args.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
