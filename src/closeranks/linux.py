"""The few Linux calls Python has no binding for: prctl, and the process title. No torch, no state."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import time
from pathlib import Path

__all__ = [
    "STACK_SIGNAL",
    "become_subreaper",
    "boot_id",
    "boottime_s",
    "die_with_parent",
    "go_first",
    "interface_of",
    "set_title",
]

# include/uapi/linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_SIOCGIFADDR = 0x8915  # include/uapi/linux/sockios.h; the answer's address is at byte 20 (netdevice(7))

# A real-time signal that nothing in the field uses; the agent asks ranks for their Python stacks with it.
STACK_SIGNAL = signal.SIGRTMIN + 9


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if libc.prctl(option, value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Have the kernel send this process ``sig`` when its parent ends. Cleared by fork, kept by exec."""
    _prctl(_PR_SET_PDEATHSIG, int(sig))


def become_subreaper() -> None:
    """Adopt every orphan below this process, instead of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def go_first() -> None:
    """Run before processes of equal rights, where we may (root, CAP_SYS_NICE): ranks use every core they get.

    Children don't inherit it (SCHED_RESET_ON_FORK, sched(7)). Without the right to, nothing changes.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, -10)


def set_title(title: str, short: str) -> None:
    """Show ``title`` as the command line and ``short`` (15 bytes) as the name of this process.

    A forked worker would otherwise look like the zygote in ``ps`` and to ``pkill -f train.py``. The kernel
    reads the command line from our own memory, between arg_start and arg_end (proc(5), fields 48 and 49 of
    /proc/PID/stat), so what doesn't fit there is cut. Does nothing where /proc hides the addresses.
    """
    _prctl(_PR_SET_NAME, short.encode("utf-8", "replace")[:15])
    try:
        stat = Path("/proc/self/stat").read_bytes()
    except OSError:
        return
    fields = stat[stat.rindex(b")") + 2 :].split()
    start, end = int(fields[45]), int(fields[46])
    size_bytes = end - start
    if start == 0 or not 0 < size_bytes <= 1 << 20:
        return
    text = b"\0".join(os.fsencode(part) for part in title.split("\0"))[: size_bytes - 1]
    ctypes.memmove(start, text.ljust(size_bytes, b"\0"), size_bytes)


def boot_id() -> str:
    """Tells one boot of one machine from all others (random(4)); "" where /proc doesn't say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def boottime_s() -> float:
    """CLOCK_BOOTTIME: unlike CLOCK_MONOTONIC it goes on while the machine is suspended, as leases do."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this IPv4 or IPv6 address; None: none has it."""
    if ":" in address:
        return _interface_of_v6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _interface_of_v6(address: str) -> str | None:
    """From /proc/net/if_inet6: address, index, prefix, scope, flags, name."""
    try:
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[5] for line in lines if line.startswith(wanted)), None)
