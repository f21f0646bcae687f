"""Hosts that can be cut off: network namespaces on a bridge. For benchmarks and tests; needs root and ip(8).

What they share with a real network: addresses, links that go down, packets that are dropped, also one way.
What they don't: distance. All of them are this machine, with its cores, its clock and its disk.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from types import TracebackType

__all__ = ["Hosts", "why_not"]


def why_not() -> str:
    """Why there can be no isolated hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "nsenter", "nft") if shutil.which(tool) is None]
    return f"needs {', '.join(missing)}" if missing else ""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


class Hosts:
    """``with Hosts(5) as hosts``: so many hosts and a ``hub``, which has a link to each of them."""

    def __init__(self, count: int) -> None:
        self._mark = f"cr{secrets.token_hex(2)}"
        self.hub = f"{self._mark}-hub"
        self.names = [f"{self._mark}-h{number}" for number in range(count)]
        self._network = f"10.{100 + secrets.randbelow(100)}.{secrets.randbelow(250)}"
        self.hub_address = f"{self._network}.1"

    def __enter__(self) -> Hosts:
        _run("ip", "netns", "add", self.hub)
        self._hub("link", "add", "br0", "type", "bridge")
        self._hub("addr", "add", f"{self.hub_address}/24", "dev", "br0")
        for name in ("br0", "lo"):
            self._hub("link", "set", name, "up")
        for host in self.names:
            _run("ip", "netns", "add", host)
            port = self._port(host)
            _run(
                "ip",
                "-n",
                host,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self.hub,
            )
            self._hub("link", "set", port, "master", "br0", "up")
            _run("ip", "-n", host, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for name in ("eth0", "lo"):
                _run("ip", "-n", host, "link", "set", name, "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (*self.names, self.hub):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30)

    def _hub(self, *arguments: str) -> None:
        _run("ip", "-n", self.hub, *arguments)

    def _port(self, host: str) -> str:
        return f"v{self.names.index(host)}"

    def address(self, host: str) -> str:
        return f"{self._network}.{10 + self.names.index(host)}"

    def of_namespace(self, link: str) -> str:
        """Which host that is: ``link`` is what /proc/PID/ns/net of a process there points to."""
        number = int(link.partition("[")[2].rstrip("]\n"))
        return next(name for name in self.names if os.stat(f"/run/netns/{name}").st_ino == number)  # noqa: PTH116

    def inside(self, host: str) -> list[str]:
        """What to put before a command that is to run there."""
        return ["nsenter", f"--net=/run/netns/{host}"]

    def link(self, host: str, *, up: bool) -> None:
        """Pull its cable, or put it back."""
        self._hub("link", "set", self._port(host), "up" if up else "down")

    def drop(self, host: str, direction: str) -> None:
        """From now on nothing gets in, or nothing gets out: ``direction`` is "in" or "out"."""
        hook, side = {"in": ("input", "iif"), "out": ("output", "oif")}[direction]
        chain = f"add chain inet cut c {{ type filter hook {hook} priority 0; policy drop; }}"
        rules = f"add table inet cut; {chain}; add rule inet cut c {side} lo accept"
        _run(*self.inside(host), "nft", rules)

    def heal(self, host: str) -> None:
        _run(*self.inside(host), "nft", "delete table inet cut")
