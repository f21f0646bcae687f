"""Every kind of fault on every rank: found, the right rank named, survived, and nothing lost.

One run a kind and world size; each generation has the fault on another rank, so that a run of n ranks has n
incidents, and a last generation that reaches the end with the parameters of an undisturbed run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "train.py"
AT_STEP = 12  # the early comparison of collectives needs eight of them in lockstep


@dataclass(frozen=True)
class Kind:
    fault: str
    verdicts: tuple[str, ...]  # acceptable Verdict.kind
    leaf: str | None = None
    extra: str = ""
    flags: tuple[str, ...] = ()


KINDS = (
    Kind("kill", ("rank_exit",)),
    Kind("stop", ("frozen_process",), "app.hang"),
    Kind("hang-python", ("host_block", "never_enters"), "app.hang"),
    Kind("hang-c", ("host_block", "never_enters"), "app.hang"),
    Kind("spin", ("host_block", "never_enters"), "app.hang", flags=("--hang-timeout", "4")),
    Kind("skip", ("skip_collective",), "comm.desync"),
    Kind("dtype", ("dtype_mismatch",), "comm.desync"),
    Kind("size", ("size_mismatch",), "comm.desync"),
    Kind("op", ("type_mismatch",), "comm.desync"),
    Kind("exception", ("exception",), "app.exception"),
    Kind("exit", ("rank_exit", "exit_code", "exception"), extra=",code=7"),
    Kind("os-exit", ("rank_exit", "exit_code"), extra=",code=9"),
    Kind("segv", ("native_crash",), "app.crash_segv"),
    Kind("oom", ("exception", "out_of_memory"), "app.host_oom", extra=",limit_mb=300"),
)
SIZES = (2, 4, 8)
EIGHT = {"kill", "stop", "skip", "hang-c"}  # of eight ranks the rest is `make test-exhaustive`
QUICK = {("kill", 2), ("stop", 2), ("skip", 4), ("hang-c", 2), ("exception", 2), ("size", 2)}


def cells() -> list[pytest.ParameterSet]:
    found = []
    for kind in KINDS:
        for world_size in SIZES:
            marks = [] if (kind.fault, world_size) in QUICK else [pytest.mark.slow]
            if world_size == 8 and kind.fault not in EIGHT:
                marks.append(pytest.mark.exhaustive)
            found.append(pytest.param(kind, world_size, marks=marks, id=f"{kind.fault}-{world_size}"))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The final line of an undisturbed run, by world size; filled on demand."""
    return {}


def final_line(stdout: str) -> str:
    ends = {line.partition("end ")[2] for line in stdout.splitlines() if "end " in line}
    assert len(ends) == 1, f"ranks disagree or did not finish: {ends}\n{stdout[-3000:]}"
    return ends.pop()


def verdicts(runs: Path) -> list[dict[str, object]]:
    (run,) = [path for path in runs.iterdir() if path.is_dir() and not path.is_symlink()]
    return [json.loads(path.read_text()) for path in sorted(run.glob("incidents/[0-9]*/verdict.json"))]


@pytest.mark.torch
@pytest.mark.parametrize(("kind", "world_size"), cells())
def test_each_rank_is_named_and_the_run_ends_as_if_nothing_had_been(
    kind: Kind,
    world_size: int,
    run_closeranks: Callable[..., object],
    tmp_path: Path,
    undisturbed: dict[int, str],
) -> None:
    size = ("--nproc-per-node", str(world_size))
    if world_size not in undisturbed:
        plain = run_closeranks("run", *size, SCRIPT, "--steps", "60", "--checkpoint", tmp_path / "plain.pt")
        assert plain.returncode == 0, plain.stderr
        undisturbed[world_size] = final_line(plain.stdout)
    runs = tmp_path / "runs"
    faults = [
        part
        for rank in range(world_size)
        for part in ("--inject", f"{kind.fault}:rank={rank},step={AT_STEP},generation={rank}{kind.extra}")
    ]
    steps = ("--steps", "200", "--checkpoint", tmp_path / "disturbed.pt")
    disturbed = run_closeranks(
        "run", *size, "--log-dir", runs, *kind.flags, *faults, SCRIPT, *steps, timeout_s=60 + 20 * world_size
    )
    assert disturbed.returncode == 0, disturbed.stderr[-6000:]
    found = verdicts(runs)
    named = [[culprit["rank"] for culprit in verdict["culprits"]] for verdict in found]
    assert named == [[rank] for rank in range(world_size)], [v["summary"] for v in found]
    assert {v["kind"] for v in found} <= set(kind.verdicts), [(v["kind"], v["summary"]) for v in found]
    if kind.leaf is not None:
        assert {v["leaf"] for v in found} == {kind.leaf}
    final_line(disturbed.stdout)


@pytest.mark.torch
@pytest.mark.parametrize("fault", ["kill", "stop", "skip"])
def test_parameters_are_those_of_an_undisturbed_run(
    fault: str, run_closeranks: Callable[..., object], tmp_path: Path
) -> None:
    size = ("--nproc-per-node", "2")
    plain = run_closeranks("run", *size, SCRIPT, "--steps", "50", "--checkpoint", tmp_path / "plain.pt")
    spec = f"{fault}:rank=1,step={AT_STEP}"
    broken = run_closeranks(
        "run", *size, "--inject", spec, SCRIPT, "--steps", "50", "--checkpoint", tmp_path / "broken.pt"
    )
    assert plain.returncode == broken.returncode == 0, broken.stderr
    assert final_line(plain.stdout) == final_line(broken.stdout)
    assert "incident 0001" in broken.stderr and "incident 0002" not in broken.stderr


@pytest.mark.torch
def test_a_barrier_skipped_beside_collectives_from_cpp_is_proved(
    run_closeranks: Callable[..., object], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    script = SCRIPT.with_name("skip_barrier.py")
    done = run_closeranks("run", "--nproc-per-node", "2", "--log-dir", runs, script)
    assert done.returncode == 0, done.stderr
    (verdict,) = verdicts(runs)
    assert verdict["kind"] == "skip_collective", verdict
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [1], verdict


@pytest.mark.torch
@pytest.mark.parametrize(("world_size", "rank"), [(3, 1), (4, 0)])
def test_a_collective_skipped_for_one_of_ddp_that_gloo_lets_pass_is_proved(
    world_size: int, rank: int, run_closeranks: Callable[..., object], tmp_path: Path
) -> None:
    """No abort, no mismatch that Python could see: one rank never gets out of what the others left."""
    runs = tmp_path / "runs"
    script = SCRIPT.with_name("skip_reduce.py")
    done = run_closeranks("run", "--nproc-per-node", str(world_size), "--log-dir", runs, script, str(rank))
    assert done.returncode == 0, done.stderr
    (verdict,) = verdicts(runs)
    assert verdict["kind"] == "skip_collective", verdict
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [rank], verdict


@pytest.mark.torch
@pytest.mark.parametrize(("world_size", "rank"), [(3, 1), (4, 0)])
def test_an_all_reduce_skipped_where_the_rest_is_from_cpp_is_named(
    world_size: int, rank: int, run_closeranks: Callable[..., object], tmp_path: Path
) -> None:
    """It is the only one that Python sees: no past to compare with, and gloo lets the others pass."""
    runs = tmp_path / "runs"
    script = SCRIPT.with_name("conditional_reduce.py")
    size = ("--nproc-per-node", str(world_size))
    done = run_closeranks("run", *size, "--log-dir", runs, script, "all-but", str(rank))
    assert done.returncode == 0, done.stderr
    (verdict,) = verdicts(runs)
    assert verdict["kind"] == "skip_collective", verdict
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [rank], verdict
    assert "conditional_reduce.py:" in verdict["summary"], verdict


@pytest.mark.torch
@pytest.mark.slow
def test_an_all_reduce_of_one_rank_alone_is_named(
    run_closeranks: Callable[..., object], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    script = SCRIPT.with_name("conditional_reduce.py")
    done = run_closeranks("run", "--nproc-per-node", "4", "--log-dir", runs, script, "only", "0")
    assert done.returncode == 0, done.stderr
    (verdict,) = verdicts(runs)
    assert verdict["kind"] == "extra_collective", verdict
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [0], verdict


@pytest.mark.torch
@pytest.mark.slow
def test_a_barrier_of_one_of_two_ranks_is_told_from_both_sides(
    run_closeranks: Callable[..., object], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    script = SCRIPT.with_name("conditional_reduce.py")
    done = run_closeranks("run", "--nproc-per-node", "2", "--log-dir", runs, script, "barrier", "0")
    assert done.returncode == 0, done.stderr
    (verdict,) = verdicts(runs)
    assert (verdict["leaf"], verdict["culprits"]) == ("comm.desync", []), verdict
    assert "ranks 0,1 are in different collectives" in verdict["summary"], verdict
    assert "barrier (conditional_reduce.py:" in verdict["summary"], verdict
    assert "issued from C++ (conditional_reduce.py:" in verdict["summary"], verdict


@pytest.mark.torch
def test_a_receive_too_many_accuses_none_of_those_who_finished(
    run_closeranks: Callable[..., object], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    script = SCRIPT.with_name("ring.py")
    size = ("--nproc-per-node", "4", "--max-restarts", "0")
    done = run_closeranks("run", *size, "--log-dir", runs, script)
    assert done.returncode != 0, done.stderr
    (verdict,) = verdicts(runs)
    assert (verdict["kind"], verdict["culprits"]) == ("unanswered", []), verdict
    assert "recv (ring.py:" in verdict["summary"], verdict


@pytest.mark.torch
def test_a_sync_of_ddp_skipped_in_cpp_is_proved(
    run_closeranks: Callable[..., object], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    script = SCRIPT.with_name("skip_sync.py")
    done = run_closeranks("run", "--nproc-per-node", "2", "--log-dir", runs, script)
    assert done.returncode == 0, done.stderr
    (verdict,) = verdicts(runs)
    assert (verdict["kind"], verdict["leaf"]) == ("skip_collective", "comm.desync"), verdict
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [1], verdict
    assert "step 30" in str(verdict["summary"]), verdict


@pytest.mark.torch
@pytest.mark.parametrize(
    ("fault", "world_size", "kinds"),
    [
        ("hang-python", 2, ("host_block", "never_enters")),
        pytest.param("hang-c", 2, ("host_block", "never_enters"), marks=pytest.mark.slow),
        pytest.param("skip", 4, ("skip_collective",), marks=pytest.mark.slow),
        pytest.param("stop", 2, ("frozen_process",), marks=pytest.mark.slow),
    ],
)
def test_workers_of_a_data_loader_hide_nothing(
    fault: str, world_size: int, kinds: tuple[str, ...], run_closeranks: Callable[..., object], tmp_path: Path
) -> None:
    """They idle with a time limit and at a socket, which must not pass for life of the rank."""
    runs, last = tmp_path / "runs", world_size - 1
    done = run_closeranks(
        *("run", "--nproc-per-node", str(world_size), "--log-dir", runs),
        *("--inject", f"{fault}:rank={last},step={AT_STEP}", SCRIPT, "--workers", "2", "--steps", "40"),
        *("--checkpoint", tmp_path / "c.pt"),
        timeout_s=120,
    )
    assert done.returncode == 0, done.stderr
    (verdict,) = verdicts(runs)
    assert verdict["kind"] in kinds, verdict
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [last], verdict
    if fault == "hang-python":
        (suspicion,) = [line for line in done.stderr.splitlines() if "suspicious" in line]
        assert "train.py:" in suspicion, suspicion


@pytest.mark.torch
def test_a_sync_of_ddp_skipped_beside_data_workers_is_proved(
    run_closeranks: Callable[..., object], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    script = SCRIPT.with_name("skip_sync.py")
    done = run_closeranks("run", "--nproc-per-node", "3", "--log-dir", runs, script, "2")
    assert done.returncode == 0, done.stderr
    (verdict,) = verdicts(runs)
    assert (verdict["kind"], verdict["leaf"]) == ("skip_collective", "comm.desync"), verdict
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [1], verdict


def test_a_fault_for_a_rank_that_is_not_there_is_refused(
    run_closeranks: Callable[..., object], tmp_path: Path
) -> None:
    script = SCRIPT.with_name("skip_barrier.py")
    done = run_closeranks("run", "--nproc-per-node", "2", "--inject", "kill:rank=9,step=3", script)
    assert done.returncode == 2
    assert "there is no rank 9" in done.stderr and "Traceback" not in done.stderr
