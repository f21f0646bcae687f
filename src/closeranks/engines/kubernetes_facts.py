"""From what Kubernetes says about pods and nodes to facts about a job's nodes. Pure: objects in, facts out.

What counts as **certain** is only what the node's own kubelet reported of the agent's container: it has
terminated, and with it all of its processes. A pod that has merely vanished was perhaps deleted by force, a
pod that was set to Failed by the control plane may run on, on a host that is cut off; neither is proof of
anything.

A node that isn't ready is no dead host. Kubernetes takes 40 s to call a silent kubelet ``Unknown``; by then
a dead host has lost its lease long ago, and an agent that still holds one is alive beside it. Its pod will
be evicted all the same, minutes later: that is a drain. ``False`` is kubelet's own complaint, perhaps as it
is restarted; nothing follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from closeranks.cluster_events import EngineDrains, NodeGone
from closeranks.engines.base import EngineFact
from closeranks.engines.kubernetes_api import Change, Object, at, text_at
from closeranks.engines.kubernetes_pods import AGENT, CONTAINER, ROLE_LABEL

__all__ = ["Facts", "NodeView", "PodView", "node_of", "pod_of"]

_MAX_TEXT_CHARS = 200
_MAX_NAME_CHARS = 253

# Taints that announce the end of a node, and who sets them.
_DRAIN_TAINTS = {
    "node.kubernetes.io/unschedulable": "cordoned",  # kubectl cordon and drain, through the node controller
    "ToBeDeletedByClusterAutoscaler": "the cluster autoscaler removes it",
    "karpenter.sh/disrupted": "Karpenter removes it",
    "cloud.google.com/impending-node-termination": "GKE is about to end it",
    "aws-node-termination-handler/spot-itn": "EC2 takes the spot instance back",
    "aws-node-termination-handler/asg-lifecycle-termination": "its auto-scaling group ends it",
    "aws-node-termination-handler/scheduled-maintenance": "EC2 has maintenance scheduled",
}
# Taints that say that the host is off.
_GONE_TAINTS = {
    "node.kubernetes.io/out-of-service": "an administrator says that it is out of service",
    "node.cloudprovider.kubernetes.io/shutdown": "the cloud says that it is shut down",
}


@dataclass(frozen=True, slots=True)
class PodView:
    """What matters of a pod. ``ended``: why its agent is certain to be gone; ``drains``: why it soon will
    be."""

    uid: str
    name: str
    node: str
    phase: str
    deleting: bool
    ended: str
    drains: str

    @property
    def is_live(self) -> bool:
        """Has an agent, or will have."""
        return not self.ended and not self.deleting and self.phase in ("Pending", "Running", "Unknown")


@dataclass(frozen=True, slots=True)
class NodeView:
    """What matters of a node object. ``gone``: who says that its host is off; ``drains``: why it soon will
    be."""

    name: str
    gone: str
    drains: str
    deleted: bool = False


def pod_of(pod: Object) -> PodView | None:
    """None for what is no pod of an agent."""
    uid, name = text_at(pod, "metadata", "uid"), text_at(pod, "metadata", "name")
    if (
        not uid
        or len(uid) > _MAX_NAME_CHARS
        or not name
        or at(pod, "metadata", "labels", ROLE_LABEL) != AGENT
    ):
        return None
    phase = text_at(pod, "status", "phase")
    ended = _ended(pod, phase)
    deleting = at(pod, "metadata", "deletionTimestamp") is not None
    node = text_at(pod, "spec", "nodeName")[:_MAX_NAME_CHARS]
    return PodView(uid, name, node, phase, deleting, ended, "" if ended else _pod_drains(pod, deleting))


def _ended(pod: Object, phase: str) -> str:
    """Why the agent's container is certain to have ended for good, or nothing."""
    statuses = at(pod, "status", "containerStatuses")
    for status in statuses if isinstance(statuses, list) else ():
        if text_at(status, "name") != CONTAINER:
            continue
        end = at(status, "state", "terminated")
        for_good = at(pod, "spec", "restartPolicy") == "Never" or phase in ("Failed", "Succeeded")
        # ContainerStatusUnknown: kubelet couldn't find the container, and made the rest up.
        if not isinstance(end, dict) or not for_good or end.get("reason") == "ContainerStatusUnknown":
            return ""
        code = end.get("exitCode") if isinstance(end.get("exitCode"), int) else "?"
        why = _short(text_at(end, "reason")) or "no reason"
        return f"its agent's container ended with {code} ({why})"
    return ""


def _pod_drains(pod: Object, deleting: bool) -> str:
    conditions = at(pod, "status", "conditions")
    for condition in conditions if isinstance(conditions, list) else ():
        if text_at(condition, "type") == "DisruptionTarget" and text_at(condition, "status") == "True":
            return f"its pod is to go: {_short(text_at(condition, 'reason')) or 'no reason given'}"
    return "its pod is being deleted" if deleting else ""


def node_of(node: Object, marks: Mapping[str, str]) -> NodeView | None:
    """``marks``: labels, annotations and taints that announce the end of a node; an empty value matches
    any."""
    name = text_at(node, "metadata", "name")
    if not name or len(name) > _MAX_NAME_CHARS:
        return None
    taints = _taints(node)
    gone = next((why for key, why in _GONE_TAINTS.items() if key in taints), "")
    drains = "cordoned" if at(node, "spec", "unschedulable") is True else ""
    drains = drains or next((why for key, why in _DRAIN_TAINTS.items() if key in taints), "")
    return NodeView(name, gone, drains or _marked(node, taints, marks) or _silent(node))


def _deleted(name: str) -> NodeView:
    return NodeView(name, "its node object was deleted", "", deleted=True)


def _silent(node: Object) -> str:
    conditions = at(node, "status", "conditions")
    for condition in conditions if isinstance(conditions, list) else ():
        if text_at(condition, "type") == "Ready" and text_at(condition, "status") == "Unknown":
            return "its kubelet is silent, and Kubernetes will evict what runs there"
    return ""


def _taints(node: Object) -> dict[str, str]:
    taints = at(node, "spec", "taints")
    listed = taints if isinstance(taints, list) else ()
    return {text_at(taint, "key"): text_at(taint, "value") for taint in listed}


def _marked(node: Object, taints: Mapping[str, str], marks: Mapping[str, str]) -> str:
    for key, wanted in marks.items():
        for found in (at(node, "metadata", "labels"), at(node, "metadata", "annotations"), taints):
            value = found.get(key) if isinstance(found, Mapping) else None
            if isinstance(value, str) and wanted in ("", value):
                return f"marked with {key}={_short(value)}"
    return ""


def _short(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:_MAX_TEXT_CHARS])


@dataclass(slots=True)
class Facts:
    """Says each thing once, and again only when it had stopped being so in between.

    ``released``: pods that the job itself gave back; ``cordoned``: nodes that it has cordoned. That they go
    is no news.
    """

    marks: Mapping[str, str] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    cordoned: set[str] = field(default_factory=set)
    _pods: dict[str, PodView] = field(default_factory=dict)
    _nodes: dict[str, NodeView] = field(default_factory=dict)
    _on: dict[str, set[str]] = field(
        default_factory=dict
    )  # node to the pods there whose agents haven't ended
    _told: set[tuple[str, str]] = field(default_factory=set)

    def of_pods(self, change: Change) -> list[EngineFact]:
        """A pod's end before a drain, so that nobody is asked to drain what is gone."""
        views = [view for view in map(pod_of, change.objects) if view is not None]
        found = [fact for view in views for fact in self._of_pod(view)]
        if change.kind == "LISTED":
            self._forget_pods(set(self._pods) - {view.uid for view in views})
        elif change.kind == "DELETED":
            self._forget_pods({view.uid for view in views})
        return found

    def of_nodes(self, change: Change) -> list[EngineFact]:
        views = [view for object_ in change.objects if (view := node_of(object_, self.marks)) is not None]
        if change.kind == "DELETED":
            views = [_deleted(view.name) for view in views]
        elif change.kind == "LISTED":
            missing = set(self._nodes) - {view.name for view in views}
            views += [_deleted(name) for name in sorted(missing)]
        found: list[EngineFact] = []
        for view in views:
            self._nodes[view.name] = view
            found += self._of_node(view.name)
        if change.kind in ("DELETED", "LISTED"):
            self._forget_nodes()
        return found

    def _of_pod(self, view: PodView) -> Iterable[EngineFact]:
        self._pods[view.uid] = view
        if not view.node:
            return
        if view.ended:
            self._leave(view)
            if self._is_news("ended", view.uid):
                yield NodeGone(view.node, view.ended, view.uid)
            return
        self._on.setdefault(view.node, set()).add(view.uid)
        if view.drains and view.uid not in self.released and self._is_news("pod drains", view.uid):
            yield EngineDrains(view.node, view.drains)
        yield from self._of_node(view.node)

    def _of_node(self, name: str) -> Iterable[EngineFact]:
        """Only about nodes on which an agent is, or may be."""
        node = self._nodes.get(name)
        if node is None or name not in self._on:
            return
        if not node.gone:
            self._told.discard(("gone", name))
        elif self._is_news("gone", name):
            yield NodeGone(name, node.gone)
        if not node.drains:
            self._told.discard(("drains", name))
        elif not node.gone and name not in self.cordoned and self._is_news("drains", name):
            yield EngineDrains(name, node.drains)

    def _is_news(self, what: str, whom: str) -> bool:
        if (what, whom) in self._told:
            return False
        self._told.add((what, whom))
        return True

    def _leave(self, view: PodView) -> None:
        there = self._on.get(view.node, set())
        there.discard(view.uid)
        if not there:
            self._on.pop(view.node, None)

    def _forget_pods(self, uids: set[str]) -> None:
        for uid in uids:
            if (view := self._pods.pop(uid, None)) is not None:
                self._leave(view)
            self.released.discard(uid)
            self._told -= {("ended", uid), ("pod drains", uid)}

    def _forget_nodes(self) -> None:
        """A node that is no more is forgotten with its last pod."""
        gone = [name for name, node in self._nodes.items() if node.deleted and name not in self._on]
        for name in gone:
            del self._nodes[name]
            self._told -= {("gone", name), ("drains", name)}
