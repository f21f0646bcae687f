"""A port that was asked for and is taken: said before the start, with who holds it."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from closeranks.errors import ConfigError

__all__ = ["check", "holder"]

_MOST_TABLE_BYTES = 16 * 1024 * 1024
_MOST_COMMAND_CHARS = 120


def check(port: int) -> None:
    """Raises ConfigError if ``port`` can't be listened on, on every address of this machine."""
    try:
        _try(port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            who = holder(port)
            held = f"is in use by {who}" if who else "is in use (by a process this user can't look into)"
            raise ConfigError(
                f"port {port} {held}; stop that, name another --master-port, or leave the flag out to get a "
                "free one"
            ) from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"port {port} is for privileged users; name one above 1023") from None
        raise ConfigError(f"port {port} can't be listened on: {error.strerror}") from None


def _try(port: int) -> None:
    # As TCPStore listens: on every address, and past sockets that only linger in TIME_WAIT.
    if socket.has_dualstack_ipv6():
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("::", port))
            probe.listen(1)
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("0.0.0.0", port))
        probe.listen(1)


def holder(port: int, proc: Path = Path("/proc")) -> str:
    """The process with a socket on that local port, as ``pid 12 (python train.py)``; "" if not to be told."""
    inodes = {i for table in ("tcp", "tcp6") for i in _inodes(proc / "net" / table, port)}
    if not inodes:
        return ""
    targets = {f"socket:[{inode}]" for inode in inodes}
    for entry in proc.iterdir():
        if entry.name.isdigit() and _has_open(entry / "fd", targets):
            return f"pid {entry.name} ({_command(entry)})"
    return ""


def _inodes(table: Path, port: int) -> list[str]:
    """Inodes of the sockets with that local port."""
    try:
        with table.open("rb") as file:
            lines = file.read(_MOST_TABLE_BYTES).decode("ascii", "replace").splitlines()[1:]
    except OSError:
        return []
    suffix = f":{port:04X}"
    rows = [line.split() for line in lines]
    return [row[9] for row in rows if len(row) > 9 and row[1].endswith(suffix) and row[9] != "0"]


def _has_open(directory: Path, targets: set[str]) -> bool:
    try:
        with os.scandir(directory) as entries:
            return any(_link(entry.path) in targets for entry in entries)
    except OSError:  # someone else's process, or one that is gone
        return False


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _command(process: Path) -> str:
    try:
        with (process / "cmdline").open("rb") as file:
            words = file.read(4096).decode("utf-8", "replace").split("\0")
    except OSError:
        return "unknown command"
    command = " ".join(word for word in words if word)
    return command[:_MOST_COMMAND_CHARS] or "unknown command"
