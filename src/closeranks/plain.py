"""Dataclasses as plain JSON-able data, and back again. No I/O.

Writing follows the fields one by one, so that a new field needs no code here. Reading follows the type hints:
tolerant of fields that are missing (an older version wrote it) or unknown (a newer one did), strict about
types, and bounded: what is read may come from anybody.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
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
    try:
        return _reader(hint)(value, required)
    except _Wrong as wrong:
        raise PlainError(f"{where}{''.join(reversed(wrong.path))}: {wrong.text}") from None


def shown(value: Any) -> str:
    """What ``value`` is, in few words, for a message."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"{type(value).__name__} {value!r}"[:60])


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind))


# --- reading: a function for each type hint, made once ------------------------------------------------

_Required = Mapping[type, frozenset[str]]
_Read = Callable[[Any, _Required], Any]


class _Wrong(Exception):
    """What is wrong, and the way to it, which grows as the readers return: innermost first."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.path: list[str] = []


@functools.cache
def _fields(kind: type) -> tuple[tuple[dataclasses.Field[Any], Any, _Read], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((f, hints[f.name], _reader(hints[f.name])) for f in dataclasses.fields(kind))


@functools.cache
def _reader(hint: Any) -> _Read:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return functools.partial(_read_union, args)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return functools.partial(_read_list, _reader(args[0]))
        return functools.partial(_read_tuple, tuple(map(_reader, args)))
    if origin is dict:
        return functools.partial(_read_mapping, args[0] is int, _reader(args[1]))
    if dataclasses.is_dataclass(hint):
        return functools.partial(_read_object, typing.cast(type, hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return functools.partial(_read_enum, hint)
    return functools.partial(_read_scalar, hint)


def _read_union(args: tuple[Any, ...], value: Any, required: _Required) -> Any:
    return None if value is None else _reader(_member(args, value))(value, required)


def _read_object(kind: type, value: Any, required: _Required) -> Any:
    if not isinstance(value, dict):
        raise _Wrong(f"expected an object, found {shown(value)}")
    found: dict[str, Any] = {}
    for f, hint, read in _fields(kind):
        name = f.name
        if name in value:
            try:
                found[name] = read(value[name], required)
            except _Wrong as wrong:
                wrong.path.append(f": {name}")
                raise
        elif name in required.get(kind, ()):
            raise _Wrong(f"{name} is missing")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            found[name] = _nothing(hint, required)
    if kind is ExitStatus:
        code, number = found.get("code"), found.get("signal")
        if (code is None) == (number is None):
            raise _Wrong("an exit has either a code or a signal")
    return kind(**found)


def _nothing(hint: Any, required: _Required) -> Any:
    """What stands for a field that isn't there."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return None
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    if dataclasses.is_dataclass(hint):
        return _read_object(typing.cast(type, hint), {}, required)
    args = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and Ellipsis not in args:
        return tuple(_nothing(arg, required) for arg in args)
    return (typing.get_origin(hint) or hint)()


def _read_list(read: _Read, value: Any, required: _Required) -> tuple[Any, ...]:
    return tuple(_read_items(itertools.repeat(read), _checked_list(value), required))


def _read_tuple(reads: tuple[_Read, ...], value: Any, required: _Required) -> tuple[Any, ...]:
    if len(_checked_list(value)) != len(reads):
        raise _Wrong(f"expected {len(reads)} items, found {len(value)}")
    return tuple(_read_items(reads, value, required))


def _checked_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _Wrong(f"expected a list, found {shown(value)}")
    if len(value) > MAX_ITEMS:
        raise _Wrong(f"{len(value):,} items; at most {MAX_ITEMS:,} are read")
    return value


def _read_items(reads: Iterable[_Read], value: list[Any], required: _Required) -> list[Any]:
    items: list[Any] = []
    try:
        for item, read in zip(value, reads, strict=False):
            items.append(read(item, required))  # how many there are tells where it went wrong
    except _Wrong as wrong:
        wrong.path.append(f"[{len(items)}]")
        raise
    return items


def _read_mapping(by_number: bool, read: _Read, value: Any, required: _Required) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"expected an object, found {shown(value)}")
    if len(value) > MAX_ITEMS:
        raise _Wrong(f"{len(value):,} items; at most {MAX_ITEMS:,} are read")
    mapping: dict[Any, Any] = {}
    for key, item in value.items():
        if by_number and not (len(key) <= 20 and key.isdecimal() and key.isascii()):
            raise _Wrong(f"key {key[:40]!r} is not a number")
        try:
            mapping[int(key) if by_number else key] = read(item, required)
        except _Wrong as wrong:
            wrong.path.append(f"[{key[:40]}]")
            raise
    return mapping


def _member(args: Iterable[Any], value: Any) -> Any:
    """Which of a union's members ``value`` is meant to be; of several classes, the one with these fields."""
    some = [hint for hint in args if hint is not type(None)]
    if len(some) > 1 and isinstance(value, dict):
        for hint in some:
            if dataclasses.is_dataclass(hint) and {f.name for f in dataclasses.fields(hint)} == set(value):
                return hint
    return some[0]


def _read_enum(kind: type[Enum], value: Any, _required: _Required) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise _Wrong(f"{shown(value)} is not a known {kind.__name__.lower()}") from None


def _read_scalar(hint: Any, value: Any, _required: _Required) -> Any:
    kind = type(value)
    if hint is str and kind is str:
        if len(value) > MAX_STRING_CHARS:
            raise _Wrong(f"text of {len(value):,} characters; at most {MAX_STRING_CHARS:,} are read")
        return value
    if hint is int and kind is int:
        if abs(value) <= _MAX_INTEGER:
            return value
    elif hint is float and kind in (int, float):
        number = float(value) if abs(value) < 1e308 else math.inf
        if math.isfinite(number):
            return number
    elif hint is bool and kind is bool:
        return value
    wanted = {float: "a number", int: "a whole number of at most 64 bits", str: "text", bool: "true or false"}
    raise _Wrong(f"expected {wanted.get(hint, str(hint))}, found {shown(value)}")
