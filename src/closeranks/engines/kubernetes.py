"""The Kubernetes engine: agents are pods of a JobSet or TrainJob, which sees to it that there are enough of
them.

On a login node it renders the job and hands it to ``kubectl``. In the controller's pod it watches the job's
pods, and its nodes where it may, and gives pods back. It creates none: whoever deletes one gets another
one, from the Job that owns it.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import os
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from closeranks.engines.base import Bundles, EngineFact, JobSpec, Join
from closeranks.engines.kubernetes_api import Change, KubernetesApi
from closeranks.engines.kubernetes_facts import Facts, PodView, pod_of
from closeranks.engines.kubernetes_http import SERVICE_ACCOUNT, in_cluster, is_in_cluster
from closeranks.engines.kubernetes_manifests import manifests, object_name
from closeranks.engines.kubernetes_options import parse
from closeranks.engines.kubernetes_pods import AGENT, JOB_LABEL, NAME_VARIABLE, ROLE_LABEL
from closeranks.errors import ConfigError, EngineError

__all__ = ["KubernetesEngine"]

_KUBECTL_TIMEOUT_S = 120
_MAX_ERROR_CHARS = 2000
_MAX_FACTS_WAITING = 1024
_MIN_SECRET_CHARS = 16  # a line of a key is longer, and nothing that helps is


class KubernetesEngine:
    """One job's nodes on Kubernetes.

    ``bundles`` makes the credentials that ``submit`` hands to the cluster; it is asked there and nowhere
    else. ``tell`` is told, for people, what doesn't work.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        bundles: Callable[[], Bundles] | None = None,
        env: Mapping[str, str] = os.environ,
        service_account: Path = SERVICE_ACCOUNT,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._spec = spec
        self._options = parse(spec.options)
        self._bundles = bundles
        self._env = env
        self._service_account = service_account
        self._tell = tell or _to_stderr
        self._object_name = env.get(NAME_VARIABLE) or object_name(spec.job_id)
        self._selector = f"{JOB_LABEL}={self._object_name},{ROLE_LABEL}={AGENT}"
        self._facts = Facts(self._options.drain_mark)
        self._api: KubernetesApi | None = None
        self._queue: asyncio.Queue[EngineFact] = asyncio.Queue(_MAX_FACTS_WAITING)
        self._closed = asyncio.Event()

    @property
    def name(self) -> str:
        return "kubernetes"

    def runs_here(self) -> bool:
        return is_in_cluster(self._env)

    def listen_address(self) -> str | None:
        """The pod's own address; agents find it by the pod's name. Outside of a pod nobody listens."""
        if not is_in_cluster(self._env):
            return None
        try:
            return str(ipaddress.ip_address(self._env.get("POD_IP", "")))
        except ValueError:
            return "0.0.0.0"

    def start(self, join: Join) -> None:
        """The pods know how to join since they were rendered. Raises ConfigError outside of a pod."""
        self._api = KubernetesApi(in_cluster(self._env, self._service_account), random.random, self._say)

    # --- nodes --------------------------------------------------------------------------------------

    async def place(self, count: int, reason: str, taken: frozenset[str] = frozenset()) -> int:
        """Nothing to create: counts pods that wait for a host or an image, and those that the Job has yet to
        make in the place of ones that ended. What failed stays there for people to read its logs; it is
        replaced all the same."""
        try:
            views = await self._pods()
        except EngineError as error:
            self._say(f"{count} more nodes are wanted ({reason}), and it isn't known how many come: {error}")
            return 0
        live = [view for view in views if view.is_live]
        starting = sum(view.phase == "Pending" for view in live)
        done = sum(view.phase == "Succeeded" for view in views)
        return max(0, min(count, starting + self._spec.all_nodes - len(live) - done))

    async def release(self, node: str, reason: str) -> None:
        """Delete this job's pod there, after a cordon if that was asked for, so that no other one takes its
        place there."""
        if self._options.cordon:
            await self._cordon(node, reason)
        try:
            for view in await self._pods():
                if view.node == node and not view.deleting:
                    self._facts.released.add(view.uid)
                    await self._ready().delete_pod(view.name, view.uid)
        except EngineError as error:
            self._say(f"node {node} can't be given back ({reason}): {error}")

    async def _cordon(self, node: str, reason: str) -> None:
        self._facts.cordoned.add(node)
        try:
            await self._ready().cordon(node, on=True, reason=f"{self._object_name}: {reason}")
        except EngineError as error:
            self._facts.cordoned.discard(node)
            self._say(f"node {node} can't be cordoned ({reason}): {error}")

    async def _pods(self) -> list[PodView]:
        return [view for pod in await self._ready().pods(self._selector) if (view := pod_of(pod)) is not None]

    def _ready(self) -> KubernetesApi:
        if self._api is None:
            raise EngineError("the Kubernetes engine hasn't been started")
        return self._api

    # --- facts --------------------------------------------------------------------------------------

    async def facts(self) -> AsyncIterator[EngineFact]:
        api = self._ready()
        watches = [asyncio.create_task(self._watch(api.follow_pods(self._selector), self._facts.of_pods))]
        if self._options.needs_nodes:
            # A set of labels that pods ask for is one that their nodes have.
            labels = ",".join(f"{key}={value}" for key, value in self._options.node_selector.items())
            watches.append(asyncio.create_task(self._watch(api.follow_nodes(labels), self._facts.of_nodes)))
        tasks: list[asyncio.Task[Any]] = [*watches, asyncio.create_task(self._closed.wait())]
        item: asyncio.Task[EngineFact] | None = None
        try:
            while not self._closed.is_set():
                item = item or asyncio.create_task(self._queue.get())
                await asyncio.wait([item, *tasks], return_when=asyncio.FIRST_COMPLETED)
                if item.done():
                    fact, item = item.result(), None
                    yield fact
                    continue
                for watch in watches:
                    if watch.done():
                        watch.result()  # a watch has no end but an error
        finally:
            tasks += [item] if item is not None else []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(
        self, changes: AsyncGenerator[Change, None], facts_of: Callable[[Change], list[EngineFact]]
    ) -> None:
        async with aclosing(changes) as found:
            async for change in found:
                for fact in facts_of(change):
                    await self._queue.put(fact)

    async def close(self) -> None:
        """The pods are the JobSet's, which ends them when the controller's pod does."""
        self._closed.set()

    # --- submit -------------------------------------------------------------------------------------

    def render(self) -> str:
        return manifests(self._spec, self._options)

    def submit(self) -> str:
        """By ``kubectl create``: it knows the user's clusters and how to log in there, and never writes
        over what is there already. On an error, what was created goes again."""
        kubectl = shutil.which("kubectl", path=self._env.get("PATH"))
        if kubectl is None:
            raise ConfigError(
                "there is no kubectl here to hand the job to Kubernetes with. Install it, or render the job "
                "and hand it over elsewhere: closeranks engine render --engine kubernetes ... > job.yaml"
            )
        if self._bundles is None:
            raise EngineError("a job on Kubernetes can't be submitted without credentials for its agents")
        bundles = self._bundles()
        text = manifests(self._spec, self._options, bundles)
        done = _kubectl(kubectl, self._env, ["create", "--filename", "-", "--output", "name"], text)
        created = [line for line in done.stdout.splitlines() if "/" in line]
        if done.returncode == 0:
            kind = f"{self._options.format}."
            return next((line for line in created if line.startswith(kind)), f"{kind}/{self._object_name}")
        why = _without_secrets(done.stderr, bundles)
        if created:
            where = ["--namespace", self._options.namespace] if self._options.namespace else []
            undone = _kubectl(kubectl, self._env, ["delete", "--ignore-not-found", *where, *created], "")
            if undone.returncode:
                why += f"\nLeft behind, as it can't be deleted: {' '.join(created)}"
        raise EngineError(f"kubectl couldn't create the job {self._object_name}:\n{why}")

    def _say(self, text: str) -> None:
        self._tell(f"kubernetes: {text}")


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"closeranks: {text}\n")


def _kubectl(
    kubectl: str, env: Mapping[str, str], arguments: list[str], text: str
) -> subprocess.CompletedProcess[str]:
    """Manifests go in by a pipe: they hold keys, and everybody can read a command line."""
    try:
        return subprocess.run(
            [kubectl, *arguments], input=text, env=dict(env), text=True, errors="replace",
            capture_output=True, timeout=_KUBECTL_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"kubectl {arguments[0]} didn't end within {_KUBECTL_TIMEOUT_S} s. Look for what it left: "
            "kubectl get jobsets,secrets -l app.kubernetes.io/managed-by=closeranks"
        ) from None
    except OSError as error:
        raise EngineError(f"{kubectl} can't be started: {error.strerror or error}") from error


def _without_secrets(text: str, bundles: Bundles) -> str:
    """What kubectl complains about, should it quote what it was given."""
    for bundle in (bundles.controller, bundles.agent):
        lines = [line for line in bundle.splitlines() if len(line) >= _MIN_SECRET_CHARS]
        for secret in (base64.b64encode(bundle.encode()).decode(), *lines):
            text = text.replace(secret, "…")
    return text[:_MAX_ERROR_CHARS].strip() or "it doesn't say why"
