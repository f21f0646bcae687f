"""A job over many nodes: facts in, actions out, both in the journal before anyone acts on them.

A thin shell around ``policy.cluster``: it adds the clock and the journal, and finds its way back after a
crash.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from closeranks.cluster_events import ClusterAction, ClusterEvent, Tick
from closeranks.config import BudgetConfig, ClusterConfig
from closeranks.controller.cluster_journal import STATE_KIND, StateDiary, read_parts, read_state
from closeranks.controller.journal import Journal, Record, read
from closeranks.controller.shared_state import Found, SharedState
from closeranks.events import Finish, RunExit, Tell
from closeranks.linux import boot_id
from closeranks.plain import to_plain
from closeranks.policy import cluster as policy
from closeranks.policy.cluster import ClusterState

__all__ = ["ClusterJob"]

STARTED_KIND = "controller_started"
_KINDS = frozenset({STATE_KIND, STARTED_KIND, "finished", "detected", "decided"})


class ClusterJob:
    """One job's policy state and journal. ``resumed``: a controller before this one had begun it.

    ``shared``: where the state is kept for the next one, and without which nothing may be acted upon.
    """

    shared: SharedState | None = None

    def __init__(
        self,
        journal: Journal,
        state: ClusterState,
        *,
        resumed: bool,
        clock: Callable[[], float],
        followed: bool = False,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._diary = StateDiary()
        self.state = state
        self.resumed = resumed
        self.incidents_before = 0
        self.decided_end: Finish | None = None  # by a controller before this one, which may have told nobody
        self._ended: Finish | None = None
        # In this order: whoever comes next must not take times of another boot for times of this one.
        if resumed and not followed:
            self._keep(self._changes(), ())
        self.note(STARTED_KIND, {"boot_id": boot_id(), "resumed": resumed})

    @classmethod
    def open(
        cls,
        path: Path,
        config: ClusterConfig,
        budget: BudgetConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> ClusterJob:
        """Begin with a new journal, or go on with the one that is there. Raises JournalError, ConfigError."""
        fresh = policy.initial(config, budget)
        if not path.exists():
            return cls(Journal.create(path), fresh, resumed=False, clock=clock)
        journal = Journal.open_for_append(path)  # nobody else writes from here on
        records = [record for record in read(path) if record.kind in _KINDS]
        found = read_state(records, fresh)
        if found is None:
            return cls(journal, fresh, resumed=False, clock=clock)
        job = cls(journal, policy.restore(found, clock(), _shift_s(records)), resumed=True, clock=clock)
        job.incidents_before = sum(record.kind == "detected" for record in records)
        job._ended = next((_end_of(record.data) for record in records if record.kind == "finished"), None)
        ends = (end for record in records if (end := _decided_end(record)) is not None)
        job.decided_end = (
            next(ends, Finish(RunExit.INTERNAL, "the job had ended")) if found.finished else None
        )
        return job

    @classmethod
    def lead(
        cls,
        path: Path,
        config: ClusterConfig,
        budget: BudgetConfig,
        shared: SharedState,
        found: Found | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> ClusterJob:
        """Go on from what another controller has left in etcd; None: begin. Raises as ``open`` does."""
        state = policy.initial(config, budget)
        is_new = not path.exists()
        journal = Journal.create(path) if is_new else Journal.open_for_append(path)
        if found is not None:
            state = policy.restore(read_parts(found.parts, state), clock(), found.shift_s)
        job = cls(journal, state, resumed=found is not None, clock=clock, followed=True)
        job.shared = shared
        if found is not None:
            if is_new:
                job.note("run_started", found.began)
            job._diary.go_on(found.parts)
            job._keep(job._changes(), ())
        return job

    def note(self, kind: str, data: Mapping[str, Any], *, generation: int | None = None) -> None:
        """Put a fact into the journal that needs no decision."""
        self._journal.append(
            kind, data, generation=generation, wall_ns=time.time_ns(), mono_ns=time.monotonic_ns()
        )

    def handle(self, event: ClusterEvent) -> tuple[ClusterAction, ...]:
        """Decide what follows from ``event``; decision and state are in the journal when this returns.

        A fact from which nothing follows yet waits for the next decision, at most until the next Tick: a
        thousand nodes say the same within milliseconds, nobody acts on it before, and after a crash each of
        them says it again.
        """
        self.state, actions = policy.decide(self.state, event, self._clock())
        if not actions and not isinstance(event, Tick):
            return actions
        records = self._changes()
        if actions:
            because = {"event": type(event).__name__, **to_plain(event)}
            decided = {"because": because, "actions": _plain_runs(actions), "reason": _told(actions)}
            records.insert(0, ("decided", decided))
        self._keep(records, actions)
        return actions

    def _changes(self) -> list[tuple[str, dict[str, Any]]]:
        return [(STATE_KIND, data) for data in self._diary.changes(self.state)]

    def _keep(self, records: list[tuple[str, dict[str, Any]]], actions: tuple[ClusterAction, ...]) -> None:
        generation = self.state.job.generation
        if records:
            self._journal.append_all(
                records,
                generation=generation if actions and generation >= 0 else None,
                wall_ns=time.time_ns(),
                mono_ns=time.monotonic_ns(),
            )
        if self.shared is not None:
            self.shared.decided([data for kind, data in records if kind == STATE_KIND], actions)

    @property
    def ended(self) -> Finish | None:
        """How the job ended, if it has: then there is nothing to go on with."""
        return self._ended

    def holds_lease(self, node: str, session: str) -> bool:
        """Whether this agent's heartbeats count, and are to be answered."""
        return policy.holds_lease(self.state, node, session)

    @property
    def journal_problem(self) -> str | None:
        """Why the journal can't be written at present, or None."""
        return self._journal.problem

    def close(self) -> None:
        self._journal.close()


def _plain_runs(actions: tuple[ClusterAction, ...]) -> list[dict[str, Any]]:
    """Actions for the journal. The same one for many nodes in a row is one entry, in which a field that isn't
    the same for all of them is a list."""
    entries: list[dict[str, Any]] = []
    for kind, group in itertools.groupby(actions, type):
        run = [to_plain(action) for action in group]
        columns = {name: [row[name] for row in run] for name in run[0]}
        fields = {name: column[0] if _is_one(column) else column for name, column in columns.items()}
        entries.append({"action": kind.__name__, **fields})
    return entries


def _is_one(column: list[Any]) -> bool:
    return column.count(column[0]) == len(column)


def _told(actions: tuple[ClusterAction, ...]) -> str:
    return next((action.text for action in actions if isinstance(action, Tell)), "")


def _shift_s(records: list[Record]) -> float:
    """What to add to the journal's monotonic times: nothing on the same boot of the same host."""
    boots = [record for record in records if record.kind == STARTED_KIND]
    if boots and boots[-1].data.get("boot_id") == boot_id():
        return 0.0
    last = records[-1]
    now_ns = time.monotonic_ns() - max(0, time.time_ns() - last.wall_ns)
    return (now_ns - last.mono_ns) / 1e9


def _end_of(data: Mapping[str, Any]) -> Finish:
    code = data.get("exit_code")
    return Finish(code if isinstance(code, int) else RunExit.INTERNAL, str(data.get("reason", "")))


def _decided_end(record: Record) -> Finish | None:
    actions = record.data.get("actions") if record.kind == "decided" else None
    for action in actions if isinstance(actions, list) else ():
        if isinstance(action, Mapping) and action.get("action") == "Finish":
            return _end_of(action)
    return None
