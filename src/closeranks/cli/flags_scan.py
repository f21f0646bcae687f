"""From a command line to what was given: torchrun's grammar, no values read yet.

argparse can't do this on the Pythons we support: it matches the *script's* arguments against our flags (so
``torchrun train.py --no`` fails as ambiguous), and on 3.11 it holds ``--nproc`` to be ambiguous because the
flag has two spellings. Everything from the script on is left untouched here, a ``--`` included.
"""

from __future__ import annotations

from typing import NamedTuple

from closeranks.cli.flags_table import Flag
from closeranks.cli.flags_values import shown
from closeranks.errors import UsageError

__all__ = ["Given", "scan"]


class Given(NamedTuple):
    """A flag as it was given: under which spelling, and with which text ("" for a switch)."""

    flag: Flag
    spelling: str
    text: str


def scan(argv: list[str], flags: tuple[Flag, ...]) -> tuple[list[Given], list[str]]:
    """The flags before the script, and the rest: script and its arguments.

    Raises UsageError for a flag that isn't one, is ambiguous, misses its value or takes none.
    """
    given: list[Given] = []
    rest = list(argv)
    while rest and rest[0] != "-" and rest[0].startswith("-"):
        token = rest.pop(0)
        if token == "--":
            break
        take = _long if token.startswith("--") else _cluster
        given.extend(take(token, rest, flags))
    return given, rest


def _long(token: str, rest: list[str], flags: tuple[Flag, ...]) -> list[Given]:
    name, equals, text = token.partition("=")
    flag, spelling = _find(name, flags)
    if flag.is_switch:
        if equals:
            raise UsageError(f"{spelling} is a switch and takes no value, not {shown(text)}")
        return [Given(flag, spelling, "")]
    return [Given(flag, spelling, text if equals else _value(flag, spelling, rest))]


def _cluster(token: str, rest: list[str], flags: tuple[Flag, ...]) -> list[Given]:
    """Short flags: ``-m``, ``-r 3``, ``-r3``, ``-r=3``, ``-mr3``."""
    given: list[Given] = []
    letters = token[1:]
    while letters:
        spelling, letters = "-" + letters[0], letters[1:]
        flag = next((f for f in flags if f.short == spelling), None)
        if flag is None:
            raise _unknown(token, flags)
        if flag.is_switch:
            given.append(Given(flag, spelling, ""))
            continue
        text = letters.removeprefix("=") if letters else _value(flag, spelling, rest)
        given.append(Given(flag, spelling, text))
        break
    return given


def _value(flag: Flag, spelling: str, rest: list[str]) -> str:
    if rest and not _looks_like_flag(rest[0]):
        return rest.pop(0)
    hint = ""
    if rest:
        hint = f"; {shown(rest[0])} looks like a flag, so if it is the value write {spelling}={rest[0][:80]}"
    raise UsageError(f"{spelling} needs a value: {spelling} {flag.metavar}{hint}")


def _looks_like_flag(token: str) -> bool:
    """argparse's rule: a dash starts a flag, unless it's alone, starts a number, or a space is inside."""
    if not token.startswith("-") or token == "-" or (" " in token and "=" not in token):
        return False
    number = token[1:].replace(".", "", 1)
    return not number.isdigit()


def _find(name: str, flags: tuple[Flag, ...]) -> tuple[Flag, str]:
    """The flag of that name or unambiguous beginning of one, and the name to call it by."""
    for flag in flags:
        if name in flag.spellings:
            return flag, name
    matches = [f for f in flags if any(s.startswith(name) for s in f.spellings)]
    # What torchrun takes for short must go on to mean the same, whatever flags we add.
    matches = [f for f in matches if f.torchrun] if len(matches) > 1 else matches
    if len(matches) == 1:
        return matches[0], matches[0].long
    matches = [f for f in flags if any(s.startswith(name) for s in f.spellings)]
    if matches:
        raise UsageError(f"{name} can mean {', '.join(f.long for f in matches)}; write more of it")
    raise _unknown(name, flags)


def _unknown(token: str, flags: tuple[Flag, ...]) -> UsageError:
    from difflib import get_close_matches

    name = token.partition("=")[0][:80].lower()
    names = {s: flag.long for flag in flags for s in flag.spellings if s.startswith("--")}
    near = get_close_matches("--" + name.lstrip("-"), names, n=1)
    hint = f"did you mean {names[near[0]]}?" if near else "see closeranks run --help"
    return UsageError(
        f"there is no flag {shown(token)[1:-1]}; {hint} (flags of the script itself go after the script)"
    )
