"""The ``closeranks`` command: finds the verb, imports that alone, and turns errors into one clean line."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from types import ModuleType

from closeranks import __version__
from closeranks.errors import CloseranksError, UsageError

__all__ = ["VERBS", "main"]

# A verb's module has HELP: str, configure(parser) and main(args) -> int; or RAW = True and
# main(argv) -> int, where it reads its own command line.
VERBS: dict[str, tuple[str, str]] = {
    "run": ("closeranks.cli.run", "run a training script on every rank, and keep it running"),
    "demo": ("closeranks.cli.demo", "see a training run lose ranks and come back"),
    "report": ("closeranks.cli.report", "what happened in a run: incidents, causes, time lost"),
    "inject": ("closeranks.cli.inject", "make a fault happen in a live run"),
    "drain": ("closeranks.cli.drain", "take a node out of a running job without losing work"),
    "engine": ("closeranks.cli.engine", "engine render: what would be handed to a cluster"),
    "controller": ("closeranks.cli.controller", "be a job's controller by itself; engines call this"),
    "agent": ("closeranks.cli.agent", "make this host a node of a job; engines call this"),
    "config": ("closeranks.cli.config_show", "config show: every setting, and where it comes from"),
}
_INTERRUPTED = 130  # 128 + SIGINT
_BROKEN_PIPE = 141  # 128 + SIGPIPE
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def main(argv: list[str] | None = None) -> int:
    """Run the command line ``argv`` (sys.argv without the program's name); returns the exit code."""
    try:
        code = _dispatch(sys.argv[1:] if argv is None else list(argv))
        if sys.stdout is not None:
            sys.stdout.flush()
    except CloseranksError as error:
        _say(f"closeranks: error: {_printable(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return _BROKEN_PIPE
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        _forget_stdout()
        where = error.filename or "stdout, or a file of the run"
        _say(f"closeranks: error: the disk is full: can't write to {_printable(str(where))}\n")
        return CloseranksError.exit_code
    return code


def _dispatch(argv: list[str]) -> int:
    if not argv:
        _say(_help_page())
        return UsageError.exit_code
    verb, *rest = argv
    if verb == "help" and rest:
        verb, rest = rest[0], ["--help"]
    if verb in ("help", "-h", "--help"):
        print(_help_page(), end="")
        return 0
    if verb in ("-V", "--version"):
        print(f"closeranks {__version__}")
        return 0
    if verb not in VERBS:
        raise _unknown(verb)
    module = importlib.import_module(VERBS[verb][0])
    return int(module.main(rest)) if getattr(module, "RAW", False) else _parsed_main(verb, module, rest)


def _parsed_main(verb: str, module: ModuleType, argv: list[str]) -> int:
    try:
        os.getcwd()  # noqa: PTH109 - pathlib is not needed to start
    except FileNotFoundError:
        raise UsageError("the current directory no longer exists; change to one that does") from None
    from closeranks.cli.parser import Parser

    parser = Parser(prog=f"closeranks {verb}", description=module.HELP)
    module.configure(parser)
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # --help has been printed
        return stop.code if isinstance(stop.code, int) else 0
    return int(module.main(args))


def _help_page() -> str:
    rows = "\n".join(f"  {verb:<12}{text}" for verb, (_, text) in VERBS.items())
    return (
        "usage: closeranks VERB [arguments]\n\n"
        "A rank falls, the others close ranks, and the run goes on.\n\n"
        f"verbs:\n{rows}\n\n"
        "closeranks VERB --help says more, closeranks --version which version this is.\n"
        "Start with: closeranks run --nproc-per-node 2 train.py\n"
    )


def _unknown(verb: str) -> UsageError:
    from difflib import get_close_matches

    name = _printable(verb[:80])
    if verb.endswith(".py"):
        return UsageError(f"there is no verb {name}; to run a script say closeranks run {name}")
    if verb.startswith("-"):
        return UsageError(f"there is no verb {name}; flags follow their verb: closeranks run {name} ...")
    near = get_close_matches(verb[:80], VERBS, n=1)
    hint = f"did you mean closeranks {near[0]}?" if near else f"there are {', '.join(VERBS)}"
    return UsageError(f"there is no verb {name}; {hint}")


def _printable(text: str) -> str:
    """``text`` without what could steer a terminal: file names and sources are other people's."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _say(text: str) -> None:
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except BrokenPipeError:
        return


def _forget_stdout() -> None:
    """Nobody reads stdout any more; without this the interpreter would complain while it exits."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.close(devnull)
