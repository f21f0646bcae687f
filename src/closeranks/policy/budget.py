"""Whether a failed generation is worth another one: the restart budget of the whole job. Pure.

``judge`` applies these rules, and the first that fits decides:

0. process-group init that stalled is retried at once, a few times, outside of the default budget; an explicit
   ``--max-restarts`` bounds these retries too;
1. an error of the script's own that a restart would only repeat stops the job with the script's code;
2. the total budget (``--max-restarts``);
3. the rate over a sliding window, which bounds flapping;
4. several generations in a row without a newer step.

"Newer step" can't be read off the step numbers alone: they count from each generation's start, and a script
that resumes from a checkpoint starts nearer to the place where it breaks. So a generation got somewhere if it
saved a checkpoint after a step; or if something outside the script ended it after at least one step; or if it
completed a step and then failed in a way, or at a distance, that was not yet seen from this checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from closeranks.config import BudgetConfig
from closeranks.errors import ConfigError
from closeranks.events import Failure, FailureKind, RunExit

__all__ = [
    "MAX_INIT_STALLS",
    "MAX_SIGNATURES",
    "MAX_WINDOW_RESTARTS",
    "Budget",
    "Restart",
    "Stop",
    "backoff_s",
    "check_budget_config",
    "headline",
    "judge",
    "one_line",
    "progressed",
]

MAX_INIT_STALLS = 3  # retries in a row; a stall is a lost race or a slow name server, and both pass by then
MAX_SIGNATURES = 32  # remembered since the last durable progress; the oldest is forgotten first
MAX_WINDOW_RESTARTS = 10_000  # bounds the memory of the sliding window
_MAX_TEXT_CHARS = 160

# What ended the script came from the script itself, so its own exit code is the one to pass on.
_SCRIPT_ERRORS = frozenset({FailureKind.EXCEPTION, FailureKind.EXIT_CODE, FailureKind.CRASH})
# Nothing the script did: the same script gets farther next time. Out of memory is not among them, as a leak
# or too large a batch comes back at the same step.
_EXTERNAL = frozenset({FailureKind.SIGNAL, FailureKind.STOPPED, FailureKind.NODE_LOST})
# What a generation failed of, where it isn't one rank that did it.
_ABOUT_ALL = {
    FailureKind.DESYNC: "ranks are in different collectives",
    FailureKind.DEADLOCK: "ranks wait for ever",
    FailureKind.HANG_TIMEOUT: "nothing moved for --hang-timeout",
    FailureKind.INIT_STALL: "process-group init stalled",
    FailureKind.LAUNCH: "a rank could not be started",
    FailureKind.NODE_LOST: "a node was lost",
}
_FAILED = 1  # no code of the script's own to pass on; what torchrun ends with, too


@dataclass(frozen=True, slots=True)
class Budget:
    """What past failures of this job have used up; bounded however long the job lives.

    ``restarts``: charged against the total. ``recent_s``: times of the restarts inside the window; kept only
    where the rate applies. ``fruitless``: generations in a row without a newer step. ``init_stalls``: in a
    row. ``seen``: (signature, step) of failures since the last durable progress, oldest first.
    """

    restarts: int = 0
    recent_s: tuple[float, ...] = ()
    fruitless: int = 0
    init_stalls: int = 0
    seen: tuple[tuple[str, int], ...] = ()

    def step_of(self, signature: str) -> int | None:
        """The step at which this signature was last seen, None if it was not or has been disproved."""
        return dict(self.seen).get(signature)


@dataclass(frozen=True, slots=True)
class Restart:
    """Go on, ``delay_s`` seconds after the generation is down; ``why`` continues a sentence."""

    delay_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the job with this exit code; ``reason`` is for the person on call."""

    exit_code: int
    reason: str


def check_budget_config(config: BudgetConfig) -> None:
    """Raises ConfigError for settings under which the rules make no sense or nothing is bounded."""
    total = config.max_restarts
    if total is not None and total < 0:
        raise ConfigError(f"--max-restarts is {total}; give 0 (never restart) or more")
    at_least_one = {
        "no_progress_generations": config.no_progress_generations,
        "max_restarts_per_window": config.max_restarts_per_window,
    }
    for name, count in at_least_one.items():
        if not 1 <= count <= MAX_WINDOW_RESTARTS:
            raise ConfigError(f"budget.{name} is {count}; give a number from 1 to {MAX_WINDOW_RESTARTS}")
    if config.default_max_restarts < 0:
        raise ConfigError(f"budget.default_max_restarts is {config.default_max_restarts}; give 0 or more")
    if not (math.isfinite(config.window_s) and config.window_s > 0):
        raise ConfigError(f"budget.window_s is {config.window_s}; give a number of seconds above 0")
    for name, delay_s in (("first", config.backoff_first_s), ("max", config.backoff_max_s)):
        if not (math.isfinite(delay_s) and delay_s >= 0):
            raise ConfigError(f"budget.backoff_{name}_s is {delay_s}; give a number of seconds, 0 or more")
    if not (math.isfinite(config.backoff_factor) and config.backoff_factor >= 1):
        raise ConfigError(f"budget.backoff_factor is {config.backoff_factor}; give a number, 1 or more")


def judge(
    config: BudgetConfig, budget: Budget, failure: Failure, now_s: float
) -> tuple[Budget, Restart | Stop]:
    """Restart after this failure, or stop? ``now_s`` is on any clock that doesn't go backwards.

    Call it once for each generation that failed, in order.
    """
    if _is_init_stall(failure):
        return _judge_init_stall(config, budget, failure)
    before = budget
    fruitless = 0 if progressed(before, failure) else before.fruitless + 1
    budget = replace(before, fruitless=fruitless, init_stalls=0, seen=_remember(before, failure))
    if _rate_applies(config):
        recent_s = tuple(at_s for at_s in budget.recent_s if at_s > now_s - config.window_s)
        budget = replace(budget, recent_s=recent_s)
    stop = (
        _stop_for_script_error(before, failure)
        or _stop_for_total(config, budget, failure)
        or _stop_for_rate(config, budget, failure)
        or _stop_for_no_progress(config, budget, failure)
    )
    if stop is not None:
        return budget, stop
    restarts = budget.restarts + 1
    recent_s = (*budget.recent_s, now_s) if _rate_applies(config) else ()
    why = f"restart {restarts} of at most {_total(config)}"
    if fruitless:
        why += f"; {fruitless} of at most {config.no_progress_generations} generations without a newer step"
    return (
        replace(budget, restarts=restarts, recent_s=recent_s),
        Restart(backoff_s(config, fruitless), why),
    )


def progressed(budget: Budget, failure: Failure) -> bool:
    """Whether the failed generation got anywhere, given the failures before it (see the module's text)."""
    if failure.durable_progress:
        return True
    if failure.step < 1:
        return False
    return failure.kind in _EXTERNAL or not _is_repeat(budget, failure)


def backoff_s(config: BudgetConfig, fruitless: int) -> float:
    """Seconds to wait after ``fruitless`` generations in a row without a newer step; 0 after progress."""
    if fruitless < 1:
        return 0.0
    delay_s = config.backoff_first_s
    for _ in range(fruitless - 1):  # not a power: that overflows where repeated multiplication saturates
        if delay_s >= config.backoff_max_s:
            break
        delay_s *= config.backoff_factor
    return min(delay_s, config.backoff_max_s)


def one_line(text: str) -> str:
    """Foreign text made fit for a sentence: printable, on one line, of bounded length."""
    head = text[: _MAX_TEXT_CHARS + 1]
    clean = "".join(c if c.isprintable() else " " for c in head)
    return clean if len(clean) <= _MAX_TEXT_CHARS else clean[:_MAX_TEXT_CHARS] + "…"


# --- rule 0: init stalls ----------------------------------------------------------------------------


def _is_init_stall(failure: Failure) -> bool:
    """A later group's init can stall after steps were made; that is an ordinary failure."""
    return failure.kind is FailureKind.INIT_STALL and failure.step < 1 and not failure.durable_progress


def _judge_init_stall(
    config: BudgetConfig, budget: Budget, failure: Failure
) -> tuple[Budget, Restart | Stop]:
    """Not charged against the default budget: it is our launch that did not come about (a late name server,
    a lost packet), and nothing of the training has run. ``MAX_INIT_STALLS`` bounds it instead. A user's own
    ``--max-restarts`` means every restart, whatever for."""
    explicit = config.max_restarts is not None
    if explicit and (stop := _stop_for_total(config, budget, failure)) is not None:
        return budget, stop
    stalls = budget.init_stalls + 1
    budget = replace(budget, init_stalls=stalls, restarts=budget.restarts + explicit)
    if stalls <= MAX_INIT_STALLS:
        why = f"process-group init stalled; retry {stalls} of at most {MAX_INIT_STALLS}"
        if explicit:
            return budget, Restart(0.0, f"{why}; restart {budget.restarts} of at most {_total(config)}")
        return budget, Restart(0.0, f"{why}, outside the budget")
    reason = (
        f"process-group init stalled {stalls} times in a row and {MAX_INIT_STALLS} retries did not help "
        f"(the last: {_describe(failure)}); check that every rank calls init_process_group, that host names "
        f"resolve and that ranks reach each other; see {_where(failure)}"
    )
    return budget, Stop(RunExit.NO_PROGRESS, reason)


# --- rule 1: an error that a restart would repeat ---------------------------------------------------


def _stop_for_script_error(before: Budget, failure: Failure) -> Stop | None:
    if failure.kind not in _SCRIPT_ERRORS:
        return None
    at_start = failure.generation == 0 and failure.startup and not failure.durable_progress
    # A native crash at start-up gets a second try: a broken GPU or driver looks the same as broken code.
    if at_start and failure.kind is not FailureKind.CRASH:
        when = "before any step was seen" if failure.collectives else "at start-up, before its first step"
        reason = (
            f"the script failed {when} ({_describe(failure)}), and a restart would only repeat that; "
            f"fix the script: {_its_words(failure)}"
        )
        if failure.collectives:
            reason += "; if it makes steps that can't be seen from outside, let it call closeranks.step()"
        return Stop(_exit_code(failure), reason)
    if not _is_repeat(before, failure):
        return None
    place = _describe(failure)
    if not failure.collectives:
        step = before.step_of(failure.signature)
        place += f"; before: at step {step}, each counted from its generation's start"
    reason = (
        f"the script failed twice in the same way ({place}) with nothing saved in between, so a restart "
        f"would repeat it; fix the script: {_its_words(failure)}"
    )
    return Stop(_exit_code(failure), reason)


def _is_repeat(budget: Budget, failure: Failure) -> bool:
    """The same thing at the same place, no farther than before, and nothing saved on the way there."""
    step = budget.step_of(failure.signature)
    return step is not None and failure.step <= step and not failure.durable_progress


def _remember(budget: Budget, failure: Failure) -> tuple[tuple[str, int], ...]:
    """Durable progress makes earlier steps incomparable. A generation that got past the place where another
    failed has shown that failure not to be inevitable. What ended from outside says nothing of a place."""
    kept = () if failure.durable_progress else budget.seen
    kept = tuple((name, step) for name, step in kept if step >= failure.step)
    if failure.kind not in _EXTERNAL:
        step = max([failure.step, *(step for name, step in kept if name == failure.signature)])
        kept = tuple(entry for entry in kept if entry[0] != failure.signature)
        kept = (*kept, (failure.signature, step))
    return kept[-MAX_SIGNATURES:]


# --- rules 2 to 4 -----------------------------------------------------------------------------------


def _total(config: BudgetConfig) -> int:
    return config.default_max_restarts if config.max_restarts is None else config.max_restarts


def _rate_applies(config: BudgetConfig) -> bool:
    return config.max_restarts is None


def _stop_for_total(config: BudgetConfig, budget: Budget, failure: Failure) -> Stop | None:
    total = _total(config)
    if budget.restarts < total:
        return None
    if total == 0:
        reason = (
            f"the job failed ({_describe(failure)}) and --max-restarts 0 allows no restart; "
            f"see {_where(failure)}, or allow restarts with --max-restarts N"
        )
        return Stop(_exit_code(failure), reason)
    reason = (
        f"the job failed again ({_describe(failure)}) after all {total} restarts it may have; "
        f"see {_where(failure)} and fix the cause, or raise --max-restarts"
    )
    return Stop(RunExit.BUDGET_SPENT, reason)


def _stop_for_rate(config: BudgetConfig, budget: Budget, failure: Failure) -> Stop | None:
    limit = config.max_restarts_per_window
    if len(budget.recent_s) < limit:  # always so where the rate is off: nothing is kept then
        return None
    reason = (
        f"the job failed again ({_describe(failure)}) with {len(budget.recent_s)} restarts in the last "
        f"{config.window_s:g} s, and {limit} is the limit: it fails faster than restarts can help; "
        f"see {_where(failure)} and fix the cause, or bound restarts by number alone with --max-restarts N"
    )
    return Stop(RunExit.BUDGET_SPENT, reason)


def _stop_for_no_progress(config: BudgetConfig, budget: Budget, failure: Failure) -> Stop | None:
    if budget.fruitless < config.no_progress_generations:
        return None
    reason = (
        f"{budget.fruitless} generations in a row got no farther than those before them (the last: "
        f"{_describe(failure)}); see {_where(failure)} and fix the cause; if the script does move on in a "
        f"way that can't be seen from outside, let it call closeranks.step()"
    )
    return Stop(RunExit.NO_PROGRESS, reason)


# --- words ------------------------------------------------------------------------------------------


def _exit_code(failure: Failure) -> int:
    """The script's own code where the script failed by itself; never 0."""
    own = failure.exit_code if 1 <= failure.exit_code <= 255 else _FAILED
    return own if failure.kind in _SCRIPT_ERRORS else _FAILED


def headline(failure: Failure) -> str:
    """What happened, as the beginning of a sentence about what follows from it."""
    signature = one_line(failure.signature) or failure.kind.value
    error, at, place = signature.rpartition(" at ")
    happened = {
        FailureKind.EXCEPTION: f"raised {error}{at}{place.rpartition('/')[2]}",
        FailureKind.EXIT_CODE: f"ended with {signature}",
        FailureKind.SIGNAL: f"was killed by {signature}",
        FailureKind.CRASH: f"crashed with {signature}",
        FailureKind.OUT_OF_MEMORY: "was killed for memory",
        FailureKind.STOPPED: "was stopped",
        FailureKind.EARLY_EXIT: "ended before the others",
    }.get(failure.kind)
    if failure.rank is not None and happened is not None:
        return f"rank {failure.rank} {happened}"
    who = "" if failure.rank is None else f"rank {failure.rank}: "
    return who + _ABOUT_ALL.get(failure.kind, failure.kind.value.replace("_", " "))


def _describe(failure: Failure) -> str:
    who = "no single rank" if failure.rank is None else f"rank {failure.rank}"
    what = failure.kind.value.replace("_", " ")
    signature = one_line(failure.signature)
    if signature:
        what = signature if signature.startswith(what) else f"{what}: {signature}"
    number = failure.collectives
    at = f"after {number} collective{'s' * (number != 1)}" if number else f"at step {failure.step}"
    return f"generation {failure.generation}, {who}, {what}, {at}"


def _where(failure: Failure) -> str:
    return f"incident {one_line(failure.incident_id)}"


def _its_words(failure: Failure) -> str:
    """Only an exception leaves an error that can be shown."""
    if failure.kind is FailureKind.EXCEPTION:
        return f"its own error is in {_where(failure)}"
    return f"see {_where(failure)} and what it printed"
