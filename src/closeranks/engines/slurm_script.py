"""The batch script that a job is submitted with, and the options it is made from. No I/O.

What is given with ``--engine-option NAME=VALUE`` is an option of sbatch by its long name, unless it is one of
our own; sbatch is the judge of its options. What would change what a job of ours is can't be given.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from closeranks.engines.base import JobSpec
from closeranks.errors import UsageError

__all__ = [
    "EXCLUDED_FILE",
    "NO_NODES_CODE",
    "SUBMITTED_VARIABLE",
    "SlurmOptions",
    "batch_environment",
    "batch_script",
    "read_options",
]

# In the run directory: nodes that a requeued job must not get again, one a line.
EXCLUDED_FILE = "excluded-nodes"
# Tells the run inside of the allocation which run directory it was promised.
SUBMITTED_VARIABLE = "CLOSERANKS_SUBMITTED"
NO_NODES_CODE = 93

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_SIGNAL = re.compile(r"(?:SIG)?(TERM|INT|HUP|USR1|USR2|CONT)@(\d{1,5})")
_ONE_JOB = "a job here is one training run; submit another one"
_OURS = "closeranks sets it"
_RESERVED = {
    "array": _ONE_JOB,
    "help": _OURS,
    "kill-on-bad-exit": _OURS,
    "no-kill": "a lost node would end the job otherwise",
    "no-requeue": "leave it out, and give requeues=0",
    "nodes": "give --nnodes and --spares",
    "ntasks": "give --nnodes, --spares and --nproc-per-node",
    "ntasks-per-node": "one agent a node starts all of its ranks; give --nproc-per-node",
    "open-mode": _OURS,
    "parsable": _OURS,
    "requeue": _OURS,
    "test-only": "look at `closeranks engine render` instead",
    "usage": _OURS,
    "version": _OURS,
    "wait": "follow the job with squeue, or the log file",
    "wrap": _OURS,
}
# Variables that sbatch puts above what a script says (sbatch(1), "INPUT ENVIRONMENT VARIABLES").
_VARIABLES_OF = {
    "time": "TIMELIMIT",
    "mem": "MEM_PER_NODE",
    "chdir": "WORKING_DIR",
    "cpus-per-task": "CPUS_PER_TASK",
}
_NEVER_FROM_OUTSIDE = (
    "ARRAY_INX",
    "NO_KILL",
    "NO_REQUEUE",
    "OPEN_MODE",
    "REQUEUE",
    "SIGNAL",
    "TEST_ONLY",
    "WAIT",
)


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """The engine's options, read and checked. ``sbatch``: those that are sbatch's own, by long name."""

    signal: str = "TERM@120"
    requeues: int = 3
    requeue_at_time_limit: bool = False
    setup: str = ""
    agent_output: str = "console"
    requeue_without_batch_host: bool = True
    poll_s: float = 5.0
    sbatch: Mapping[str, str] = field(default_factory=dict)


def read_options(given: Mapping[str, str]) -> SlurmOptions:
    """``given`` as SlurmOptions. Raises UsageError with what to write instead."""
    own: dict[str, str] = {}
    sbatch: dict[str, str] = {}
    for typed, value in given.items():
        name = typed.removeprefix("--").replace("_", "-")
        if not _NAME.fullmatch(name):
            raise UsageError(f"--engine-option {typed!r}: options of sbatch are written like partition=gpu")
        if _CONTROL.search(value):
            raise UsageError(
                f"--engine-option {name}: its value holds a line break or another control character; "
                "a script's line can't hold it. Put several commands on one line with &&, or into a file"
            )
        if name in _RESERVED:
            raise UsageError(f"--engine-option {name} can't be given: {_RESERVED[name]}")
        (own if name in _OWN else sbatch)[name] = value
    return SlurmOptions(
        signal=_signal(own.get("signal", "TERM@120")),
        requeues=int(_number("requeues", own.get("requeues", "3"), 0, 1000)),
        requeue_at_time_limit=_choice("at-time-limit", own.get("at-time-limit", "end"), "end", "requeue")
        == "requeue",
        setup=own.get("setup", ""),
        agent_output=_choice("agent-output", own.get("agent-output", "console"), "console", "files"),
        requeue_without_batch_host=_choice(
            "batch-host-lost", own.get("batch-host-lost", "requeue"), "requeue", "stay"
        )
        == "requeue",
        poll_s=_number("poll-s", own.get("poll-s", "5"), 0.1, 3600),
        sbatch=sbatch,
    )


_OWN = frozenset(
    {"agent-output", "at-time-limit", "batch-host-lost", "poll-s", "requeues", "setup", "signal"}
)


def _signal(value: str) -> str:
    match = _SIGNAL.fullmatch(value.removeprefix("B:"))
    if match is None:
        raise UsageError(f"--engine-option signal={value!r}: write a signal and seconds, such as TERM@120")
    return f"{match[1]}@{int(match[2])}"


def _number(name: str, value: str, least: float, most: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not least <= number <= most:
        raise UsageError(f"--engine-option {name}={value!r}: give a number from {least:g} to {most:g}")
    return number


def _choice(name: str, value: str, *choices: str) -> str:
    if value not in choices:
        raise UsageError(f"--engine-option {name}={value!r}: give {' or '.join(choices)}")
    return value


def batch_environment(options: SlurmOptions, environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` for sbatch, without the variables that would overrule what the script says."""
    names = {_VARIABLES_OF.get(name, name.upper().replace("-", "_")) for name in options.sbatch}
    dropped = {f"SBATCH_{name}" for name in (*names, *_NEVER_FROM_OUTSIDE)}
    return {name: value for name, value in environment.items() if name not in dropped}


def batch_script(spec: JobSpec, options: SlurmOptions, working_directory: Path) -> str:
    """The whole script, as sbatch reads it."""
    if not spec.run_dir.is_absolute():
        raise UsageError(f"the run directory {str(spec.run_dir)!r} has to be an absolute path")
    for word in (spec.job_id, str(spec.run_dir), str(working_directory), spec.python):
        if _CONTROL.search(word):
            raise UsageError(
                f"{word!r} holds a line break or another control character, which a line of a batch script "
                "can't; use another directory or name"
            )
    return "\n".join((_header(spec, options, working_directory), _body(spec, options), _again(options), ""))


def _header(spec: JobSpec, options: SlurmOptions, working_directory: Path) -> str:
    given = {
        "job-name": spec.job_id,
        "nodes": str(spec.all_nodes),
        "ntasks-per-node": "1",
        "no-kill": "",
        "requeue": "",
        "signal": f"B:{options.signal}",
        "open-mode": "append",
        "output": _file_pattern(spec.run_dir) + "/slurm-%j.log",
        "chdir": str(working_directory),
        **options.sbatch,
    }
    lines = [
        f"#SBATCH --{name}={_quoted(value)}" if value else f"#SBATCH --{name}"
        for name, value in given.items()
    ]
    return "\n".join(("#!/bin/bash", *lines))


def _quoted(value: str) -> str:
    """As sbatch reads a line of a script: like a shell, but with backslashes at work inside of any quotes."""
    return shlex.quote(value).replace("\\", "\\\\")


def _file_pattern(path: Path) -> str:
    if "\\" in str(path):
        raise UsageError(
            f"{str(path)!r}: sbatch can't write to a path with a backslash; give another --log-dir"
        )
    return str(path).replace("%", "%%")


def _command(spec: JobSpec) -> str:
    is_named = any(word == "--engine" or word.startswith("--engine=") for word in spec.run_argv)
    engine = () if is_named else ("--engine", "slurm")
    return shlex.join((spec.python, "-m", "closeranks", "run", *engine, *spec.run_argv))


def _body(spec: JobSpec, options: SlurmOptions) -> str:
    setup = ""
    if options.setup:
        setup = f"""{{ {options.setup}
}} || {{ echo "closeranks: the setup option's commands failed" >&2; exit 2; }}
"""
    name = options.signal.partition("@")[0]
    return f"""
run_dir={shlex.quote(str(spec.run_dir))}
base_excluded={shlex.quote(options.sbatch.get("exclude", ""))}
export {SUBMITTED_VARIABLE}="$run_dir"
{setup}{_command(spec)} &
run=$!
# Slurm sends this signal to this script alone when the time limit or a preemption is near. SIGTERM has the
# run stop its ranks in order.
told=
trap 'told=yes; kill -TERM "$run" 2>/dev/null' {"TERM" if name == "TERM" else f"TERM {name}"}
wait "$run"
code=$?
while kill -0 "$run" 2>/dev/null; do
    wait "$run"
    code=$?
done"""


def _again(options: SlurmOptions) -> str:
    at_limit = ""
    if options.requeue_at_time_limit:
        at_limit = """
if [ "$told" = yes ] && { [ "$code" = 94 ] || [ "$code" = 143 ]; }; then again="stopped in time"; fi"""
    return f"""
# {NO_NODES_CODE}: fewer healthy nodes than the job needs. Slurm finds others once it knows which are no good.
again=
if [ "$code" = {NO_NODES_CODE} ]; then again="too few healthy nodes"; fi{at_limit}
state=$(squeue -h -j "$SLURM_JOB_ID" -o %T 2>/dev/null)
if [ -n "$again" ] && [ "$state" = RUNNING ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {options.requeues} ]; then
    excluded=$({{ printf '%s\\n' "$base_excluded"; cat "$run_dir/{EXCLUDED_FILE}" 2>/dev/null; }} |
        grep -xE '[][A-Za-z0-9_.,-]+' | sort -u | paste -sd, -)
    echo "closeranks: $again: the job is requeued${{excluded:+, leaving out $excluded}}" >&2
    # From here on Slurm ends this script, which still has something to say. The job starts in two minutes.
    trap '' TERM
    scontrol requeue "$SLURM_JOB_ID" || exit "$code"
    for attempt in 1 2 3 4 5 6 7 8 9 10; do
        [ -n "$excluded" ] || break
        scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$excluded" && break
        sleep 0.2
    done
    # Not to end before Slurm ends us: our exit code isn't the job's any more.
    sleep 300
fi
exit "$code\""""
