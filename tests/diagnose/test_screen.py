"""The screen of an incident: aligned, bounded, calm, and deaf to what ranks printed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from closeranks.diagnose import diagnose, screen
from closeranks.diagnose.screen import render, to_ascii
from closeranks.diagnose.text import width_of
from closeranks.events import ExitStatus
from closeranks.evidence import ErrorRecord, Evidence

from . import scenes
from .scenes import CLOSED, GLOO_ABORT, SCRIPT, SIGABRT, SIGKILL, Job
from .test_matrix import IN_C, LOCK, halted, sleeping, without


def stopped() -> Evidence:
    job = halted(8, 1)
    alive = job.alive(job.broken)
    assert alive.process is not None
    end = replace(alive, process=replace(alive.process, state="T"), answered=False, groups=())
    return job.evidence("stopped", {1: end}, ranks=(1,))


def raising(traceback: str, message: str = "bad batch") -> Evidence:
    job = halted(4, 2)
    error = ErrorRecord("ValueError", message, f"{SCRIPT}:57", 12, job.now_ns, traceback)
    return job.evidence("exception", {2: replace(job.dead(job.broken, ExitStatus(code=1)), error=error)})


def long_traceback(lines: int = 40) -> str:
    frames = "".join(
        f'  File "/home/user/job/m{i}.py", line {i}, in f{i}\n    call_{i}(x)\n' for i in range(lines)
    )
    return f"Traceback (most recent call last):\n{frames}ValueError: bad batch\n"


def cases() -> dict[str, Evidence]:
    job, killed = halted(8, 3, scenes.ddp), halted(4, 1)
    skipped = Job(4, scenes.ddp, 2, tamper=without(4)).run()
    abort = skipped.dead(skipped.ranks[0], SIGABRT, after_ms=12, aborted_by=GLOO_ABORT)
    lost = {r.number: killed.victim(r, CLOSED, at_ns=killed.now_ns) for r in killed.ranks}
    return {
        "stopped": stopped(),
        "killed": killed.evidence("exit", {1: killed.dead(killed.broken, SIGKILL)}, oom_kills=1),
        "lock": job.evidence("blocked", {3: sleeping(job, stack=LOCK)}),
        "native": job.evidence("blocked", {3: sleeping(job, stack=IN_C, answered=False)}),
        "skip": skipped.evidence("exit", {0: abort}),
        "exception": raising(long_traceback()),
        "suspect": killed.evidence("suspect", {1: sleeping(killed, stack=LOCK)}),
        "lost": killed.evidence("exception", lost),
        "empty": Evidence("", 0, 0, killed.evidence("exit", {}).trigger, ()),
    }


@pytest.mark.parametrize("width", [20, 60, 80, 100, 120])
@pytest.mark.parametrize("name", list(cases()))
def test_fits(name: str, width: int) -> None:
    evidence = cases()[name]
    verdict = diagnose(evidence)
    text = render(evidence, verdict, width=width, next_step="generation 3", run_hint="runs/incidents/0003")
    assert text.endswith("\n")
    lines = text.rstrip("\n").split("\n")
    assert len(lines) <= screen.MAX_LINES + screen.MAX_TRACEBACK_LINES
    assert all(width_of(line) <= max(40, width) for line in lines), text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in lines)
    assert "confidence" in lines[1]
    assert any(line.startswith("   files ") for line in lines)
    if name != "exception":
        assert len(lines) <= screen.MAX_LINES


def test_what_a_person_sees() -> None:
    evidence = stopped()
    shown = render(evidence, diagnose(evidence), width=100, run_hint="runs/incidents/0003", clock="14:03:22")
    lines = shown.splitlines()
    assert lines[0].startswith("── incident 0003 · generation 2 ──")
    assert lines[0].endswith(" 14:03:22 ──")
    assert width_of(lines[0]) == 100
    assert lines[1].startswith("   rank 1 was stopped by a signal (SIGSTOP")
    assert lines[1].endswith("confidence 98 %")
    assert any("app.hang · frozen_process · restart in place" in line for line in lines)
    assert "ranks 0,2-7  wait in all_reduce #13 of the default group, train.py:57" in shown
    assert "rank 1's stack: train.py:50 train ← train.py:80 main" in shown
    assert "state T for 1.5 s" in shown


def test_both_sides_of_a_mismatch_are_shown() -> None:
    evidence = cases()["skip"]
    shown = render(evidence, diagnose(evidence))
    assert "rank 2 skipped all_reduce #52 of the default group (step 13, train.py:57)" in shown
    assert "ranks 1,3  wait in all_reduce #52 of the default group, train.py:57" in shown
    assert "was killed by SIGABRT: op.preamble.length <= op.nbytes. 1000 vs 4" in shown


def test_the_last_lines_of_the_real_traceback() -> None:
    evidence = raising(long_traceback())
    shown = render(evidence, diagnose(evidence))
    assert "ValueError: bad batch" in shown.splitlines()[-1]
    assert "call_39(x)" in shown
    assert "call_30(x)" not in shown
    inner = [line for line in shown.splitlines() if "call_39" in line or "m39.py" in line]
    assert len(inner[1]) - len(inner[1].lstrip()) == len(inner[0]) - len(inner[0].lstrip()) + 2


EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[31mboo\x1b[0m \u202egnp.exe\r\n\x00\x9b1mfake closeranks line"


def test_a_victims_traceback_is_not_shown_as_the_error() -> None:
    """The culprit of a mismatch loses its peers in the end, too; that isn't what went wrong."""
    job = Job(4, scenes.ddp, 2, tamper=without(4)).run()
    abort = job.dead(job.ranks[0], SIGABRT, after_ms=12, aborted_by=GLOO_ABORT)
    lost = job.victim(job.broken, CLOSED, at_ns=job.now_ns)
    evidence = job.evidence("exit", {0: abort, 2: lost})
    shown = render(evidence, diagnose(evidence))
    assert "rank 2 skipped all_reduce" in shown
    assert "   error " not in shown
    assert "rank 2's stack: train.py:80" in shown


def test_foreign_text_cannot_act_on_the_terminal() -> None:
    trace = f'Traceback (most recent call last):\n  File "{EVIL}", line 1, in {EVIL}\nValueError: {EVIL}\n'
    evidence = replace(raising(trace, EVIL), node=EVIL, incident_id=EVIL)
    frames = tuple(replace(f, function=EVIL, file=EVIL) for f in LOCK)
    evidence = replace(
        evidence, ranks=tuple(replace(r, stack=frames, log_tail=(EVIL,)) for r in evidence.ranks)
    )
    verdict = diagnose(evidence)
    for colour in (False, True):
        shown = render(evidence, verdict, run_hint=EVIL, next_step=EVIL, clock=EVIL, colour=colour)
        for code in (screen._BOLD, screen._DIM, screen._RED, screen._RESET):
            shown = shown.replace(code, "")
        assert all(c.isprintable() for c in shown.replace("\n", "")), ascii(shown)


def test_colour_only_if_asked() -> None:
    evidence = stopped()
    plain = render(evidence, diagnose(evidence), run_hint="x")
    coloured = render(evidence, diagnose(evidence), run_hint="x", colour=True)
    assert "\x1b[1m" in coloured
    for code in (screen._BOLD, screen._DIM, screen._RED, screen._YELLOW, screen._RESET):
        coloured = coloured.replace(code, "")
    assert "\n".join(line.rstrip() for line in coloured.split("\n")) == plain


def test_ascii_fallback() -> None:
    evidence = stopped()
    text = to_ascii(render(evidence, diagnose(evidence)))
    assert text.isascii()
    assert "-- incident 0003 - generation 2 ---" in text
    assert "train.py:50 train <- train.py:80 main" in text


def test_unknown_says_what_is_missing_and_accuses_nobody() -> None:
    evidence = cases()["lost"]
    shown = render(evidence, diagnose(evidence))
    assert "lacks the end of the rank that the others lost" in shown
    assert "lost a peer: Connection closed by peer [127.0.0.1]:30134" in shown


def test_frames_of_our_own_hooks_are_not_shown() -> None:
    """An injected exception is raised inside of them: the script's own line is what people look for."""
    ours = "".join(
        f'  File "/opt/site-packages/closeranks/worker/{name}.py", line 7, in f\n    call()\n    ^^^^\n'
        for name in ("hooks_training", "faults", "hooks_collectives")
    )
    own = f'  File "{SCRIPT}", line 57, in main\n    optimizer.step()\n'
    chained = "\nThe above exception was the direct cause of the following exception:\n\n"
    trace = f"Traceback (most recent call last):\n{own}{ours}KeyError: 1\n{chained}"
    trace += f"Traceback (most recent call last):\n{own}{ours}ValueError: bad batch\n"
    evidence = raising(trace)
    shown = render(evidence, diagnose(evidence), width=100)
    assert "closeranks/worker" not in shown and "call()" not in shown
    assert shown.count("optimizer.step()") == 2
    assert "KeyError: 1" in shown and "The above exception" in shown
