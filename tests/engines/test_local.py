"""Agents as processes of this host: real ones, with a stand-in for what an agent does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from closeranks.cluster_events import NodeGone
from closeranks.engines import ENGINES, engine_for, local
from closeranks.engines.base import JobSpec, Join, agent_command
from closeranks.engines.local import LocalEngine
from closeranks.errors import UsageError

SOON_S = 20.0
# Says what it was told and does what the file of its name says: "end CODE", "deaf" or nothing; else it waits.
AGENT = """
import json, os, pathlib, signal, sys, time
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--run-dir") + 1])
node = words[words.index("--node") + 1]
session = words[words.index("--session") + 1]
orders = folder / f"{node}.orders"
if orders.exists() and orders.read_text() == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
told = {"argv": words, "pid": os.getpid(), "session": session, "sid": os.getsid(0)}
part = folder / f"{node}.new"
part.write_text(json.dumps(told))
part.replace(folder / f"{node}.json")
while True:
    text = orders.read_text() if orders.exists() else ""
    if text.startswith("end"):
        sys.exit(int(text.split()[1]))
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """With agents that end by a signal only, as these do."""
    monkeypatch.setattr(local, "_END_S", 0.3)


class Host:
    """One engine, and what its agents have told."""

    def __init__(self, folder: Path, options: dict[str, str]) -> None:
        self.folder = folder
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {folder / "agent.py"} "$@"\n')
        python.chmod(0o755)
        (folder / "agent.py").write_text(AGENT)
        self.spec = JobSpec("job-1", folder, 2, 2, 1, ("train.py", "--lr", "1"), str(python), options)
        self.engine = LocalEngine(self.spec)
        self.facts: list[Any] = []

    def told(self, node: str) -> dict[str, Any]:
        path = self.folder / f"{node}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    async def up(self, *nodes: str) -> None:
        await soon(lambda: all(self.told(node) for node in nodes))

    def order(self, node: str, text: str) -> None:
        part = self.folder / "orders.new"
        part.write_text(text)
        part.replace(self.folder / f"{node}.orders")

    async def fact(self, count: int = 1) -> NodeGone:
        await soon(lambda: len(self.facts) >= count)
        return self.facts[count - 1]

    async def listen(self) -> None:
        async for fact in self.engine.facts():
            self.facts.append(fact)


async def soon(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def play(folder: Path, scene: Callable[[Host], Awaitable[None]], **options: str) -> Host:
    """A scene, after which nothing runs that the engine has started, and its facts have an end."""

    async def main() -> Host:
        host = Host(folder, options)
        host.engine.start(Join("/run/channel", folder / "agent.pem"))
        listening = asyncio.get_running_loop().create_task(host.listen())
        try:
            await scene(host)
        finally:
            await host.engine.close()
        await asyncio.wait_for(listening, SOON_S)
        pids = [json.loads(path.read_text())["pid"] for path in folder.glob("*.json")]
        assert [pid for pid in pids if is_alive(pid)] == []
        await host.engine.close()
        return host

    return asyncio.run(main())


def test_as_many_agents_as_are_wanted_each_under_its_name_and_in_its_session(tmp_path: Path) -> None:
    async def scene(host: Host) -> None:
        assert await host.engine.place(2, "the job begins") == 2
        assert await host.engine.place(1, "one was lost") == 1
        await host.up("node0", "node1", "node2")

    host = play(tmp_path, scene)
    told = [host.told(f"node{n}") for n in range(3)]
    assert len({entry["session"] for entry in told}) == 3
    assert all(entry["sid"] == entry["pid"] for entry in told), "no signal of the terminal's reaches it"
    argv = told[1]["argv"]
    expected = agent_command(
        host.spec,
        Join("/run/channel", tmp_path / "agent.pem"),
        node="node1",
        session=told[1]["session"],
    )
    assert argv == expected[1:]
    assert argv[-4:] == ["--", "train.py", "--lr", "1"]
    assert host.facts == [], "what close ends is no news"


def test_of_hosts_each_is_used_once_and_the_one_that_was_longest_unused_first(tmp_path: Path) -> None:
    async def scene(host: Host) -> None:
        assert await host.engine.place(5, "x") == 3
        await host.up("a", "b", "c")
        assert await host.engine.place(1, "x") == 0
        for count, node in enumerate("ba", start=1):
            host.order(node, "end 0")
            assert (await host.fact(count)).node == node
            (tmp_path / f"{node}.json").unlink()
            (tmp_path / f"{node}.orders").unlink()
        assert await host.engine.place(1, "x") == 1
        await host.up("a")
        assert host.told("b") == {}

    play(tmp_path, scene, hosts="a,b,c")


@pytest.mark.parametrize("code", [0, 1, 137])
def test_an_agent_that_ended_by_itself_is_gone_for_certain(tmp_path: Path, code: int) -> None:
    async def scene(host: Host) -> None:
        await host.engine.place(1, "x")
        await host.up("node0")
        host.order("node0", f"end {code}")
        fact = await host.fact()
        assert (fact.node, fact.session) == ("node0", host.told("node0")["session"])
        assert f"code {code}" in fact.reason

    play(tmp_path, scene)


def test_an_agent_that_was_killed_may_have_left_its_ranks(tmp_path: Path) -> None:
    async def scene(host: Host) -> None:
        await host.engine.place(1, "x")
        await host.up("node0")
        os.kill(host.told("node0")["pid"], signal.SIGKILL)
        fact = await host.fact()
        assert (fact.node, fact.session) == ("node0", "") and "signal 9" in fact.reason

    play(tmp_path, scene)


def test_behind_a_prefix_no_end_is_certain(tmp_path: Path) -> None:
    async def scene(host: Host) -> None:
        await host.engine.place(1, "x")
        await host.up("node0")
        host.order("node0", "end 255")
        assert (await host.fact()).session == ""

    host = play(tmp_path, scene, prefix="env FOR={node} NICE='a b'")
    assert host.told("node0")["argv"][-1] == "1"


def test_a_prefix_knows_the_node(tmp_path: Path) -> None:
    engine = Host(tmp_path, {"prefix": "ssh -p 22 {node} --", "hosts": "a,b"}).engine
    first, second = engine.render().splitlines()
    assert first.startswith("ssh -p 22 a -- ") and second.startswith("ssh -p 22 b -- ")
    assert "--node a --session SESSION" in first and "train.py" in second


def test_a_command_that_isn_t_there_is_a_fact_and_no_crash(tmp_path: Path) -> None:
    async def scene(host: Host) -> None:
        assert await host.engine.place(2, "x") == 0
        fact = await host.fact()
        assert fact.session == "" and "can't be started" in fact.reason

    play(tmp_path, scene, prefix=str(tmp_path / "no-such-command"))


def test_release_waits_for_an_agent_that_ends_as_it_was_told(tmp_path: Path) -> None:
    async def scene(host: Host) -> None:
        await host.engine.place(2, "x")
        await host.up("node0", "node1")
        host.order("node0", "end 0")
        await host.engine.release("node0", "drained")
        assert not is_alive(host.told("node0")["pid"]) and is_alive(host.told("node1")["pid"])
        await host.engine.release("node7", "never was")

    play(tmp_path, scene)


def test_release_ends_an_agent_that_was_not_told(tmp_path: Path) -> None:
    async def scene(host: Host) -> None:
        await host.engine.place(1, "x")
        await host.up("node0")
        await host.engine.release("node0", "drained")
        assert not is_alive(host.told("node0")["pid"])

    play(tmp_path, scene)


def test_close_ends_even_what_is_deaf_or_stopped(tmp_path: Path) -> None:
    async def scene(host: Host) -> None:
        host.order("node0", "deaf")
        await host.engine.place(3, "x")
        await host.up("node0", "node1", "node2")
        os.kill(host.told("node1")["pid"], signal.SIGSTOP)
        began_s = time.monotonic()
        await host.engine.close()
        assert time.monotonic() - began_s < 10.0
        assert await host.engine.place(1, "too late") == 0

    play(tmp_path, scene)


def test_it_needs_no_network_unless_it_is_told_where_to_listen(tmp_path: Path) -> None:
    assert Host(tmp_path, {}).engine.listen_address() is None
    assert Host(tmp_path, {"listen": "10.0.0.1"}).engine.listen_address() == "10.0.0.1"


def test_an_option_that_it_doesn_t_have_is_named_with_those_it_has(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no option 'host'; it has hosts, prefix, listen"):
        Host(tmp_path, {"host": "a"})


def test_it_has_no_scheduler(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no scheduler"):
        Host(tmp_path, {}).engine.submit()


def test_an_engine_is_found_by_its_name_and_others_are_named(tmp_path: Path) -> None:
    spec = Host(tmp_path, {}).spec
    assert engine_for("local", spec).name == "local" and "local" in ENGINES
    with pytest.raises(UsageError, match="no engine 'lokal'; there are local"):
        engine_for("lokal", spec)
