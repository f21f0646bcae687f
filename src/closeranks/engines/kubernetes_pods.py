"""The pods of a job on Kubernetes: one for the controller, one a node. Pure; plain dictionaries.

Each pod is one life of one agent: it is never restarted in place, and its uid is the agent's session. So what
Kubernetes says about a pod can't be about an earlier or later agent of the same node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from closeranks.engines.base import JobSpec, Join, agent_command, controller_command
from closeranks.engines.kubernetes_options import KubernetesOptions
from closeranks.engines.kubernetes_yaml import Octal

__all__ = [
    "AGENT", "CONTAINER", "CONTROLLER", "JOB_LABEL", "NAME_VARIABLE", "ROLE_LABEL",
    "agent_pod", "controller_host", "controller_pod", "labels_of",
]  # fmt: skip

JOB_LABEL = "closeranks/job"
ROLE_LABEL = "closeranks/role"
CONTROLLER, AGENT = "controller", "agent"
CONTAINER = "node"  # Kubeflow Trainer wants the trainer's container to be called so
NAME_VARIABLE = "CLOSERANKS_KUBERNETES_NAME"
_CREDENTIALS_AT = PurePosixPath("/run/closeranks")
_HOST = "kubernetes.io/hostname"
_KEEP = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
_SOON_S = 30  # how long the controller's pod stays on a host that doesn't answer

Manifest = dict[str, Any]


def controller_host(name: str) -> str:
    """The name of the controller's pod in the job's own network, the same for each pod that takes its
    place."""
    return f"{name}-{CONTROLLER}-0-0.{name}"


def labels_of(name: str, role: str | None = None, more: Mapping[str, str] | None = None) -> Manifest:
    """What marks an object as belonging to a job."""
    labels = {**(more or {}), "app.kubernetes.io/managed-by": "closeranks", JOB_LABEL: name}
    return labels if role is None else {**labels, ROLE_LABEL: role}


def agent_pod(spec: JobSpec, options: KubernetesOptions, name: str) -> Manifest:
    """A node of the job. ``run_dir`` of ``spec`` is a path inside of the pod."""
    join = Join(f"{controller_host(name)}:{options.port}", _bundle(AGENT))  # type: ignore[arg-type]
    command = agent_command(replace(spec, python=options.python), join)
    env = [_from_pod("CLOSERANKS_NODE", "spec.nodeName"), _from_pod("CLOSERANKS_SESSION", "metadata.uid")]
    devices = {**({"nvidia.com/gpu": str(options.gpus)} if options.gpus else {}), **options.resource}
    container = _container(spec, options, command, env)
    _ask_for(container, _amounts(options.cpu, options.memory), devices)
    container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    pod = _pod(options, name, AGENT, container, _run_volume(options))
    shm = {"medium": "Memory", **({"sizeLimit": options.shm} if options.shm else {})}
    pod["volumes"].append({"name": "shm", "emptyDir": shm})
    pod["automountServiceAccountToken"] = False
    if options.node_selector:
        pod["nodeSelector"] = dict(options.node_selector)
    if options.toleration:
        pod["tolerations"] = [_toleration(*each) for each in options.toleration]
    pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_agents(name)]}}
    return _template(options, name, AGENT, pod)


def controller_pod(spec: JobSpec, options: KubernetesOptions, name: str, account: str) -> Manifest:
    """The one that decides: small, without a GPU, and rather not on a host with ranks."""
    command = controller_command(
        replace(spec, python=options.python),
        listen=f"0.0.0.0:{options.port}",
        credentials=_bundle(CONTROLLER),  # type: ignore[arg-type]
    )
    env = [_from_pod("POD_IP", "status.podIP"), _from_pod("POD_NAMESPACE", "metadata.namespace")]
    env.append({"name": NAME_VARIABLE, "value": name})
    container = _container(spec, options, command, env)
    container["ports"] = [{"name": "control", "containerPort": options.port}]
    _ask_for(container, _amounts(options.controller_cpu, options.controller_memory), {})
    pod = _pod(options, name, CONTROLLER, container, _run_volume(options))
    pod["serviceAccountName"] = account
    # Its end must be seen soon: nobody can ask for another one while it is away.
    pod["tolerations"] = [
        {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute",
         "tolerationSeconds": _SOON_S}
        for why in ("not-ready", "unreachable")
    ]  # fmt: skip
    pod["tolerations"] += [_toleration(*each) for each in options.toleration]
    away = {"weight": 100, "podAffinityTerm": _agents(name)}
    pod["affinity"] = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [away]}}
    return _template(options, name, CONTROLLER, pod)


def _template(options: KubernetesOptions, name: str, role: str, pod: Manifest) -> Manifest:
    annotations = {**options.annotation, **_KEEP}
    metadata = {"labels": labels_of(name, role, options.label), "annotations": annotations}
    return {"metadata": metadata, "spec": pod}


def _pod(
    options: KubernetesOptions, name: str, role: str, container: Manifest, run_volume: Manifest
) -> Manifest:
    secret = {"secretName": f"{name}-{role}", "defaultMode": Octal(0o400)}
    pod: Manifest = {"restartPolicy": "Never", "terminationGracePeriodSeconds": options.grace_s}
    pod["enableServiceLinks"] = False
    if options.priority_class:
        pod["priorityClassName"] = options.priority_class
    pod["securityContext"] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if options.user is not None:
        identity = {"runAsUser": options.user, "runAsGroup": options.user, "fsGroup": options.user}
        pod["securityContext"] |= {**identity, "runAsNonRoot": options.user != 0}
    if options.image_pull_secret:
        pod["imagePullSecrets"] = [{"name": options.image_pull_secret}]
    pod["containers"] = [container]
    pod["volumes"] = [{"name": "credentials", "secret": secret}, run_volume]
    return pod


def _container(
    spec: JobSpec, options: KubernetesOptions, command: list[str], env: list[Manifest]
) -> Manifest:
    container: Manifest = {"name": CONTAINER, "image": options.image}
    if options.image_pull_policy:
        container["imagePullPolicy"] = options.image_pull_policy
    container["command"] = [_literal(word) for word in command]
    if options.working_dir:
        container["workingDir"] = options.working_dir
    given = [{"name": key, "value": _literal(value)} for key, value in options.env.items()]
    container["env"] = [*given, *env]  # the last of a name wins
    container["securityContext"] = {"allowPrivilegeEscalation": False}
    run = {"name": "run", "mountPath": str(spec.run_dir)}
    if options.claim:
        run["subPath"] = spec.run_dir.name
    credentials = {"name": "credentials", "mountPath": str(_CREDENTIALS_AT), "readOnly": True}
    container["volumeMounts"] = [credentials, run]
    return container


def _run_volume(options: KubernetesOptions) -> Manifest:
    if options.claim:
        return {"name": "run", "persistentVolumeClaim": {"claimName": options.claim}}
    return {"name": "run", "emptyDir": {}}


def _bundle(role: str) -> PurePosixPath:
    return _CREDENTIALS_AT / f"{role}.pem"


def _literal(text: str) -> str:
    """Kubernetes puts variables in for ``$(NAME)``; what was typed here is meant as it is."""
    return text.replace("$", "$$")


def _from_pod(variable: str, path: str) -> Manifest:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _amounts(cpu: str, memory: str) -> dict[str, str]:
    return {**({"cpu": cpu} if cpu else {}), **({"memory": memory} if memory else {})}


def _ask_for(container: Manifest, requests: dict[str, str], devices: Mapping[str, str]) -> None:
    """Memory and devices are limits, too. Processors aren't: a limit would stall ranks in mid-step."""
    limits = {**({"memory": requests["memory"]} if "memory" in requests else {}), **devices}
    wanted = {**requests, **devices}
    resources = {**({"requests": wanted} if wanted else {}), **({"limits": limits} if limits else {})}
    if resources:
        container["resources"] = resources


def _agents(name: str) -> Manifest:
    """This job's agents, host by host."""
    return {"topologyKey": _HOST, "labelSelector": {"matchLabels": {JOB_LABEL: name, ROLE_LABEL: AGENT}}}


def _toleration(key: str, value: str, effect: str) -> Manifest:
    how = {"operator": "Equal", "value": value} if value else {"operator": "Exists"}
    return {"key": key, **how, **({"effect": effect} if effect else {})}
