"""What follows from what Kubernetes says, and what doesn't."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.cluster_events import EngineDrains, NodeGone
from closeranks.engines.kubernetes_api import Change
from closeranks.engines.kubernetes_facts import Facts, node_of, pod_of

from .kubernetes_rig import node, pod


def listed(*objects: dict[str, Any]) -> Change:
    return Change("LISTED", objects)


def now(each: dict[str, Any]) -> Change:
    return Change("MODIFIED", (each,))


def gone(each: dict[str, Any]) -> Change:
    return Change("DELETED", (each,))


# --- the end of an agent ----------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "code"), [("Failed", 137), ("Succeeded", 0), ("Running", 1)])
def test_a_container_that_ended_is_proof_of_that_session(phase: str, code: int) -> None:
    """Running: a container that somebody put beside the agent is still there."""
    facts = Facts()
    assert facts.of_pods(listed(pod("p", "n1"))) == []
    (fact,) = facts.of_pods(now(pod("p", "n1", phase=phase, exit_code=code)))
    assert fact == NodeGone("n1", f"its agent's container ended with {code} (Error)", "uid-p")
    assert facts.of_pods(now(pod("p", "n1", phase=phase, exit_code=code))) == []
    assert facts.of_pods(gone(pod("p", "n1", phase=phase, exit_code=code))) == []


def test_a_graceful_deletion_ends_with_proof() -> None:
    facts = Facts()
    facts.of_pods(listed(pod("p", "n1")))
    assert facts.of_pods(now(pod("p", "n1", deleting=True))) == [
        EngineDrains("n1", "its pod is being deleted")
    ]
    (fact,) = facts.of_pods(gone(pod("p", "n1", phase="Succeeded", exit_code=0, deleting=True)))
    assert isinstance(fact, NodeGone) and fact.session == "uid-p"


def no_proofs() -> dict[str, dict[str, Any]]:
    restarts = pod("p", "n1", exit_code=1)
    restarts["spec"]["restartPolicy"] = "Always"
    other = pod("p", "n1", phase="Failed", exit_code=1)
    other["status"]["containerStatuses"][0]["name"] = "sidecar"
    never_started = pod("p", "n1", phase="Failed")
    del never_started["status"]["containerStatuses"]
    return {
        "it was set to Failed while its kubelet was silent": pod("p", "n1", phase="Failed"),
        "kubelet made the end up": pod(
            "p", "n1", phase="Failed", exit_code=137, reason="ContainerStatusUnknown"
        ),
        "the container will be restarted under the same uid": restarts,
        "it is another container's end": other,
        "no container ever ran": never_started,
        "it has no node": pod("p", phase="Failed", exit_code=1),
        "it is the controller": pod("p", "n1", phase="Failed", exit_code=1, role="controller"),
    }


@pytest.mark.parametrize("why", no_proofs())
def test_what_is_no_proof(why: str) -> None:
    facts = Facts()
    assert facts.of_pods(now(no_proofs()[why])) == []


def test_a_pod_that_vanishes_proves_nothing() -> None:
    """Deleted by force, or while nobody watched: it may still run on a host that is cut off."""
    facts = Facts()
    facts.of_pods(listed(pod("p", "n1"), pod("q", "n2")))
    assert facts.of_pods(gone(pod("p", "n1"))) == []
    assert facts.of_pods(listed()) == []


def test_a_list_tells_the_same_as_a_watch_would_have() -> None:
    facts = Facts()
    found = facts.of_pods(listed(pod("p", "n1", phase="Failed", exit_code=1), pod("q", "n2", deleting=True)))
    assert found == [
        NodeGone("n1", "its agent's container ended with 1 (Error)", "uid-p"),
        EngineDrains("n2", "its pod is being deleted"),
    ]
    assert (
        facts.of_pods(listed(pod("p", "n1", phase="Failed", exit_code=1), pod("q", "n2", deleting=True)))
        == []
    )


# --- drains -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["EvictionByEvictionAPI", "PreemptionByScheduler", "TerminationByKubelet"])
def test_a_disruption_is_a_drain_told_once(reason: str) -> None:
    facts = Facts()
    facts.of_pods(listed(pod("p", "n1")))
    assert facts.of_pods(now(pod("p", "n1", condition=reason))) == [
        EngineDrains("n1", f"its pod is to go: {reason}")
    ]
    assert facts.of_pods(now(pod("p", "n1", condition=reason, deleting=True))) == []


def test_a_pod_that_was_given_back_is_no_news() -> None:
    facts = Facts(released={"uid-p"})
    assert facts.of_pods(now(pod("p", "n1", deleting=True))) == []
    (fact,) = facts.of_pods(now(pod("p", "n1", phase="Failed", exit_code=143, deleting=True)))
    assert isinstance(fact, NodeGone), "that it is gone is"
    facts.of_pods(gone(pod("p", "n1", phase="Failed", exit_code=143)))
    assert not facts.released


CORDONS = {
    "cordoned": node("n1", cordoned=True),
    "the cluster autoscaler": node("n1", taints=("ToBeDeletedByClusterAutoscaler",)),
    "Karpenter": node("n1", taints=("karpenter.sh/disrupted",)),
    "kubelet is silent": node("n1", ready="Unknown"),
}


@pytest.mark.parametrize("why", CORDONS)
def test_a_node_that_is_to_go_is_a_drain_told_once_a_change(why: str) -> None:
    facts = Facts()
    facts.of_nodes(listed(node("n1"), node("n2")))
    facts.of_pods(listed(pod("p", "n1")))
    (fact,) = facts.of_nodes(now(CORDONS[why]))
    assert isinstance(fact, EngineDrains) and fact.node == "n1" and why in fact.reason
    assert facts.of_nodes(now(CORDONS[why])) == []
    assert facts.of_nodes(listed(CORDONS[why], node("n2"))) == []
    assert facts.of_nodes(now(node("n1"))) == []
    assert facts.of_nodes(now(CORDONS[why])) == [fact], "again, after it had been taken back"


def test_kubelets_own_complaint_is_no_fact() -> None:
    facts = Facts()
    facts.of_pods(listed(pod("p", "n1")))
    assert facts.of_nodes(now(node("n1", ready="False"))) == []


def test_nodes_without_an_agent_dont_matter_until_there_is_one() -> None:
    facts = Facts()
    assert facts.of_nodes(listed(node("n1", cordoned=True))) == []
    assert facts.of_pods(listed(pod("p"))) == []
    assert facts.of_pods(now(pod("p", "n1"))) == [EngineDrains("n1", "cordoned")]


def test_a_cordon_of_our_own_is_no_news() -> None:
    facts = Facts(cordoned={"n1"})
    facts.of_pods(listed(pod("p", "n1")))
    assert facts.of_nodes(now(node("n1", cordoned=True))) == []


@pytest.mark.parametrize("where", ["labels", "annotations", "taints"])
@pytest.mark.parametrize(
    ("wanted", "value", "drains"), [("", "soon", True), ("soon", "soon", True), ("soon", "no", False)]
)
def test_marks_of_ones_own(where: str, wanted: str, value: str, drains: bool) -> None:
    marked = node("n1")
    if where == "taints":
        marked["spec"]["taints"] = [{"key": "example.com/maintenance", "value": value}]
    else:
        marked["metadata"][where] = {"example.com/maintenance": value}
    view = node_of(marked, {"example.com/maintenance": wanted})
    assert view is not None and bool(view.drains) is drains


# --- hosts that are off -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "taint", ["node.kubernetes.io/out-of-service", "node.cloudprovider.kubernetes.io/shutdown"]
)
def test_a_host_that_is_off_is_gone_without_a_session(taint: str) -> None:
    facts = Facts()
    facts.of_pods(listed(pod("p", "n1")))
    (fact,) = facts.of_nodes(now(node("n1", taints=(taint,), cordoned=True)))
    assert isinstance(fact, NodeGone) and fact.node == "n1" and fact.session == ""


@pytest.mark.parametrize("how", ["watch", "list"])
def test_a_node_object_that_is_deleted(how: str) -> None:
    facts = Facts()
    facts.of_nodes(listed(node("n1"), node("n2")))
    facts.of_pods(listed(pod("p", "n1")))
    change = gone(node("n1")) if how == "watch" else listed(node("n2"))
    assert facts.of_nodes(change) == [NodeGone("n1", "its node object was deleted")]
    assert facts.of_nodes(listed(node("n2"))) == []
    assert facts.of_nodes(now(node("n1"))) == []
    assert facts.of_nodes(gone(node("n1"))) == [NodeGone("n1", "its node object was deleted")]


def test_nothing_is_kept_of_what_is_no_more() -> None:
    facts = Facts()
    for index in range(100):
        facts.of_nodes(now(node(f"n{index}", cordoned=True)))
        facts.of_pods(now(pod(f"p{index}", f"n{index}", deleting=True)))
        facts.of_pods(gone(pod(f"p{index}", f"n{index}", phase="Failed", exit_code=1)))
        facts.of_nodes(gone(node(f"n{index}")))
    assert not (facts._pods or facts._nodes or facts._on)
    assert len(facts._told) == 0


# --- whatever is sent -------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
PLACES = [
    ("metadata",), ("metadata", "labels"), ("metadata", "uid"), ("metadata", "name"), ("spec",),
    ("spec", "nodeName"), ("spec", "taints"), ("spec", "unschedulable"), ("status",), ("status", "phase"),
    ("status", "containerStatuses"), ("status", "conditions"), ("metadata", "annotations"),
]  # fmt: skip


@given(st.sampled_from(PLACES), ANYTHING, st.booleans())
def test_objects_of_any_shape_raise_nothing(place: tuple[str, ...], value: Any, in_list: bool) -> None:
    for each in (pod("p", "n1", phase="Failed", exit_code=1, condition="x"), node("n1", cordoned=True)):
        broken = json.loads(json.dumps(each))
        inner = broken
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = [value] if in_list else value
        facts = Facts({"x": ""})
        change = Change("LISTED", (broken,))
        for fact in [*facts.of_pods(change), *facts.of_nodes(change)]:
            assert fact.reason.isprintable() and len(fact.reason) < 400
        pod_of(broken), node_of(broken, {})
