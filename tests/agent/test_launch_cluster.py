"""What is settled before a controller starts: what the engine is told, and how often it may come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.agent import launch_cluster, launch_node
from closeranks.agent.launch_cluster import _join, _restarts, job_spec
from closeranks.cli.flags import parse_run
from closeranks.engines.base import Join, agent_command

LINE = [
    "--engine",
    "local",
    "--nnodes",
    "2:4",
    "--spares",
    "1",
    "--engine-option",
    "hosts=a,b",
    "t.py",
    "--x",
]


def test_the_engine_is_told_what_it_has_to_know(tmp_path: Path) -> None:
    config = parse_run([*LINE[:6], "--engine-option", "prefix=ssh a=b", *LINE[6:]], {})
    spec = job_spec(config, tuple(LINE), tmp_path / "job-1")
    assert (spec.job_id, spec.min_nodes, spec.max_nodes, spec.spares, spec.all_nodes) == ("job-1", 2, 4, 1, 5)
    assert spec.options == {"prefix": "ssh a=b", "hosts": "a,b"}
    assert spec.run_argv == tuple(LINE)


def test_an_agent_reads_the_line_that_was_typed(tmp_path: Path) -> None:
    config = parse_run(LINE, {})
    command = agent_command(job_spec(config, tuple(LINE), tmp_path), Join("/c"), node="a", session="s")
    assert parse_run(command[command.index("--") + 1 :], {}, lambda: config.run_id) == config


@pytest.mark.parametrize(
    ("listen", "endpoint"), [("10.0.0.1", "10.0.0.1:4711"), ("fe80::1", "[fe80::1]:4711")]
)
def test_agents_are_told_where_and_with_which_secret(tmp_path: Path, listen: str, endpoint: str) -> None:
    assert _join(listen, [4711], tmp_path) == Join(endpoint, tmp_path / "agent.pem")


def test_what_kills_a_controller_again_and_again_is_given_way_to(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(launch_cluster.time, "monotonic", lambda: now_s)
    may_restart = _restarts(3)
    assert [may_restart() for _ in range(4)] == [True, True, True, False]
    now_s += launch_cluster._RESTART_WINDOW_S
    assert may_restart(), "what was long ago doesn't count"


def test_a_node_faces_its_controller_with_an_address_of_its_own() -> None:
    assert launch_node._facing_address("127.0.0.1:4711") == "127.0.0.1"
    assert launch_node._facing_address("/run/channel") == ""
    assert launch_node._facing_address("no.such.host.invalid:1") == ""


@pytest.mark.parametrize(
    ("address", "given", "used"),
    [("127.0.0.1", None, "lo"), ("192.0.2.1", None, None), ("127.0.0.1", "x9", "x9")],
)
def test_gloo_goes_over_the_interface_that_faces_the_job_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, given: str | None, used: str | None
) -> None:
    environment = {} if given is None else {"GLOO_SOCKET_IFNAME": given}
    monkeypatch.setattr(launch_node.os, "environ", environment)
    place = launch_node.NodePlace("/run/channel", None, tmp_path, address=address)
    launch_node._use_interface(place)
    assert environment.get("GLOO_SOCKET_IFNAME") == used
