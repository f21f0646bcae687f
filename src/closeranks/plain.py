"""Dataclasses as plain JSON-able data, and back again. No I/O.

Writing follows the fields one by one, so that a new field needs no code here. Reading follows the type hints:
tolerant of fields that are missing (an older version wrote it) or unknown (a newer one did), strict about
types, and bounded: what is read may come from anybody.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from closeranks.events import ExitStatus

__all__ = ["MAX_ITEMS", "MAX_STRING_CHARS", "PlainError", "from_plain", "shown", "to_plain"]

MAX_STRING_CHARS = 1 << 20
MAX_ITEMS = 1 << 20  # of one list or mapping
_MAX_INTEGER = 1 << 64
_ATOMS = frozenset({str, int, float, bool, type(None)})
_NOTHING_REQUIRED: Mapping[type, frozenset[str]] = {}


class PlainError(ValueError):
    """The data isn't what it should be; the message says where, and what was expected."""


def to_plain(value: Any) -> Any:
    """Dataclasses become objects, enums their values, tuples and sets lists; keys become text."""
    if type(value) in _ATOMS:  # most of what there is
        return value
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    assert dataclasses.is_dataclass(value), f"{type(value)} has no JSON form"
    names = _names(type(value))  # type: ignore[arg-type]
    return {name: to_plain(getattr(value, name)) for name in names}


def from_plain(
    hint: Any, value: Any, where: str, required: Mapping[type, frozenset[str]] = _NOTHING_REQUIRED
) -> Any:
    """``value`` as a ``hint``: a dataclass, say. ``where``: what it is, for messages.

    ``required``: fields without which an object of a class means nothing; all others have a value for "not
    known". Raises PlainError.
    """
    return _Reader(required).read(hint, value, where)


def shown(value: Any) -> str:
    """What ``value`` is, in few words, for a message."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"{type(value).__name__} {value!r}"[:60])


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind))


@functools.cache
def _fields(kind: type) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((f, hints[f.name]) for f in dataclasses.fields(kind))


class _Reader:
    def __init__(self, required: Mapping[type, frozenset[str]]) -> None:
        self._required = required

    def read(self, hint: Any, value: Any, where: str) -> Any:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            return None if value is None else self.read(_member(args, value), value, where)
        if origin is tuple:
            return self._tuple(args, value, where)
        if origin is dict:
            return self._mapping(args, value, where)
        if dataclasses.is_dataclass(hint):
            return self._object(typing.cast(type, hint), value, where)
        return _scalar(hint, value, where)

    def _object(self, kind: type, value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise PlainError(f"{where}: expected an object, found {shown(value)}")
        found: dict[str, Any] = {}
        for f, hint in _fields(kind):
            if f.name in value:
                found[f.name] = self.read(hint, value[f.name], f"{where}: {f.name}")
            elif f.name in self._required.get(kind, ()):
                raise PlainError(f"{where}: {f.name} is missing")
            elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                found[f.name] = self._nothing(hint)
        if kind is ExitStatus:
            code, number = found.get("code"), found.get("signal")
            if (code is None) == (number is None):
                raise PlainError(f"{where}: an exit has either a code or a signal")
        return kind(**found)

    def _nothing(self, hint: Any) -> Any:
        """What stands for a field that isn't there."""
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            return None
        if isinstance(hint, type) and issubclass(hint, Enum):
            return next(iter(hint))
        if dataclasses.is_dataclass(hint):
            return self._object(typing.cast(type, hint), {}, "")
        return (typing.get_origin(hint) or hint)()

    def _tuple(self, args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise PlainError(f"{where}: expected a list, found {shown(value)}")
        if len(value) > MAX_ITEMS:
            raise PlainError(f"{where}: {len(value):,} items; at most {MAX_ITEMS:,} are read")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(self.read(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
        if len(value) != len(args):
            raise PlainError(f"{where}: expected {len(args)} items, found {len(value)}")
        pairs = zip(args, value, strict=True)
        return tuple(self.read(hint, item, f"{where}[{i}]") for i, (hint, item) in enumerate(pairs))

    def _mapping(self, args: tuple[Any, ...], value: Any, where: str) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise PlainError(f"{where}: expected an object, found {shown(value)}")
        if len(value) > MAX_ITEMS:
            raise PlainError(f"{where}: {len(value):,} items; at most {MAX_ITEMS:,} are read")
        mapping: dict[Any, Any] = {}
        for key, item in value.items():
            if args[0] is int and not (len(key) <= 20 and key.isdecimal() and key.isascii()):
                raise PlainError(f"{where}: key {key[:40]!r} is not a number")
            name = int(key) if args[0] is int else key
            mapping[name] = self.read(args[1], item, f"{where}[{key[:40]}]")
        return mapping


def _member(args: Iterable[Any], value: Any) -> Any:
    """Which of a union's members ``value`` is meant to be; of several classes, the one with these fields."""
    some = [hint for hint in args if hint is not type(None)]
    if len(some) > 1 and isinstance(value, dict):
        for hint in some:
            if dataclasses.is_dataclass(hint) and {f.name for f in dataclasses.fields(hint)} == set(value):
                return hint
    return some[0]


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            raise PlainError(f"{where}: {shown(value)} is not a known {hint.__name__.lower()}") from None
    if hint is float and type(value) in (int, float):
        number = float(value) if abs(value) < 1e308 else math.inf
        if math.isfinite(number):
            return number
    elif hint is int and type(value) is int:
        if abs(value) <= _MAX_INTEGER:
            return value
    elif hint is str and type(value) is str:
        if len(value) > MAX_STRING_CHARS:
            raise PlainError(
                f"{where}: text of {len(value):,} characters; at most {MAX_STRING_CHARS:,} are read"
            )
        return value
    elif hint is bool and type(value) is bool:
        return value
    wanted = {float: "a number", int: "a whole number of at most 64 bits", str: "text", bool: "true or false"}
    raise PlainError(f"{where}: expected {wanted.get(hint, str(hint))}, found {shown(value)}")
