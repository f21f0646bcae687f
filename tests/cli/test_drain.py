"""``closeranks drain``: what it asks of a job, and what it makes of the answer. The job is a stand-in."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from closeranks.cli import main as cli


class Job:
    """Listens where a running job would, and answers what it is to."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        run = self.runs / "20261201-000000-train-0001"
        run.mkdir(parents=True)
        (run / "journal.db").touch()
        self.asked: list[dict[str, Any]] = []
        self.answer: dict[str, Any] = {"ok": True}
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.bind(str(folder / "control"))
        self._sock.listen()
        (run / "control.json").write_text(json.dumps({"socket": str(folder / "control"), "pid": 1}))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                conn, _ = self._sock.accept()
            except OSError:
                return
            with conn, conn.makefile("rwb") as file:
                self.asked.append(json.loads(file.readline()))
                file.write(json.dumps(self.answer).encode() + b"\n")

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(10)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


@pytest.fixture
def drain(job: Job, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*argv: str) -> tuple[int, str, str]:
        code = cli.main(["drain", *argv, "--runs-dir", str(job.runs)])
        return (code, *capsys.readouterr())

    return run


Drain = Callable[..., tuple[int, str, str]]
SEATED = {"ok": True, "node": "n3", "deadline_s": 600.0, "spares": 2, "seated": True}


def test_it_asks_for_the_node_within_the_deadline_and_says_who_takes_over(job: Job, drain: Drain) -> None:
    job.answer = SEATED
    code, out, err = drain("n3", "--deadline", "600", "--reason", "firmware")
    assert (code, err) == (0, "")
    assert out == "node n3 drains within 600 s; 2 spares can take its place\n"
    assert job.asked == [{"type": "drain", "node": "n3", "reason": "firmware", "deadline_s": 600.0}]


def test_without_a_deadline_the_job_has_its_own(job: Job, drain: Drain) -> None:
    job.answer = {**SEATED, "deadline_s": 300, "spares": 0}
    code, out, _ = drain("n3")
    assert (code, out) == (0, "node n3 drains within 300 s; there is no spare to take its place\n")
    assert job.asked[0]["deadline_s"] is None and job.asked[0]["reason"] == "asked for"


def test_a_spare_is_released_at_once(job: Job, drain: Drain) -> None:
    job.answer = {**SEATED, "seated": False}
    assert "it was a spare, and is released at once" in drain("n3")[1]


def test_json_is_the_answer_itself(job: Job, drain: Drain) -> None:
    job.answer = SEATED
    code, out, _ = drain("n3", "--json")
    assert code == 0 and json.loads(out) == SEATED


@pytest.mark.parametrize("as_json", [False, True])
def test_a_node_that_there_isn_t_is_code_2(job: Job, drain: Drain, as_json: bool) -> None:
    job.answer = {"ok": False, "error": "this job has no node 'n3'; its nodes are a, b"}
    code, out, err = drain("n3", *(["--json"] if as_json else []))
    assert code == 2 and "its nodes are a, b" in (out if as_json else err)
    assert "Traceback" not in err


def test_a_job_of_one_machine_has_no_nodes_to_drain(job: Job, drain: Drain) -> None:
    job.answer = {"ok": False, "error": "unknown request 'drain'"}
    code, _, err = drain("n3")
    assert code == 2 and "this job runs on one machine alone" in err


@pytest.mark.parametrize("deadline", ["-1", "nan", "inf", "2592001", "soon"])
def test_a_deadline_that_is_none_asks_nobody(job: Job, drain: Drain, deadline: str) -> None:
    code, _, err = drain("n3", "--deadline", deadline)
    assert code == 2 and "--deadline" in err and "Traceback" not in err
    assert job.asked == []


def test_without_a_node_nobody_is_asked(job: Job, drain: Drain) -> None:
    code, _, err = drain()
    assert code == 2 and "NODE" in err and job.asked == []


def test_without_a_job_there_is_nothing_to_drain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drain", "n3", "--runs-dir", str(tmp_path / "none")]) == 2
    assert "no runs under" in capsys.readouterr().err


def test_help_says_what_happens_without_a_spare(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drain", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "a spare takes the node's place" in out and "Without a spare the job goes on" in out
