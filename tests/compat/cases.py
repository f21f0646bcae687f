"""The scripts whose behaviour under torchrun is the yardstick, and how to start each.

One list serves both sides: ``scripts/record_compat.py`` runs it under torchrun and writes ``expected/``,
``test_compat.py`` runs it under closeranks and compares.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "scripts"
EXPECTED = HERE / "expected"


@dataclass(frozen=True, slots=True)
class Case:
    """One command line after the launcher's own name, started in ``scripts/``.

    ``exit_code`` is what closeranks ends with. torchrun ends with 1 whenever a rank fails, and closeranks
    with the script's own code.
    """

    name: str
    arguments: tuple[str, ...]
    flags: tuple[str, ...] = ()
    nproc: int = 2
    stdin: str = ""
    exit_code: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def launch(self) -> list[str]:
        return ["--nproc-per-node", str(self.nproc), *self.flags, *self.arguments]

    @property
    def expected(self) -> Path:
        return EXPECTED / f"{self.name}.txt"


HOSTILE_ARGUMENTS = (
    "--lr=-1e-3", "--nproc-per-node", "7", "--negative", "-5", "-vv", "--", "--not-a-flag", "", "two words",
    "line\nbreak", "it's", '"quoted"', "$HOME `id` \\", "naïve ✓",
)  # fmt: skip

CASES = (
    Case("argparse_args", ("argparse_args.py", *HOSTILE_ARGUMENTS)),
    Case("at_exit", ("at_exit.py",)),
    Case("collectives", ("collectives.py",)),
    Case("command", ("sh", "-c", 'echo "rank $RANK of $WORLD_SIZE, $0, $1"', "a", "b c"), ("--no-python",)),
    Case("dataloader_workers", ("dataloader_workers.py",)),
    Case("ddp", ("ddp.py",)),
    Case("ddp_one_rank", ("ddp.py",), nproc=1),
    Case("device_mesh_subgroups", ("device_mesh_subgroups.py",), nproc=4),
    Case("elastic_record", ("elastic_record.py",)),
    Case("elastic_record_fail", ("elastic_record.py", "--fail"), exit_code=1),
    Case("env_dump", ("env_dump.py",), ("--max-restarts", "3", "--role", "trainer")),
    Case("exit_hard", ("exit_codes.py", "hard")),
    Case("exit_message", ("exit_codes.py", "message"), nproc=1, exit_code=1),
    Case("exit_none", ("exit_codes.py", "none")),
    Case("exit_seven", ("exit_codes.py", "seven"), nproc=1, exit_code=7),
    Case("exit_zero", ("exit_codes.py", "zero")),
    Case("fsdp2", ("fsdp2.py",)),
    Case("main_guard", ("main_guard.py",)),
    Case("module", ("pkg.mod", "--flag", "value"), ("-m",)),
    Case("mp_children", ("mp_children.py",)),
    Case("optimizers", ("optimizers.py",), nproc=1),
    Case("own_tcpstore", ("own_tcpstore.py",)),
    Case("package", ("pkg", "one"), ("--module",)),
    Case("pickle_main", ("pickle_main.py",), nproc=1),
    Case("pipeline_p2p", ("pipeline_p2p.py",), nproc=3),
    Case("reinit", ("reinit.py",)),
    Case("rng", ("rng.py",), nproc=3),
    Case("run_path", ("argparse_args.py", "--lr", "2"), ("--run-path",), nproc=1),
    Case("sibling_import", ("sibling_import.py",), nproc=1),
    Case("signal_handler", ("signal_handler.py",)),
    Case("stdin", ("stdin.py",), stdin="alpha\nbeta\n"),
    Case("sys_path", ("sys_path.py", "a", "b")),
    Case("sys_path_space", ("with space/a script.py",), nproc=1),
    Case("tcp_init", ("tcp_init.py",)),
    Case("threads", ("threads.py",)),
)


def normalise(text: str) -> str:
    """Take out of a rank's output what may differ between two machines or runs: paths and addresses."""
    text = text.replace(str(SCRIPTS), "<scripts>")
    return re.sub(r"0x[0-9a-f]+", "<address>", text)


def render(outputs: dict[int, str]) -> str:
    """Every rank's standard output, in the order of ranks, each line behind its rank."""
    lines = [
        f"[{rank}] {line}" for rank, text in sorted(outputs.items()) for line in normalise(text).splitlines()
    ]
    return "\n".join(lines) + "\n"
