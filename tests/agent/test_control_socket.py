"""How others talk to a running job: real sockets, odd requests, and a directory that takes none."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from closeranks.agent.control_socket import CONTROL_FILE, ControlSocket
from closeranks.agent.supervisor import Supervisor
from closeranks.faults import FaultSpec


@dataclass
class FakeSupervisor:
    """Answers as the supervisor does, and notes what it was asked."""

    injected: list[FaultSpec] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def faults(self) -> FakeSupervisor:
        return self

    async def inject(self, spec: FaultSpec) -> dict[str, Any]:
        self.injected.append(spec)
        return {"ok": True, "rank": spec.rank}

    def status(self) -> dict[str, Any]:
        return {"generation": 4}

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        return await Supervisor.answer(self, request)  # type: ignore[arg-type]

    def notice(self, text: str) -> None:
        self.notices.append(text)


def with_socket(folder: Path, body: Callable[[Path], Any], supervisor: FakeSupervisor) -> Any:
    """What ``body(path of the socket)`` returns, run in a thread while the socket is served."""

    async def main() -> Any:
        async with ControlSocket(folder, folder, supervisor):  # type: ignore[arg-type]
            where = json.loads((folder / CONTROL_FILE).read_text())
            assert where["pid"] == os.getpid()
            return await asyncio.to_thread(body, Path(where["socket"]))

    return asyncio.run(main())


def ask(path: Path, line: bytes) -> Any:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(path))
        sock.sendall(line)
        with sock.makefile("rb") as reply:
            text = reply.readline()
    return json.loads(text) if text else None


def test_requests_are_answered_and_nothing_is_left(tmp_path: Path) -> None:
    supervisor = FakeSupervisor()

    def body(path: Path) -> None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert ask(path, b'{"type":"status"}\n') == {"ok": True, "generation": 4}
        assert ask(path, b'{"type":"inject","spec":"kill:rank=3"}\n') == {"ok": True, "rank": 3}

    with_socket(tmp_path, body, supervisor)
    assert [(spec.kind, spec.rank) for spec in supervisor.injected] == [("kill", 3)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"\n", "not a request"),
        (b"\xff\xfe\n", "not a request"),
        (b"[1]\n", "not a request"),
        (b"[" * 50_000 + b"\n", "not a request"),
        (b'{"spec":"kill"}\n', "not a request"),
        (b'{"type":"stop"}\n', "unknown request 'stop'"),
        (b'{"type":"inject"}\n', "no kind ''"),
        (b'{"type":"inject","spec":"kil"}\n', "did you mean 'kill'?"),
        (b'{"type":"inject","spec":["kill"]}\n', "no kind"),
    ],
)
def test_an_odd_request_is_told_what_is_wrong_with_it(tmp_path: Path, line: bytes, error: str) -> None:
    answer = with_socket(tmp_path, lambda path: ask(path, line), FakeSupervisor())
    assert answer["ok"] is False and error in answer["error"]


def test_too_long_a_line_and_one_that_is_never_ended_cost_nobody_else(tmp_path: Path) -> None:
    def body(path: Path) -> Any:
        idle = socket.socket(socket.AF_UNIX)
        idle.connect(str(path))
        idle.sendall(b'{"type":')
        with idle, pytest.raises((OSError, ValueError)):
            assert ask(path, b"x" * 200_000 + b"\n") is None
            raise OSError  # closed without an answer, or reset: both will do
        return ask(path, b'{"type":"status"}\n')

    assert with_socket(tmp_path, body, FakeSupervisor())["ok"]


def test_where_there_can_be_no_socket_the_job_runs_on(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    supervisor = FakeSupervisor()

    async def main() -> None:
        async with ControlSocket(deep, deep, supervisor):  # type: ignore[arg-type]
            assert not (deep / CONTROL_FILE).exists()

    asyncio.run(main())
    (told,) = supervisor.notices
    assert "closeranks inject can't reach this run" in told
