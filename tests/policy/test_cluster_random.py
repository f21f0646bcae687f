"""Any order of facts at all, and hours of a cluster in which everything goes wrong: never two worlds."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random

import pytest
from cluster_lab import failure
from cluster_world_model import Chaos, Model
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.cluster_events import (
    ClusterAction,
    ClusterEvent,
    DrainReady,
    DrainRequested,
    EngineDrains,
    NodeAttached,
    NodeDown,
    NodeFailed,
    NodeGone,
    NodeHealth,
    NodeHeartbeat,
    NodeLeft,
    NodeReady,
    NodeStarted,
    NodeSucceeded,
    StartNode,
    StoreLost,
    StoreOpened,
    Tick,
)
from closeranks.config import BudgetConfig, ClusterConfig
from closeranks.events import FailureKind, Finish, Progress, RunStarted, StopRequested
from closeranks.policy.cluster import ClusterState, decide, durable, holds_lease, initial, restore
from closeranks.policy.cluster_state import Link

REPLAYABLE = settings(print_blob=True, deadline=None)
CONFIGS = st.builds(
    ClusterConfig,
    min_nodes=st.integers(1, 3),
    max_nodes=st.integers(3, 4),
    spares=st.integers(0, 2),
    lease_s=st.sampled_from([1.0, 2.0]),
    lease_misses=st.integers(3, 4),
    fence_margin_s=st.sampled_from([0.5, 1.0, 2.0]),
    join_timeout_s=st.sampled_from([20.0, 60.0]),
    last_call_s=st.just(3.0),
    reattach_wait_s=st.sampled_from([1.0, 5.0, 10.0]),
    order_timeout_s=st.sampled_from([5.0, 20.0]),
    stop_timeout_s=st.just(30.0),
    exclusion_s=st.sampled_from([1.0, 5.0]),
    exclusion_max_s=st.just(20.0),
    max_exclusions=st.sampled_from([5, 100]),
    blame_window_s=st.just(30.0),
    forgive_s=st.just(60.0),
    grow_back=st.booleans(),
    grow_cooldown_s=st.just(20.0),
    drain_deadline_s=st.just(20.0),
    drain_prepare_s=st.sampled_from([0.0, 5.0]),
)
SEEDS = st.integers(0, 2**32 - 1)


# --- a cluster in which everything goes wrong -------------------------------------------------------


def walk(config: ClusterConfig, seed: int, others: int, share: float) -> None:
    """Chaos, then quiet: the model objects to whatever must never happen, and in the end the job runs or has
    ended. ``share``: of the usual odds."""
    odds = {odd.name: getattr(Chaos(), odd.name) * share for odd in fields(Chaos)}
    chaos = Chaos(**{**odds, "restart": Chaos().restart})
    model = Model(Random(seed), config, [f"n{i}" for i in range(config.max_nodes + others)], chaos=chaos)
    for _ in range(500):
        model.go_wrong()
        model.step()
    runs_at_s = -1.0
    for _ in range(500):
        if model.end is not None:
            break
        model.recover()
        model.step()
        runs_at_s = model.now_s if model.is_running() else runs_at_s
    if model.end is not None:
        assert model.end.reason and model.end.reason.isprintable()
    else:
        assert runs_at_s > model.now_s - 50.0, "neither finished nor running"


@settings(REPLAYABLE, max_examples=30)
@given(CONFIGS, SEEDS, st.integers(0, 3), st.sampled_from([0.1, 0.3, 1.0]))
def test_never_two_worlds_and_every_run_ends_finished_or_running(config, seed, others, share):
    walk(config, seed, others, share)


@pytest.mark.slow
@settings(REPLAYABLE, max_examples=1500)
@given(CONFIGS, SEEDS, st.integers(0, 3), st.sampled_from([0.1, 0.3, 1.0]))
def test_never_two_worlds_in_many_walks(config, seed, others, share):
    walk(config, seed, others, share)


# --- any order of facts -----------------------------------------------------------------------------

NAMES = ("a", "b", "c")
SESSIONS = ("s1", "s1", "s1", "s2", "s3")
# Mostly of the current generation, so that histories get somewhere.
OFFSETS = (0, 0, 0, 0, 0, -1, 1)
KINDS = tuple(kind for kind in FailureKind if kind is not FailureKind.EXCEPTION)
KNOWN = ("beat", "beat", "beat", "store", "store", "down", "down", "down", "down", "tick", "tick", "failed")
RARE = (
    "attach", "attach", "attach", "attach", "attach", "attach", "ready", "health", "health", "health", "left",
    "gone", "started", "succeeded", "store lost", "drain", "saved", "saved", "progress", "stop", "restore",
)  # fmt: skip
TEMPLATES = st.tuples(
    st.sampled_from(KNOWN * 3 + RARE),
    st.sampled_from(NAMES),
    st.sampled_from(SESSIONS),
    st.sampled_from(OFFSETS),
    st.integers(0, 11),
    st.sampled_from([0.0, 0.0, 0.0, 0.0, 0.0, 0.25, 0.25, 0.5, 3.0]),
)
HISTORIES = st.lists(TEMPLATES, min_size=60, max_size=150)


def likely(state: ClusterState, what: str, node: str, salt: int) -> str:
    """Mostly the node from which such a fact is to come now, if there is one."""
    if what == "store" and salt > 1 and state.forming is not None and state.forming.store is not None:
        return state.forming.store.node
    if what == "down" and salt > 1 and state.world is not None:
        return next((m.node for m in state.world.members.values() if not m.down), node)
    return node


def event_of(state: ClusterState, what: str, node: str, session: str, offset: int, salt: int) -> ClusterEvent:
    """A fact about the state as it is, more or less: late, doubled, of a wrong session, or just made up."""
    generation = state.job.generation + offset
    node = likely(state, what, node, salt)
    check = state.nodes[node].checks if node in state.nodes else 0
    known = state.nodes.get(node)
    if known is not None and salt > 2:
        session = known.session if known.link is not Link.LEFT else f"{known.session}+"
    kind = KINDS[salt % len(KINDS)]
    facts: dict[str, ClusterEvent] = {
        "attach": NodeAttached(node, session, 1 + salt % 3, node, generation if salt > 8 else None),
        "beat": NodeHeartbeat(node, session),
        "ready": NodeReady(node, session),
        "health": NodeHealth(node, salt % 4 != 0, "test", check if salt % 3 else salt % 2),
        "left": NodeLeft(node, session, "test"),
        "started": NodeStarted(node, generation),
        "down": NodeDown(node, generation),
        "succeeded": NodeSucceeded(node, generation),
        "failed": NodeFailed(node, failure(generation, kind, durable_progress=True), NAMES[: salt % 3]),
        "store": StoreOpened(node, generation, f"{node}:{generation}"),
        "store lost": StoreLost(node, generation),
        "drain": DrainRequested(node, 5.0 * salt, "test") if salt % 2 else EngineDrains(node, "test"),
        "saved": DrainReady(node, generation),
        "gone": NodeGone(node, "test", session if salt % 2 else ""),
        "progress": Progress(generation, salt),
        "stop": StopRequested("test", 15) if salt == 0 else Tick(),
    }
    return facts.get(what, Tick())


class Referee:
    """Knows from facts alone which ranks may be alive, and objects to a start while older ones may be."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.ranks: dict[str, tuple[str, int]] = {}  # node -> session and generation that was started there
        self.heard_s: dict[tuple[str, str], float] = {}
        self.generation = -1
        self.ended = False

    def see(self, state: ClusterState, event: ClusterEvent, now_s: float) -> None:
        """A fact, and the state after it: a heartbeat keeps ranks alive if it is answered, and in time."""
        session, generation = self.ranks.get(getattr(event, "node", ""), ("", -2))
        if isinstance(event, NodeAttached | NodeHeartbeat) and holds_lease(state, event.node, event.session):
            if event.session == session and self.are_dead(event.node, session, now_s):
                del self.ranks[event.node]
            self.heard_s[event.node, event.session] = now_s
        is_down = isinstance(event, NodeDown) and event.generation == generation
        if is_down or (isinstance(event, NodeLeft | NodeGone) and event.session == session):
            self.ranks.pop(event.node, None)

    def are_dead(self, node: str, session: str, now_s: float) -> bool:
        length_s = self.config.lease_length_s + self.config.fence_margin_s
        return now_s - self.heard_s[node, session] >= length_s

    def see_restart(self, now_s: float) -> None:
        """Agents that saw the controller gone while they held a lease may go on for the grace."""
        for node, (session, _) in tuple(self.ranks.items()):
            if self.are_dead(node, session, now_s):
                del self.ranks[node]
            more_s = max(0.0, self.config.reattach_wait_s - self.config.lease_length_s)
            self.heard_s[node, session] = now_s + more_s

    def check(self, state: ClusterState, actions: tuple[ClusterAction, ...], now_s: float) -> None:
        assert not (self.ended and actions), "decided after the end"
        self.ended |= any(isinstance(action, Finish) for action in actions)
        starts = [action for action in actions if isinstance(action, StartNode)]
        if not starts:
            return
        (generation,) = {start.generation for start in starts}
        assert generation == self.generation + 1
        self.generation = generation
        for node, (session, older) in self.ranks.items():
            assert self.are_dead(node, session, now_s), f"generation {older} may be alive on {node}"
        ranks = sorted(rank for s in starts for rank in range(s.first_rank, s.first_rank + s.ranks))
        assert ranks == list(range(starts[0].world_size))
        self.ranks = {start.node: (state.nodes[start.node].session, generation) for start in starts}


@settings(REPLAYABLE, max_examples=300)
@given(CONFIGS, HISTORIES)
def test_no_order_of_facts_starts_a_world_beside_another(config, history):
    """Also proves decide total and pure: no fact in any state raises, and asking again changes nothing."""
    config = replace(config, min_nodes=1, max_nodes=2, lease_s=1.0)
    state, referee, now_s = initial(config, BudgetConfig()), Referee(config), 0.0
    questions = []
    for event in (RunStarted(), *(NodeAttached(name, "s1", 2, name) for name in NAMES)):
        state, _ = decide(state, event, now_s)
        referee.see(state, event, now_s)
    for what, name, session, offset, salt, for_s in history:
        now_s += for_s
        if what == "restore":
            state = restore(durable(state), now_s)
            referee.see_restart(now_s)
        events = [event_of(state, what, name, session, offset, salt)]
        if what in ("beat", "restore"):  # of all but one
            held = {node.name: node.session for node in state.nodes.values() if salt > 2 or node.name != name}
            running = state.job.generation if what == "restore" else None
            events = [NodeHeartbeat(*node) for node in held.items()]
            events += [NodeAttached(*node, 2, "x", running) for node in held.items() if what == "restore"]
        for event in events:
            answer = decide(state, event, now_s)
            questions.append((state, event, now_s, answer))
            referee.see(answer[0], event, now_s)
            referee.check(*answer, now_s)
            state = answer[0]
    for asked, event, at_s, answer in reversed(questions):
        assert decide(asked, event, at_s) == answer
