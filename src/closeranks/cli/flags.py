"""``closeranks run [flags] (script.py | -m module | --no-python program) args...`` -> RunConfig.

Each flag's value comes from the command line, else from its environment variable, else from the defaults in
closeranks.config; where it came from is kept, so that ``config show`` and messages can say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from closeranks.cli.flags_scan import Given, scan
from closeranks.cli.flags_table import ENVIRONMENT, FLAGS, Flag
from closeranks.cli.flags_values import shown, switch_from_environment
from closeranks.errors import UsageError

if TYPE_CHECKING:
    from closeranks.config import Entrypoint, RunConfig

__all__ = ["Parsed", "Setting", "fresh_id", "parse", "parse_run", "to_config"]

_MOST_FAULTS = 64  # each has one bit in the progress page
_WITH_ETCD = ("standbys", "etcd_ca", "etcd_cert", "etcd_user")
_USAGE = "closeranks run [flags] script.py [arguments]"


class Setting(NamedTuple):
    """One value that was given, not a default. ``source`` is a flag as it was typed, or a variable."""

    flag: Flag
    value: Any
    source: str


class Parsed(NamedTuple):
    """A command line: its settings by flag name, and what follows the flags (target and arguments)."""

    settings: dict[str, Setting]
    rest: tuple[str, ...]

    def value(self, name: str, default: Any = None) -> Any:
        setting = self.settings.get(name)
        return default if setting is None else setting.value

    def has(self, name: str) -> bool:
        return name in self.settings


def fresh_id() -> str:
    """A new random id, in the form torchrun gives a run on one machine."""
    import uuid

    return str(uuid.uuid4())


def parse_run(argv: list[str], environ: Mapping[str, str], new_id: Callable[[], str] = fresh_id) -> RunConfig:
    """The RunConfig of a command line. Pure but for ``new_id``; whether the script exists is not looked at.

    Raises UsageError, whose message names the flag or variable and what it wants.
    """
    parsed = _with_found_engine(parse(argv, environ), environ)
    if not parsed.rest:
        raise UsageError(f"nothing to run: {_USAGE} (closeranks run --help)")
    return to_config(parsed, new_id)


def _with_found_engine(parsed: Parsed, environ: Mapping[str, str]) -> Parsed:
    """Several nodes inside of a Slurm allocation come from it, without anybody having to say so."""
    most = parsed.value("nnodes", (1, 1))[1]
    several = most > 1 or parsed.has("spares")
    if parsed.has("engine") or not several or not environ.get("SLURM_JOB_ID"):
        return parsed
    flag = next(flag for flag in FLAGS if flag.name == "engine")
    found = Setting(flag, "slurm", "SLURM_JOB_ID")
    return Parsed({**parsed.settings, "engine": found}, parsed.rest)


def parse(argv: list[str], environ: Mapping[str, str], further: tuple[Flag, ...] = ()) -> Parsed:
    """Read flags and environment. ``further`` are flags of a verb that builds on these.

    Raises UsageError.
    """
    flags = (*FLAGS, *further)
    given, rest = scan(argv, flags)
    settings: dict[str, Setting] = {}
    for flag in (*flags, *ENVIRONMENT):
        mine = [g for g in given if g.flag is flag]
        setting = _from_line(flag, mine) if mine else _from_environment(flag, environ)
        if setting is not None:
            settings[flag.name] = setting
    return Parsed(settings, tuple(rest))


def _from_line(flag: Flag, given: list[Given]) -> Setting:
    if flag.is_switch:
        return Setting(flag, flag.switched, given[-1].spelling)
    if not flag.repeatable:
        given = given[-1:]
    values = [_read(flag, g.text, g.spelling) for g in given]
    return Setting(flag, _joined(values) if flag.repeatable else values[0], given[-1].spelling)


def _joined(values: list[Any]) -> tuple[Any, ...]:
    joined: list[Any] = []
    for value in values:
        joined.extend(value if isinstance(value, tuple) else (value,))
    return tuple(joined)


def _from_environment(flag: Flag, environ: Mapping[str, str]) -> Setting | None:
    for variable in flag.variables:
        text = environ.get(variable)
        if text is not None:
            return _environment_setting(flag, variable, text)
    return None


def _environment_setting(flag: Flag, variable: str, text: str) -> Setting | None:
    if not flag.is_switch:
        return Setting(flag, _read(flag, text, variable), variable)
    try:
        on = switch_from_environment(text)
    except ValueError as error:
        raise UsageError(f"{variable}={shown(text)}: {error}") from None
    return Setting(flag, flag.switched, variable) if on else None


def _read(flag: Flag, text: str, source: str) -> Any:
    try:
        return flag.read(text)
    except ValueError as error:
        separator = " " if source.startswith("-") else "="
        raise UsageError(f"{source}{separator}{shown(text)}: {error}") from None


# --- settings -> RunConfig --------------------------------------------------------------------------


def to_config(parsed: Parsed, new_id: Callable[[], str] = fresh_id) -> RunConfig:
    """Settings in their places, the rest by default; without a target its entrypoint is empty."""
    from closeranks.config import BudgetConfig, ClusterConfig, EtcdConfig, HangConfig, LogConfig, RunConfig

    top: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {
        "": top, "budget": {}, "cluster": {}, "etcd": {}, "hang": {}, "logs": {},
    }  # fmt: skip
    for setting in parsed.settings.values():
        section, _, field = setting.flag.field.rpartition(".")
        if field:
            sections[section][field] = setting.value
    if len(parsed.value("inject", ())) > _MOST_FAULTS:
        raise UsageError(f"--inject was given more than {_MOST_FAULTS} times; leave some out")
    top["run_id"] = _run_id(parsed, new_id)
    if not parsed.has("master_addr") and parsed.has("local_addr"):
        top["master_addr"] = parsed.value("local_addr")  # what torchrun's workers see on one machine
    return RunConfig(
        entrypoint=_entrypoint(parsed),
        budget=BudgetConfig(**sections["budget"]),
        cluster=ClusterConfig(**_cluster(parsed, sections["cluster"])),
        etcd=EtcdConfig(**sections["etcd"]),
        hang=HangConfig(**sections["hang"]),
        logs=LogConfig(**sections["logs"]),
        notices=_notices(parsed),
        **top,
    )


def _cluster(parsed: Parsed, settings: dict[str, Any]) -> dict[str, Any]:
    """Several nodes need to come from somewhere; one that may be joined by others runs alone without."""
    least, most = parsed.value("nnodes", (1, 1))
    for name in (*_WITH_ETCD, "etcd_key"):
        needed = "etcd_cert" if name == "etcd_key" else "etcd"
        if parsed.value(name) and not parsed.has(needed):
            raise UsageError(
                f"{parsed.settings[name].source} is of no use without --{needed.replace('_', '-')}"
            )
    if parsed.has("engine"):
        return {**settings, "min_nodes": least, "max_nodes": most}
    for name in ("spares", "engine_option", "lease", "etcd"):
        if parsed.has(name):
            raise UsageError(
                f"{parsed.settings[name].source} is about several nodes; say where from with --engine"
            )
    if least > 1:
        raise UsageError(
            f"{parsed.settings['nnodes'].source} asks for {least} nodes; say with --engine where they come "
            "from: --engine local tries it out on this host"
        )
    return settings


def _entrypoint(parsed: Parsed) -> Entrypoint:
    from closeranks.config import Entrypoint

    target, args = (parsed.rest[0], parsed.rest[1:]) if parsed.rest else ("", ())
    if parsed.has("run_path"):  # torchrun's precedence
        return Entrypoint("script", target, args)
    if parsed.has("no_python") and parsed.has("module"):
        raise UsageError(
            f"{parsed.settings['no_python'].source} and {parsed.settings['module'].source} exclude each "
            "other: a program has no modules; keep one"
        )
    kind = "command" if parsed.has("no_python") else "module" if parsed.has("module") else "script"
    return Entrypoint(kind, target, args)


def _run_id(parsed: Parsed, new_id: Callable[[], str]) -> str:
    """torchrun's rule: on one machine a new id, and ``none`` where a rendezvous is given without one.

    But an id that was given is kept where torchrun 2.13 replaces it: without --standalone, and without a
    port or an endpoint.
    """
    if parsed.has("standalone"):
        return new_id()
    if parsed.has("rdzv_id"):
        return str(parsed.value("rdzv_id"))
    own_rendezvous = (
        parsed.value("rdzv_backend", "static") != "static"
        or parsed.value("rdzv_endpoint")
        or parsed.value("master_port") is not None
    )
    return "none" if own_rendezvous else new_id()


def _notices(parsed: Parsed) -> tuple[str, ...]:
    """One sentence for each thing that was asked for and won't happen."""
    sources_by_reason: dict[str, list[str]] = {}
    for setting in parsed.settings.values():
        if setting.flag.no_effect:
            sources_by_reason.setdefault(setting.flag.no_effect, []).append(setting.source)
    notices = [
        f"{', '.join(sources)} {'has' if len(sources) == 1 else 'have'} no effect here: {reason}."
        for reason, sources in sources_by_reason.items()
    ]
    nodes = parsed.value("nnodes", (1, 1))
    if nodes[1] > 1 and not parsed.has("engine"):
        source = parsed.settings["nnodes"].source
        notices.append(f"{source} allows up to {nodes[1]} nodes; without --engine it runs on this one alone.")
    if parsed.has("standalone") and parsed.has("rdzv_id"):
        source = parsed.settings["rdzv_id"].source
        notices.append(f"{source} has no effect under --standalone, which makes a new id, as in torchrun.")
    for other in ("no_zygote", "no_python"):
        if parsed.has(other) and parsed.has("preload"):
            source = parsed.settings[other].source
            notices.append(f"--preload has no effect with {source}: there is no process to preload into.")
    return tuple(notices)
