"""Any order of events, and thousands of seconds of a cluster in which everything goes wrong."""

from __future__ import annotations

from random import Random

from cluster_world_model import Model
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.config import ClusterConfig

REPLAYABLE = settings(print_blob=True, deadline=None, max_examples=60)
CONFIGS = st.builds(
    ClusterConfig,
    min_nodes=st.integers(1, 3),
    max_nodes=st.integers(3, 4),
    spares=st.integers(0, 2),
    lease_s=st.sampled_from([0.5, 1.0]),
    fence_margin_s=st.sampled_from([0.5, 1.0, 2.0]),
    join_timeout_s=st.sampled_from([20.0, 60.0]),
    last_call_s=st.just(3.0),
    reattach_grace_s=st.sampled_from([0.0, 5.0, 10.0]),
    order_timeout_s=st.sampled_from([5.0, 20.0]),
    exclusion_s=st.sampled_from([1.0, 5.0]),
    exclusion_max_s=st.just(20.0),
    max_exclusions=st.sampled_from([3, 100]),
    blame_window_s=st.just(30.0),
    forgive_s=st.just(60.0),
    grow_back=st.booleans(),
    grow_cooldown_s=st.just(20.0),
    drain_deadline_s=st.just(20.0),
    drain_prepare_s=st.sampled_from([0.0, 5.0]),
)


@REPLAYABLE
@given(CONFIGS, st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_never_two_worlds_and_every_run_ends_finished_or_running(config, seed, spare_nodes):
    model = Model(Random(seed), config, [f"n{i}" for i in range(config.max_nodes + spare_nodes)])
    for _ in range(600):
        model.go_wrong()
        model.step()
    runs = False
    for step in range(800):
        model.recover()
        model.step()
        runs = (runs and step > 600) or model.is_running()
    assert model.end is not None or runs, "neither finished nor running, without a reason"
    if model.end is not None:
        assert model.end.reason.isprintable() and model.end.reason
