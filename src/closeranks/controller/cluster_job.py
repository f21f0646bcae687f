"""A job over many nodes: facts in, actions out, both in the journal before anyone acts on them.

A thin shell around ``policy.cluster``: it adds the clock and the journal, and finds its way back after a
crash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from closeranks.cluster_events import ClusterAction, ClusterEvent, NodeHeartbeat
from closeranks.config import BudgetConfig, ClusterConfig
from closeranks.controller.cluster_journal import STATE_KIND, StateDiary, read_parts, read_state
from closeranks.controller.journal import Journal, Record, read
from closeranks.controller.shared_state import Found, SharedState
from closeranks.events import Tell
from closeranks.linux import boot_id
from closeranks.plain import to_plain
from closeranks.policy import cluster as policy
from closeranks.policy.cluster import ClusterState

__all__ = ["ClusterJob"]

STARTED_KIND = "controller_started"


class ClusterJob:
    """One job's policy state and journal. ``resumed``: a controller before this one had begun it.

    ``shared``: where the state is kept for the next one, and without which nothing may be acted upon.
    """

    shared: SharedState | None = None

    def __init__(
        self, journal: Journal, state: ClusterState, *, resumed: bool, clock: Callable[[], float]
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._diary = StateDiary()
        self.state = state
        self.resumed = resumed
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
        records = [record for record in read(path) if record.kind in (STATE_KIND, STARTED_KIND)]
        found = read_state(records, fresh)
        if found is None:
            return cls(journal, fresh, resumed=False, clock=clock)
        return cls(journal, policy.restore(found, clock(), _shift_s(records)), resumed=True, clock=clock)

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
        job = cls(journal, state, resumed=found is not None, clock=clock)
        job.shared = shared
        if found is not None:
            if is_new:
                job.note("run_started", found.began)
            job._diary.go_on(found.parts)
            job._keep(())
        return job

    def note(self, kind: str, data: Mapping[str, Any], *, generation: int | None = None) -> None:
        """Put a fact into the journal that needs no decision."""
        self._journal.append(
            kind, data, generation=generation, wall_ns=time.time_ns(), mono_ns=time.monotonic_ns()
        )

    def handle(self, event: ClusterEvent) -> tuple[ClusterAction, ...]:
        """Decide what follows from ``event``; decision and state are in the journal when this returns."""
        before = self.state
        self.state, actions = policy.decide(before, event, self._clock())
        if actions:
            decided = [{"action": type(action).__name__, **to_plain(action)} for action in actions]
            because = {"event": type(event).__name__, **to_plain(event)}
            job = self.state.job
            data = {"because": because, "actions": decided, "reason": _told(actions)}
            self.note("decided", data, generation=job.generation if job.generation >= 0 else None)
        # A heartbeat renews a lease, which begins anew after a crash; there are thousands of them a second.
        if self.state is not before and not isinstance(event, NodeHeartbeat):
            self._keep(actions)
        return actions

    def _keep(self, actions: tuple[ClusterAction, ...]) -> None:
        changes = list(self._diary.changes(self.state))
        for data in changes:
            self.note(STATE_KIND, data)
        if self.shared is not None:
            self.shared.decided(changes, actions)

    def holds_lease(self, node: str, session: str) -> bool:
        """Whether this agent's heartbeats count, and are to be answered."""
        return policy.holds_lease(self.state, node, session)

    @property
    def journal_problem(self) -> str | None:
        """Why the journal can't be written at present, or None."""
        return self._journal.problem

    def close(self) -> None:
        self._journal.close()


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
