"""A script that runs under torchrun runs here, and can't tell the difference.

``expected/`` holds what torchrun printed (``scripts/record_compat.py`` records it); a rank's output must be
the same, line for line.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compat.cases import CASES, EXPECTED, SCRIPTS, Case, render

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_behaves_as_under_torchrun(case: Case, run_closeranks: Callable, tmp_path) -> None:
    done = run_closeranks(
        *("run", "--log-dir", tmp_path / "runs", *case.launch),
        stdin=case.stdin,
        cwd=SCRIPTS,
        env={"PYTHONDONTWRITEBYTECODE": "1", **case.environment},
    )
    expected = case.expected.read_text()
    assert done.returncode == case.exit_code, done.stderr
    if case.exit_code == 0:
        assert render(done.by_rank) == expected, done.stderr
    else:
        # A failing script may be tried again, and a rank may be stopped for another's sake before it prints.
        assert set(render(done.by_rank).splitlines()) <= set(expected.splitlines())
        assert done.stdout


def test_every_case_is_recorded_and_every_record_has_a_case() -> None:
    assert {case.expected for case in CASES} == set(EXPECTED.glob("*.txt"))
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_script_is_used() -> None:
    named = {argument.partition(".py")[0] for case in CASES for argument in case.arguments}
    scripts = {str(path.relative_to(SCRIPTS)).removesuffix(".py") for path in SCRIPTS.rglob("*.py")}
    helpers = {"sibling_helper", "pkg/__init__", "pkg/__main__", "pkg/mod", "pkg/sub"}
    assert scripts - helpers == named & scripts
