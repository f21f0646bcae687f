"""What is rendered: as people read it, as the published schemas want it, and whatever is put into it.

    python tests/engines/test_kubernetes_manifests.py

writes the golden files anew.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.engines.base import Bundles, JobSpec
from closeranks.engines.kubernetes_manifests import manifests, object_name
from closeranks.engines.kubernetes_options import parse
from closeranks.errors import ConfigError

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden"
KEY = "-----BEGIN PRIVATE KEY-----\nTk8gUkVBTCBLRVkgQVQgQUxM\n-----END PRIVATE KEY-----\n"
BUNDLES = Bundles(controller=f"closeranks-role: controller\n{KEY}", agent=f"closeranks-role: agent\n{KEY}")
SPEC = JobSpec(
    job_id="llama-7b", run_dir=Path("/closeranks-runs/llama-7b"), min_nodes=3, max_nodes=4, spares=1,
    run_argv=("--engine", "kubernetes", "--nnodes", "3:4", "--spares", "1", "train.py", "--lr", "1e-3"),
    python="/usr/bin/python3",
)  # fmt: skip
SMALL = {"image": "registry.example/train:1"}
LARGE = {
    **SMALL, "namespace": "research", "gpus": "8", "cpu": "64", "memory": "512Gi", "shm": "64Gi",
    "claim": "runs",
    "priority_class": "training", "user": "1000", "cordon": "true", "image_pull_secret": "registry",
    "image_pull_policy": "IfNotPresent", "working_dir": "/src", "grace_s": "300", "env.NCCL_DEBUG": "WARN",
    "label.team": "language", "annotation.example.com/cost-center": "42", "resource.rdma/hca": "4",
    "node_selector.cloud.google.com/gke-nodepool": "h200", "toleration.nvidia.com/gpu": ":NoSchedule",
}  # fmt: skip
CASES = {
    "jobset-small.yaml": (replace(SPEC, spares=0), SMALL, None),
    "jobset-large.yaml": (SPEC, LARGE, None),
    "trainjob-small.yaml": (SPEC, {**SMALL, "format": "trainjob"}, None),
}


def rendered(spec: JobSpec, options: dict[str, str], bundles: Bundles | None = None) -> str:
    return manifests(spec, parse(options), bundles)


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


def by_kind(text: str) -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in documents(text)}


def jobs_of(text: str) -> dict[str, dict[str, Any]]:
    kinds = by_kind(text)
    spec = (
        kinds["JobSet"]["spec"] if "JobSet" in kinds else kinds["TrainingRuntime"]["spec"]["template"]["spec"]
    )
    return {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job["template"]["spec"]["containers"]
    return container


# --- as people read it ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    spec, options, bundles = CASES[name]
    again = "if that is meant: python tests/engines/test_kubernetes_manifests.py"
    assert rendered(spec, options, bundles) == (GOLDEN / name).read_text(), again


def test_two_renderings_are_equal() -> None:
    turned = dict(reversed(LARGE.items()))
    assert rendered(SPEC, LARGE) == rendered(SPEC, turned)


# --- as the published schemas want it ---------------------------------------------------------------

TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
}


def problems(schema: dict[str, Any], value: Any, where: str) -> Iterator[str]:
    """What of ``value`` a structural schema of Kubernetes refuses, or would silently drop."""
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            yield f"{where}: {value!r} is neither a number nor a text"
        return
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{where}: {value!r} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {schema['enum']}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{where}: {value!r} doesn't match {schema['pattern']}"
    if isinstance(value, (str, list)):
        bounds = ("minLength", "maxLength") if isinstance(value, str) else ("minItems", "maxItems")
        if not schema.get(bounds[0], 0) <= len(value) <= schema.get(bounds[1], len(value)):
            yield f"{where}: {len(value)} long"
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{where}: {value} is out of bounds"
    if schema.get("format") == "int32" and not -(2**31) <= value < 2**31:
        yield f"{where}: {value} doesn't fit"
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from problems(schema["items"], item, f"{where}[{index}]")
    if isinstance(value, dict):
        yield from problems_of_object(schema, value, where)


def problems_of_object(schema: dict[str, Any], value: dict[str, Any], where: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    yield from (f"{where}.{name} is missing" for name in schema.get("required", ()) if name not in value)
    anything = schema.get("x-kubernetes-preserve-unknown-fields") or (not known and not others)
    for name, item in value.items():
        if name in known:
            yield from problems(known[name], item, f"{where}.{name}")
        elif isinstance(others, dict):
            yield from problems(others, item, f"{where}.{name}")
        elif not anything:
            yield f"{where}.{name} is unknown"


def schema_of(document: dict[str, Any]) -> dict[str, Any]:
    version = document["apiVersion"].rpartition("/")[2]
    return json.loads((HERE / "schemas" / f"{document['kind']}.{version}.json").read_text())


OURS = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "Secret"}


@pytest.mark.parametrize("form", ["jobset", "trainjob"])
@pytest.mark.parametrize("options", [SMALL, LARGE], ids=["small", "large"])
def test_published_crds_take_them(form: str, options: dict[str, str]) -> None:
    found = documents(rendered(SPEC, {**options, "format": form}, BUNDLES))
    custom = [document for document in found if document["kind"] not in OURS]
    assert [document["kind"] for document in custom] == (
        ["JobSet"] if form == "jobset" else ["TrainingRuntime", "TrainJob"]
    )
    wrong = [
        each for document in custom for each in problems(schema_of(document), document, document["kind"])
    ]
    assert not wrong, "\n".join(wrong)


def test_the_checker_sees_what_is_wrong() -> None:
    jobset = by_kind(rendered(SPEC, LARGE))["JobSet"]
    pod = jobset["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]
    pod["containers"][0]["volumeMount"] = []
    del pod["containers"][0]["name"]
    pod["terminationGracePeriodSeconds"] = "300"
    jobset["spec"]["failurePolicy"]["rules"][0]["action"] = "Ignore"
    wrong = "\n".join(problems(schema_of(jobset), jobset, "JobSet"))
    found = ["".join(each) for each in re.findall(r"(\w+ is missing|\w+ is unknown|\w+: ')", wrong)]
    assert sorted(found) == [
        "action: '", "name is missing", "terminationGracePeriodSeconds: '", "volumeMount is unknown",
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["jobset", "trainjob"])
@pytest.mark.parametrize("options", [SMALL, LARGE], ids=["small", "large"])
def test_models_of_the_official_client_take_them(form: str, options: dict[str, str]) -> None:
    """They refuse unknown fields, missing ones, and wrong types."""
    models = pytest.importorskip("kubernetes.client.models", reason="SKIPPED CHECK: pip install kubernetes")
    text = rendered(SPEC, {**options, "format": form}, BUNDLES)
    checked = set()
    for document in documents(text):
        if document["kind"] in OURS:
            getattr(models, f"V1{document['kind']}").model_validate(document)
            checked.add(document["kind"])
    assert checked == (OURS if options is LARGE else OURS - {"ClusterRole", "ClusterRoleBinding"})
    for job in jobs_of(text).values():
        models.V1JobSpec.model_validate(job)
    with pytest.raises(ValueError, match="nonsense"):
        container_of(job)["nonsense"] = 1
        models.V1JobSpec.model_validate(job)


# --- what Kubernetes' own validation asks beyond schemas --------------------------------------------


@pytest.mark.parametrize("form", ["jobset", "trainjob"])
def test_rules_of_jobs(form: str) -> None:
    jobs = jobs_of(rendered(SPEC, {**LARGE, "format": form}))
    assert {name: job["parallelism"] for name, job in jobs.items()} == {
        "controller": 1,
        "node": 4,
        "spare": 1,
    }
    for name, job in jobs.items():
        pod = job["template"]["spec"]
        assert job["completionMode"] == "Indexed" and pod["restartPolicy"] == "Never"
        assert job["completions"] == job["parallelism"]
        assert {mount["name"] for mount in container_of(job)["volumeMounts"]} == {
            volume["name"] for volume in pod["volumes"]
        }
        if name == "controller":
            assert job["podReplacementPolicy"] == "Failed"  # all that goes with a podFailurePolicy
            values = job["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
            assert values == sorted(set(values)) and len(values) <= 255
        else:
            assert "podFailurePolicy" not in job and job["backoffLimitPerIndex"] == 2**31 - 1


def test_a_trainjob_is_what_the_trainers_webhook_wants() -> None:
    kinds = by_kind(rendered(SPEC, {**SMALL, "format": "trainjob"}))
    runtime, job = kinds["TrainingRuntime"], kinds["TrainJob"]
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime["metadata"]["name"],
    }  # fmt: skip
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 4}, (
        "a policy of torch's would set torchrun's variables"
    )
    (trainer,) = (
        each
        for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]
        if "metadata" in each["template"]
    )
    assert trainer["name"] == "node" and trainer["replicas"] == 1
    assert trainer["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert container_of(trainer["template"]["spec"])["name"] == "node"


def test_agents_find_the_controller_by_its_pods_name() -> None:
    text = rendered(SPEC, SMALL)
    jobset, jobs = by_kind(text)["JobSet"], jobs_of(text)
    set_name, subdomain = jobset["metadata"]["name"], jobset["spec"]["network"]["subdomain"]
    command = container_of(jobs["node"])["command"]
    # <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>, says the schema of the JobSet
    assert command[command.index("--controller") + 1] == f"{set_name}-controller-0-0.{subdomain}:29401"
    listens = container_of(jobs["controller"])["command"]
    assert listens[listens.index("--listen") + 1] == "0.0.0.0:29401"


def test_each_pod_has_its_own_roles_secret_and_no_more() -> None:
    for name, job in jobs_of(rendered(SPEC, LARGE)).items():
        pod, role = job["template"]["spec"], "controller" if name == "controller" else "agent"
        (secret,) = (volume["secret"] for volume in pod["volumes"] if "secret" in volume)
        assert secret == {"secretName": f"llama-7b-{role}", "defaultMode": 0o400}
        command = container_of(job)["command"]
        assert command[command.index("--credentials") + 1] == f"/run/closeranks/{role}.pem"
        assert pod.get("automountServiceAccountToken", True) is (role == "controller")


def test_an_agent_goes_by_its_host_and_its_pod() -> None:
    env = {
        each["name"]: each.get("valueFrom")
        for each in container_of(jobs_of(rendered(SPEC, LARGE))["spare"])["env"]
    }
    assert env["CLOSERANKS_NODE"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert env["CLOSERANKS_SESSION"] == {"fieldRef": {"fieldPath": "metadata.uid"}}


def test_two_agents_share_no_host_spares_included() -> None:
    for name, job in jobs_of(rendered(SPEC, SMALL)).items():
        affinity = job["template"]["spec"]["affinity"]["podAntiAffinity"]
        if name == "controller":
            assert list(affinity) == ["preferredDuringSchedulingIgnoredDuringExecution"]
            continue
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        labels = job["template"]["metadata"]["labels"]
        assert term["labelSelector"]["matchLabels"].items() <= labels.items()


def test_nobody_gets_a_permission_that_wasnt_asked_for() -> None:
    roles = by_kind(rendered(SPEC, SMALL))
    assert "ClusterRole" not in roles
    assert roles["Role"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "delete"]}
    ]
    watching = by_kind(rendered(SPEC, {**SMALL, "namespace": "research", "watch_nodes": "true"}))[
        "ClusterRole"
    ]["rules"]
    assert watching == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]}]
    cordoning = by_kind(rendered(SPEC, {**SMALL, "namespace": "research", "cordon": "true"}))["ClusterRole"][
        "rules"
    ]
    assert cordoning[0]["verbs"] == ["get", "list", "watch", "patch"]
    of_another = by_kind(rendered(SPEC, {**SMALL, "service_account": "trainer"}))
    assert set(of_another) == {"JobSet"}
    assert (
        jobs_of(rendered(SPEC, {**SMALL, "service_account": "trainer"}))["controller"]["template"]["spec"][
            "serviceAccountName"
        ]
        == "trainer"
    )


# --- secrets ----------------------------------------------------------------------------------------


def test_secrets_are_in_no_text_but_the_one_that_is_submitted() -> None:
    text = rendered(SPEC, LARGE)
    assert "kind: Secret" not in text
    assert "kubectl create secret generic llama-7b-agent --namespace research --from-file=agent.pem" in text
    assert "PRIVATE" not in repr(BUNDLES) and "agent" not in repr(BUNDLES).replace("Bundles", "")
    submitted = documents(rendered(SPEC, LARGE, BUNDLES))
    secrets = {each["metadata"]["name"]: each["data"] for each in submitted if each["kind"] == "Secret"}
    assert {name: list(data) for name, data in secrets.items()} == {
        "llama-7b-controller": ["controller.pem"], "llama-7b-agent": ["agent.pem"],
    }  # fmt: skip
    assert documents(text) == [each for each in submitted if each["kind"] != "Secret"]


# --- whatever is put in -----------------------------------------------------------------------------

HOSTILE = [
    "a: b", "- x", "# no comment", "x\n---\nkind: Pod", "'", '"', "\\", "{}", "[1]", "&a", "*a", "%",
    "!!python/name:os", "yes", "No", "y", "null", "~", "1e5", "0o17", "0x1F", "1_000", "12:30:45", ".5", "1.",
    "-", "--",
    "=", "<<", "on", "\u2028kind: x", "\u0085x: y", "\x07", "é", "😀", "\ufeff", " lead", "trail ",
    "\t", "", "$(NODE)", "$$", "a" * 3000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_arguments_come_out_as_they_went_in(text: str) -> None:
    plain, env = replace(SPEC, run_argv=("train.py", text)), {**SMALL, "env.X": text, "annotation.x": text}
    result = rendered(plain, env)
    assert result.isascii()
    assert len(documents(result)) == len(documents(rendered(SPEC, SMALL)))
    node = jobs_of(result)["node"]
    meant = text.replace("$", "$$")  # Kubernetes makes one of two, and would expand one
    assert container_of(node)["command"][-2:] == ["train.py", meant]
    assert container_of(node)["env"][0] == {"name": "X", "value": meant}
    assert node["template"]["metadata"]["annotations"]["x"] == text


@settings(deadline=None, max_examples=30)
@given(st.text(min_size=1, max_size=40), st.lists(st.text(max_size=40), max_size=4))
def test_any_job_renders_as_data(job_id: str, argv: list[str]) -> None:
    text = rendered(replace(SPEC, job_id=job_id, run_argv=tuple(argv)), {**SMALL, "run_dir": "/runs/x"})
    kinds = [document["kind"] for document in documents(text)]
    assert kinds == ["ServiceAccount", "Role", "RoleBinding", "JobSet"]
    command = container_of(jobs_of(text)["node"])["command"]
    assert command[command.index("--") + 1 :] == [each.replace("$", "$$") for each in argv]
    assert by_kind(text)["JobSet"]["metadata"]["annotations"]["closeranks/job-id"] == job_id


def test_arguments_that_are_no_text_are_refused() -> None:
    """A file's name on Linux may be any bytes; a manifest is text."""
    with pytest.raises(ConfigError, match=r"can't be handed to Kubernetes: it isn't text: 'train\\udcff.py'"):
        rendered(replace(SPEC, run_argv=("train\udcff.py",)), SMALL)


@given(st.text(min_size=1, max_size=200))
def test_names_are_names(job_id: str) -> None:
    name = object_name(job_id)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name), name
    assert len(f"{name}-controller-0-0-abcde") <= 63
    assert len(f"{name}-node-0-16383-abcde") <= 63
    assert object_name(name) == name


def test_names_of_two_jobs_differ() -> None:
    ids = ["llama", "Llama", "llama-", "llama.", "-llama", "7b", "job-7b", "ü", "a" * 40, "a" * 41, "a" * 42]
    assert len({object_name(each) for each in ids}) == len(ids)
    assert object_name("llama") == "llama"


@pytest.mark.parametrize("run_dir", ["relative", "/", "/a/../b", "/a:b"])
def test_a_run_directory_has_to_be_one_inside_of_pods(run_dir: str) -> None:
    with pytest.raises(ConfigError, match="run_dir="):
        rendered(replace(SPEC, run_dir=Path(run_dir)), SMALL)


@pytest.mark.parametrize(("nodes", "spares"), [(0, 0), (16_385, 0), (16_384, 1), (2, -1)])
def test_numbers_of_nodes_are_bounded(nodes: int, spares: int) -> None:
    with pytest.raises(ConfigError, match="nodes"):
        rendered(replace(SPEC, max_nodes=nodes, spares=spares), SMALL)


def test_without_pyyaml_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"pip install 'closeranks\[kubernetes\]'"):
        rendered(SPEC, SMALL)


if __name__ == "__main__":
    for golden, (of_spec, with_options, with_bundles) in CASES.items():
        (GOLDEN / golden).write_text(rendered(of_spec, with_options, with_bundles))
