"""Options: each is checked, and each error says what would do."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from closeranks.engines.kubernetes_options import _KEYED, _SINGLE, KubernetesOptions, parse
from closeranks.errors import ConfigError

IMAGE = {"image": "registry.example/train:1"}


def test_every_option_has_its_field_and_every_field_its_option() -> None:
    assert sorted((*_SINGLE, *_KEYED)) == sorted(field.name for field in fields(KubernetesOptions))


def test_every_option_is_documented() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "kubernetes.md").read_text()
    names = [*_SINGLE, *(f"{group}.{'NAME' if group == 'env' else 'KEY'}" for group in _KEYED)]
    assert not [name for name in names if f"`{name}`" not in page]


def test_what_is_given_arrives() -> None:
    found = parse(
        {
            **IMAGE, "gpus": "8", "cordon": "true", "namespace": "research",
            "shm": "64Gi", "user": "0", "run_dir": "/runs/x",
            "env.NCCL_IB_HCA": "=mlx5_0:1", "resource.rdma/hca": "4", "toleration.a": "",
            "toleration.example.com/gpu": "yes:NoExecute",
            "drain_mark.example.com/maintenance": "", "node_selector.pool": "h200",
        }
    )  # fmt: skip
    assert (found.gpus, found.cordon, found.shm, found.user, found.run_dir) == (8, True, "64Gi", 0, "/runs/x")
    assert found.env == {"NCCL_IB_HCA": "=mlx5_0:1"} and found.resource == {"rdma/hca": "4"}
    assert found.toleration == (("a", "", ""), ("example.com/gpu", "yes", "NoExecute"))
    assert found.drain_mark == {"example.com/maintenance": ""} and found.node_selector == {"pool": "h200"}
    assert found.needs_nodes and not parse(IMAGE).needs_nodes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs a container image"),
        ({"image": ""}, "printable characters"),
        ({"image": "a b"}, "printable characters"),
        ({"image": "a\nb"}, "printable characters"),
        ({**IMAGE, "iamge": "x"}, "did you mean image"),
        ({**IMAGE, "env": "A=B"}, "no option 'env'"),
        ({**IMAGE, "nonsense.x": "1"}, "no option 'nonsense.x'"),
        ({**IMAGE, "gpus": "-1"}, "a whole number from 0 to"),
        ({**IMAGE, "gpus": "eight"}, "a whole number from 0 to"),
        ({**IMAGE, "gpus": "٣"}, "a whole number from 0 to"),
        ({**IMAGE, "gpus": "9999999999"}, "a whole number from 0 to"),
        ({**IMAGE, "port": "80"}, "a whole number from 1024 to 65535"),
        ({**IMAGE, "cordon": "yes"}, "true or false"),
        ({**IMAGE, "cordon": "true"}, "namespace=NAME"),
        ({**IMAGE, "watch_nodes": "true"}, "namespace=NAME"),
        ({**IMAGE, "format": "pod"}, "jobset or trainjob"),
        ({**IMAGE, "image_pull_policy": "Sometimes"}, "IfNotPresent"),
        ({**IMAGE, "memory": "lots"}, "a quantity of Kubernetes"),
        ({**IMAGE, "memory": "1Gi\nx: y"}, "a quantity of Kubernetes"),
        ({**IMAGE, "claim": "Runs"}, "the name of an object"),
        ({**IMAGE, "namespace": "a.b"}, "63 at most"),
        ({**IMAGE, "namespace": "a$(reboot)"}, "63 at most"),
        ({**IMAGE, "run_dir": "runs"}, "an absolute path"),
        ({**IMAGE, "run_dir": "/a/../b"}, "an absolute path"),
        ({**IMAGE, "run_dir": "/a:b"}, "an absolute path"),
        ({**IMAGE, "working_dir": "/a\n"}, "an absolute path"),
        ({**IMAGE, "env.1A": "x"}, "for a variable"),
        ({**IMAGE, "env.": "x"}, "for a variable"),
        ({**IMAGE, "env.A": "x" * 4097}, "at most 4,096 characters"),
        ({**IMAGE, "env.A": "x\0"}, "none of them NUL"),
        ({**IMAGE, "label.a b": "x"}, "for a key of Kubernetes"),
        ({**IMAGE, "label.a": "x y"}, "a label's value"),
        ({**IMAGE, "label.a": "x\n"}, "a label's value"),
        ({**IMAGE, "label.UPPER.example/a": "x"}, "for a key of Kubernetes"),
        ({**IMAGE, "label.closeranks/role": "controller"}, "begin with closeranks/"),
        ({**IMAGE, "resource.nvidia.com/gpu": "many"}, "a quantity of Kubernetes"),
        ({**IMAGE, "toleration.a": "x:Never"}, "NoSchedule"),
        ({**IMAGE, "toleration.a": "x:"}, "NoSchedule"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(options)
    assert says in str(error.value)
    assert len(str(error.value)) < 800 and "\n" not in str(error.value)
