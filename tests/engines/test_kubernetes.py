"""The engine in a controller's pod, against a server that stands in for Kubernetes, and on a login node."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from closeranks.cluster_events import EngineDrains, NodeGone
from closeranks.controller.credentials import AGENT, CONTROLLER, bundle, mint, parse_bundle
from closeranks.engines import kubernetes
from closeranks.engines.base import Bundles, Engine, EngineFact, JobSpec, Join
from closeranks.engines.kubernetes import KubernetesEngine
from closeranks.errors import ConfigError, EngineError

from .kubernetes_rig import FakeApi, node, pod, served
from .test_kubernetes_api import raw, run

JOIN = Join("llama-7b-controller-0-0.llama-7b:29401", Path("/run/closeranks/agent.pem"))
SPEC = JobSpec(
    job_id="llama-7b", run_dir=Path("/closeranks-runs/llama-7b"), min_nodes=3, max_nodes=4, spares=1,
    run_argv=("--nnodes", "3:4", "train.py"), python="python3", options={"image": "registry.example/train:1"},
)  # fmt: skip


class Rig:
    """An engine as in the controller's pod."""

    def __init__(self, api: FakeApi, env: dict[str, str], directory: Path) -> None:
        self.api, self.env, self.directory = api, env, directory
        self.told: list[str] = []

    def engine(self, **options: str) -> KubernetesEngine:
        spec = replace(SPEC, options={**SPEC.options, "namespace": "research", **options})
        made = KubernetesEngine(spec, env=self.env, service_account=self.directory, tell=self.told.append)
        made.start(JOIN)
        return made


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with served(tmp_path) as (api, env):
        yield Rig(api, env, tmp_path)


async def take(engine: KubernetesEngine, count: int) -> list[EngineFact]:
    found: list[EngineFact] = []
    async with aclosing(engine.facts()) as facts:  # type: ignore[type-var]
        async for fact in facts:
            found.append(fact)
            if len(found) == count:
                break
    return found


def test_it_is_an_engine() -> None:
    engine: Engine = KubernetesEngine(SPEC, env={})
    assert engine.name == "kubernetes"


@pytest.mark.parametrize(
    ("env", "address"),
    [
        ({}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_IP": "10.1.2.3"}, "10.1.2.3"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_IP": "fd00::3"}, "fd00::3"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "0.0.0.0"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_IP": "pod.example"}, "0.0.0.0"),
    ],
)
def test_the_address_to_listen_on_is_the_pods(env: dict[str, str], address: str | None) -> None:
    assert KubernetesEngine(SPEC, env=env).listen_address() == address


def test_outside_of_a_pod_it_doesnt_start() -> None:
    with pytest.raises(ConfigError, match="isn't in a pod"):
        KubernetesEngine(SPEC, env={}).start(JOIN)


# --- place ------------------------------------------------------------------------------------------


def test_place_counts_who_is_on_the_way(rig: Rig) -> None:
    engine = rig.engine()
    assert run(engine.place(5, "start")) == 5, "the Jobs haven't made a pod yet"
    rig.api.put(*(pod(f"node-{index}", f"n{index}") for index in range(3)), pod("node-3", phase="Pending"))
    assert run(engine.place(5, "start")) == 2
    assert run(engine.place(1, "start")) == 1
    rig.api.put(pod("node-3", "n3"), pod("spare-0", "n4"))
    assert run(engine.place(1, "a node was lost")) == 0
    rig.api.put(pod("node-0", "n0", phase="Failed", exit_code=137))
    assert run(engine.place(1, "a node was lost")) == 1, "the Job makes another one"
    rig.api.put(pod("node-0", "n0", phase="Succeeded", exit_code=0))
    assert run(engine.place(1, "a node was lost")) == 0, "a place that is done with stays empty"
    assert not [line for line in rig.api.requests if not line.startswith("GET")]
    assert not rig.told


def test_place_counts_a_pod_that_is_being_replaced(rig: Rig) -> None:
    rig.api.put(
        *(pod(f"node-{index}", f"n{index}") for index in range(4)), pod("spare-0", "n4", deleting=True)
    )
    assert run(rig.engine().place(3, "n4 was given back")) == 1


@pytest.mark.parametrize("what", ["place", "release"])
def test_what_a_cluster_can_do_raises_nothing(rig: Rig, what: str) -> None:
    engine = rig.engine(cordon="true")
    for misbehaviour in (raw(), raw(b"garbage\r\n\r\n")):
        rig.api.misbehave.extend([misbehaviour, misbehaviour])
        if what == "place":
            assert run(engine.place(1, "why not")) == 0
        else:
            run(engine.release("n1", "why not"))
        rig.api.misbehave.clear()
    assert rig.told and all("why not" in line for line in rig.told)


# --- release ----------------------------------------------------------------------------------------


def test_release_deletes_this_jobs_pod_there_and_no_other(rig: Rig) -> None:
    rig.api.put(
        pod("node-0", "n0"), pod("node-1", "n1"), pod("other", "n1", job="other"),
        pod("controller", "n1", role="controller"), node("n1"),
    )  # fmt: skip
    engine = rig.engine()
    run(engine.release("n1", "excluded"))
    run(engine.release("nowhere", "excluded"))
    run(engine.release("n1", "once more"))
    changes = [line for line in rig.api.requests if not line.startswith("GET")]
    assert changes == ["DELETE /api/v1/namespaces/research/pods/node-1"]
    assert rig.api.bodies[-1]["preconditions"] == {"uid": "uid-node-1"}
    assert not rig.told


def test_a_cordon_comes_before_the_delete_and_is_no_drain(rig: Rig) -> None:
    rig.api.put(pod("node-1", "n1"), node("n1"), pod("node-2", "n2"), node("n2"))
    engine = rig.engine(cordon="true")

    async def scenario() -> list[EngineFact]:
        task = asyncio.create_task(take(engine, 1))
        await asyncio.to_thread(rig.api.wait_for_watchers, 2)
        await engine.release("n1", "three losses")
        await asyncio.sleep(0.3)
        rig.api.put(node("n2", cordoned=True))
        return await task

    assert run(scenario()) == [EngineDrains("n2", "cordoned")]
    changes = [line.split()[0] for line in rig.api.requests if not line.startswith("GET")]
    assert changes == ["PATCH", "DELETE"]
    assert rig.api.objects["nodes"]["n1"]["metadata"]["annotations"] == {
        "closeranks/cordoned": "llama-7b: three losses"
    }


def test_a_cordon_that_is_forbidden_is_told_and_the_pod_goes_all_the_same(rig: Rig) -> None:
    rig.api.put(pod("node-1", "n1"), node("n1"))
    rig.api.misbehave.append(lambda handler: handler.refuse(403, 'cannot patch resource "nodes"'))
    run(rig.engine(cordon="true").release("n1", "three losses"))
    assert "can't be cordoned (three losses)" in rig.told[0] and "403" in rig.told[0]
    assert "deletionTimestamp" in rig.api.objects["pods"]["node-1"]["metadata"]


# --- facts ------------------------------------------------------------------------------------------


def test_an_eviction_from_the_first_sign_to_the_end(rig: Rig) -> None:
    rig.api.put(pod("node-0", "n0"), pod("node-1", "n1"))
    engine = rig.engine()

    async def scenario() -> list[EngineFact]:
        task = asyncio.create_task(take(engine, 2))
        await asyncio.to_thread(rig.api.wait_for_watchers, 1)
        evicted = pod("node-1", "n1", condition="EvictionByEvictionAPI", deleting=True)
        rig.api.put(evicted)
        rig.api.put(pod("node-1b", phase="Pending"))
        rig.api.remove(
            "pods", "node-1", last=pod("node-1", "n1", phase="Failed", exit_code=143, deleting=True)
        )
        return await task

    assert run(scenario()) == [
        EngineDrains("n1", "its pod is to go: EvictionByEvictionAPI"),
        NodeGone("n1", "its agent's container ended with 143 (Error)", "uid-node-1"),
    ]
    assert not any("nodes" in line for line in rig.api.requests), "nobody asked for nodes"


def test_nodes_are_watched_where_that_was_asked_for(rig: Rig) -> None:
    chosen, other = node("n1"), node("n2", cordoned=True)
    chosen["metadata"]["labels"] = {"pool": "h200"}
    rig.api.put(pod("node-1", "n1"), chosen, other)
    engine = rig.engine(watch_nodes="true", **{"node_selector.pool": "h200"})

    async def scenario() -> list[EngineFact]:
        task = asyncio.create_task(take(engine, 1))
        await asyncio.to_thread(rig.api.wait_for_watchers, 2)
        cordoned = json.loads(json.dumps(chosen))
        cordoned["spec"]["unschedulable"] = True
        rig.api.put(cordoned)
        return await task

    assert run(scenario()) == [EngineDrains("n1", "cordoned")]
    assert any("/api/v1/nodes?" in line and "pool%3Dh200" in line for line in rig.api.requests)


def test_facts_go_on_through_an_outage(rig: Rig) -> None:
    rig.api.put(pod("node-0", "n0"))
    engine = rig.engine()

    async def scenario() -> list[EngineFact]:
        task = asyncio.create_task(take(engine, 1))
        await asyncio.to_thread(rig.api.wait_for_watchers, 1)
        rig.api.misbehave.extend([raw(), raw(), raw(b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n")])
        rig.api.put(pod("node-0", "n0", phase="Failed", exit_code=137))
        rig.api.forget()
        return await task

    (fact,) = run(scenario())
    assert isinstance(fact, NodeGone) and fact.session == "uid-node-0"
    assert rig.told and all(line.startswith("kubernetes: watching") for line in rig.told)


def test_close_ends_the_facts_at_once_and_touches_no_pod(rig: Rig) -> None:
    rig.api.put(pod("node-0", "n0"))
    engine = rig.engine(watch_nodes="true")

    async def scenario() -> float:
        task = asyncio.create_task(take(engine, 1))
        await asyncio.to_thread(rig.api.wait_for_watchers, 2)
        began = time.monotonic()
        await engine.close()
        await engine.close()
        assert await task == []
        return time.monotonic() - began

    assert run(scenario()) < 2.5
    assert not [line for line in rig.api.requests if not line.startswith("GET")]


def test_the_pods_carry_the_name_that_was_rendered(rig: Rig) -> None:
    """In the pod the job may go by another id than where it was rendered."""
    rig.api.put(pod("node-0", "n0", job="as-rendered"))
    rig.env["CLOSERANKS_KUBERNETES_NAME"] = "as-rendered"
    run(rig.engine().release("n0", "excluded"))
    assert "deletionTimestamp" in rig.api.objects["pods"]["node-0"]["metadata"]


def test_problems_go_to_stderr_unless_told_otherwise(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    engine = KubernetesEngine(SPEC, env=rig.env, service_account=rig.directory)
    engine.start(JOIN)
    rig.api.token = "another"
    assert run(engine.place(1, "start")) == 0
    assert capsys.readouterr().err.startswith("closeranks: kubernetes: 1 more nodes are wanted (start)")


# --- submit -----------------------------------------------------------------------------------------

KUBECTL = """#!/bin/sh
echo "$0 $@" >> "$RECORD/calls"
env > "$RECORD/env"
cat > "$RECORD/stdin.$1"
if [ "$1" = create ]; then {create}; fi
"""


class Login:
    """A login node with a kubectl that writes down what it is told."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        credentials = directory / "credentials"
        mint("llama-7b", credentials)
        self.bundles = Bundles(bundle(credentials, CONTROLLER), bundle(credentials, AGENT))
        self.env = {"PATH": f"{directory}:{os.environ['PATH']}", "RECORD": str(directory)}

    def kubectl(self, create: str) -> None:
        path = self.directory / "kubectl"
        path.write_text(KUBECTL.format(create=create))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def engine(self, **options: str) -> KubernetesEngine:
        spec = replace(SPEC, options={**SPEC.options, **options})
        return KubernetesEngine(spec, bundles=lambda: self.bundles, env=self.env)

    def calls(self) -> list[str]:
        return [line.partition(" ")[2] for line in (self.directory / "calls").read_text().splitlines()]


@pytest.fixture
def login(tmp_path: Path) -> Login:
    return Login(tmp_path)


CREATES = "echo secret/llama-7b-agent; echo jobset.jobset.x-k8s.io/llama-7b"


def test_submit_hands_over_what_render_shows_and_the_secrets(login: Login) -> None:
    login.kubectl(CREATES)
    engine = login.engine()
    assert engine.submit() == "jobset.jobset.x-k8s.io/llama-7b"
    assert login.calls() == ["create --filename - --output name"]
    given = [each for each in yaml.safe_load_all((login.directory / "stdin.create").read_text()) if each]
    shown = [each for each in yaml.safe_load_all(engine.render()) if each]
    assert [each for each in given if each["kind"] != "Secret"] == shown
    secrets = {
        name: data for each in given if each["kind"] == "Secret" for name, data in each["data"].items()
    }
    assert sorted(secrets) == ["agent.pem", "controller.pem"]
    for name, data in secrets.items():
        found = parse_bundle(base64.b64decode(data).decode())
        assert (f"{found.role}.pem", found.job_id) == (name, "llama-7b")


def test_keys_are_in_no_command_line_and_no_variable(login: Login) -> None:
    login.kubectl(CREATES)
    login.engine().submit()
    seen = (login.directory / "calls").read_text() + (login.directory / "env").read_text()
    for text in (login.bundles.controller, login.bundles.agent):
        assert not any(line in seen for line in text.splitlines() if len(line) > 16)


def test_a_failure_takes_back_what_was_created_and_quotes_no_key(login: Login) -> None:
    secret = base64.b64encode(login.bundles.agent.encode()).decode()
    line = login.bundles.controller.splitlines()[6]
    login.kubectl(
        f"echo secret/llama-7b-agent; echo 'no matches for kind JobSet: {secret} {line}' >&2; exit 1"
    )
    with pytest.raises(EngineError) as error:
        login.engine(namespace="research").submit()
    text = str(error.value)
    assert "no matches for kind JobSet: … …" in text and len(text) < 2500
    assert login.calls()[-1] == "delete --ignore-not-found --namespace research secret/llama-7b-agent"
    assert "kind: Secret" not in login.engine().render()


def test_a_job_of_that_name_is_left_alone(login: Login) -> None:
    login.kubectl("echo 'secrets \"llama-7b-agent\" already exists' >&2; exit 1")
    with pytest.raises(EngineError, match="already exists"):
        login.engine().submit()
    assert len(login.calls()) == 1, "nothing of it is deleted"


def test_a_kubectl_that_hangs(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "_KUBECTL_TIMEOUT_S", 0.3)
    login.kubectl("exec sleep 20")
    with pytest.raises(EngineError, match="didn't end within"):
        login.engine().submit()


def test_without_kubectl_an_error_says_what_to_do(login: Login) -> None:
    login.env["PATH"] = str(login.directory / "nothing")
    with pytest.raises(ConfigError, match="closeranks engine render"):
        login.engine().submit()


def test_without_credentials_nothing_is_submitted(login: Login) -> None:
    login.kubectl(CREATES)
    with pytest.raises(EngineError, match="without credentials"):
        KubernetesEngine(SPEC, env=login.env).submit()
    assert not (login.directory / "calls").exists()


def test_a_wrong_option_is_an_error_at_once() -> None:
    with pytest.raises(ConfigError, match="did you mean gpus"):
        KubernetesEngine(replace(SPEC, options={"image": "x", "gpu": "8"}), env={})
