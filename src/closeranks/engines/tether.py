"""Run a program that ends when whoever started it does, however that was.

    python -m closeranks.engines.tether PARENT PROGRAM [ARGUMENT ...]

``PARENT`` is the pid of the one who starts it. The program gets SIGTERM, so that it can clean up.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from closeranks.linux import die_with_parent

__all__ = ["tethered"]


def tethered(argv: Sequence[str], python: str) -> list[str]:
    """``argv`` as a command line of a program that ends with this very process."""
    return [python, "-m", "closeranks.engines.tether", str(os.getpid()), *argv]


def main() -> int:
    """Tie this process to its parent, and become the program."""
    parent, *argv = sys.argv[1:]
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):  # it had ended before we could ask to be told
        return 1
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"closeranks: {argv[0]} can't be run: {error.strerror}\n")
        return 127


if __name__ == "__main__":
    sys.exit(main())
