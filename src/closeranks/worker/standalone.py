"""A worker started by exec, for ``--no-zygote``, ``--no-python`` and what isn't safe to fork.

It imports torch by itself and then waits as a spare, so that even without a zygote a restart doesn't wait
for imports: the next generation's processes are already up.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 - PYTHON_EXEC names any
        sys.exit("closeranks: ranks need Python 3.11 or newer, and %s is %s" % (sys.executable, sys.version))  # noqa: UP031
    _here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    if sys.path and sys.path[0] == _here:
        del sys.path[0]  # our own folder's names (store, page, ...) must not hide anybody's modules
    # The interpreter that PYTHON_EXEC names may have no closeranks of its own.
    sys.path.append(os.path.dirname(os.path.dirname(_here)))  # noqa: PTH120

from closeranks import linux
from closeranks.worker import bootstrap
from closeranks.worker.zygote import import_all, open_channel, prepare_hooks

if __name__ == "__main__":
    sys.path.pop()  # nothing else is to be found there

__all__ = ["main"]


def main(argv: list[str]) -> None:
    """``standalone.py CHANNEL_FD AGENT_PID MODULES ...``: import, say hello, wait, run."""
    linux.die_with_parent()
    bootstrap.unblock_signals()
    sock = open_channel(argv[1])
    if os.getppid() != int(argv[2]):
        os._exit(1)
    linux.set_title("closeranks: spare", "cr-spare")
    bootstrap.ignore_user_signals()
    for failure in import_all([name for name in argv[3].split(",") if name]):
        sys.stderr.write(f"closeranks: can't import {failure['module']}: {failure['error']}\n")
    prepare_hooks()
    order = bootstrap.wait_for_order(sock)
    if order is None:
        os._exit(0)
    bootstrap.run(order)


if __name__ == "__main__":
    main(sys.argv)
