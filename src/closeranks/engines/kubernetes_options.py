"""The settings of the Kubernetes engine, as given with ``--engine-option NAME=VALUE``: read once, checked
at once.

What gets past here is well-formed: names, quantities and numbers. A wrong one is an error before anything
is rendered, with the names that would do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from closeranks.errors import ConfigError

__all__ = ["FORMATS", "KubernetesOptions", "parse"]

FORMATS = ("jobset", "trainjob")
_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_QUANTITY = re.compile(r"[0-9]{1,18}(\.[0-9]{1,9})?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_KEY = re.compile(r"(?P<prefix>[^/]{1,253}/)?(?P<name>[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_MAX_VALUE_CHARS = 4096


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """One field an option; the mappings and ``tolerations`` gather the options that end in a key of one's
    own, such as ``env.NCCL_DEBUG=INFO``. Empty means: whatever the cluster does by default."""

    image: str
    format: str = "jobset"
    namespace: str = ""
    python: str = "python3"
    port: int = 29401
    run_dir: str = ""
    claim: str = ""
    working_dir: str = ""
    gpus: int = 0
    cpu: str = ""
    memory: str = ""
    shm: str = ""
    controller_cpu: str = "1"
    controller_memory: str = "1Gi"
    controller_restarts: int = 20
    grace_s: int = 120
    priority_class: str = ""
    service_account: str = ""
    image_pull_policy: str = ""
    image_pull_secret: str = ""
    user: int | None = None
    watch_nodes: bool = False
    cordon: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    label: Mapping[str, str] = field(default_factory=dict)
    annotation: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    resource: Mapping[str, str] = field(default_factory=dict)
    toleration: tuple[tuple[str, str, str], ...] = ()
    drain_mark: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs_nodes(self) -> bool:
        """Whether the controller looks at node objects, which takes a role of the whole cluster."""
        return self.watch_nodes or self.cordon


_NUMBERS = {
    "port": (1024, 65535),
    "gpus": (0, 1024),
    "controller_restarts": (0, 10_000),
    "grace_s": (1, 86_400),
    "user": (0, 2**31 - 1),
}
_FLAGS = ("watch_nodes", "cordon")
_QUANTITIES = ("cpu", "memory", "shm", "controller_cpu", "controller_memory")
_NAMES = ("priority_class", "service_account", "image_pull_secret", "claim")
_CHOICES = {"format": FORMATS, "image_pull_policy": _PULL_POLICIES}
_PATHS = ("run_dir", "working_dir")
_TEXTS = ("image", "python", "namespace")
_SINGLE = (*_TEXTS, *_NUMBERS, *_FLAGS, *_QUANTITIES, *_NAMES, *_CHOICES, *_PATHS)
_KEYED = ("env", "label", "annotation", "node_selector", "resource", "toleration", "drain_mark")


def parse(options: Mapping[str, str]) -> KubernetesOptions:
    """Raises ConfigError, which names the option and what it may be."""
    single: dict[str, object] = {}
    keyed: dict[str, dict[str, str]] = {}
    for name, value in options.items():
        if len(value) > _MAX_VALUE_CHARS or "\0" in value:
            raise _wrong(name, value[:40], f"at most {_MAX_VALUE_CHARS:,} characters, none of them NUL")
        group, dot, key = name.partition(".")
        if dot and group in _KEYED:
            keyed.setdefault(group, {})[key] = _checked_key(group, key, value)
        elif name in _SINGLE:
            single[name] = _checked(name, value)
        else:
            raise ConfigError(f"the Kubernetes engine has no option {name[:60]!r}{_hint(name)}")
    if not single.get("image"):
        raise ConfigError(
            "the Kubernetes engine needs a container image with torch and closeranks in it: "
            "--engine-option image=registry/name:tag"
        )
    if "true" in (options.get("watch_nodes"), options.get("cordon")) and not single.get("namespace"):
        raise ConfigError(
            "looking at nodes takes a role of the whole cluster, which has to name the namespace of the job's"
            " account: --engine-option namespace=NAME"
        )
    tolerations = tuple(_toleration(key, text) for key, text in sorted(keyed.pop("toleration", {}).items()))
    groups = {group: dict(sorted(values.items())) for group, values in keyed.items()}
    return KubernetesOptions(**single, **groups, toleration=tolerations)  # type: ignore[arg-type]


def _hint(name: str) -> str:
    known = [*_SINGLE, *(f"{group}.KEY" for group in _KEYED)]
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; it has {', '.join(known)}"


def _wrong(name: str, value: str, may_be: str) -> ConfigError:
    return ConfigError(f"--engine-option {name[:60]!s}={value[:80]!r}: it may be {may_be}")


def _checked(name: str, value: str) -> object:
    if name in _NUMBERS:
        low, high = _NUMBERS[name]
        if not (re.fullmatch(r"[0-9]{1,10}", value) and low <= int(value) <= high):
            raise _wrong(name, value, f"a whole number from {low} to {high}")
        return int(value)
    if name in _FLAGS:
        if value not in ("true", "false"):
            raise _wrong(name, value, "true or false")
        return value == "true"
    if name in _CHOICES and value not in _CHOICES[name]:
        raise _wrong(name, value, " or ".join(_CHOICES[name]))
    if name in _QUANTITIES and not _QUANTITY.fullmatch(value):
        raise _wrong(name, value, "a quantity of Kubernetes, such as 4, 500m or 64Gi")
    if name in _NAMES and not (len(value) <= 253 and _DNS_NAME.fullmatch(value)):
        raise _wrong(name, value, "the name of an object: lower case letters, digits, - and .")
    if name == "namespace" and not _DNS_LABEL.fullmatch(value):
        raise _wrong(name, value, "lower case letters, digits and -, 63 at most")
    if name in _PATHS and not _is_plain_path(value):
        raise _wrong(name, value, "an absolute path inside of the container, without .. and :")
    if name in ("image", "python") and (not value or not value.isprintable() or re.search(r"\s", value)):
        raise _wrong(name, value, "printable characters without spaces")
    return value


def _is_plain_path(value: str) -> bool:
    path = PurePosixPath(value)
    return value.isprintable() and path.is_absolute() and not {"..", ":"} & {*path.parts, *value}


def _checked_key(group: str, key: str, value: str) -> str:
    name = f"{group}.{key}"
    if group == "env":
        if not _VARIABLE.fullmatch(key):
            raise _wrong(name, value, "given for a variable: letters, digits and _, no digit first")
        return value
    match = _KEY.fullmatch(key)
    if match is None or not (match["prefix"] is None or _DNS_NAME.fullmatch(match["prefix"][:-1])):
        raise _wrong(name, value, "given for a key of Kubernetes, such as example.com/name")
    if key.startswith("closeranks/") and group in ("label", "annotation"):
        raise _wrong(name, value, "given for any key but those that begin with closeranks/")
    if group in ("label", "node_selector") and not _LABEL_VALUE.fullmatch(value):
        raise _wrong(name, value, "a label's value: letters, digits, - _ and ., 63 at most")
    if group == "resource" and not _QUANTITY.fullmatch(value):
        raise _wrong(name, value, "a quantity of Kubernetes, such as 8 or 2Gi")
    return value


def _toleration(key: str, text: str) -> tuple[str, str, str]:
    """``[VALUE][:EFFECT]`` as (key, value, effect)."""
    value, colon, effect = text.partition(":")
    if not _LABEL_VALUE.fullmatch(value) or (colon and effect not in _EFFECTS):
        raise _wrong(f"toleration.{key}", text, f"[VALUE][:EFFECT], the effect one of {', '.join(_EFFECTS)}")
    return key, value, effect
