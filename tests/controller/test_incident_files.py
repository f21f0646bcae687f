"""An incident's directory: what is in its files, and what happens where they can't be written."""

from __future__ import annotations

import json
from pathlib import Path

from closeranks.controller.incident_files import write_incident
from closeranks.diagnose import diagnose
from closeranks.diagnose.codec import evidence_from_json
from closeranks.events import ExitStatus
from closeranks.evidence import ErrorRecord, Evidence, RankEvidence, Trigger

TAIL = ("first line", "KeyError: 'lr' \udce9")
KEY_ERROR = ErrorRecord("KeyError", "'lr'", "train.py:9", 3, 50, "Traceback\nKeyError: 'lr'")
ALIVE = RankEvidence(0, 100, answered=True)
ENDED = RankEvidence(1, 101, exit=ExitStatus(code=1), exit_mono_ns=60, error=KEY_ERROR, log_tail=TAIL)
FOUND = Evidence("0007", 4, 2, Trigger("exit", (1,), "", 100), (ALIVE, ENDED))


def test_the_files_say_what_the_evidence_says(tmp_path: Path) -> None:
    directory = tmp_path / "incidents" / "0007"
    assert write_incident(directory, FOUND, diagnose(FOUND), {0: "stack of 0"}, {1: "native of 1"}) == ""
    assert evidence_from_json(json.loads((directory / "evidence.json").read_text())) == FOUND
    verdict = json.loads((directory / "verdict.json").read_text())
    assert verdict["culprits"][0]["rank"] == 1 and verdict["kind"] == "exception"
    assert (directory / "stacks" / "0.txt").read_text() == "stack of 0"
    assert (directory / "stacks" / "1.native.txt").read_text() == "native of 1"
    assert (directory / "logs" / "1.err").read_bytes() == b"first line\nKeyError: 'lr' \xe9\n"
    assert not list(directory.rglob("*.tmp"))


def test_without_stacks_and_last_lines_there_are_no_folders_for_them(tmp_path: Path) -> None:
    quiet = Evidence("0007", 4, 1, Trigger("exit", (0,), "", 100), (ALIVE,))
    assert write_incident(tmp_path, quiet, diagnose(quiet), {}, {}) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evidence.json", "verdict.json"]


def test_a_directory_that_can_t_be_written_is_told_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "incidents").write_text("a file in the way")
    problem = write_incident(tmp_path / "incidents" / "0007", FOUND, diagnose(FOUND), {}, {})
    assert problem.startswith("can't write") and "Not a directory" in problem
