"""What we agreed on, held by a test: layers, lengths, names, words. See CONTRIBUTING.md for the reasons."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
PACKAGE = SRC / "closeranks"
MODULES = sorted(PACKAGE.rglob("*.py"))

MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 70
HELP_CPU_S = 0.15

# Who may import whom. "shared" is every module that lies directly in the package.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "shared": frozenset(),
    "policy": frozenset(),
    "diagnose": frozenset({"policy"}),
    "goodput": frozenset({"policy"}),
    "worker": frozenset(),
    "controller": frozenset({"policy"}),
    "engines": frozenset(),
    "agent": frozenset({"policy", "diagnose", "goodput", "controller", "engines"}),
    "cli": frozenset({"policy", "diagnose", "goodput", "controller", "agent", "engines"}),
}
# The doors of the package lead where their users want to go.
DOORS = {"closeranks": {"worker"}, "closeranks.__main__": {"cli"}}

PURE_ROOMS = {"policy", "diagnose", "goodput"}
_PURE_SHARED = (
    "backoff", "cluster_events", "config", "errors", "events", "evidence", "faults", "frames", "messages",
    "progress", "taxonomy",
)  # fmt: skip
PURE_MODULES = {f"closeranks.{name}" for name in _PURE_SHARED}
IMPURE = {
    "asyncio", "concurrent", "ctypes", "http", "multiprocessing", "os", "pathlib", "random", "secrets",
    "select", "selectors", "shutil", "socket", "sqlite3", "subprocess", "tempfile", "threading", "time",
    "urllib", "uuid",
}  # fmt: skip
# The one module of a pure room that reads files for it, and the journal through its reader.
LOADERS = {"closeranks.diagnose.load": {"pathlib", "os"}, "closeranks.goodput.load": {"pathlib", "os"}}
LOADERS_MAY_IMPORT = {"closeranks.goodput.load": {"controller"}}

FLOAT_UNITS = ("_s", "_ms", "_ns", "_bytes", "_factor", "_ratio", "_share", "confidence")


def name_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else "shared"


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every module ``path`` imports, at any depth of nesting, as an absolute dotted name."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield base, node.lineno
            for alias in node.names:
                if (SRC / Path(*base.split("."), alias.name)).with_suffix(".py").exists() or (
                    SRC / Path(*base.split("."), alias.name)
                ).is_dir():
                    yield f"{base}.{alias.name}", node.lineno


def ours(path: Path) -> Iterator[tuple[str, int]]:
    for target, line in imports_of(path):
        if target == "closeranks" or target.startswith("closeranks."):
            yield target, line


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def each_module() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", [pytest.param(path, id=name_of(path)) for path in MODULES])


@each_module()
def test_arrows_go_one_way(path: Path) -> None:
    name, room = name_of(path), room_of(name_of(path))
    allowed = (
        MAY_IMPORT[room] | DOORS.get(name, set()) | LOADERS_MAY_IMPORT.get(name, set()) | {room, "shared"}
    )
    wrong = [
        f"{relative(path)}:{line} imports {target}: {room} may import {sorted(allowed - {'shared'})}"
        for target, line in ours(path)
        if room_of(target) not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@each_module()
def test_pure_rooms_touch_nothing_outside(path: Path) -> None:
    name = name_of(path)
    if room_of(name) not in PURE_ROOMS and name not in PURE_MODULES:
        return
    banned = IMPURE - LOADERS.get(name, set())
    wrong = [
        f"{relative(path)}:{line} imports {target}; time, files and chance come in as arguments here"
        for target, line in imports_of(path)
        if target.partition(".")[0] in banned
    ]
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        opens = isinstance(node.func, ast.Name) and called in {"open", "input"} and name not in LOADERS
        if opens or called in {"now", "utcnow", "today"}:
            wrong.append(f"{relative(path)}:{node.lineno} calls {called}()")
    assert not wrong, "\n".join(wrong)


@each_module()
def test_only_workers_know_torch(path: Path) -> None:
    if room_of(name_of(path)) == "worker":
        return
    wrong = [
        f"{relative(path)}:{line} imports {target}; only worker/ may"
        for target, line in imports_of(path)
        if target.partition(".")[0] in {"torch", "numpy"}
    ]
    assert not wrong, "\n".join(wrong)


@each_module()
def test_lengths(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_MODULE_LINES, f"{relative(path)} has {lines} lines; split it by what changes together"
    long = [
        f"{relative(path)}:{node.lineno} {node.name}() has {length} lines"
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


@each_module()
def test_every_module_says_what_it_is(path: Path) -> None:
    tree = tree_of(path)
    assert not tree.body or ast.get_docstring(tree), f"{relative(path)} has no docstring"


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those under its top-level conditions included."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            branches = [node.body, node.orelse]
            if isinstance(node, ast.Try):
                branches += [node.finalbody, *(handler.body for handler in node.handlers)]
            for branch in branches:
                yield from top_level(branch)


def constants_then_classes_then_functions(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name.lstrip("_")[:1].isupper() else 2, name)


@each_module()
def test_exported_names_exist_and_are_sorted(path: Path) -> None:
    exported: list[str] = []
    defined: set[str] = set()
    for node in top_level(tree_of(path).body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {t.id for target in targets for t in ast.walk(target) if isinstance(t, ast.Name)}
            defined |= names
            if "__all__" in names and node.value is not None:
                exported = ast.literal_eval(node.value)
    orders = [sorted(exported), sorted(exported, key=constants_then_classes_then_functions)]
    assert exported in orders, f"{relative(path)}: sort __all__ as {orders[1]}"
    missing = set() if "__getattr__" in defined else set(exported) - defined
    assert not missing, f"{relative(path)}: {missing} isn't defined"


def ends_it(nodes: list[ast.stmt]) -> bool:
    """Whether ``nodes`` raise again, or end the process."""
    return any(
        isinstance(node, ast.Raise)
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in {"sys.exit", "os._exit"})
        for statement in nodes
        for node in ast.walk(statement)
    )


# A bug in gathering or judging evidence is reported to the user, and must not cost the job its restart.
LAST_RESORTS = {"src/closeranks/agent/incidents.py"}


@each_module()
def test_no_error_is_swallowed_unseen(path: Path) -> None:
    if relative(path) in LAST_RESORTS:
        return
    wrong = []
    for attempt in ast.walk(tree_of(path)):
        if not isinstance(attempt, (ast.Try, ast.TryStar)):
            continue
        for handler in attempt.handlers:
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            caught = {ast.unparse(kind) if kind else "everything" for kind in kinds}
            if caught & {"Exception", "everything"}:
                wrong.append(f"{relative(path)}:{handler.lineno} catches {caught}: name what can go wrong")
            # Whoever must see every way a script can end must then let it end.
            if "BaseException" in caught and not ends_it(handler.body + attempt.finalbody):
                wrong.append(f"{relative(path)}:{handler.lineno} catches BaseException and goes on")
    wrong += [
        f"{relative(path)}:{node.lineno} suppresses everything"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("suppress")
        and {ast.unparse(argument) for argument in node.args} & {"Exception", "BaseException"}
    ]
    assert not wrong, "\n".join(wrong)


@each_module()
def test_only_the_command_line_prints(path: Path) -> None:
    if room_of(name_of(path)) == "cli":
        return
    wrong = [
        f"{relative(path)}:{node.lineno} prints"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, "\n".join(wrong)


@each_module()
def test_fractions_of_something_say_of_what(path: Path) -> None:
    """A float field of a dataclass has a unit in its name: timeout_s, not timeout."""
    wrong = [
        f"{relative(path)}:{field.lineno} {field.target.id} needs a unit: one of {FLOAT_UNITS}"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and re.fullmatch(r"float( \| None)?", ast.unparse(field.annotation))
        and not field.target.id.endswith(FLOAT_UNITS)
    ]
    assert not wrong, "\n".join(wrong)


# Built and tested before the part that uses it: what a job over several machines stands on.
NOT_USED_YET = {
    "closeranks.agent.store_process",
    "closeranks.backoff",
    "closeranks.controller.connect",
    "closeranks.engines.slurm",
}


def test_no_file_is_dead() -> None:
    """Every module is imported by another one, or named in a string: a verb's module, a process to start."""
    alive = {"closeranks", "closeranks.__main__", "closeranks.cli.main"}
    strings: set[str] = set()
    for path in MODULES:
        alive |= {target for target, _ in ours(path) if target != name_of(path)}
        strings |= {
            node.value
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    for path in MODULES:
        name, text = name_of(path), path.read_text()
        started = 'if __name__ == "__main__"' in text and name.rpartition(".")[2] in strings
        if started or any(f"{name} " in f"{string} " for string in strings):
            alive.add(name)
    packages = {name_of(path) for path in MODULES if path.name == "__init__.py"}
    dead = {name_of(path) for path in MODULES} - packages - alive
    assert dead == NOT_USED_YET, f"nothing imports {dead - NOT_USED_YET}; used by now: {NOT_USED_YET - dead}"


def test_no_room_is_empty() -> None:
    rooms = [path for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    empty = [room.name for room in rooms if len(list(room.glob("*.py"))) < 2]
    assert not empty, f"rooms with nothing in them: {empty}"


def texts() -> list[Path]:
    """The repository's own text files, whether committed yet or not."""
    folders = ("src", "tests", "docs", "scripts", "examples", "benchmarks", ".ci")
    suffixes = {"", ".py", ".md", ".toml", ".yml", ".txt", ".json", ".svg", ".css"}
    found = [path for path in ROOT.iterdir() if path.is_file() and path.suffix in suffixes]
    for folder in folders:
        found += [
            path
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and path.suffix in suffixes and not {"__pycache__"} & set(path.parts)
        ]
    return sorted(found)


# Put together from halves, so that this file doesn't hold what it looks for.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
FOREIGN = re.compile(r"/wo" + r"rk/|\bissue" + r" #?\d\b|DESIGN" + r"\.md|ANCHORS" + r"\.md|STYLE" + r"\.md")


@pytest.mark.parametrize(("pattern", "why"), [(UNFINISHED, "finish it"), (FOREIGN, "it means nothing here")])
def test_words_that_have_no_place_here(pattern: re.Pattern[str], why: str) -> None:
    wrong = [
        f"{relative(path)}:{number}: {found[0]}: {why}"
        for path in texts()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if (found := pattern.search(line))
    ]
    assert not wrong, "\n".join(wrong)


def test_test_modules_have_names_of_their_own() -> None:
    """Two modules of one name would shadow each other; a folder with an __init__.py is part of the name."""

    def imported_as(path: Path) -> str:
        parts, folder = [path.stem], path.parent
        while (folder / "__init__.py").exists():
            parts.insert(0, folder.name)
            folder = folder.parent
        return ".".join(parts)

    counts = Counter(imported_as(path) for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in counts.items() if count > 1]


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]], ids=" ".join)
def test_help_needs_nothing_heavy(arguments: list[str]) -> None:
    heavy = ["torch", "numpy", "asyncio", "http", "sqlite3", "subprocess", "ssl"]
    code = (
        "import sys\nfrom closeranks.cli.main import main\n"
        f"code = main({arguments!r})\n"
        f"print([name for name in {heavy!r} if name in sys.modules], code, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd="/"
    )
    assert done.stderr.strip() == "[] 0"
    assert "closeranks" in done.stdout


def test_help_is_quick() -> None:
    """Processor time, not wall time, and the best of five: a busy machine or a cold cache doesn't count."""

    def cpu_s() -> float:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "closeranks", "--help"],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
        )
        _, status, usage = os.wait4(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        return usage.ru_utime + usage.ru_stime

    assert min(cpu_s() for _ in range(5)) < HELP_CPU_S
