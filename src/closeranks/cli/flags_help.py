"""The page of ``closeranks run --help``, made from the table of flags."""

from __future__ import annotations

from closeranks.cli.flags_table import ENVIRONMENT, FLAGS, GROUPS, Flag

__all__ = ["help_page", "markdown_table"]

_USAGE = """\
usage: closeranks run [flags] script.py [arguments]
       closeranks run [flags] -m package.module [arguments]
       closeranks run [flags] --no-python program [arguments]

Run a training script on every rank, as torchrun does; when a rank dies or hangs,
say which and why, and go on from the last checkpoint. torchrun's flags work in
both spellings, its PET_ variables too. Flags go before the script; what follows
it is the script's own.
"""
_EXAMPLES = """\
examples:
  closeranks run --nproc-per-node 4 train.py --epochs 3
  closeranks run --nproc-per-node gpu -m my_package.train
  closeranks run --nproc-per-node 2 --inject kill:rank=1,step=20 train.py

exit code: 0 when all ranks finished, the script's own when the script must be
fixed, and 91 to 95 for reasons of the run (docs/reference/exit-codes.md).
"""
_COLUMN = 28
_WIDTH = 88


def help_page() -> str:
    """The whole page, at most 88 columns wide."""
    parts = [_USAGE]
    for group in GROUPS:
        rows = [line for flag in FLAGS if flag.group == group for line in _rows(_label(flag), flag.effect)]
        parts.append("\n".join([f"{group}:", *rows]) + "\n")
    rows = [line for flag in ENVIRONMENT for line in _rows(flag.variable, flag.effect)]
    parts.append("\n".join(["Environment:", *rows]) + "\n")
    parts.append(_EXAMPLES)
    return "\n".join(parts)


def _label(flag: Flag) -> str:
    label = f"{flag.short}, {flag.long}" if flag.short else flag.long
    return f"{label} {flag.metavar}".rstrip()


def _rows(label: str, text: str) -> list[str]:
    """``label`` in the left column and ``text`` wrapped in the right one."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > _WIDTH - _COLUMN:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".lstrip()
    left = f"  {label}"
    rows = [left] if len(left) > _COLUMN - 2 else []
    for line in lines:
        rows.append(" " * _COLUMN + line if rows else left.ljust(_COLUMN) + line)
    return rows


def markdown_table(flags: tuple[Flag, ...]) -> str:
    """The same rows for docs/reference/torchrun-flags.md, with what torchrun does beside them."""
    lines = ["| flag | environment | in torchrun | in closeranks |", "|---|---|---|---|"]
    for flag in flags:
        names = ", ".join(f"`{s}`" for s in flag.spellings) if flag in FLAGS else ""
        variables = ", ".join(f"`{v}`" for v in flag.variables)
        cells = (names, variables, flag.torchrun, flag.effect)
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines) + "\n"
