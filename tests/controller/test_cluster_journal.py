"""The policy's state in the journal: what the records say, read again, is what the policy remembers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.cluster_events import NodeAttached, NodeHeartbeat, NodeStarted
from closeranks.config import BudgetConfig, ClusterConfig
from closeranks.controller.cluster_journal import STATE_KIND, StateDiary, read_state
from closeranks.controller.journal import MAX_DATA_BYTES, Record
from closeranks.errors import JournalError
from closeranks.events import RunStarted
from closeranks.policy.cluster import ClusterState, decide, durable, initial

from .cluster_walks import CONFIG, big_cluster, walk

FRESH = initial(CONFIG, BudgetConfig(default_max_restarts=10_000))


def record(data: object, kind: str = STATE_KIND) -> Record:
    """As it comes back from the file."""
    return Record(0, kind, json.loads(json.dumps(data)), None, 0, 0)


def written(diary: StateDiary, state: ClusterState) -> list[Record]:
    return [record(data) for data in diary.changes(state)]


def after(state: ClusterState, *facts: Any, now_s: float = 0.0) -> ClusterState:
    for fact in facts:
        state, _ = decide(state, fact, now_s)
    return state


def attached(*names: str) -> ClusterState:
    return after(FRESH, RunStarted(), *(NodeAttached(name, "s", 2, name) for name in names))


def cut(records: Iterable[Record]) -> list[Record]:
    """Without the word that the batch is whole."""
    return [record({**item.data, "last": False}) for item in records]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_records_in_order_give_back_the_state_after_every_fact(seed: int) -> None:
    diary, records = StateDiary(), []

    def saw(fact: object, state: ClusterState, now_s: float) -> None:
        records.extend(written(diary, state))
        assert read_state(records, FRESH) == durable(state), fact

    walk(seed, 100, saw)
    assert len(records) > 10


def test_an_empty_journal_holds_no_state() -> None:
    assert read_state([], FRESH) is None
    assert read_state([record({"set": {"job": 7}, "last": True}, "decided")], FRESH) is None


def test_the_settings_are_those_of_today() -> None:
    records = written(StateDiary(), attached("a"))
    today = initial(ClusterConfig(max_nodes=9), BudgetConfig(max_restarts=1))
    found = read_state(records, today)
    assert found is not None and (found.config, found.job.config) == (today.config, today.job.config)


def test_what_stays_is_not_written_again() -> None:
    diary = StateDiary()
    state = attached("a", "b")
    assert len(written(diary, state)) == 1
    assert written(diary, state) == []
    beaten = after(state, NodeHeartbeat("a", "s"), now_s=0.5)
    assert beaten is not state and written(diary, beaten) == [], "a lease begins anew after a crash"
    (change,) = written(diary, after(beaten, NodeAttached("c", "s", 2, "c")))
    assert "node/c" in change.data["set"] and "node/a" not in change.data["set"]


def test_a_part_that_goes_is_said_to_be_gone() -> None:
    diary = StateDiary()
    records = written(diary, attached("a", "b"))
    less = replace(attached("a", "b"), nodes=attached("a").nodes)
    (change,) = written(diary, less)
    assert change.data["gone"] == ["node/b"]
    assert read_state([*records, change], FRESH) == durable(less)


def test_a_batch_that_is_cut_never_happened() -> None:
    diary = StateDiary()
    before = attached("a")
    records = written(diary, before)
    lost = cut(written(diary, attached("a", "b")))
    assert read_state([*records, *lost], FRESH) == durable(before)
    assert read_state(lost, FRESH) is None


def test_a_batch_that_is_cut_has_not_happened_for_the_next_controller_either() -> None:
    """The next one goes on without node b, and must never hear of it again."""
    diary = StateDiary()
    before = attached("a")
    records = written(diary, before)
    lost = cut(written(diary, attached("a", "b")))
    goes_on = after(before, NodeAttached("c", "s", 2, "c"))
    records += [*lost, *written(StateDiary(), goes_on)]
    assert read_state(records, FRESH) == durable(goes_on)


def test_a_big_state_is_split_and_each_record_fits() -> None:
    state = big_cluster(2048)
    batches = list(StateDiary().changes(state))
    sizes_bytes = [len(json.dumps(batch)) for batch in batches]
    assert max(sizes_bytes) < MAX_DATA_BYTES
    assert 2 < len(batches) < 2 * sum(sizes_bytes) / (MAX_DATA_BYTES / 2) + 2, "no more than are needed"
    assert [batch["last"] for batch in batches] == [*[False] * (len(batches) - 1), True]
    fresh = initial(state.config, state.job.config)
    assert read_state(map(record, batches), fresh) == durable(state)


def test_one_node_of_thousands_costs_one_small_record() -> None:
    state = big_cluster(2048)
    diary = StateDiary()
    list(diary.changes(state))
    assert state.world is not None
    name = next(iter(state.world.members))
    member = replace(state.world.members[name], down=True)
    state = replace(state, world=replace(state.world, members={**state.world.members, name: member}))
    (batch,) = diary.changes(state)
    assert list(batch["set"]) == [f"member/{name}"] and len(json.dumps(batch)) < 1000


def test_a_start_of_thousands_costs_a_record_for_each_that_says_so_and_no_more() -> None:
    state = big_cluster(256)
    diary = StateDiary()
    list(diary.changes(state))
    assert state.world is not None
    members = {name: replace(member, started=False) for name, member in state.world.members.items()}
    state = replace(state, world=replace(state.world, members=members))
    list(diary.changes(state))
    count = 0
    for name in members:
        state = after(state, NodeStarted(name, 0))
        count += len(list(diary.changes(state)))
    assert count == 256


GARBAGE = {
    "nothing of a job": {"world": None},
    "a job that is text": {"job": "x"},
    "a node without a link that exists": {"node/a": {"name": "a", "link": "sideways"}},
    "a node that is a list": {"node/a": []},
    "a rest of two": {"rest": [True, 1]},
    "a member with words for a rank": {"world": {"generation": 0}, "member/a": {"node_rank": "one"}},
    "a stage that there isn't": {"world": {"generation": 0, "stage": "asleep"}},
}


@pytest.mark.parametrize("parts", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_told_apart_from_a_state(parts: dict[str, Any]) -> None:
    (whole,) = StateDiary().changes(attached())
    known = {} if "world" in parts and len(parts) == 1 else whole["set"]
    bad = record({"set": {**known, **parts}, "gone": [], "last": True})
    with pytest.raises(JournalError, match="makes no sense"):
        read_state([bad], FRESH)


def test_garbage_about_what_is_gone_is_told_too() -> None:
    with pytest.raises(JournalError):
        read_state([record({"set": {}, "last": True, "gone": 7})], FRESH)


@given(
    st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3))
)
def test_no_part_raises_anything_else(value: object) -> None:
    (whole,) = StateDiary().changes(attached("a"))
    for key in whole["set"]:
        try:
            read_state([record({"set": {**whole["set"], key: value}, "gone": [], "last": True})], FRESH)
        except JournalError as error:
            assert "makes no sense" in str(error)
