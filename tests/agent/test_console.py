"""What reaches the terminal: bytes given to the log pump, whatever the terminal can show."""

from __future__ import annotations

import io
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from closeranks.agent.console import Console
from closeranks.cli.main import main
from closeranks.controller.journal import Journal
from closeranks.controller.runs import create_run_dir
from closeranks.diagnose import diagnose
from closeranks.events import ExitStatus, Finish
from closeranks.evidence import Evidence, RankEvidence, Trigger

KILLED = Evidence(
    incident_id="0001",
    generation=0,
    world_size=2,
    trigger=Trigger("exit", (1,), "", 100),
    ranks=(RankEvidence(0, 100), RankEvidence(1, 101, exit=ExitStatus(signal=9), exit_mono_ns=90)),
)


class Terminal:
    """Collects what is said. ``encoding`` is that of stderr."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, quiet: bool = False, encoding: str = "utf-8"
    ) -> None:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding))
        self.said: list[bytes] = []
        self.console = Console(self.said.append, quiet=quiet, runs_hint="runs")

    @property
    def text(self) -> str:
        return b"".join(self.said).decode()

    def incident(
        self, directory: Path | None = Path("runs/x"), *, next_generation: int | None = 1, **more: Any
    ) -> str:
        more = {"injected": False, **more}
        self.console.incident(KILLED, diagnose(KILLED), directory, next_generation=next_generation, **more)
        return self.text


def test_quiet_leaves_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, quiet=True)
    for level in ("info", "warning", "error"):
        terminal.console.tell(level, f"an {level}")
    assert terminal.text == "closeranks: warning: an warning\ncloseranks: error: an error\n"
    assert "incident 0001" in terminal.incident()


def test_an_incident_says_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = Terminal(monkeypatch).incident().splitlines()[2]
    assert terms.endswith("generation 1") and "restart" in terms


def test_an_incident_says_how_long_the_next_generation_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = Terminal(monkeypatch).incident(delay_s=0.5).splitlines()[2]
    assert terms.endswith("generation 1 in 0.5 s") and "restart" in terms


def test_files_that_could_not_be_written_are_not_pointed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "files" in Terminal(monkeypatch).incident()
    assert "files" not in Terminal(monkeypatch).incident(None)


def test_a_script_that_refuses_its_command_line_gets_a_line_and_no_screen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tail = ("usage: train.py [-h]", "train.py: error: argument --steps: invalid int value: 'many'")
    refused = replace(
        KILLED, ranks=(RankEvidence(0, 100, exit=ExitStatus(code=2), exit_mono_ns=90, log_tail=tail),)
    )
    terminal = Terminal(monkeypatch)
    said = "incident 0001: rank 0 exited with code 2, after a usage message of its own · incidents/0001"
    for following in (None, 1):
        terminal.said.clear()
        terminal.console.incident(
            refused, diagnose(refused), Path("incidents/0001"), next_generation=following, injected=False
        )
        assert (said in terminal.text) == (following is None)
        assert ("confidence" in terminal.text) == (following is not None)


def test_one_that_was_asked_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Terminal(monkeypatch).incident(injected=True).splitlines()[2].endswith("generation 1 · injected")


def test_the_last_one_promises_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = Terminal(monkeypatch).incident(next_generation=None).splitlines()[2]
    assert terms.endswith("the job stops")


def test_a_terminal_without_unicode_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Terminal(monkeypatch, encoding="ascii").incident(injected=True).isascii()


@pytest.mark.parametrize(
    ("code", "incidents", "journal", "hint"),
    [(0, 0, True, False), (0, 2, True, True), (1, 0, True, True), (1, 2, False, False)],
)
def test_the_last_line_leads_to_a_report_where_there_is_something_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, incidents: int, journal: bool, hint: bool
) -> None:
    if journal:
        (tmp_path / "journal.db").touch()
    terminal = Terminal(monkeypatch)
    terminal.console.finished(Finish(code, "so it ended"), 12.34, incidents, tmp_path)
    assert "so it ended · 12.3 s" in terminal.text
    assert (f"closeranks report {tmp_path}" in terminal.text) == hint
    assert ("error: " in terminal.text) == bool(code)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ("closeranks-runs", "NAME"),
        ("mine", "mine/NAME"),
        ("with a space", "'with a space/NAME'"),
        ("..", "{elsewhere}/NAME"),
    ],
)
def test_the_hint_works_as_it_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: str, expected: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    run_dir = create_run_dir(Path(runs).resolve(), "train")
    Journal.create(run_dir / "journal.db").close()
    terminal = Terminal(monkeypatch)
    terminal.console.finished(Finish(1, "so it ended"), 12.34, 1, run_dir)
    printed = terminal.text.rpartition(" · ")[2].strip()
    assert printed == "closeranks report " + expected.format(elsewhere=tmp_path).replace("NAME", run_dir.name)
    assert main(shlex.split(printed)[1:]) == 0


def test_a_bug_of_ours_is_told_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    try:
        raise KeyError("nobody expects it")
    except KeyError as error:
        terminal.console.internal_error(error)
    assert "please report it" in terminal.text and "nobody expects it" in terminal.text


def test_text_that_is_no_utf8_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    terminal.console.tell("info", "a path \udce9")
    assert terminal.said == [b"closeranks: a path ?\n"]
