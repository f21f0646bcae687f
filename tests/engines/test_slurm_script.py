"""The batch script and its options, without a Slurm to run it; test_slurm runs it."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.engines.base import JobSpec
from closeranks.engines.slurm import SlurmEngine
from closeranks.engines.slurm_commands import step_environment
from closeranks.engines.slurm_script import SlurmOptions, batch_environment, batch_script, read_options
from closeranks.errors import ConfigError, UsageError

SPEC = JobSpec(
    job_id="20261201-042655-train-a1b2",
    run_dir=Path("/shared/runs/20261201-042655-train-a1b2"),
    min_nodes=4,
    max_nodes=4,
    spares=1,
    run_argv=("--nnodes", "4", "--spares", "1", "train.py", "--lr", "0.1"),
    python="/usr/bin/python3",
)


def script(spec: JobSpec = SPEC, **options: str) -> str:
    return batch_script(spec, read_options(options), Path("/home/me/project"))


def test_the_script_asks_for_all_nodes_and_starts_one_run():
    lines = script(partition="gpu", gpus_per_node="8", exclusive="").splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=20261201-042655-train-a1b2",
        "#SBATCH --nodes=5",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --no-kill",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@120",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=/shared/runs/20261201-042655-train-a1b2/slurm-%j.log",
        "#SBATCH --chdir=/home/me/project",
        "#SBATCH --partition=gpu",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --exclusive",
    ]
    assert (
        "/usr/bin/python3 -m closeranks run --engine slurm --nnodes 4 --spares 1 train.py --lr 0.1 &" in lines
    )


def test_the_engine_is_named_once():
    spec = dataclasses.replace(SPEC, run_argv=("--engine", "slurm", *SPEC.run_argv))
    assert script(spec).count("--engine slurm") == 1
    spec = dataclasses.replace(SPEC, run_argv=("--engine=slurm", *SPEC.run_argv))
    assert "--engine slurm" not in script(spec)


def test_defaults_can_be_overruled_where_that_does_no_harm():
    text = script(**{"job-name": "big", "output": "/logs/%x.log", "chdir": "/data", "signal": "SIGUSR1@60"})
    assert "#SBATCH --job-name=big\n" in text
    assert "#SBATCH --output=/logs/%x.log\n" in text
    assert text.count("--output") == text.count("--chdir") == 1
    assert "#SBATCH --signal=B:USR1@60\n" in text
    assert "' TERM USR1\n" in text


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": "7"}, {"ntasks": "7"}, {"ntasks_per_node": "8"}, {"no-kill": ""}, {"array": "1-3"},
        {"wrap": "true"}, {"wait": ""}, {"parsable": ""}, {"open-mode": "truncate"}, {"--requeue": ""},
        {"partition": "gpu\n#SBATCH --uid=0"}, {"comment": "a\tb"}, {"setup": "true\nfalse"},
        {"comment": "\x7f"}, {"part ition": "x"}, {"Partition": "x"}, {"": "x"}, {"-p": "x"},
        {"a=b": "x"}, {"x\ny": "z"},
        {"signal": "TERM"}, {"signal": "KILL@3"}, {"signal": "TERM@-1"}, {"requeues": "-1"},
        {"requeues": "many"}, {"requeues": "nan"}, {"poll-s": "0"}, {"poll-s": "inf"},
        {"at-time-limit": "yes"}, {"agent-output": "no"},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_script_can_not_hold_is_refused_in_one_line(options: dict[str, str]):
    with pytest.raises(UsageError) as caught:
        script(**options)
    assert "\n" not in str(caught.value)
    assert "--engine-option" in str(caught.value)


def test_paths_that_a_script_can_not_hold_are_refused():
    for run_dir in ("relative/dir", "/a\nb", "/back\\slash"):
        with pytest.raises(UsageError):
            script(dataclasses.replace(SPEC, run_dir=Path(run_dir)))


@settings(deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=20), max_size=5
    )
)
def test_bash_hands_on_every_argument_as_it_was(arguments: list[str]):
    arguments = ["a=b" if argument.startswith("--engine") else argument for argument in arguments]
    text = script(dataclasses.replace(SPEC, run_argv=("train.py", *arguments)))
    command = next(line for line in text.split("\n") if line.startswith("/usr/bin/python3"))
    begin = text.index(command)
    end = text.index(" &\nrun=$!", begin)
    assert shlex.split(text[begin:end])[6:] == ["train.py", *arguments]


@settings(deadline=None, max_examples=30)  # a bash each
@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=30))
def test_bash_can_read_every_script(value: str):
    text = script(
        dataclasses.replace(SPEC, run_dir=Path("/x") / value.replace("\\", "")), comment=value, exclude=value
    )
    subprocess.run(["bash", "-n"], input=text.encode(), check=True, timeout=20)


def test_variables_do_not_overrule_the_script():
    environment = {
        "SBATCH_PARTITION": "a", "SBATCH_TIMELIMIT": "1", "SBATCH_NO_REQUEUE": "1", "SBATCH_ACCOUNT": "mine",
        "SBATCH_MEM_PER_NODE": "1", "SBATCH_ARRAY_INX": "1-9", "PATH": "/bin",
    }  # fmt: skip
    options = read_options({"partition": "gpu", "time": "1:00:00", "mem": "0"})
    assert batch_environment(options, environment) == {"SBATCH_ACCOUNT": "mine", "PATH": "/bin"}


def test_steps_keep_who_and_where_and_lose_what_shapes_them():
    given = {
        "SLURM_CONF": "/c", "SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": "/d", "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_RESTART_COUNT": "2", "SLURM_CLUSTERS": "x", "SLURM_GPUS": "32", "SLURM_TRES_PER_TASK": "gpu:1",
        "SLURM_CPU_BIND": "rank", "SRUN_CPUS_PER_TASK": "3", "HOME": "/h",
    }  # fmt: skip
    assert step_environment(given, "7") == {
        "SLURM_CONF": "/c", "SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_SUBMIT_DIR": "/d",
        "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2", "SLURM_CLUSTERS": "x", "HOME": "/h",
    }  # fmt: skip


def test_outside_of_an_allocation_nothing_is_placed():
    engine = SlurmEngine(SPEC, environment={"PATH": ""})
    with pytest.raises(ConfigError, match="SLURM_JOB_ID"):
        engine.listen_address()
    with pytest.raises(ConfigError, match="sbatch isn't in PATH"):
        engine.submit()


def test_a_run_started_on_every_node_by_srun_is_told_so():
    environment = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    with pytest.raises(ConfigError, match="without srun"):
        SlurmEngine(SPEC, environment=environment).listen_address()


def test_options_have_defaults():
    assert read_options({}) == SlurmOptions()
