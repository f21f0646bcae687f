"""``closeranks config show [flags of run]``: every setting of a run, its value, and where that came from."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from closeranks.cli.flags import Parsed, parse, to_config
from closeranks.cli.flags_table import RUN, Flag
from closeranks.errors import UsageError

if TYPE_CHECKING:
    from closeranks.config import RunConfig

__all__ = ["HELP", "RAW", "Row", "main", "rows"]

HELP = "show every setting of a run, and where it comes from"
RAW = True

_PAGE = """\
usage: closeranks config show [--json] [flags of closeranks run] [script.py [arguments]]

Show each setting of a run with these flags in this environment: its name, its
value, and whether a flag, an environment variable or the default set it. Nothing
is started.

  --json   one JSON document: {"settings": [{"name", "value", "source"}], "notices": [...]}
"""
_JSON = Flag("json", RUN, here="print one JSON document")
# Made anew for each run, so a value shown here would be a lie.
_NEW_ID = "(a new id for each run)"


class Row(NamedTuple):
    """One setting; ``source`` is a flag, an environment variable or "default"."""

    name: str
    value: Any
    source: str


def main(argv: list[str]) -> int:
    """Print the settings; returns 0. Raises UsageError as ``closeranks run`` would."""
    if argv[:1] in (["-h"], ["--help"]):
        print(_PAGE, end="")
        return 0
    if argv[:1] != ["show"]:
        given = " ".join(["closeranks config", *argv])[:100]
        raise UsageError(f"there is no '{given}'; use closeranks config show")
    parsed = parse(argv[1:], os.environ, (_JSON,))
    if parsed.has("help"):
        print(_PAGE, end="")
        return 0
    config = to_config(parsed, lambda: _NEW_ID)
    if parsed.has("json"):
        settings = [{**row._asdict(), "value": _plain(row.value)} for row in rows(config, parsed)]
        document = {"settings": settings, "notices": list(config.notices)}
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print(_table(list(rows(config, parsed)), config.notices), end="")
    return 0


def rows(config: RunConfig, parsed: Parsed) -> Iterator[Row]:
    """Every setting of ``config`` in the order of its dataclasses, components' own as ``budget.window_s``."""
    sources = {s.flag.field: s.source for s in parsed.settings.values() if s.flag.field}
    if "local_addr" in sources:
        sources.setdefault("master_addr", sources["local_addr"])
    if parsed.has("standalone"):  # then an id that was given doesn't count
        sources["run_id"] = parsed.settings["standalone"].source
    kinds = [parsed.settings[n].source for n in ("run_path", "module", "no_python") if parsed.has(n)]
    for name, value in _flat(config, ""):
        if name == "notices":
            continue
        if name.startswith("entrypoint."):
            given = kinds[0] if name == "entrypoint.kind" and kinds else "command line"
            yield Row(name, value, given if parsed.rest else "not given")
        else:
            yield Row(name, value, sources.get(name, "default"))


def _flat(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        # Streams are one flag's value, not a component with settings of its own.
        if dataclasses.is_dataclass(value) and not hasattr(value, "by_local_rank"):
            yield from _flat(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def _plain(value: Any) -> Any:
    """``value`` in JSON's terms; infinity (never) becomes null."""
    if isinstance(value, float) and math.isinf(value):
        return None
    if isinstance(value, frozenset | tuple):
        return sorted(value) if isinstance(value, frozenset) else list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        streams = dataclasses.asdict(value)
        by_rank = streams["by_local_rank"]
        return {str(rank): which for rank, which in by_rank.items()} if by_rank else streams["default"]
    return value


def _shown(value: Any) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "never"
    plain = _plain(value)
    if plain is None:
        return "-"
    if isinstance(plain, list):
        return ",".join(str(item) for item in plain) or "-"
    if isinstance(plain, dict):
        return ",".join(f"{rank}:{which}" for rank, which in plain.items())
    if isinstance(plain, bool):
        return "yes" if plain else "no"
    return f"{plain:g}" if isinstance(plain, float) else str(plain)


def _table(settings: list[Row], notices: tuple[str, ...]) -> str:
    shown = [(row.name, _shown(row.value), row.source) for row in settings]
    widths = [max(len(row[i]) for row in shown) for i in (0, 1)]
    widths[1] = min(widths[1], 48)
    lines = [f"{name:{widths[0]}}  {value:{widths[1]}}  {source}" for name, value, source in shown]
    return "\n".join([*lines, *(f"note: {notice}" for notice in notices)]) + "\n"
