"""Seats: node ranks stay with their nodes, and every rank is given out exactly once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.policy.cluster_state import Member, Node, World
from closeranks.policy.cluster_world import Pool, choose, seat

REPLAYABLE = settings(print_blob=True, deadline=None, max_examples=200)


def node(name: str, slots: int = 2, *, ready: bool = True, drain_due_s: float | None = None) -> Node:
    return Node(name, "s1", slots, f"{name}:1", 10.0, ready=ready, drain_due_s=drain_due_s)


def world(names: str) -> World:
    return World(0, seat([node(name) for name in names], None), names[0], "store", 0.0)


def seats(members: dict[str, Member]) -> str:
    return "".join(sorted(members, key=lambda name: members[name].node_rank))


def test_the_first_world_takes_ready_nodes_first_then_by_name():
    pool = Pool((node("c"), node("b", ready=False), node("a", ready=False)), ())
    assert [n.name for n in choose(pool, None, 2)] == ["c", "a"]


def test_a_spare_takes_the_vacant_node_rank():
    chosen = choose(Pool((node("d"), node("c"), node("a"), node("x")), ()), world("abc"), 3)
    assert seats(seat(chosen, world("abc"))) == "adc"


def test_who_sits_too_high_in_a_smaller_world_moves_down():
    chosen = choose(Pool((node("d"), node("b"), node("c")), ()), world("abcd"), 3)
    assert seats(seat(chosen, world("abcd"))) == "dbc"


def test_one_that_drains_stays_only_where_spares_are_too_few():
    pool = Pool((node("a"), node("x")), (node("b", drain_due_s=5.0), node("c", drain_due_s=9.0)))
    assert seats(seat(choose(pool, world("abc"), 3), world("abc"))) == "axc"


def test_first_ranks_follow_from_the_slots_of_lower_node_ranks():
    members = seat([node("a", 3), node("b", 1), node("c", 4)], None)
    assert [(members[n].first_rank, members[n].ranks) for n in "abc"] == [(0, 3), (3, 1), (4, 4)]


@REPLAYABLE
@given(
    st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1),
    st.lists(
        st.tuples(st.sampled_from("abcdefghij"), st.integers(1, 8)), unique_by=lambda t: t[0], min_size=1
    ),
    st.data(),
)
def test_seats_are_a_permutation_and_move_no_more_than_they_must(before, candidates, data):
    last = world("".join(before))
    pool = Pool(tuple(node(name, slots) for name, slots in candidates), ())
    chosen = choose(pool, last, data.draw(st.integers(1, len(candidates))))
    members = seat(chosen, last)
    by_rank = sorted(members.values(), key=lambda member: member.node_rank)
    assert [member.node_rank for member in by_rank] == list(range(len(chosen)))
    ranks = [
        rank for member in by_rank for rank in range(member.first_rank, member.first_rank + member.ranks)
    ]
    assert ranks == list(range(sum(member.ranks for member in by_rank)))
    for name, member in members.items():
        old = last.members.get(name)
        if old is not None and old.node_rank < len(chosen):
            assert member.node_rank == old.node_rank
    stayed = [n.name for n in pool.fit if n.name in last.members]
    assert set(stayed) <= set(members) or set(members) <= set(stayed)
