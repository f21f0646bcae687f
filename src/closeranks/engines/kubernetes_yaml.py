"""Manifests as text that people can read, and that every reader of YAML takes for the same thing.

PyYAML and Kubernetes' own reader follow different versions of YAML: to one ``1e5`` and ``0o17`` are texts,
to the other numbers. So every text that isn't plainly a word is in double quotes, all but ASCII escaped.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from closeranks.errors import ConfigError

__all__ = ["Octal", "to_yaml"]

_WORD = re.compile(r"[A-Za-z/][A-Za-z0-9/_.-]*")
_NOT_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf", "infinity"}


class Octal(int):
    """A file mode, which is written the way people know it."""


def to_yaml(documents: Sequence[tuple[str, Mapping[str, Any] | None]]) -> str:
    """Documents as one text, each under its comment; None: the comment alone. Raises ConfigError without
    PyYAML."""
    yaml, dumper = _dumper()
    parts: list[str] = []
    for comment, document in documents:
        lines = [f"# {_ascii(line)}".rstrip() for line in comment.splitlines()]
        text = "\n".join(lines) + "\n" if lines else ""
        if document is None:
            parts.append(text)
            continue
        plain = yaml.dump(document, Dumper=dumper, sort_keys=False, default_flow_style=False, width=1 << 30)
        parts.append("---\n" + text + plain)
    return "".join(parts)


def _ascii(line: str) -> str:
    """A comment must end where its line does, to every reader."""
    return "".join(char if " " <= char <= "~" else "?" for char in line)


def _dumper() -> tuple[Any, Any]:
    """PyYAML, and how it has to write."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            "manifests for Kubernetes need the library PyYAML: pip install 'closeranks[kubernetes]'"
        ) from error

    def text(representer: Any, data: str) -> Any:
        is_word = _WORD.fullmatch(data) and data.lower() not in _NOT_WORDS
        return representer.represent_scalar("tag:yaml.org,2002:str", data, style=None if is_word else '"')

    def octal(representer: Any, data: Octal) -> Any:
        return representer.represent_scalar("tag:yaml.org,2002:int", f"0{data:o}")

    def indented(emitter: Any, flow: bool = False, indentless: bool = False) -> Any:
        return yaml.SafeDumper.increase_indent(emitter, flow, False)

    # No anchors: the same label may occur twice without a reference from one to the other.
    rules = {"ignore_aliases": lambda self, data: True, "increase_indent": indented}
    dumper: Any = type("Dumper", (yaml.SafeDumper,), rules)
    dumper.add_representer(str, text)
    dumper.add_representer(Octal, octal)
    return yaml, dumper
