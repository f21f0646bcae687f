"""What every engine owes: the interface as it is written, and answers to what can be asked of it anywhere."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from closeranks.engines import ENGINES, engine_for
from closeranks.engines.base import Engine, JobSpec
from closeranks.errors import CloseranksError, UsageError

OPTIONS = {"local": {}, "slurm": {}, "kubernetes": {"image": "ghcr.io/me/train:1"}}
METHODS = [name for name, member in vars(Engine).items() if not name.startswith("_")]


@pytest.fixture(params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    spec = JobSpec(
        job_id="20261201-120000-train-a1b2",
        run_dir=tmp_path,
        min_nodes=2,
        max_nodes=4,
        spares=1,
        run_argv=("--engine", request.param, "--nnodes", "2:4", "--spares", "1", "train.py", "--lr", "a b'c"),
        python="/usr/bin/python3",
        options=OPTIONS[request.param],
    )
    return engine_for(request.param, spec)


def test_the_interface_is_small() -> None:
    assert len([name for name in METHODS if inspect.isfunction(vars(Engine)[name])]) < 10


@pytest.mark.parametrize("method", METHODS)
def test_methods_take_what_the_interface_says(engine: Any, method: str) -> None:
    wanted = vars(Engine)[method]
    if isinstance(wanted, property):
        assert isinstance(getattr(engine, method), str)
        return
    given = inspect.signature(getattr(type(engine), method)).parameters
    promised = inspect.signature(wanted).parameters
    assert list(given) == list(promised)
    assert [p.default for p in given.values()] == [p.default for p in promised.values()]
    assert inspect.iscoroutinefunction(getattr(type(engine), method)) == inspect.iscoroutinefunction(wanted)


def test_it_goes_by_the_name_it_is_found_under(engine: Any) -> None:
    assert engine_for(engine.name, engine._spec).name == engine.name


def test_what_would_be_submitted_can_be_read_and_holds_the_command(engine: Any) -> None:
    text = engine.render()
    assert text == engine.render(), "the same each time"
    assert "train.py" in text and text.endswith("\n") and text.isprintable() is False
    assert "PRIVATE KEY" not in text


def test_an_option_that_it_doesn_t_know_is_refused_by_name(engine: Any) -> None:
    odd = {**OPTIONS[engine.name], "no such option!": "1"}
    with pytest.raises(CloseranksError, match="no such option!") as told:
        engine_for(engine.name, replace(engine._spec, options=odd))
    assert told.value.exit_code == UsageError.exit_code


def test_it_can_be_closed_before_it_was_started_and_more_than_once(engine: Any) -> None:
    async def scene() -> None:
        await engine.close()
        await engine.close()

    asyncio.run(asyncio.wait_for(scene(), 10.0))


def test_where_it_can_t_run_or_submit_it_says_so_in_a_sentence(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CloseranksError) as told:
        engine_for(engine.name, engine._spec).submit()
    assert len(str(told.value)) > 20
