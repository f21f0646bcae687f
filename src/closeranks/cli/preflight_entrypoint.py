"""Is there something to run? Looked at without importing or executing any of it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import os
import shutil
import stat
import sys
import warnings
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from closeranks.cli.flags_values import shown
from closeranks.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from closeranks.config import Entrypoint

__all__ = ["check", "check_interpreter", "check_modules"]

# A larger file is data in disguise, or takes longer to compile twice than its error is worth.
_MOST_SOURCE_BYTES = 8 * 1024 * 1024
_MOST_NAMES = 10_000
_MOST_LINE_CHARS = 200
_NEAR_RATIO = 0.7  # of difflib: a slip or two in a short name


def check(entrypoint: Entrypoint, *, own_python: bool) -> None:
    """Raises UsageError or ConfigError if ``entrypoint`` can't even start.

    ``own_python``: the ranks' interpreter is the one running here, so it knows their modules and syntax.
    """
    if entrypoint.kind == "command":
        _check_command(entrypoint.target)
    elif entrypoint.kind == "module":
        _check_module_target(entrypoint.target, own_python=own_python)
    else:
        _check_script(entrypoint.target, own_python=own_python)


def check_interpreter(python: str) -> None:
    """Raises ConfigError if PYTHON_EXEC can't be run."""
    if shutil.which(python) is None:
        raise ConfigError(f"PYTHON_EXEC={shown(python)} is no program that can be run; correct or unset it")


def check_modules(names: Iterable[str]) -> None:
    """Raises ConfigError for a ``--preload`` module that isn't installed."""
    for name in names:
        if not _is_importable(name.partition(".")[0]):
            raise ConfigError(f"--preload {name}: there is no module {name.partition('.')[0]} to import")


# --- scripts ----------------------------------------------------------------------------------------


def _check_script(target: str, *, own_python: bool) -> None:
    if target == "-":
        raise UsageError("every rank reads the script for itself, so it can't come from stdin; name a file")
    path = Path(target)
    try:
        status = path.stat() if target else None
    except FileNotFoundError:
        status = None
    except OSError as error:
        raise ConfigError(
            f"can't look at {shown(target)}: {(error.strerror or str(error)).lower()}"
        ) from None
    if status is None:
        raise UsageError(_missing_script(target))
    if stat.S_ISDIR(status.st_mode):
        if not (path / "__main__.py").is_file():
            raise UsageError(f"{target} is a directory without __main__.py; name the script in it")
        path = path / "__main__.py"
    elif not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{target} is not a regular file, and every rank has to read it; save it to one")
    source = _read(path)
    if own_python and len(source) <= _MOST_SOURCE_BYTES:
        _check_source(str(path), source)


def _missing_script(target: str) -> str:
    """Why there is no such file, and what may have been meant."""
    path = Path(target)
    if not path.parent.is_dir():
        return f"there is no directory {shown(str(path.parent))} to hold the script {path.name}"
    names = _names_in(path.parent)
    near = _nearest_script(path.name, names)
    if near:
        return f"there is no script {shown(target)}; did you mean {path.parent / near}?"
    if "/" not in target and path.suffix != ".py" and _is_importable(target.partition(".")[0]):
        return f"there is no script {shown(target)}; to run a module say closeranks run -m {target}"
    return f"there is no script {shown(target)} in {_here() if path.parent == Path() else path.parent}"


def _nearest_script(name: str, names: list[str]) -> str | None:
    """The name that was meant, perhaps. Suffixes are left out of the comparison: all scripts share them."""
    stem = name.removesuffix(".py")
    stems = {other.removesuffix(".py"): other for other in names if other != name}
    near = get_close_matches(stem, stems, n=1, cutoff=_NEAR_RATIO)
    return stems[near[0]] if near else None


def _here() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return "the current directory, which was deleted"


def _names_in(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in itertools.islice(entries, _MOST_NAMES)]
    except OSError:
        return []


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_SOURCE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {(error.strerror or str(error)).lower()}") from None


def _check_source(path: str, source: bytes) -> None:
    """Raises UsageError where Python would refuse ``source``. Nothing is executed, nothing written."""
    other = _what_else(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python will say it when it runs the script
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise UsageError(f"{path} {other}" if other else _syntax_error(path, error)) from None
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{path} {other}" if other else f"{path} is no Python source: {error}") from None
    except (RecursionError, MemoryError):
        return  # too deeply nested to judge from here


def _what_else(source: bytes) -> str:
    """What ``source`` is if not Python text, with the way to run it; "" if nothing says so."""
    as_program = "start it with --no-python"
    if source.startswith(b"\x7fELF"):
        return f"is a compiled program, not a Python script; {as_program}"
    if source.startswith(importlib.util.MAGIC_NUMBER):
        return "is compiled Python; name its source, or use --no-python python"
    head = source[:_MOST_LINE_CHARS].partition(b"\n")[0]
    if head.startswith(b"#!") and b"python" not in head:
        interpreter = head[2:].decode("utf-8", "replace").strip()
        return f"is a script for {interpreter}, not for Python; {as_program}"
    if source.startswith(b"PK\x03\x04") or (head.startswith(b"#!") and b"PK\x03\x04" in source):
        return "is a zip application; use --no-python python, or the directory it was made from"
    if b"\0" in source:
        return f"is a binary file, not a Python script; if it is a program {as_program}"
    return ""


def _syntax_error(path: str, error: SyntaxError) -> str:
    """``file:line: what``, the line, and a caret under the place, as Python itself would show it."""
    message = f"{path}:{error.lineno or 1}: {type(error).__name__}: {error.msg}"
    line = (error.text or "").rstrip("\r\n")
    shift = len(line) - len(line.lstrip())
    line = line.strip()[:_MOST_LINE_CHARS].expandtabs(1)
    if not line:
        return message
    column = (error.offset or 0) - 1 - shift
    if error.offset is None or not 0 <= column <= len(line):
        return f"{message}\n    {line}"
    end = (error.end_offset or 0) - 1 - shift if error.end_lineno == error.lineno else 0
    return f"{message}\n    {line}\n    {' ' * column}{'^' * max(1, min(end, len(line)) - column)}"


# --- modules ----------------------------------------------------------------------------------------


def _check_module_target(target: str, *, own_python: bool) -> None:
    parts = target.split(".")
    if target.endswith(".py") and Path(target).is_file():
        raise UsageError(f"-m takes a module's name and {target} is a file; leave out -m")
    if "/" in target or " " in target or not all(parts):
        raise UsageError(f"-m takes a module's name such as package.train, not {shown(target)}")
    if own_python and not _is_importable(parts[0]):
        near = get_close_matches(parts[0], _modules_here(), n=1)
        hint = f"did you mean {'.'.join([near[0], *parts[1:]])}?" if near else _where_looked()
        raise UsageError(f"there is no module {parts[0]}; {hint}")
    if own_python and len(parts) == 1 and _lacks_main(target):
        raise UsageError(f"{target} is a package without __main__.py; name a module in it: -m {target}.NAME")
    if own_python and len(parts) > 1:
        _check_submodule(parts)


def _check_submodule(parts: list[str]) -> None:
    """Raises UsageError for ``package.nope``, as far as can be told without importing the package."""
    places = _places_of(parts[0])
    for depth in range(1, len(parts)):
        if not places or any(_makes_modules(place) for place in places):
            return
        name = ".".join(parts[: depth + 1])
        found = _find_in(name, places)
        if found is None:
            near = get_close_matches(parts[depth], _modules_in(Path(places[0])), n=1, cutoff=_NEAR_RATIO)
            hint = (
                f"; did you mean {'.'.join([*parts[:depth], near[0], *parts[depth + 1 :]])}?" if near else ""
            )
            raise UsageError(f"there is no module {name} in {places[0]}{hint}")
        places = list(found.submodule_search_locations or ())


def _places_of(top: str) -> list[str]:
    """Where the submodules of a top-level package are, [] where that isn't known without importing it."""
    try:
        spec = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()])  # noqa: PTH109 - a path entry
        spec = spec or importlib.util.find_spec(top)
    except (ImportError, ValueError, OSError):
        return []
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def _find_in(name: str, places: list[str]) -> importlib.machinery.ModuleSpec | None:
    """As the import system would, but for importing the parent first."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec: importlib.machinery.ModuleSpec | None = find(name, places, None) if find is not None else None
        if spec is not None:
            return spec
    return None


def _makes_modules(place: str) -> bool:
    """Whether a package's own code may add to where its modules are found."""
    try:
        source = (Path(place) / "__init__.py").read_bytes()
    except OSError:
        return False
    return b"__path__" in source or b"meta_path" in source


def _where_looked() -> str:
    return f"it is neither installed for {sys.executable} nor in {_here()}"


def _is_importable(top: str) -> bool:
    """Whether a top-level module can be found, here or where ``python -m`` adds: the current directory."""
    if not top or top in sys.builtin_module_names:
        return bool(top)
    try:
        if importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]):  # noqa: PTH109 - a path entry
            return True
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError, OSError):
        # ValueError: the module is loaded, and is odd. OSError: the current directory is gone.
        return top in sys.modules


def _lacks_main(package: str) -> bool:
    """Whether a top-level module is a package that ``python -m`` can't run, as far as can be seen."""
    try:
        spec = importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path])  # noqa: PTH109
    except (ImportError, ValueError, OSError):
        return False
    if spec is None or spec.submodule_search_locations is None:
        return False
    places = list(spec.submodule_search_locations)
    return bool(places) and importlib.machinery.PathFinder.find_spec("__main__", places) is None


def _modules_here() -> Iterator[str]:
    return _modules_in(Path())


def _modules_in(directory: Path) -> Iterator[str]:
    for name in _names_in(directory):
        module = name.removesuffix(".py")
        if module.isidentifier() and (name.endswith(".py") or (directory / name).is_dir()):
            yield module


# --- programs ---------------------------------------------------------------------------------------


def _check_command(target: str) -> None:
    found = shutil.which(target) if target else None
    if found is None:
        raise UsageError(_why_no_program(target))
    head = _first_line(Path(found))
    if not head.startswith(b"#!"):
        return
    if head.endswith(b"\r"):
        raise ConfigError(
            f"{target} has Windows line ends, so its #! line names no program; save it with Unix ones"
        )
    interpreter = os.fsdecode(head[2:].split()[0]) if head[2:].split() else ""
    if interpreter and not Path(interpreter).exists():
        raise ConfigError(f"{target} asks for {shown(interpreter)}, which isn't there; correct its #! line")


def _first_line(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_LINE_CHARS).partition(b"\n")[0]
    except OSError:  # it may be executed and not read
        return b""


def _why_no_program(target: str) -> str:
    path = Path(target)
    if target and path.is_file():
        if not os.access(path, os.X_OK):
            return f"{target} is not executable; chmod +x {target}, or leave out --no-python for Python"
        return f"{target} is not on PATH; to run the one in this directory say ./{target}"
    if target and path.is_dir():
        return f"{target} is a directory, not a program"
    if "/" in target:
        return f"there is no program {shown(target)}"
    near = get_close_matches(target, _programs(), n=1)
    return f"there is no program {shown(target)} on PATH" + (f"; did you mean {near[0]}?" if near else "")


def _programs() -> list[str]:
    return [n for directory in os.get_exec_path() for n in _names_in(Path(directory))]
