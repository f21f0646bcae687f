"""Readers of flag values: text in, checked value out, ValueError with what was wanted instead.

Pure and cheap to import: ``closeranks run --help`` loads this module and must start nothing heavy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from closeranks.config import StdStreams

__all__ = [
    "Reader",
    "address",
    "choice",
    "comma_list",
    "fault",
    "float_at_least_0",
    "int_at_least_0",
    "job_name",
    "key_values",
    "local_ranks",
    "module_names",
    "name",
    "node_rank",
    "nodes",
    "nproc",
    "off_or_seconds",
    "on_off",
    "path",
    "port",
    "shown",
    "signal_names",
    "std_streams",
    "switch_from_environment",
    "text",
    "urls",
]

Reader = Callable[[str], Any]
_NPROC_WORDS = ("auto", "cpu", "gpu", "xpu")
_MOST_SHOWN_CHARS = 80
_JOB_NAME_CHARS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_MOST_JOB_NAME_CHARS = 64
_UNCATCHABLE = ("SIGKILL", "SIGSTOP")


def shown(value: str) -> str:
    """``value`` quoted for a message, shortened if it's long, control characters escaped."""
    if len(value) > _MOST_SHOWN_CHARS:
        return f"{value[:_MOST_SHOWN_CHARS]!r}… ({len(value)} characters)"
    return repr(value)


def _integer(value: str, wanted: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"want {wanted}") from None


def text(value: str) -> str:
    """Any text, as it is."""
    return value


def name(value: str) -> str:
    """Text that isn't empty."""
    if not value.strip():
        raise ValueError("want a name, and this is empty")
    return value


def nproc(value: str) -> str:
    """A number of ranks (in canonical form), or the word that stands for one."""
    if value in _NPROC_WORDS:
        return value
    number = _integer(value, "a number of ranks (1 or more), or auto, cpu, gpu or xpu")
    if number < 1:
        raise ValueError("want at least 1 rank")
    return str(number)


def nodes(value: str) -> tuple[int, int]:
    """``MIN:MAX`` or ``N``."""
    wanted = "a number of machines, or MIN:MAX with 1 <= MIN <= MAX"
    parts = value.split(":")
    if len(parts) > 2:
        raise ValueError(f"want {wanted}")
    least = _integer(parts[0], wanted)
    most = _integer(parts[-1], wanted)
    if not 1 <= least <= most:
        raise ValueError(f"want {wanted}")
    return least, most


def engine_option(value: str) -> tuple[str, ...]:
    """``NAME=VALUE``, on one line."""
    name, equals, rest = value.partition("=")
    if not equals or not name.replace("-", "_").isidentifier():
        raise ValueError("want NAME=VALUE")
    if not rest.isprintable():
        raise ValueError("want one line of printable text")
    return (value,)


def path(value: str) -> str:
    """A file's path."""
    if not value or "\0" in value:
        raise ValueError("want a path")
    return value


def urls(value: str) -> tuple[str, ...]:
    """``http(s)://HOST:PORT`` with commas between. What is secret has no place there."""
    found = tuple(part.strip().rstrip("/") for part in value.split(",") if part.strip())
    if not found or not all(url.startswith(("http://", "https://")) and url.isprintable() for url in found):
        raise ValueError("want http://HOST:PORT or https://HOST:PORT, commas between several")
    if any("@" in url for url in found):
        raise ValueError("want no user and password there, which others can read; see --etcd-user")
    return found


def positive_seconds(value: str) -> float:
    """Seconds, above 0 and at most a day."""
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number <= 86_400:
        raise ValueError("want a number of seconds, above 0")
    return number


def node_rank(value: str) -> int:
    """0, the rank of the only machine there is."""
    if _integer(value, "the rank of this machine, 0") != 0:
        raise ValueError(
            "this version runs one machine, whose rank is 0; started on several machines it would run "
            "the whole job on each. Leave it out, or use torchrun for several machines"
        )
    return 0


def int_at_least_0(value: str) -> int:
    number = _integer(value, "a whole number, 0 or more")
    if number < 0:
        raise ValueError("want 0 or more")
    return number


def float_at_least_0(value: str) -> float:
    """A finite number, 0 or more."""
    try:
        number = float(value)
    except ValueError:
        raise ValueError("want a number of seconds") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError("want a number of seconds, 0 or more")
    return number


def off_or_seconds(value: str) -> float:
    """Seconds; 0 means never, which is infinity to whoever compares with it."""
    return float_at_least_0(value) or math.inf


def on_off(value: str) -> bool:
    if value not in ("on", "off"):
        raise ValueError("want on or off")
    return value == "on"


def choice(*words: str) -> Callable[[str], str]:
    """A reader of exactly these words."""

    def read(value: str) -> str:
        if value in words:
            return value
        raise ValueError(f"want one of {', '.join(words)}{_nearest(value, words)}")

    return read


def _nearest(value: str, words: tuple[str, ...]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(value[:_MOST_SHOWN_CHARS], words, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def port(value: str) -> int | None:
    """A TCP port; 0 asks for any free one and is None."""
    number = _integer(value, "a port number")
    if not 0 <= number <= 65535:
        raise ValueError("want a port between 1 and 65535, or 0 for any free one")
    return number or None


def address(value: str) -> str:
    """A host name or address; the brackets that torchrun wants around IPv6 are taken off."""
    stripped = value.strip().removeprefix("[").removesuffix("]")
    if not stripped or any(c.isspace() for c in stripped):
        raise ValueError("want a host name or an address")
    return stripped


def std_streams(value: str) -> StdStreams:
    """torchrun's ``Std``: 0 none, 1 stdout, 2 stderr, 3 both; for all ranks or as ``RANK:WHICH,...``."""
    from closeranks.config import StdStreams

    wanted = (
        "0, 1, 2 or 3 (none, stdout, stderr, both) for all ranks, or RANK:WHICH for some, such as 0:3,1:2"
    )
    if value in ("0", "1", "2", "3"):
        return StdStreams(int(value))
    by_local_rank: dict[int, int] = {}
    for pair in value.split(","):
        rank, colon, which = pair.partition(":")
        # isascii: isdigit alone also takes superscripts, which int() refuses.
        digits = rank.isascii() and rank.isdigit() and len(rank) <= 6
        if not colon or not digits or which not in ("0", "1", "2", "3"):
            raise ValueError(f"want {wanted}")
        by_local_rank[int(rank)] = int(which)
    return StdStreams(0, by_local_rank)


def local_ranks(value: str) -> frozenset[int] | None:
    """Comma-separated local ranks; empty = all, which is None."""
    if not value:
        return None
    wanted = "local ranks with commas between them, such as 0,1"
    numbers = frozenset(_integer(part, wanted) for part in value.split(","))
    if min(numbers) < 0:
        raise ValueError(f"want {wanted}")
    return numbers


def comma_list(value: str) -> tuple[str, ...]:
    """Items with commas between them; a doubled comma is a comma in an item, as in torchrun."""
    # No argument and no environment variable can hold a NUL, so it can stand for the doubled comma.
    return tuple(item.replace("\0", ",") for item in value.replace(",,", "\0").split(","))


def key_values(value: str) -> dict[str, str]:
    """``KEY=VALUE,KEY=VALUE``."""
    pairs: dict[str, str] = {}
    for pair in value.strip().split(",") if value.strip() else ():
        key, _, word = pair.partition("=")
        if not key.strip() or not word.strip():
            raise ValueError("want KEY=VALUE pairs with commas between them")
        pairs[key.strip()] = word.strip()
    return pairs


def signal_names(value: str) -> tuple[str, ...]:
    """Signals by name (with or without SIG) or number, as names, in order and each once."""
    import signal

    known = tuple(s.name for s in signal.Signals)
    names: dict[str, None] = {}
    for part in value.split(","):
        word = part.strip().upper()
        if not word:
            raise ValueError("want signals with commas between them, such as SIGTERM,SIGUSR1")
        found = ""
        if word.isascii() and word.isdigit() and len(word) <= 3:
            found = next((s.name for s in signal.Signals if s == int(word)), "")
        else:
            word = word if word.startswith("SIG") else "SIG" + word
            found = word if word in known else ""
        if not found:
            raise ValueError(f"there is no signal {shown(part.strip())}{_nearest(word, known)}")
        if found in _UNCATCHABLE:
            raise ValueError(f"{found} can't be handled by any process; leave it out")
        names[found] = None
    return tuple(names)


def module_names(value: str) -> tuple[str, ...]:
    """Dotted module names with commas between them."""
    names = tuple(part.strip() for part in value.split(","))
    for module in names:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f"{shown(module)} is no module name; want such as torchvision,my_package.models")
    return names


def fault(value: str) -> str:
    """The text of a fault, after closeranks.faults has taken it. Raises UsageError where it hasn't."""
    from closeranks.faults import parse_spec

    parse_spec(value)
    return value


def job_name(value: str) -> str:
    """A name that can be a directory's."""
    fits = 0 < len(value) <= _MOST_JOB_NAME_CHARS and _JOB_NAME_CHARS.issuperset(value)
    if not fits or value.startswith((".", "-")):
        raise ValueError(
            f"want 1 to {_MOST_JOB_NAME_CHARS} letters, digits, '.', '_' or '-', "
            "the first a letter, digit or '_'"
        )
    return value


def switch_from_environment(value: str) -> bool:
    """torchrun's rule for switches in the environment: a number, and any but 0 is on."""
    return bool(_integer(value, "1 (on) or 0 (off)"))
