"""Make the schemas in tests/engines/schemas from published CustomResourceDefinitions: structure only, no
texts.

python scripts/strip_crds.py jobset.x-k8s.io_jobsets.yaml trainer.kubeflow.org_trainjobs.yaml ...
"""
# ruff: noqa: T201

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

KEPT = {
    "additionalProperties", "enum", "format", "items", "maximum", "maxItems", "maxLength", "minimum",
    "minItems", "minLength", "pattern", "properties", "required", "type", "uniqueItems",
    "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields",
}  # fmt: skip
TARGET = Path(__file__).resolve().parent.parent / "tests" / "engines" / "schemas"


def stripped(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` without descriptions and rules in CEL."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: stripped(each) for name, each in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            found[key] = stripped(value)
        elif key in KEPT:
            found[key] = value
    return found


def main() -> None:
    """One file a kind and version, on one line each."""
    for name in sys.argv[1:]:
        definition = yaml.safe_load(Path(name).read_text())
        for version in definition["spec"]["versions"]:
            kind = definition["spec"]["names"]["kind"]
            schema = stripped(version["schema"]["openAPIV3Schema"])
            schema["properties"].pop("status", None)
            path = TARGET / f"{kind}.{version['name']}.json"
            path.write_text(json.dumps(schema, sort_keys=True, separators=(",", ":")) + "\n")
            print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
