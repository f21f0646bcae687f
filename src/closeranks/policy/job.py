"""The job's state machine: facts in, actions out. Pure; the controller and the simulator both drive it.

::

    new ──RunStarted──> running ──Failure──> killing ──GenerationDown──> running (next generation)
                          │  ^                  │ └──────────────────> backoff ──its time──> running
                          │  └──────────────────┘ (RestartPlanned likewise, at no charge)
                          └──StopRequested──> stopping ──StopRequested──> killing ──> finished

``AllRanksSucceeded`` finishes the job from every phase in which ranks run. An event of another generation
than the current one is fenced off; so is everything after ``Finish``, and every event that its phase has no
use for. None of these is an error: kills race with exits, and messages come late and twice.

What whoever carries out the actions owes: a ``Failure`` or ``AllRanksSucceeded`` for every generation that
ended unasked; success before the ``GenerationDown`` of the same generation; and ``GenerationDown`` after
``KillGeneration`` or ``StopGracefully`` also of a generation that is still to start (which then never does).
"""

from __future__ import annotations

import signal as _signal
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import assert_never

from closeranks.config import BudgetConfig
from closeranks.events import (
    Action,
    AllRanksSucceeded,
    Event,
    Failure,
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
    signal_name,
)
from closeranks.policy.budget import Budget, Restart, check_budget_config, headline, judge, one_line

__all__ = ["JobState", "Phase", "decide", "initial"]


class Phase(StrEnum):
    """Where the job stands. ``BACKOFF``: a generation is ordered, and its time has not come."""

    NEW = "new"
    RUNNING = "running"
    KILLING = "killing"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    FINISHED = "finished"


_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.NEW: frozenset({Phase.RUNNING, Phase.FINISHED}),
    Phase.RUNNING: frozenset({Phase.KILLING, Phase.STOPPING, Phase.FINISHED}),
    Phase.KILLING: frozenset({Phase.RUNNING, Phase.BACKOFF, Phase.FINISHED}),
    Phase.BACKOFF: frozenset({Phase.RUNNING, Phase.FINISHED}),
    Phase.STOPPING: frozenset({Phase.KILLING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}
_WITH_RANKS = frozenset({Phase.RUNNING, Phase.KILLING, Phase.STOPPING})


@dataclass(frozen=True, slots=True)
class JobState:
    """All that ``decide`` remembers; of bounded size, made of plain data.

    ``generation``: the newest one ordered, -1 before the first. ``due_s``: when it starts, in BACKOFF.
    ``steps``: what all its ranks have completed. ``is_down``: its GenerationDown came before the fact that
    explains it. ``plan``: what follows once it is down, in KILLING and STOPPING.
    """

    config: BudgetConfig
    phase: Phase = Phase.NEW
    generation: int = -1
    due_s: float = 0.0
    steps: int = 0
    is_down: bool = False
    plan: StartGeneration | Finish | None = None
    budget: Budget = field(default_factory=Budget)


_Decision = tuple[JobState, tuple[Action, ...]]


def initial(config: BudgetConfig) -> JobState:
    """The state before anything happened. Raises ConfigError for settings that can't work."""
    check_budget_config(config)
    return JobState(config)


def decide(state: JobState, event: Event, now_s: float) -> _Decision:
    """What follows from ``event``, for any event in any state. ``now_s`` is seconds on a monotonic clock."""
    if state.phase is Phase.FINISHED or _is_fenced(state, event):
        return state, ()
    state = _end_backoff(state, event, now_s)
    match event:
        case RunStarted():
            return _on_run_started(state, now_s)
        case GenerationStarted():
            return state, ()
        case Progress():
            return replace(state, steps=max(state.steps, event.step)), ()
        case Failure():
            return _on_failure(state, event, now_s)
        case GenerationDown():
            return _on_generation_down(state, now_s)
        case AllRanksSucceeded():
            return _on_success(state)
        case StopRequested():
            return _on_stop_requested(state, event)
        case RestartPlanned():
            return _on_restart_planned(state, event, now_s)
    assert_never(event)


# --- one function an event --------------------------------------------------------------------------


def _on_run_started(state: JobState, now_s: float) -> _Decision:
    if state.phase is not Phase.NEW:
        return state, ()
    return _start(state, StartGeneration(0), now_s)


def _on_failure(state: JobState, failure: Failure, now_s: float) -> _Decision:
    """Only the first failure of a running generation counts: later ones, and those of a generation that was
    told to stop, are consequences."""
    if state.phase is not Phase.RUNNING:
        return state, ()
    # Progress and Failure come from different places; the culprit did what all ranks did.
    step = max(0, failure.step, state.steps)
    failure = replace(failure, step=step, startup=failure.startup and step == 0)
    budget, ruling = judge(state.config, state.budget, failure, now_s)
    plan: StartGeneration | Finish
    if isinstance(ruling, Restart):
        plan = StartGeneration(state.generation + 1, ruling.delay_s)
        when = f"in {ruling.delay_s:g} s" if ruling.delay_s else "at once"
        follows = f"restarting all ranks {when} as generation {plan.generation}"
        tell = Tell("warning", f"{headline(failure)}: {follows} ({ruling.why})")
    else:
        plan = Finish(ruling.exit_code, ruling.reason)
        tell = Tell(
            "error", f"{headline(failure)}: no restart after generation {state.generation}; the job ends"
        )
    state = _enter(state, Phase.KILLING, plan=plan, budget=budget)
    if state.is_down:
        state, actions = _carry_out(state, now_s)
        return state, (tell, *actions)
    return state, (KillGeneration(state.generation), tell)


def _on_generation_down(state: JobState, now_s: float) -> _Decision:
    if state.phase is Phase.RUNNING:  # its failure or success is still on the way
        return replace(state, is_down=True), ()
    if state.phase in (Phase.KILLING, Phase.STOPPING):
        return _carry_out(state, now_s)
    return state, ()


def _on_success(state: JobState) -> _Decision:
    """Every rank exited with 0, so the work is done, whatever failure was being dealt with meanwhile.

    After a request to stop it means no more than that they all handled the signal: a scheduler must still see
    that the job was stopped.
    """
    if state.phase not in _WITH_RANKS:
        return state, ()
    if state.phase is Phase.STOPPING:
        assert isinstance(state.plan, Finish), "stopping, and then?"
        return _finish(state, replace(state.plan, reason=f"{state.plan.reason}; every rank ended by itself"))
    reason = f"all ranks finished, in generation {state.generation}"
    return _finish(state, Finish(RunExit.OK, reason))


def _on_stop_requested(state: JobState, stop: StopRequested) -> _Decision:
    finish = _stop_finish(stop)
    generation = state.generation
    if state.phase is Phase.STOPPING:
        # Asked twice, people mean it. The first request's exit code stands.
        tell = Tell("warning", f"asked to stop again: killing generation {generation} without further grace")
        return _enter(state, Phase.KILLING), (KillGeneration(generation), tell)
    if state.phase is Phase.KILLING:
        if isinstance(state.plan, Finish):  # it ends anyway, and for a better reason
            return state, ()
        tell = Tell("info", f"no restart: {finish.reason}")
        return replace(state, plan=finish), (tell,)
    if state.phase is Phase.RUNNING and not state.is_down:
        state = _enter(state, Phase.STOPPING, plan=finish)
        return state, (StopGracefully(generation, _signal_to_forward(stop)),)
    return _finish(state, finish)  # nothing runs: before the first generation, or between two


def _on_restart_planned(state: JobState, planned: RestartPlanned, now_s: float) -> _Decision:
    """The budget is for failures; whoever plans a restart answers for how often."""
    if state.phase is not Phase.RUNNING:  # ending, or about to start anew anyway
        return state, ()
    plan = StartGeneration(state.generation + 1)
    tell = Tell(
        "info",
        f"restarting all ranks as generation {plan.generation}, as planned: {one_line(planned.reason)}",
    )
    state = _enter(state, Phase.KILLING, plan=plan)
    if state.is_down:
        state, actions = _carry_out(state, now_s)
        return state, (tell, *actions)
    return state, (KillGeneration(state.generation), tell)


# --- transitions ------------------------------------------------------------------------------------


def _is_fenced(state: JobState, event: Event) -> bool:
    if isinstance(event, RunStarted | StopRequested):
        return False
    return event.generation != state.generation


def _end_backoff(state: JobState, event: Event, now_s: float) -> JobState:
    """The back-off is over when its time has come, or when the generation itself is heard of."""
    heard_of = not isinstance(event, RunStarted | StopRequested)
    if state.phase is Phase.BACKOFF and (heard_of or now_s >= state.due_s):
        return _enter(state, Phase.RUNNING)
    return state


def _enter(
    state: JobState,
    phase: Phase,
    *,
    plan: StartGeneration | Finish | None = None,
    budget: Budget | None = None,
) -> JobState:
    """The one way to another phase. Without ``plan`` or ``budget`` they stay as they are."""
    assert phase in _MOVES[state.phase], f"a job never goes from {state.phase} to {phase}"
    state = replace(state, phase=phase, plan=plan or state.plan, budget=budget or state.budget)
    assert phase not in (Phase.KILLING, Phase.STOPPING) or state.plan is not None, "killed without a plan"
    return state


def _carry_out(state: JobState, now_s: float) -> _Decision:
    plan = state.plan
    assert plan is not None, "nothing follows"
    if isinstance(plan, Finish):
        return _finish(state, plan)
    return _start(state, plan, now_s)


def _start(state: JobState, start: StartGeneration, now_s: float) -> _Decision:
    assert start.generation == state.generation + 1, "a generation number was left out or used again"
    phase = Phase.BACKOFF if start.delay_s > 0 else Phase.RUNNING
    state = replace(
        _enter(state, phase),
        generation=start.generation,
        due_s=now_s + start.delay_s,
        steps=0,
        is_down=False,
        plan=None,
    )
    return state, (start,)


def _finish(state: JobState, finish: Finish) -> _Decision:
    assert 0 <= finish.exit_code <= 255, "not an exit code"
    return replace(_enter(state, Phase.FINISHED), plan=None), (finish,)


# --- stop requests ----------------------------------------------------------------------------------


def _is_signal(number: int) -> bool:
    return 1 <= number <= 64


def _stop_finish(stop: StopRequested) -> Finish:
    """A stop by signal ends as a shell would show it; one without a signal is a drain."""
    why = f" ({one_line(stop.reason)})" if stop.reason else ""
    if _is_signal(stop.signal):
        if stop.reason == f"{signal_name(stop.signal)} received":
            why = ""
        return Finish(128 + stop.signal, f"stopped by {signal_name(stop.signal)}{why}")
    return Finish(RunExit.DRAINED, f"stopped on request{why}")


def _signal_to_forward(stop: StopRequested) -> int:
    return stop.signal if _is_signal(stop.signal) else int(_signal.SIGTERM)
