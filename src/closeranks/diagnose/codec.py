"""Evidence and verdicts as JSON-able dicts, and back again. No I/O.

Writing follows the dataclasses field by field, so that a new field needs no code here. Reading is tolerant
of fields that are missing (an older version wrote the file) or unknown (a newer one did), strict about
types, and bounded: the file may come from anybody.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

from closeranks.errors import EvidenceError
from closeranks.events import ExitStatus
from closeranks.evidence import Evidence, RankEvidence, Verdict

__all__ = ["FORMAT_VERSION", "evidence_from_json", "public_verdict", "to_json", "verdict_from_json"]

FORMAT_VERSION = 1
MAX_STRING_CHARS = 1 << 20
MAX_ITEMS = 1 << 20  # of one list or mapping
_MAX_INTEGER = 1 << 64
# Without these an object means nothing; all other fields have a value for "not known".
_REQUIRED: dict[type, frozenset[str]] = {
    Evidence: frozenset({"world_size", "ranks"}),
    RankEvidence: frozenset({"rank"}),
    Verdict: frozenset({"leaf"}),
}


def to_json(value: Evidence | Verdict) -> dict[str, Any]:
    """The whole object; ``evidence_from_json`` and ``verdict_from_json`` read it back as an equal one."""
    plain = _plain(value)
    assert isinstance(plain, dict)
    return {"format": FORMAT_VERSION, **plain}


def public_verdict(verdict: Verdict) -> dict[str, Any]:
    """The verdict as tools rely on it (``closeranks diagnose --json``, ``verdict.json``)."""
    return {
        "leaf": verdict.leaf,
        "kind": verdict.kind,
        "table5": verdict.table5,
        "owner": verdict.owner,
        "culprits": [
            {"scope": c.scope, "rank": c.rank, "node": c.node, "gpu": c.gpu, "link": c.link}
            for c in verdict.culprits
        ],
        "action": verdict.action,
        "retry": verdict.retry,
        "confidence": verdict.confidence,
        "summary": verdict.summary,
        "signature": verdict.signature,
        "evidence": [{"source": e.source, "line": e.line, "why": e.why} for e in verdict.evidence],
    }


def evidence_from_json(document: Any) -> Evidence:
    """Raises EvidenceError for what isn't evidence, and says where."""
    evidence: Evidence = _read_document(Evidence, document, "evidence")
    numbers = [entry.rank for entry in evidence.ranks]
    if len(set(numbers)) != len(numbers):
        raise EvidenceError("evidence: ranks: a rank occurs twice; this file was not written by closeranks")
    return evidence


def verdict_from_json(document: Any) -> Verdict:
    """Raises EvidenceError for what isn't a verdict, and says where. Takes ``public_verdict``'s form, too."""
    verdict: Verdict = _read_document(Verdict, document, "verdict")
    if not 0.0 <= verdict.confidence <= 1.0:
        raise EvidenceError(f"verdict: confidence: {verdict.confidence} is not between 0 and 1")
    return verdict


# --- writing ----------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    assert dataclasses.is_dataclass(value), f"{type(value)} has no JSON form"
    return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}


# --- reading ----------------------------------------------------------------------------------------


def _read_document(kind: type, document: Any, what: str) -> Any:
    if not isinstance(document, dict):
        raise EvidenceError(f"{what}: expected an object, found {_name(document)}")
    version = document.get("format", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise EvidenceError(
            f"{what}: format {version!r} is not {FORMAT_VERSION}; "
            "read it with the version of closeranks that wrote it"
        )
    return _read_object(kind, document, what)


def _name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"{type(value).__name__} {value!r}"[:60])


@functools.cache
def _fields(kind: type) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((f, hints[f.name]) for f in dataclasses.fields(kind))


def _read_object(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise EvidenceError(f"{where}: expected an object, found {_name(value)}")
    found: dict[str, Any] = {}
    for f, hint in _fields(kind):
        if f.name in value:
            found[f.name] = _read(hint, value[f.name], f"{where}: {f.name}")
        elif f.name in _REQUIRED.get(kind, ()):
            raise EvidenceError(f"{where}: {f.name} is missing")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            found[f.name] = _nothing(hint)
    if kind is ExitStatus:
        code, number = found.get("code"), found.get("signal")
        if (code is None) == (number is None):
            raise EvidenceError(f"{where}: an exit has either a code or a signal")
    return kind(**found)


def _nothing(hint: Any) -> Any:
    """What stands for a field that the file doesn't have."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return None
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    if dataclasses.is_dataclass(hint):
        return _read_object(typing.cast(type, hint), {}, "")
    return (typing.get_origin(hint) or hint)()


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _read(next(a for a in args if a is not type(None)), value, where)
    if origin is tuple:
        return _read_tuple(args, value, where)
    if origin is dict:
        return _read_mapping(args, value, where)
    if dataclasses.is_dataclass(hint):
        return _read_object(typing.cast(type, hint), value, where)
    return _read_scalar(hint, value, where)


def _read_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise EvidenceError(f"{where}: expected a list, found {_name(value)}")
    if len(value) > MAX_ITEMS:
        raise EvidenceError(f"{where}: {len(value):,} items; at most {MAX_ITEMS:,} are read")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_read(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(args):
        raise EvidenceError(f"{where}: expected {len(args)} items, found {len(value)}")
    return tuple(_read(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(args, value, strict=True)))


def _read_mapping(args: tuple[Any, ...], value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise EvidenceError(f"{where}: expected an object, found {_name(value)}")
    if len(value) > MAX_ITEMS:
        raise EvidenceError(f"{where}: {len(value):,} items; at most {MAX_ITEMS:,} are read")
    mapping: dict[Any, Any] = {}
    for key, item in value.items():
        if args[0] is int and not (len(key) <= 20 and key.isdecimal() and key.isascii()):
            raise EvidenceError(f"{where}: key {key[:40]!r} is not a number")
        mapping[int(key) if args[0] is int else key] = _read(args[1], item, f"{where}[{key[:40]}]")
    return mapping


def _read_scalar(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            raise EvidenceError(f"{where}: {_name(value)} is not a known {hint.__name__.lower()}") from None
    if hint is float and type(value) in (int, float):
        number = float(value) if abs(value) < 1e308 else math.inf
        if math.isfinite(number):
            return number
    elif hint is int and type(value) is int:
        if abs(value) <= _MAX_INTEGER:
            return value
    elif hint is str and type(value) is str:
        if len(value) > MAX_STRING_CHARS:
            raise EvidenceError(
                f"{where}: text of {len(value):,} characters; at most {MAX_STRING_CHARS:,} are read"
            )
        return value
    elif hint is bool and type(value) is bool:
        return value
    wanted = {float: "a number", int: "a whole number of at most 64 bits", str: "text", bool: "true or false"}
    raise EvidenceError(f"{where}: expected {wanted.get(hint, str(hint))}, found {_name(value)}")
