"""A job as Kubernetes manifests: a JobSet, or a TrainJob of Kubeflow Trainer with a runtime of its own.
Pure.

- ``controller``: one pod. What it decides ends the job: with 0 the JobSet is complete, with any other code
  of its own it has failed. Killed or evicted, it is started again, and only once the old one is certain to
  be gone.
- ``node`` and ``spare``: one pod a node, each on a host of its own. Whatever happens to one of them,
  another takes its place; none of them can fail the set.

Written from the published schemas: jobset.x-k8s.io/v1alpha2 (JobSet 0.12), trainer.kubeflow.org/v1alpha1
(2.3).
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from closeranks.engines.base import Bundles, JobSpec
from closeranks.engines.kubernetes_options import KubernetesOptions
from closeranks.engines.kubernetes_pods import (
    AGENT,
    CONTAINER,
    CONTROLLER,
    agent_pod,
    controller_pod,
    labels_of,
)
from closeranks.engines.kubernetes_yaml import to_yaml
from closeranks.errors import ConfigError

__all__ = ["manifests", "object_name"]

NODE, SPARE = "node", "spare"
_MAX_INT32 = 2**31 - 1
_MAX_NAME_CHARS = 40  # the longest pod's name is this and -controller-0-0-abcde, 63 characters at most
_MAX_NODES = 16_384
# How a process ends that was killed or crashed: ABRT, BUS, FPE, KILL, SEGV, TERM. Nobody decided that.
_KILLED = [134, 135, 136, 137, 139, 143]

Manifest = dict[str, Any]
Document = tuple[str, Manifest | None]


def object_name(job_id: str) -> str:
    """What the job's objects are called: its id, if that will do, or as much of it as will and a digest."""
    plain = re.sub(r"[^a-z0-9]+", "-", job_id.lower()).strip("-")
    if plain == job_id and len(plain) <= _MAX_NAME_CHARS and not plain[0].isdigit():
        return plain
    digest = hashlib.sha256(job_id.encode(errors="surrogatepass")).hexdigest()[:8]
    start = plain if plain[:1].isalpha() else f"job-{plain}"
    return f"{start[: _MAX_NAME_CHARS - 9].strip('-')}-{digest}"


def manifests(spec: JobSpec, options: KubernetesOptions, bundles: Bundles | None = None) -> str:
    """The whole job as text. Without ``bundles`` the secrets are left out, and how to make them is told."""
    if not 1 <= spec.max_nodes <= spec.all_nodes <= _MAX_NODES:
        raise ConfigError(f"{spec.all_nodes} nodes, spares included: 1 to {_MAX_NODES:,} can be rendered")
    for word in (spec.job_id, *spec.run_argv, *options.env.values(), *options.annotation.values()):
        if not _is_text(word):
            raise ConfigError(f"an argument can't be handed to Kubernetes: it isn't text: {word[:80]!r}")
    name = object_name(spec.job_id)
    spec = replace(spec, run_dir=Path(_run_dir(spec, options, name)))
    account = options.service_account or f"{name}-{CONTROLLER}"
    found: list[Document] = [_secret(options, name, role, bundles) for role in (CONTROLLER, AGENT)]
    if not options.service_account:
        found += _permissions(options, name, account)
    jobset = _jobset(spec, options, name, account)
    if options.format == "trainjob":
        found += _trainjob(spec, options, name, jobset)
    else:
        found.append(_alone(options, name, jobset))
    comment, first = found[0]
    found[0] = f"closeranks job {spec.job_id}\n{comment}", first
    return to_yaml(found)


def _is_text(word: str) -> bool:
    """Not so where bytes of a command line were none of UTF-8."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _run_dir(spec: JobSpec, options: KubernetesOptions, name: str) -> str:
    path = PurePosixPath(options.run_dir or spec.run_dir)
    if not path.is_absolute() or len(path.parts) < 2 or {"..", ":"} & {*path.parts, *str(path)}:
        raise ConfigError(
            f"the run directory {str(path)!r} can't be one inside of pods: "
            f"--engine-option run_dir=/closeranks-runs/{name}"
        )
    return str(path)


def _metadata(options: KubernetesOptions, name: str, owner: str) -> Manifest:
    where = {"namespace": options.namespace} if options.namespace else {}
    return {"name": name, **where, "labels": labels_of(owner, more=options.label)}


# --- secrets and permissions ------------------------------------------------------------------------


def _secret(options: KubernetesOptions, name: str, role: str, bundles: Bundles | None) -> Document:
    holder = f"{name}-{role}"
    if bundles is None:
        where = f" --namespace {options.namespace}" if options.namespace else ""
        comment = f"Secret {holder} holds a key and isn't shown. Where {role}.pem is, make it with:\n"
        return comment + f"  kubectl create secret generic {holder}{where} --from-file={role}.pem", None
    bundle = bundles.controller if role == CONTROLLER else bundles.agent
    data = base64.b64encode(bundle.encode()).decode()
    return "", {
        "apiVersion": "v1", "kind": "Secret", "metadata": _metadata(options, holder, name), "type": "Opaque",
        "immutable": True, "data": {f"{role}.pem": data},
    }  # fmt: skip


def _permissions(options: KubernetesOptions, name: str, account: str) -> list[Document]:
    """What the controller may do: see and delete pods of its namespace; nodes only where that was asked
    for."""
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "delete"]}
    found: list[Document] = [
        ("", {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(options, account, name)}),
        *_role(options, name, account, pods, of_cluster=False),
    ]
    if options.needs_nodes:
        verbs = ["get", "list", "watch", *(["patch"] if options.cordon else [])]
        nodes = {"apiGroups": [""], "resources": ["nodes"], "verbs": verbs}
        found += _role(options, name, account, nodes, of_cluster=True)
    return found


def _role(
    options: KubernetesOptions, name: str, account: str, rule: Manifest, *, of_cluster: bool
) -> list[Document]:
    kind, comment, namespace = "Role", "", options.namespace
    metadata = _metadata(options, account, name)
    if of_cluster:
        kind = "ClusterRole"
        metadata = {**_metadata(replace(options, namespace=""), f"{namespace}-{account}", name)}
        comment = "Nodes belong to no namespace: only an administrator of the cluster can hand this out."
    group = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": account}
    if namespace:
        subject["namespace"] = namespace
    return [
        (comment, {"apiVersion": f"{group}/v1", "kind": kind, "metadata": metadata, "rules": [rule]}),
        ("", {
            "apiVersion": f"{group}/v1", "kind": f"{kind}Binding", "metadata": dict(metadata),
            "roleRef": {"apiGroup": group, "kind": kind, "name": metadata["name"]},
            "subjects": [subject],
        }),
    ]  # fmt: skip


# --- the set ----------------------------------------------------------------------------------------


def _alone(options: KubernetesOptions, name: str, jobset: Manifest) -> Document:
    metadata = {**_metadata(options, name, name), **jobset["metadata"]}
    return "", {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata,
                "spec": jobset["spec"]}  # fmt: skip


def _jobset(spec: JobSpec, options: KubernetesOptions, name: str, account: str) -> Manifest:
    controller = {**_one_at_a_time(options), "template": controller_pod(spec, options, name, account)}
    jobs = [
        _replicated(CONTROLLER, controller),
        _replicated(NODE, {**_for_ever(spec.max_nodes), "template": agent_pod(spec, options, name)}),
    ]
    if spec.spares:
        jobs.append(
            _replicated(SPARE, {**_for_ever(spec.spares), "template": agent_pod(spec, options, name)})
        )
    ended = {"name": "controllerEnded", "action": "FailJobSet", "targetReplicatedJobs": [CONTROLLER]}
    return {
        "metadata": {"annotations": {**options.annotation, "closeranks/job-id": spec.job_id}},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [CONTROLLER]},
            "failurePolicy": {"maxRestarts": 0, "rules": [ended]},
            "replicatedJobs": jobs,
        },
    }


def _replicated(name: str, job: Manifest) -> Manifest:
    return {"name": name, "replicas": 1, "template": {"spec": job}}


def _for_ever(count: int) -> Manifest:
    """So many agents at any time. Failures are counted place by place, and so is Kubernetes' wait before a
    replacement, which doubles with each of them. A pod on its way out isn't waited for: its host may be
    dead, and then it stays on its way. Only a pod that ends with 0 leaves its place empty, as Jobs have it:
    agents do so when the job is over, and at no other time."""
    return {
        "completionMode": "Indexed", "completions": count, "parallelism": count,
        "backoffLimitPerIndex": _MAX_INT32, "podReplacementPolicy": "TerminatingOrFailed",
    }  # fmt: skip


def _one_at_a_time(options: KubernetesOptions) -> Manifest:
    """A controller that was evicted costs nothing, one that was killed a restart; with any other code it
    ends."""
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    decided = {"containerName": CONTAINER, "operator": "NotIn", "values": [0, *_KILLED]}
    return {
        "completionMode": "Indexed", "completions": 1, "parallelism": 1,
        "backoffLimit": options.controller_restarts,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [
            {"action": "Ignore", "onPodConditions": [disrupted]},
            {"action": "FailJob", "onExitCodes": decided},
        ]},
    }  # fmt: skip


def _trainjob(spec: JobSpec, options: KubernetesOptions, name: str, jobset: Manifest) -> list[Document]:
    """The set as a runtime, and a TrainJob that refers to it. No policy of torch's: it would set torchrun's
    variables."""
    trainer = next(job for job in jobset["spec"]["replicatedJobs"] if job["name"] == NODE)
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    trainer["template"] = {"metadata": step, **trainer["template"]}
    api = "trainer.kubeflow.org/v1alpha1"
    labels = labels_of(name, more=options.label)
    runtime = {
        "mlPolicy": {"numNodes": spec.max_nodes},
        "template": {"metadata": {"labels": labels, **jobset["metadata"]}, "spec": jobset["spec"]},
    }
    job = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
        "trainer": {"numNodes": spec.max_nodes},
    }
    metadata = {**_metadata(options, name, name), **jobset["metadata"]}
    return [
        ("", {"apiVersion": api, "kind": "TrainingRuntime", "metadata": metadata, "spec": runtime}),
        ("", {"apiVersion": api, "kind": "TrainJob", "metadata": metadata, "spec": job}),
    ]
