"""A rank's variables, where they follow from settings; torchrun's own are compared in tests/system."""

from __future__ import annotations

import socket

import pytest

from closeranks.agent.env import base_environment, free_port, rank_environment
from closeranks.config import BudgetConfig, Entrypoint, RunConfig

ENTRYPOINT = Entrypoint("script", "train.py")


def of_rank(config: RunConfig, local_rank: int, *, size: int = 4, generation: int = 2) -> dict[str, str]:
    return rank_environment(
        config,
        rank=4 + local_rank,
        world_size=size + 4,
        local_rank=local_rank,
        local_world_size=size,
        node_rank=1,
        node_count=2,
        generation=generation,
        master_port=29501,
        run_id="job-7",
        run_dir="/runs/x",
        error_file="/runs/x/e.json",
    )


def test_a_rank_finds_its_place_and_its_generation() -> None:
    variables = of_rank(RunConfig(ENTRYPOINT, role="trainer"), 3)
    assert (variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == ("3", "4")
    assert {variables[name] for name in ("RANK", "ROLE_RANK")} == {"7"}
    assert {variables[name] for name in ("WORLD_SIZE", "ROLE_WORLD_SIZE")} == {"8"}
    assert (variables["GROUP_RANK"], variables["GROUP_WORLD_SIZE"]) == ("1", "2")
    assert variables["TORCHELASTIC_RESTART_COUNT"] == variables["CLOSERANKS_GENERATION"] == "2"
    assert (variables["ROLE_NAME"], variables["TORCHELASTIC_RUN_ID"]) == ("trainer", "job-7")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("127.0.0.1", "29501")


@pytest.mark.parametrize(("given", "seen"), [(None, "1000"), (0, "0"), (7, "7")])
def test_the_restart_limit_is_the_one_that_holds(given: int | None, seen: str) -> None:
    config = RunConfig(ENTRYPOINT, budget=BudgetConfig(max_restarts=given))
    assert of_rank(config, 0)["TORCHELASTIC_MAX_RESTARTS"] == seen


@pytest.mark.parametrize(("visible", "device"), [("4,5,6,7", "6"), ("", "2"), ("9", "2")])
def test_a_virtual_local_rank_sees_its_own_device_as_0(
    monkeypatch: pytest.MonkeyPatch, visible: str, device: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    variables = of_rank(RunConfig(ENTRYPOINT, virtual_local_rank=True), 2)
    assert (variables["LOCAL_RANK"], variables["RANK"]) == ("0", "6")
    assert variables["CUDA_VISIBLE_DEVICES"] == device
    assert "CUDA_VISIBLE_DEVICES" not in of_rank(RunConfig(ENTRYPOINT), 2)


def test_threads_are_one_only_for_several_ranks_and_only_if_unset() -> None:
    config = RunConfig(ENTRYPOINT)
    assert base_environment(config, 2, {})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in base_environment(config, 1, {})
    assert base_environment(config, 2, {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"


def test_a_zygote_is_kept_single_threaded_and_workers_of_their_own_are_not() -> None:
    many = {"OMP_NUM_THREADS": "8"}
    assert base_environment(RunConfig(ENTRYPOINT), 2, many)["OPENBLAS_NUM_THREADS"] == "1"
    assert "OPENBLAS_NUM_THREADS" not in base_environment(RunConfig(ENTRYPOINT, zygote=False), 2, many)


def test_the_environment_given_is_left_as_it_is() -> None:
    given = {"HOME": "/h"}
    made = base_environment(RunConfig(ENTRYPOINT), 2, given)
    assert given == {"HOME": "/h"} and made["HOME"] == "/h"


def test_a_free_port_can_be_bound_and_no_connection_takes_it() -> None:
    port = free_port()
    assert 20000 <= port < 32768
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
