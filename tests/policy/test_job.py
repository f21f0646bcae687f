"""The job's state machine: its story in examples, then any order of events at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.config import BudgetConfig
from closeranks.errors import ConfigError
from closeranks.events import (
    Action,
    AllRanksSucceeded,
    Event,
    Failure,
    FailureKind,
    Finish,
    GenerationDown,
    GenerationStarted,
    KillGeneration,
    Progress,
    RestartPlanned,
    RunExit,
    RunStarted,
    StartGeneration,
    StopGracefully,
    StopRequested,
    Tell,
)
from closeranks.policy.budget import MAX_INIT_STALLS
from closeranks.policy.job import JobState, Phase, decide, initial

REPLAYABLE = settings(print_blob=True, deadline=None, max_examples=200)
SIGTERM, SIGINT = 15, 2
TERM = StopRequested("scancel", SIGTERM)
INT = StopRequested("Ctrl-C", SIGINT)


def failure(generation: int = 0, kind: FailureKind = FailureKind.SIGNAL, **changes: Any) -> Failure:
    base = Failure(
        generation=generation,
        incident_id=f"{generation:04}",
        kind=kind,
        rank=1,
        signature="SIGKILL",
        step=5,
        startup=False,
        durable_progress=False,
        exit_code=137,
    )
    return replace(base, **changes)


def startup_error(generation: int = 0, **changes: Any) -> Failure:
    what = {"signature": "ImportError at train.py:1", "step": 0, "startup": True, "exit_code": 3}
    return failure(generation, FailureKind.EXCEPTION, **{**what, **changes})


class Job:
    """Feeds events and keeps what came of each; ``clock_s`` moves by hand."""

    def __init__(self, config: BudgetConfig | None = None) -> None:
        self.state = initial(config or BudgetConfig())
        self.clock_s = 0.0

    def feed(self, *events: Event) -> list[Action]:
        """The actions of these events, without what is only told."""
        actions = []
        for event in events:
            self.state, new = decide(self.state, event, self.clock_s)
            actions += new
        self.told = [action for action in actions if isinstance(action, Tell)]
        return [action for action in actions if not isinstance(action, Tell)]

    def finish(self, *events: Event) -> Finish:
        """The one action of these events, which must be the end."""
        (action,) = self.feed(*events)
        assert isinstance(action, Finish)
        assert self.state.phase is Phase.FINISHED
        return action


def running(config: BudgetConfig | None = None) -> Job:
    job = Job(config)
    assert job.feed(RunStarted()) == [StartGeneration(0)]
    assert job.feed(GenerationStarted(0)) == []
    return job


# --- the straight story -----------------------------------------------------------------------------


def test_a_job_starts_generation_0_and_ends_with_0_when_all_ranks_succeed():
    job = running()
    assert job.feed(Progress(0, 1), Progress(0, 2)) == []
    assert job.finish(AllRanksSucceeded(0)).exit_code == 0


def test_a_failure_kills_the_generation_and_the_next_one_starts_when_it_is_down():
    job = running()
    assert job.feed(failure(0)) == [KillGeneration(0)]
    (told,) = job.told
    assert told.level == "warning"
    assert "generation 1" in told.text
    assert "at once" in told.text
    assert "restart 1 of at most 1000" in told.text
    assert job.feed(GenerationDown(0)) == [StartGeneration(1, 0.0)]
    assert job.feed(GenerationStarted(1)) == []
    assert job.finish(AllRanksSucceeded(1)).exit_code == 0


def test_200_kills_after_one_step_each_are_survived_without_delay():
    job = running()
    for generation in range(200):
        job.clock_s += 0.15
        assert job.feed(failure(generation, step=1)) == [KillGeneration(generation)]
        assert job.feed(GenerationDown(generation)) == [StartGeneration(generation + 1, 0.0)]
    assert job.finish(AllRanksSucceeded(200)).exit_code == 0


def test_a_start_up_error_ends_the_job_once_it_is_down_with_the_scripts_code():
    job = running()
    assert job.feed(startup_error()) == [KillGeneration(0)]
    (told,) = job.told
    assert told.level == "error"
    finish = job.finish(GenerationDown(0))
    assert finish.exit_code == 3
    assert "ImportError at train.py:1" in finish.reason
    assert "incident 0000" in finish.reason


def test_progress_that_all_ranks_made_counts_for_a_culprit_who_did_not_report_it():
    """The failure says step 0, yet all ranks were seen past step 7: that is no start-up error."""
    job = running()
    job.feed(Progress(0, 7), Progress(0, 3), startup_error())
    assert job.feed(GenerationDown(0)) == [StartGeneration(1, 0.0)]


def test_progress_that_arrives_out_of_order_is_not_taken_back():
    job = running()
    error = {"kind": FailureKind.EXCEPTION, "signature": "ValueError at train.py:12", "exit_code": 4}
    job.feed(Progress(0, 7), Progress(0, 3), failure(0, step=0, **error), GenerationDown(0))
    job.feed(failure(1, step=5, **error))
    assert "before: at step 7" in job.finish(GenerationDown(1)).reason


def test_progress_of_a_generation_is_not_carried_over_to_the_next():
    job = running()
    job.feed(Progress(0, 7), failure(0), GenerationDown(0))
    for generation in (1, 2):
        job.feed(failure(generation, step=0), GenerationDown(generation))
    job.feed(failure(3, step=0))
    assert job.finish(GenerationDown(3)).exit_code == RunExit.NO_PROGRESS


def test_the_same_error_twice_ends_the_job_with_the_scripts_code():
    job = running()
    error = {"signature": "ValueError at train.py:12", "exit_code": 4}
    job.feed(failure(0, FailureKind.EXCEPTION, step=57, durable_progress=True, **error), GenerationDown(0))
    job.feed(failure(1, FailureKind.EXCEPTION, step=7, **error))
    assert job.finish(GenerationDown(1)).exit_code == 4


def test_a_spent_budget_ends_the_job():
    job = running(BudgetConfig(max_restarts=1))
    job.feed(failure(0), GenerationDown(0), failure(1))
    assert job.finish(GenerationDown(1)).exit_code == RunExit.BUDGET_SPENT


def test_no_restart_at_all_where_none_is_allowed_not_even_after_an_init_stall():
    job = running(BudgetConfig(max_restarts=0))
    stall = {"kind": FailureKind.INIT_STALL, "step": 0, "startup": True}
    assert job.feed(failure(0, **stall)) == [KillGeneration(0)]
    assert job.finish(GenerationDown(0)).exit_code == 1


def test_settings_that_cannot_work_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="max-restarts"):
        initial(BudgetConfig(max_restarts=-1))


# --- late, doubled and early events -----------------------------------------------------------------


def test_a_second_failure_of_the_same_generation_is_dropped():
    job = running(BudgetConfig(max_restarts=1))
    job.feed(failure(0))
    assert job.feed(failure(0), startup_error(0)) == []
    assert job.told == []
    assert job.feed(GenerationDown(0)) == [StartGeneration(1, 0.0)]


@pytest.mark.parametrize(
    "late",
    [
        GenerationStarted(0),
        Progress(0, 99),
        failure(0),
        startup_error(0),
        GenerationDown(0),
        AllRanksSucceeded(0),
        AllRanksSucceeded(2),
        RunStarted(),
    ],
)
def test_events_of_another_generation_and_a_second_start_change_nothing(late):
    job = running()
    job.feed(failure(0), GenerationDown(0), GenerationStarted(1))
    before = job.state
    assert job.feed(late) == []
    assert job.state == before


@pytest.mark.parametrize(
    "late", [RunStarted(), TERM, failure(0), GenerationDown(0), AllRanksSucceeded(0), Progress(0, 1)]
)
def test_after_the_end_nothing_happens_any_more(late):
    job = running()
    job.finish(AllRanksSucceeded(0))
    before = job.state
    assert job.feed(late) == []
    assert job.told == []
    assert job.state == before


def test_nothing_is_started_by_events_before_the_run_has():
    job = Job()
    events = (GenerationStarted(0), Progress(0, 1), failure(0), GenerationDown(0), AllRanksSucceeded(0))
    assert job.feed(*events, failure(-1), GenerationDown(-1), AllRanksSucceeded(-1)) == []
    assert job.feed(RunStarted()) == [StartGeneration(0)]


def test_down_before_the_failure_that_explains_it_restarts_without_a_kill():
    job = running()
    assert job.feed(GenerationDown(0)) == []
    assert job.feed(failure(0)) == [StartGeneration(1, 0.0)]
    assert job.feed(failure(1)) == [KillGeneration(1)]


def test_down_before_the_success_that_explains_it_ends_with_0():
    job = running()
    assert job.feed(GenerationDown(0)) == []
    assert job.finish(AllRanksSucceeded(0)).exit_code == 0


def test_a_stop_between_down_and_its_explanation_ends_at_once():
    job = running()
    job.feed(GenerationDown(0))
    assert job.finish(TERM).exit_code == 143


def test_all_ranks_that_finish_while_being_killed_have_finished():
    job = running()
    job.feed(failure(0, FailureKind.HANG_TIMEOUT))
    assert job.finish(AllRanksSucceeded(0)).exit_code == 0


# --- back-off ---------------------------------------------------------------------------------------


def in_backoff() -> Job:
    """Generation 1 is ordered for 100.5 s, and it is 100 s."""
    job = running()
    job.clock_s = 100.0
    assert job.feed(failure(0, step=0), GenerationDown(0)) == [KillGeneration(0), StartGeneration(1, 0.5)]
    assert job.state.phase is Phase.BACKOFF
    return job


def test_the_delay_is_told():
    job = running()
    job.feed(failure(0, step=0))
    assert "in 0.5 s" in job.told[0].text
    assert "1 of at most 3 generations without a newer step" in job.told[0].text


def test_a_stop_during_back_off_ends_the_job_as_nothing_runs():
    assert in_backoff().finish(TERM).exit_code == 143


def test_a_stop_when_the_delay_is_over_is_passed_on():
    job = in_backoff()
    job.clock_s = 100.5
    assert job.feed(TERM) == [StopGracefully(1, SIGTERM)]


@pytest.mark.parametrize("heard", [GenerationStarted(1), Progress(1, 1)])
def test_a_generation_that_is_heard_of_is_no_longer_in_back_off(heard):
    job = in_backoff()
    assert job.feed(heard) == []
    assert job.feed(TERM) == [StopGracefully(1, SIGTERM)]


def test_a_generation_in_back_off_that_cannot_be_launched_is_a_failure_like_any():
    job = in_backoff()
    assert job.feed(failure(1, FailureKind.LAUNCH, step=0, signature="EAGAIN")) == [KillGeneration(1)]
    assert job.feed(GenerationDown(1)) == [StartGeneration(2, 1.0)]


# --- stop requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("stop", "code"), [(TERM, 143), (INT, 130)])
def test_a_stop_is_passed_on_and_ends_as_a_shell_shows_it(stop, code):
    job = running()
    assert job.feed(stop) == [StopGracefully(0, stop.signal)]
    finish = job.finish(GenerationDown(0))
    assert finish.exit_code == code
    assert stop.reason in finish.reason


def test_ranks_that_use_the_grace_to_finish_were_stopped_all_the_same():
    job = running()
    job.feed(TERM)
    finish = job.finish(AllRanksSucceeded(0))
    assert finish.exit_code == 143
    assert finish.reason.startswith("stopped by SIGTERM") and finish.reason.endswith("ended by itself")
    assert job.feed(GenerationDown(0)) == []


def test_failures_while_stopping_are_its_consequences():
    job = running()
    job.feed(TERM)
    assert job.feed(failure(0), startup_error(0)) == []
    assert job.finish(GenerationDown(0)).exit_code == 143


def test_a_second_stop_kills_at_once_and_a_third_changes_nothing():
    job = running()
    job.feed(TERM)
    assert job.feed(INT) == [KillGeneration(0)]
    assert job.feed(TERM) == []
    assert job.finish(GenerationDown(0)).exit_code == 143


def test_a_stop_before_anything_runs_ends_the_job_and_nothing_starts():
    job = Job()
    assert job.finish(TERM).exit_code == 143
    assert job.feed(RunStarted()) == []


def test_a_stop_while_killing_cancels_the_restart():
    job = running()
    job.feed(failure(0))
    assert job.feed(TERM) == []
    assert "no restart" in job.told[0].text
    assert job.feed(INT) == []
    assert job.finish(GenerationDown(0)).exit_code == 143


def test_a_stop_while_killing_for_a_script_error_keeps_the_scripts_code():
    job = running()
    job.feed(startup_error(0))
    assert job.feed(TERM) == []
    assert job.finish(GenerationDown(0)).exit_code == 3


@pytest.mark.parametrize("signal", [0, -1, 65, 10_000])
def test_a_stop_without_a_real_signal_is_a_drain_by_sigterm(signal):
    job = running()
    assert job.feed(StopRequested("drain node 7", signal)) == [StopGracefully(0, SIGTERM)]
    assert job.finish(GenerationDown(0)).exit_code == RunExit.DRAINED


# --- planned restarts -------------------------------------------------------------------------------


def test_a_planned_restart_is_a_restart_at_no_charge():
    job = running(BudgetConfig(max_restarts=0))
    before = job.state.budget
    for generation in range(10):
        assert job.feed(RestartPlanned(generation, "node 7 drains")) == [KillGeneration(generation)]
        (told,) = job.told
        assert told.level == "info" and "node 7 drains" in told.text
        assert job.feed(GenerationDown(generation)) == [StartGeneration(generation + 1, 0.0)]
    assert job.state.budget == before


def test_failures_after_a_planned_kill_are_its_consequences():
    job = running()
    job.feed(RestartPlanned(0, "drain"))
    assert job.feed(failure(0), startup_error(0)) == []
    assert job.feed(GenerationDown(0)) == [StartGeneration(1, 0.0)]
    assert job.state.budget.restarts == 0


def test_what_ends_or_is_to_start_anew_anyway_is_not_planned_for():
    job = running()
    job.feed(failure(0))
    assert job.feed(RestartPlanned(0, "drain")) == []
    job.feed(GenerationDown(0))
    assert job.feed(RestartPlanned(0, "late")) == []
    job.feed(TERM)
    assert job.feed(RestartPlanned(1, "drain")) == []
    assert job.finish(GenerationDown(1)).exit_code == 143


def test_a_generation_that_is_down_unexplained_makes_way_at_once():
    job = running()
    job.feed(GenerationDown(0))
    assert job.feed(RestartPlanned(0, "drain")) == [StartGeneration(1, 0.0)]


# --- any order of events ----------------------------------------------------------------------------

FAILURES = st.builds(
    Failure,
    generation=st.just(0),
    incident_id=st.just("0001"),
    kind=st.sampled_from(FailureKind),
    rank=st.none() | st.integers(0, 3),
    signature=st.sampled_from(["", "a", "b"]),
    step=st.integers(-1, 4),
    startup=st.booleans(),
    durable_progress=st.booleans(),
    exit_code=st.integers(-1, 300),
)
STOPS = st.builds(
    StopRequested, reason=st.just("test"), signal=st.sampled_from([SIGINT, SIGTERM, 0, -7, 999])
)
FACTS: st.SearchStrategy[Event] = st.one_of(
    st.just(RunStarted()),
    st.builds(RestartPlanned, st.just(0), st.just("test")),
    st.builds(GenerationStarted, st.just(0)),
    st.builds(Progress, st.just(0), st.integers(-1, 5)),
    FAILURES,
    FAILURES,
    FAILURES,
    st.builds(GenerationDown, st.just(0)),
    st.builds(GenerationDown, st.just(0)),
    st.builds(GenerationDown, st.just(0)),
    st.builds(AllRanksSucceeded, st.just(0)),
)
# How far an event's generation is from the current one: mostly it is of this generation, so that histories
# get somewhere; else late, or of a generation that nobody ordered.
OFFSETS = st.sampled_from([0, 0, 0, 0, 0, 0, -1, -1, -2, 1])
HISTORIES = st.lists(st.tuples(FACTS | STOPS, OFFSETS), max_size=80)


def at(state: JobState, event: Event, offset: int) -> Event:
    """The same event, of a generation ``offset`` away from the current one."""
    if isinstance(event, RunStarted | StopRequested):
        return event
    return replace(event, generation=state.generation + offset)


CONFIGS = st.builds(
    BudgetConfig,
    max_restarts=st.none() | st.integers(0, 6),
    default_max_restarts=st.integers(0, 10),
    max_restarts_per_window=st.integers(1, 10),
    window_s=st.floats(0.1, 100.0),
    no_progress_generations=st.integers(1, 4),
)
CLOCK_STEPS_S = st.floats(-1.0, 40.0)


class Referee:
    """Watches facts and actions, and objects to any action that must never be taken."""

    def __init__(self, config: BudgetConfig) -> None:
        self.total = config.default_max_restarts if config.max_restarts is None else config.max_restarts
        self.explicit = config.max_restarts is not None
        self.started: list[int] = []
        self.down: set[int] = set()
        self.killed: set[int] = set()
        self.stopped: set[int] = set()
        self.finishes = 0
        self.planned = 0
        self.stop_seen = False

    def see(self, event: Event, actions: Iterable[Action]) -> None:
        if isinstance(event, GenerationDown):
            self.down.add(event.generation)
        self.stop_seen |= isinstance(event, StopRequested)
        self.planned += isinstance(event, RestartPlanned)
        for action in actions:
            assert not self.finishes, f"{action} after the end"
            self._check(action)

    def _check(self, action: Action) -> None:
        current = self.started[-1] if self.started else -1
        match action:
            case StartGeneration(generation, delay_s):
                assert generation == current + 1, "numbers are used once and in order"
                assert generation == 0 or current in self.down, "the older generation is not down"
                assert not self.stop_seen, "started after a stop request"
                assert delay_s >= 0
                self.started.append(generation)
                stalls = 0 if self.explicit else (self.total + 1) * MAX_INIT_STALLS
                free = self.planned + stalls
                assert generation <= self.total + free, "budget overrun"
            case KillGeneration(generation):
                assert generation == current
                assert generation not in self.killed
                self.killed.add(generation)
            case StopGracefully(generation, signal):
                assert generation == current
                assert generation not in self.stopped
                assert 1 <= signal <= 64
                self.stopped.add(generation)
            case Finish(exit_code, reason):
                assert 0 <= exit_code <= 255
                assert reason.isprintable()
                self.finishes += 1
            case Tell(level, text):
                assert level in ("info", "warning", "error")
                assert text.isprintable()


@REPLAYABLE
@given(CONFIGS, HISTORIES, st.lists(CLOCK_STEPS_S, min_size=81, max_size=81))
def test_no_order_of_events_breaks_the_rules_of_the_game(config, history, steps_s):
    """Also proves decide total: no event in any state raises, and no assertion in it fires."""
    state, referee, now_s = initial(config), Referee(config), 0.0
    for (template, offset), step_s in zip([(RunStarted(), 0), *history], steps_s, strict=False):
        now_s += step_s
        event = at(state, template, offset)
        state, actions = decide(state, event, now_s)
        referee.see(event, actions)
        assert (state.phase is Phase.FINISHED) == (referee.finishes == 1)


@REPLAYABLE
@given(CONFIGS, HISTORIES, st.randoms(use_true_random=False))
def test_decide_is_pure(config, history, random):
    """Any decision made again, from a state passed long ago and whatever was decided since, is the same."""
    state, decisions = initial(config), []
    for number, (template, offset) in enumerate([(RunStarted(), 0), *history]):
        question = (state, at(state, template, offset), float(number))
        answer = decide(*question)
        decisions.append((question, answer))
        state = answer[0]
    random.shuffle(decisions)
    for question, answer in decisions:
        assert decide(*question) == answer


@REPLAYABLE
@given(CONFIGS, HISTORIES)
def test_restarts_never_exceed_the_total_where_no_init_stalls_or_the_user_set_it(config, history):
    state, starts, total = initial(config), 0, Referee(config).total
    for event, offset in [(RunStarted(), 0), *history]:
        stalled = isinstance(event, Failure) and event.kind is FailureKind.INIT_STALL
        if stalled and config.max_restarts is None:
            continue
        if isinstance(event, RestartPlanned):
            continue
        state, actions = decide(state, at(state, event, offset), 0.0)
        starts += sum(isinstance(action, StartGeneration) for action in actions)
    assert starts - 1 <= total


# --- a well-behaved world ---------------------------------------------------------------------------


class World:
    """Carries out actions as agents would: each generation meets the next fate, then all go well."""

    def __init__(self, config: BudgetConfig, fates: list[Failure | StopRequested]) -> None:
        self.state = initial(config)
        self.referee = Referee(config)
        self.fates = list(fates)
        self.actions: list[Action] = []
        self.failures = 0
        self.now_s = 0.0

    def deliver(self, event: Event) -> None:
        self.now_s += 0.1
        self.state, actions = decide(self.state, event, self.now_s)
        self.referee.see(event, actions)
        self.actions += actions
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case StartGeneration(generation, delay_s):
                self.now_s += delay_s
                self._live(generation)
            case KillGeneration(generation) | StopGracefully(generation):
                self.deliver(GenerationDown(generation))

    def _live(self, generation: int) -> None:
        self.deliver(GenerationStarted(generation))
        fate = self.fates.pop(0) if self.fates else AllRanksSucceeded(generation)
        self.failures += isinstance(fate, Failure)
        self.deliver(replace(fate, generation=generation) if isinstance(fate, Failure) else fate)


@REPLAYABLE
@given(CONFIGS, st.lists(FAILURES | STOPS, max_size=60))
def test_a_job_in_a_well_behaved_world_ends_exactly_once(config, fates):
    world = World(config, fates)
    world.deliver(RunStarted())
    assert world.referee.finishes == 1
    assert world.state.phase is Phase.FINISHED


@REPLAYABLE
@given(CONFIGS, st.lists(FAILURES, min_size=20, max_size=20))
def test_a_job_that_never_progresses_ends_after_a_bounded_number_of_failures(config, fates):
    fates = [replace(fate, step=0, durable_progress=False) for fate in fates]
    world = World(config, fates)
    world.deliver(RunStarted())
    (finish,) = [action for action in world.actions if isinstance(action, Finish)]
    assert finish.exit_code != 0
    assert world.failures <= config.no_progress_generations * (MAX_INIT_STALLS + 1) + MAX_INIT_STALLS + 1


class EchoingWorld(World):
    """Before every event comes an echo of the past: some fact of an older generation, or RunStarted again."""

    def __init__(
        self,
        config: BudgetConfig,
        fates: list[Failure | StopRequested],
        echoes: list[tuple[Event, int]],
    ) -> None:
        super().__init__(config, fates)
        self.echoes = list(echoes)

    def deliver(self, event: Event) -> None:
        if self.echoes and self.state.phase is not Phase.NEW:
            echo, age = self.echoes.pop()
            self.state, actions = decide(self.state, at(self.state, echo, -age), self.now_s)
            assert actions == ()
        super().deliver(event)


@REPLAYABLE
@given(CONFIGS, st.lists(FAILURES, max_size=12), st.lists(st.tuples(FACTS, st.integers(1, 3)), max_size=40))
def test_late_and_doubled_events_change_nothing(config, fates, echoes):
    calm, echoing = World(config, fates), EchoingWorld(config, fates, echoes)
    calm.deliver(RunStarted())
    echoing.deliver(RunStarted())
    assert echoing.actions == calm.actions
    assert echoing.state == calm.state
