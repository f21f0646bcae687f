"""The kernel's own view of what was asked of it, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from closeranks.linux import boot_id, interface_of


def in_a_process(source: str, *arguments: str) -> str:
    program = "import os, sys, time, signal\nfrom closeranks import linux\n" + textwrap.dedent(source)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_child_dies_with_its_parent() -> None:
    out = in_a_process(
        """
        read_end, write_end = os.pipe()
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                linux.die_with_parent(signal.SIGTERM)
                signal.signal(signal.SIGTERM, lambda *_: (os.write(write_end, b"told"), os._exit(0)))
                os.write(write_end, b"up,")
                time.sleep(20)
                os._exit(1)
            time.sleep(20)
        os.close(write_end)
        assert os.read(read_end, 3) == b"up,"
        os.kill(middle, signal.SIGKILL)
        print(os.read(read_end, 10).decode())
        """
    )
    assert out == "told\n"


def test_a_subreaper_gets_the_orphans() -> None:
    out = in_a_process(
        """
        linux.become_subreaper()
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                time.sleep(0.2)
                os._exit(7)
            os._exit(0)
        os.waitpid(middle, 0)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        """
    )
    assert out == "7\n"


@pytest.mark.parametrize(
    ("title", "short", "command", "name"),
    [
        ("closeranks: spare", "cr-spare", ["closeranks: spare"], "cr-spare"),
        ("a\0b c", "a-name-of-more-than-15-bytes", ["a", "b c"], "a-name-of-more-"),
        ("x" * 10_000, "größe ✓", None, "größe ✓"),
    ],
)
def test_a_title_is_what_ps_shows_and_is_cut_to_its_room(
    title: str, short: str, command: list[str] | None, name: str
) -> None:
    out = in_a_process(
        """
        linux.set_title(sys.argv[1].replace("|", chr(0)), sys.argv[2])
        for name in ("comm", "cmdline"):
            sys.stdout.buffer.write(open(f"/proc/self/{name}", "rb").read())
        """,
        title.replace("\0", "|"),
        short,
        "room" * 100,
    )
    comm, _, cmdline = out.partition("\n")
    assert comm == name
    shown = cmdline.rstrip("\0").split("\0")
    assert shown == command if command else set(shown[0]) == {"x"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may go first")
def test_going_first_is_not_inherited() -> None:
    out = in_a_process(
        """
        linux.go_first()
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        child = os.fork()
        if child == 0:
            os._exit(os.getpriority(os.PRIO_PROCESS, 0))
        print(mine, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert out == "-10 0\n"


def test_a_boot_has_an_id_that_stays() -> None:
    assert len(boot_id()) == 36 and boot_id() == boot_id()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_an_address_of_ours_is_on_an_interface(address: str) -> None:
    name = interface_of(address)
    assert name == "lo" or (address == "::1" and name is None), "a host may be without IPv6"


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1", "::zz", "fe80::1%nowhere"])
def test_an_address_that_nobody_has_is_on_none(address: str) -> None:
    """192.0.2.0/24 and 2001:db8::/32 are for examples (RFC 5737, RFC 3849)."""
    assert interface_of(address) is None
