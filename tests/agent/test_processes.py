"""What ranks leave behind: real processes, below one that stands for the agent."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from closeranks.agent import processes

# A process of its own, as it kills all that is below it. Each test prints what it saw.
AGENT = """
    import asyncio, os, signal, subprocess, sys, time
    from closeranks import linux
    from closeranks.agent import procfs, processes
    from closeranks.agent.processes import Strays, is_cleaner, reap_zombies

    linux.become_subreaper()

    def start(*command, session=True):
        null = subprocess.DEVNULL
        process = subprocess.Popen(command or ["sleep", "600"], start_new_session=session, stdout=null)
        process.returncode = 0  # or Popen itself would reap it at some moment
        return process.pid

    def python(source, *, name="", session=True):
        pid = start(sys.executable, "-c", source, session=session)
        while name and name not in open(f"/proc/{pid}/comm").read():
            time.sleep(0.01)
        return pid

    def living(*pids):
        return [procfs.state_of(pid) not in (None, "Z") for pid in pids]
"""
NAMED = """
    import ctypes, time
    ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)
    time.sleep({seconds})
"""


def agent(*parts: str) -> list[str]:
    """What the agent with this program printed, by lines."""
    program = "\n".join(map(textwrap.dedent, (AGENT, *parts)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def named(name: str, seconds: float = 600) -> str:
    return textwrap.dedent(NAMED.format(name=name.encode(), seconds=seconds))


def test_strays_die_and_what_is_kept_lives_with_its_children() -> None:
    program = """
        daemon = python("import os, signal, time\\nos.setsid() if os.fork() else None\\ntime.sleep(600)")
        parent = python("import subprocess, time\\nsubprocess.Popen(['sleep', '600'])\\ntime.sleep(600)")
        while len(procfs.descendants(os.getpid())) < 4:
            time.sleep(0.01)
        kept = [parent, *procfs.descendants(parent)]
        print(asyncio.run(Strays().kill({parent})))
        print(procfs.descendants(os.getpid()) == kept, living(*kept))
        print(asyncio.run(Strays().finish(set())), procfs.descendants(os.getpid()))
    """
    assert agent(program) == ["[]", "True [True, True]", "[] []"]


def test_workers_in_the_making_are_kept_until_the_end() -> None:
    program = f"""
        spare = python({named("cr-spare")!r}, name="cr-spare")
        asyncio.run(Strays().kill(set()))
        print(*living(spare))
        asyncio.run(Strays().finish(set()))
        print(*living(spare))
    """
    assert agent(program) == ["True", "False"]


def test_who_removes_shared_memory_gets_time_and_no_more() -> None:
    program = f"""
        processes.CLEANER_GRACE_S = 1.0
        quick = python({named("torch_shm_manager", 0.4)!r}, name="torch_shm_manag")
        slow = python({named("torch_shm_manager")!r}, name="torch_shm_manag")
        strays = Strays()
        began = time.monotonic()
        asyncio.run(strays.kill(set()))
        print(*living(quick, slow), time.monotonic() - began < 0.4)
        asyncio.run(strays.finish(set()))
        print(*living(quick, slow), time.monotonic() - began > 0.9)
    """
    assert agent(program) == ["True True True", "False False True"]


def test_a_cleaner_that_stays_is_killed_at_a_later_restart() -> None:
    program = f"""
        processes.CLEANER_GRACE_S = 0.3
        slow = python({named("torch_shm_manager")!r}, name="torch_shm_manag")
        strays = Strays()
        asyncio.run(strays.kill(set()))
        print(*living(slow))
        time.sleep(0.4)
        asyncio.run(strays.kill(set()))
        print(*living(slow))
    """
    assert agent(program) == ["True", "False"]


def test_pythons_resource_tracker_is_a_cleaner() -> None:
    program = """
        from multiprocessing.resource_tracker import _resource_tracker
        _resource_tracker.ensure_running()
        while b"resource_tracker" not in open(f"/proc/{_resource_tracker._pid}/cmdline", "rb").read():
            time.sleep(0.01)  # it is forked, and has yet to become that
        print(is_cleaner(_resource_tracker._pid), is_cleaner(os.getpid()), is_cleaner(start()))
        asyncio.run(Strays().finish(set()))
    """
    assert agent(program) == ["True False False"]


def test_the_agents_own_tools_are_nobodys_strays() -> None:
    """py-spy and the like are waited for where they were started; an exit that somebody else took is lost."""
    program = """
        tool = subprocess.Popen(["true"])
        orphan = start("true")
        while procfs.state_of(tool.pid) != "Z" or procfs.state_of(orphan) != "Z":
            time.sleep(0.01)
        print(reap_zombies(set()), procfs.state_of(tool.pid), procfs.state_of(orphan))
        asyncio.run(Strays().kill(set()))
        print(tool.wait())
    """
    assert agent(program) == ["1 Z None", "0"]


def test_processes_in_own_are_left_for_their_owner() -> None:
    program = """
        rank = start("true")
        while procfs.state_of(rank) != "Z":
            time.sleep(0.01)
        print(reap_zombies({rank}), os.waitpid(rank, 0)[0] == rank)
    """
    assert agent(program) == ["0 True"]


@pytest.mark.skipif(not processes._has_children_lists(), reason="a kernel without CONFIG_PROC_CHILDREN")
def test_both_ways_to_find_descendants_agree() -> None:
    program = """
        python("import subprocess, time\\nsubprocess.Popen(['sleep', '600'])\\ntime.sleep(600)")
        while len(procfs.descendants(os.getpid())) < 2:
            time.sleep(0.01)
        table = procfs.parents()
        below = procfs.descendants(os.getpid(), table)
        print(processes._parents_below() == {pid: table[pid] for pid in below})
        asyncio.run(Strays().finish(set()))
    """
    assert agent(program) == ["True"]
