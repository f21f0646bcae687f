"""The shared language of agent, policy and journal: facts that happened, actions to take. No I/O.

Policy is ``decide(state, event, now_s) -> (state, actions)``. Everything here is immutable and made of
plain data, so that a journal can hold it and a simulator can produce it.
"""

from __future__ import annotations

import signal as _signal
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "Action",
    "AllRanksSucceeded",
    "Event",
    "ExitStatus",
    "Failure",
    "FailureKind",
    "Finish",
    "GenerationDown",
    "GenerationStarted",
    "KillGeneration",
    "Progress",
    "RestartPlanned",
    "RunExit",
    "RunStarted",
    "StartGeneration",
    "StopGracefully",
    "StopRequested",
    "Tell",
    "counted",
    "signal_name",
]


def counted(number: int, what: str) -> str:
    """``1 rank``, ``4 ranks``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def signal_name(number: int) -> str:
    """``9`` -> ``"SIGKILL"``; numbers without a name become ``"signal 77"``."""
    try:
        return _signal.Signals(number).name
    except ValueError:
        first, last = int(_signal.SIGRTMIN), int(_signal.SIGRTMAX)
        return f"SIGRTMIN+{number - first}" if first <= number <= last else f"signal {number}"


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended: exactly one of ``code`` (0..255) and ``signal`` is set."""

    code: int | None = None
    signal: int | None = None

    def __post_init__(self) -> None:
        assert (self.code is None) != (self.signal is None), "an exit has a code or a signal"

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def shell_code(self) -> int:
        """What a shell would show: the code, or 128 + the signal."""
        return self.code if self.code is not None else 128 + (self.signal or 0)

    def describe(self) -> str:
        if self.signal is not None:
            return f"killed by {signal_name(self.signal)}"
        return f"exited with code {self.code}"


class RunExit:
    """Exit codes of ``closeranks run`` (documented in docs/reference/exit-codes.md).

    A script that must be fixed by its author ends the run with the script's own code instead.
    The numbers lie in the range that neither shells (126..165) nor sysexits.h (64..78) use.
    """

    OK = 0
    INTERNAL = 1
    USAGE = 2
    BUDGET_SPENT = 91
    NO_PROGRESS = 92
    NO_NODES = 93
    DRAINED = 94
    CANNOT_START = 95
    DEPOSED = 96  # of a controller: another one may lead the job by now


class FailureKind(StrEnum):
    """What ended a generation, as far as policy must tell cases apart."""

    EXCEPTION = "exception"  # an uncaught Python exception
    EXIT_CODE = "exit_code"  # a non-zero exit without a recorded exception
    SIGNAL = "signal"  # killed by a signal from outside (SIGKILL, SIGTERM, ...)
    CRASH = "crash"  # killed by a signal of its own making (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL)
    OUT_OF_MEMORY = "out_of_memory"  # the kernel or cgroup OOM killer
    STOPPED = "stopped"  # SIGSTOP and never continued
    DESYNC = "desync"  # ranks are in different collectives
    DEADLOCK = "deadlock"  # ranks wait for each other, or one waits for ever
    HANG_TIMEOUT = "hang_timeout"  # no proof, but --hang-timeout passed without progress
    EARLY_EXIT = "early_exit"  # a rank finished while the others still wait for it
    INIT_STALL = "init_stall"  # process-group init did not come to an end
    LAUNCH = "launch"  # a worker could not be started
    NODE_LOST = "node_lost"  # a node, its agent or its store went away: nothing the script did


# --- facts ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The run directory and journal exist; nothing runs yet."""


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """Every rank of this generation has been told to go."""

    generation: int


@dataclass(frozen=True, slots=True)
class Progress:
    """All ranks have completed ``step`` steps of this generation (counted from its start)."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A generation can't go on. Evidence has been captured; its processes may still be alive.

    ``signature`` is equal for two failures when the same thing went wrong at the same place (exception
    type and innermost script frame, exit code, crash signal); ``step`` is the culprit's number of
    completed steps in this generation; ``durable_progress`` says that a checkpoint was saved after at
    least one step of this generation, or that the script's own step number passed all earlier ones.
    ``startup`` is true when the culprit had completed no step. ``collectives``: of a culprit of which no step
    was seen as such, how many collectives of the default group it had completed.
    """

    generation: int
    incident_id: str
    kind: FailureKind
    rank: int | None
    signature: str
    step: int
    startup: bool
    durable_progress: bool
    exit_code: int
    collectives: int = 0


@dataclass(frozen=True, slots=True)
class GenerationDown:
    """No process of this generation is left (or what is left is in D state and has been reported)."""

    generation: int


@dataclass(frozen=True, slots=True)
class AllRanksSucceeded:
    """Every rank of this generation exited with 0."""

    generation: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Someone asked the whole job to stop: a signal to the agent, or a planned drain."""

    reason: str
    signal: int


@dataclass(frozen=True, slots=True)
class RestartPlanned:
    """This generation is to make way for the next one, to drain a node, say. No failure: free of charge."""

    generation: int
    reason: str


Event = (
    RunStarted
    | GenerationStarted
    | Progress
    | Failure
    | GenerationDown
    | AllRanksSucceeded
    | StopRequested
    | RestartPlanned
)


# --- actions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartGeneration:
    """Start every rank under a new generation number, ``delay_s`` seconds from now (back-off)."""

    generation: int
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class KillGeneration:
    """SIGCONT + SIGKILL everything of this generation, then report GenerationDown."""

    generation: int


@dataclass(frozen=True, slots=True)
class StopGracefully:
    """Forward ``signal`` to every rank, wait the per-rank grace, then kill what is left."""

    generation: int
    signal: int


@dataclass(frozen=True, slots=True)
class Finish:
    """End the job with this exit code; ``reason`` is one sentence for people."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Show a line to the user and the journal; ``level`` is "info", "warning" or "error"."""

    level: str
    text: str


Action = StartGeneration | KillGeneration | StopGracefully | Finish | Tell
