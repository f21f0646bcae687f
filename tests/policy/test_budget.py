"""The restart budget's rules, one after the other, each with the numbers people will read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.config import BudgetConfig
from closeranks.errors import ConfigError
from closeranks.events import Failure, FailureKind, RunExit
from closeranks.policy.budget import (
    MAX_INIT_STALLS,
    MAX_SIGNATURES,
    Budget,
    Restart,
    Stop,
    backoff_s,
    check_budget_config,
    headline,
    judge,
    one_line,
    progressed,
)

DEFAULT = BudgetConfig()
REPLAYABLE = settings(print_blob=True, deadline=None, max_examples=200)
EXTERNAL = (FailureKind.SIGNAL, FailureKind.STOPPED, FailureKind.NODE_LOST)
ALL_BUT_STALLS = tuple(kind for kind in FailureKind if kind is not FailureKind.INIT_STALL)  # those: rule 0
SCRIPT_ERRORS = (FailureKind.EXCEPTION, FailureKind.EXIT_CODE, FailureKind.CRASH)


def failure(kind: FailureKind = FailureKind.EXCEPTION, step: int = 5, **changes: Any) -> Failure:
    base = Failure(
        generation=1,
        incident_id="0007",
        kind=kind,
        rank=2,
        signature="ValueError at train.py:12",
        step=step,
        startup=step == 0,
        durable_progress=False,
        exit_code=3,
    )
    return replace(base, **changes)


def killed(step: int = 1, **changes: Any) -> Failure:
    return failure(FailureKind.SIGNAL, step, **{"signature": "SIGKILL", "exit_code": 137, **changes})


def run(
    failures: list[Failure], config: BudgetConfig = DEFAULT, gap_s: float = 1.0
) -> tuple[Budget, list[Restart | Stop]]:
    """Judge one failure after the other, generations numbered from 0, until the job stops."""
    budget, rulings = Budget(), []
    for generation, one in enumerate(failures):
        budget, ruling = judge(config, budget, replace(one, generation=generation), generation * gap_s)
        rulings.append(ruling)
        if isinstance(ruling, Stop):
            break
    return budget, rulings


def last_stop(failures: list[Failure], config: BudgetConfig = DEFAULT, gap_s: float = 1.0) -> Stop:
    """The ruling on the last failure, which must be the first Stop."""
    _, rulings = run(failures, config, gap_s)
    assert len(rulings) == len(failures), f"stopped too early: {rulings[-1]}"
    stop = rulings[-1]
    assert isinstance(stop, Stop)
    return stop


def all_restarts(failures: list[Failure], config: BudgetConfig = DEFAULT, gap_s: float = 1.0) -> Budget:
    budget, rulings = run(failures, config, gap_s)
    assert all(isinstance(ruling, Restart) for ruling in rulings), rulings[-1]
    assert len(rulings) == len(failures)
    return budget


# --- rule 1: the script's own error -----------------------------------------------------------------


@pytest.mark.parametrize("kind", [FailureKind.EXCEPTION, FailureKind.EXIT_CODE])
def test_a_start_up_error_stops_at_once_with_the_scripts_code(kind):
    stop = last_stop([failure(kind, step=0)])
    assert stop.exit_code == 3
    assert "start-up" in stop.reason
    assert "rank 2" in stop.reason
    assert "ValueError at train.py:12" in stop.reason
    assert "incident 0007" in stop.reason
    assert ("its own error is in" in stop.reason) == (kind is FailureKind.EXCEPTION)


def test_an_error_after_collectives_is_not_told_as_one_before_the_first_step():
    """A loop without an optimizer: that no step was seen doesn't mean that none was made."""
    stop = last_stop([failure(step=0, collectives=6)])
    assert stop.exit_code == 3
    assert "before any step was seen" in stop.reason and "after 6 collectives" in stop.reason
    assert "closeranks.step()" in stop.reason
    assert "first step" not in stop.reason and "at step" not in stop.reason
    again = last_stop([killed(), failure(step=0, collectives=1), failure(step=0, collectives=1)]).reason
    assert "after 1 collective)" in again and "at step" not in again


@pytest.mark.parametrize(
    ("kind", "signature", "expected"),
    [
        (FailureKind.SIGNAL, "SIGKILL", "rank 2 was killed by SIGKILL"),
        (
            FailureKind.EXCEPTION,
            "ValueError at /home/u/train.py:12",
            "rank 2 raised ValueError at train.py:12",
        ),
        (FailureKind.EXIT_CODE, "exit code 3", "rank 2 ended with exit code 3"),
        (FailureKind.DESYNC, "skip at train.py:9", "rank 2: ranks are in different collectives"),
    ],
)
def test_a_headline_says_what_happened(kind, signature, expected):
    assert headline(failure(kind, signature=signature)) == expected


@pytest.mark.parametrize("kind", list(FailureKind))
@pytest.mark.parametrize("rank", [None, 2])
def test_every_failure_has_a_headline(kind, rank):
    told = headline(failure(kind, rank=rank, signature=""))
    assert told.isprintable() and (rank is None or "rank 2" in told)


def test_a_native_crash_at_start_up_gets_one_more_try():
    crash = failure(FailureKind.CRASH, step=0, signature="SIGSEGV", exit_code=139)
    assert last_stop([crash, crash]).exit_code == 139


def test_a_start_up_error_after_the_first_generation_gets_one_more_try():
    assert last_stop([killed(), failure(step=0), failure(step=0)]).exit_code == 3


def test_a_start_up_error_of_a_generation_that_saved_something_is_not_final():
    all_restarts([failure(step=0, durable_progress=True)])


@pytest.mark.parametrize("kind", SCRIPT_ERRORS)
@pytest.mark.parametrize("second_step", [0, 3, 5])
def test_the_same_error_at_or_before_the_same_step_stops_with_the_scripts_code(kind, second_step):
    stop = last_stop([failure(kind, 5), failure(kind, second_step)])
    assert stop.exit_code == 3
    assert "twice" in stop.reason
    assert f"at step {second_step};" in stop.reason
    assert "before: at step 5" in stop.reason


def test_the_same_error_right_after_a_resume_is_the_same_error():
    """Saved at 50 and failed at 57; resumed from 50, it fails after 7: the script's step is 57 both times."""
    stop = last_stop([failure(step=57, durable_progress=True), failure(step=7)])
    assert stop.exit_code == 3


def test_the_same_error_farther_on_is_worth_a_restart():
    all_restarts([failure(step=5), failure(step=6), failure(step=7)])


def test_the_same_error_after_durable_progress_is_worth_a_restart():
    all_restarts([failure(step=7, durable_progress=True)] * 20)


def test_another_error_at_the_same_step_is_worth_a_restart():
    all_restarts([failure(), failure(signature="KeyError at train.py:40")])


def test_the_same_error_with_a_kill_before_its_place_in_between_still_stops():
    assert last_stop([failure(step=5), killed(2), failure(step=5)]).exit_code == 3


def test_two_ranks_that_take_turns_in_failing_first_still_stop():
    other = failure(rank=0, signature="IndexError at train.py:30")
    assert last_stop([failure(), other, failure()]).exit_code == 3


def test_getting_past_the_place_once_shows_that_the_error_is_not_inevitable():
    all_restarts([failure(step=5), killed(9), failure(step=5)])


@pytest.mark.parametrize("exit_code", [0, -9, 256, 4_000_000_000])
def test_a_failed_job_never_ends_with_0_or_an_impossible_code(exit_code):
    assert last_stop([failure(step=0, exit_code=exit_code)]).exit_code == 1


# --- rule 2: total budget ---------------------------------------------------------------------------


def test_after_the_last_allowed_restart_the_budget_is_spent():
    config = BudgetConfig(max_restarts=3)
    stop = last_stop([killed()] * 4, config)
    assert stop.exit_code == RunExit.BUDGET_SPENT
    assert "all 3 restarts" in stop.reason
    assert "--max-restarts" in stop.reason


def test_without_the_flag_the_default_total_holds():
    config = BudgetConfig(default_max_restarts=2)
    assert last_stop([killed()] * 3, config).exit_code == RunExit.BUDGET_SPENT


@pytest.mark.parametrize("kind", ALL_BUT_STALLS)
def test_zero_restarts_end_with_the_scripts_code_where_it_has_one(kind):
    stop = last_stop([failure(kind, 5)], BudgetConfig(max_restarts=0))
    assert stop.exit_code == (3 if kind in SCRIPT_ERRORS else 1)
    assert "--max-restarts 0" in stop.reason


def test_a_repeated_script_error_outranks_a_spent_budget():
    stop = last_stop([failure(), failure()], BudgetConfig(max_restarts=1))
    assert stop.exit_code == 3


# --- rule 3: rate -----------------------------------------------------------------------------------


def test_more_restarts_in_the_window_than_allowed_stop_the_job():
    config = BudgetConfig(max_restarts_per_window=5, window_s=10.0)
    stop = last_stop([killed()] * 6, config, gap_s=1.0)
    assert stop.exit_code == RunExit.BUDGET_SPENT
    assert "5 restarts in the last 10 s" in stop.reason


def test_the_same_number_of_restarts_spread_out_is_fine():
    config = BudgetConfig(max_restarts_per_window=5, window_s=10.0)
    budget = all_restarts([killed()] * 200, config, gap_s=2.0)
    assert len(budget.recent_s) <= 5


def test_the_window_slides():
    config = BudgetConfig(max_restarts_per_window=2, window_s=10.0)
    budget = Budget()
    for now_s in (0.0, 9.0, 10.0, 19.0):  # at 10.0 the first is just out of the window
        budget, ruling = judge(config, budget, killed(), now_s)
        assert isinstance(ruling, Restart), now_s
    _, ruling = judge(config, budget, killed(), 19.5)
    assert isinstance(ruling, Stop)


def test_an_explicit_total_switches_the_rate_off():
    config = BudgetConfig(max_restarts=1000, max_restarts_per_window=1)
    budget = all_restarts([killed()] * 50, config, gap_s=0.0)
    assert budget.recent_s == ()


def test_a_clock_that_steps_back_neither_fails_nor_grows_without_bound():
    config = BudgetConfig(max_restarts_per_window=5, window_s=10.0)
    budget, rulings = run([killed()] * 100, config, gap_s=-1.0)
    assert isinstance(rulings[-1], Stop)
    assert len(budget.recent_s) <= 5


# --- rule 4: no progress ----------------------------------------------------------------------------


def test_200_kills_in_a_row_after_one_step_each_are_survived_without_any_wait():
    budget, rulings = run([killed(1)] * 200, gap_s=0.15)
    assert [type(ruling) for ruling in rulings] == [Restart] * 200
    assert {ruling.delay_s for ruling in rulings if isinstance(ruling, Restart)} == {0.0}
    assert budget.restarts == 200


@pytest.mark.parametrize("kind", ALL_BUT_STALLS)
def test_three_generations_without_a_step_stop_the_job(kind):
    failures = [failure(kind, 0, signature=f"signature {n}") for n in range(4)]
    first = killed(1)  # so that none of them is a start-up error of generation 0
    stop = last_stop([first, *failures[:3]])
    assert stop.exit_code == RunExit.NO_PROGRESS
    assert "3 generations in a row" in stop.reason
    assert "closeranks.step()" in stop.reason


@pytest.mark.parametrize("between", [killed(1), failure(FailureKind.DESYNC, 0, durable_progress=True)])
def test_progress_in_between_starts_the_count_again(between):
    all_restarts([killed(0), killed(0), between, killed(0), killed(0)])


def test_running_out_of_memory_again_and_again_at_the_same_step_is_no_progress():
    oom = failure(FailureKind.OUT_OF_MEMORY, 8, signature="oom rank 2")
    assert last_stop([oom] * 4).exit_code == RunExit.NO_PROGRESS


def test_failing_now_earlier_now_later_but_never_past_the_farthest_place_is_no_progress():
    stop = last_stop([failure(FailureKind.OUT_OF_MEMORY, step, signature="oom") for step in (8, 5, 7, 6)])
    assert stop.exit_code == RunExit.NO_PROGRESS


def test_a_leak_that_ends_in_oom_after_new_checkpoints_goes_on():
    all_restarts([failure(FailureKind.OUT_OF_MEMORY, 800, durable_progress=True)] * 100)


def test_a_deadlock_at_the_same_collective_again_and_again_is_no_progress():
    deadlock = failure(FailureKind.DEADLOCK, 8, signature="rank 2 never enters")
    stop = last_stop([deadlock, deadlock, deadlock, deadlock])
    assert stop.exit_code == RunExit.NO_PROGRESS
    assert "8" in stop.reason


@pytest.mark.parametrize("kind", EXTERNAL)
def test_what_comes_from_outside_is_progress_after_one_step_however_often(kind):
    all_restarts([failure(kind, 1, signature="same")] * 50)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (failure(step=0), False),
        (failure(step=5), False),
        (failure(step=6), True),
        (failure(step=5, signature="other"), True),
        (failure(step=0, durable_progress=True), True),
        (killed(0), False),
        (killed(1), True),
        (killed(1, signature=failure().signature), True),
    ],
)
def test_what_counts_as_progress_after_the_same_error_at_step_5(one, expected):
    budget, _ = judge(DEFAULT, Budget(), failure(step=5), 0.0)
    assert progressed(budget, one) is expected


# --- rule 0: init stalls ----------------------------------------------------------------------------


def stall(**changes: Any) -> Failure:
    return failure(FailureKind.INIT_STALL, **{"step": 0, "signature": "init_stall", **changes})


def test_an_init_stall_is_retried_at_once_and_only_so_often_in_a_row():
    all_restarts([stall()] * MAX_INIT_STALLS)
    stop = last_stop([stall()] * (MAX_INIT_STALLS + 1))
    assert stop.exit_code == RunExit.NO_PROGRESS
    assert "4 times in a row" in stop.reason


def test_an_init_stall_costs_no_restart_and_no_delay():
    budget, rulings = run([stall()] * 3)
    assert [ruling.delay_s for ruling in rulings if isinstance(ruling, Restart)] == [0.0] * 3
    assert budget.restarts == 0


def test_an_explicit_total_bounds_retries_of_init_stalls_too():
    stop = last_stop([stall()], BudgetConfig(max_restarts=0))
    assert stop.exit_code == 1
    assert "--max-restarts 0 allows no restart" in stop.reason
    assert last_stop([stall(), stall()], BudgetConfig(max_restarts=1)).exit_code == RunExit.BUDGET_SPENT
    assert last_stop([stall(), killed(1), stall()], BudgetConfig(max_restarts=2)).exit_code == 91
    assert last_stop([stall()] * 4, BudgetConfig(max_restarts=9)).exit_code == RunExit.NO_PROGRESS


def test_any_other_failure_in_between_starts_the_count_of_stalls_again():
    all_restarts([stall(), stall(), stall(), killed(1)] * 10)


def test_stalls_do_not_hide_generations_without_a_step():
    assert last_stop([killed(0), stall(), killed(0), stall(), killed(0)]).exit_code == RunExit.NO_PROGRESS


@pytest.mark.parametrize("changes", [{"step": 4, "signature": "a later group"}, {"durable_progress": True}])
def test_a_stall_of_a_later_group_after_progress_is_charged_like_any_failure(changes):
    budget = all_restarts([stall(**changes)])
    assert budget.restarts == 1
    assert budget.init_stalls == 0


# --- back-off ---------------------------------------------------------------------------------------


def test_back_off_doubles_while_nothing_progresses_and_is_none_after_progress():
    config = BudgetConfig(no_progress_generations=10)
    _, rulings = run([killed(1), *[killed(0)] * 8, killed(1)], config)
    delays = [ruling.delay_s for ruling in rulings if isinstance(ruling, Restart)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 0.0]


def test_back_off_of_any_count_is_finite():
    config = BudgetConfig(backoff_factor=1e300, backoff_max_s=1e308)
    assert backoff_s(config, 10_000) == 1e308
    assert backoff_s(BudgetConfig(backoff_first_s=0.0), 10_000) == 0.0


# --- bounds, settings, words ------------------------------------------------------------------------


def test_durable_progress_makes_earlier_places_incomparable():
    other = failure(step=3, signature="KeyError at train.py:40", durable_progress=True)
    budget = all_restarts([failure(step=5), other, failure(step=5)])
    assert budget.step_of(other.signature) is None  # got past
    assert budget.step_of(failure().signature) == 5


def test_what_comes_from_outside_has_no_place_to_remember():
    assert all_restarts([killed(7), failure(FailureKind.STOPPED, 7)]).seen == ()


def test_remembered_signatures_are_bounded_and_the_newest_are_kept():
    failures = [failure(step=5, signature=f"signature {n}") for n in range(10 * MAX_SIGNATURES)]
    budget = all_restarts(failures, gap_s=60.0)
    assert len(budget.seen) == MAX_SIGNATURES
    assert budget.step_of(failures[-1].signature) == 5
    assert budget.step_of(failures[0].signature) is None


@pytest.mark.parametrize(
    "config",
    [
        BudgetConfig(max_restarts=-1),
        BudgetConfig(default_max_restarts=-1),
        BudgetConfig(max_restarts_per_window=0),
        BudgetConfig(max_restarts_per_window=1_000_000),
        BudgetConfig(no_progress_generations=0),
        BudgetConfig(window_s=0.0),
        BudgetConfig(window_s=float("nan")),
        BudgetConfig(backoff_first_s=-1.0),
        BudgetConfig(backoff_max_s=float("inf")),
        BudgetConfig(backoff_factor=0.5),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_way_out(config):
    with pytest.raises(ConfigError, match="give"):
        check_budget_config(config)


def test_the_defaults_are_accepted():
    check_budget_config(DEFAULT)


def test_foreign_text_cannot_break_a_reason():
    hostile = "\x1b[2J\nroot:\r\0" + "x" * 1_000_000
    stop = last_stop([failure(step=0, signature=hostile, incident_id=hostile)])
    assert stop.reason.isprintable()
    assert len(stop.reason) < 1000
    assert one_line("plain") == "plain"


def test_a_failure_without_rank_or_signature_is_still_described():
    stop = last_stop(
        [failure(FailureKind.HANG_TIMEOUT, rank=None, signature="")], BudgetConfig(max_restarts=0)
    )
    assert "no single rank, hang timeout, at step 5" in stop.reason


def test_what_the_signature_says_already_is_not_said_twice():
    stop = last_stop([failure(FailureKind.EXIT_CODE, signature="exit code 2")], BudgetConfig(max_restarts=0))
    assert "rank 2, exit code 2, at step 5" in stop.reason


FAILURES = st.builds(
    Failure,
    generation=st.integers(0, 50),
    incident_id=st.text(max_size=5),
    kind=st.sampled_from(FailureKind),
    rank=st.none() | st.integers(0, 3),
    signature=st.sampled_from(["", "a", "b", "c"]) | st.text(max_size=10),
    step=st.integers(0, 6),
    startup=st.booleans(),
    durable_progress=st.booleans(),
    exit_code=st.integers(-5, 300),
)
CONFIGS = st.builds(
    BudgetConfig,
    max_restarts=st.none() | st.integers(0, 10),
    default_max_restarts=st.integers(0, 20),
    max_restarts_per_window=st.integers(1, 10),
    window_s=st.floats(0.1, 100.0),
    no_progress_generations=st.integers(1, 5),
)


@REPLAYABLE
@given(CONFIGS, st.lists(FAILURES, max_size=60), st.floats(0.0, 50.0))
def test_any_failures_stay_within_total_rate_and_memory(config, failures, gap_s):
    check_budget_config(config)
    budget, rulings = run(failures, config, gap_s)
    total = config.default_max_restarts if config.max_restarts is None else config.max_restarts
    assert budget.restarts <= total
    assert len(budget.recent_s) <= config.max_restarts_per_window
    assert len(budget.seen) <= MAX_SIGNATURES
    assert len({name for name, _ in budget.seen}) == len(budget.seen)
    for ruling in rulings:
        if isinstance(ruling, Stop):
            assert 1 <= ruling.exit_code <= 255
            assert ruling.reason.isprintable()
        else:
            assert 0.0 <= ruling.delay_s <= config.backoff_max_s


@REPLAYABLE
@given(CONFIGS, st.lists(FAILURES, min_size=24, max_size=24))
def test_a_job_that_never_completes_a_step_stops_after_a_bounded_number_of_failures(config, failures):
    bound = config.no_progress_generations * (MAX_INIT_STALLS + 1) + MAX_INIT_STALLS + 1
    stuck = [replace(one, step=0, durable_progress=False) for one in failures]
    _, rulings = run(stuck[:bound], config)
    assert isinstance(rulings[-1], Stop)


@REPLAYABLE
@given(st.lists(FAILURES, max_size=20), FAILURES)
def test_an_error_of_the_script_never_outlives_its_repetition(failures, last):
    """Whatever came before: the same error at the same step twice in a row, nothing saved, is the end."""
    repeated = replace(last, kind=FailureKind.EXCEPTION, durable_progress=False)
    _, rulings = run([*failures, repeated, repeated])
    assert isinstance(rulings[-1], Stop)
