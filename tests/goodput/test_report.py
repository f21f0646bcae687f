from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.goodput.fold import Bucket, Generation, Incident, Outcome, RunSummary
from closeranks.goodput.report import MAX_ROWS, duration, percent, render, to_json
from closeranks.goodput.report import _width as columns

from .timeline import Timeline

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def two_incidents(t: Timeline) -> Timeline:
    t.start().generation(0, 0.05, 0.1, 1.1, 2)
    for k in range(1, 11):
        t.progress(2 + k, 0, 1 + k, saved=10 if k >= 9 else None)
    t.incident(0, broke=12.5, detected=12.504, verdict=12.54, killed=12.551, kill_s=0.011)
    t.generation(1, 12.551, 12.552, 12.58, 12.631).progress(32, 1, 20, saved=15)
    t.incident(1, broke=33, detected=34.1, verdict=34.14, killed=34.15, kill_s=0.01, rank=0)
    t.generation(2, 34.15, 34.16, 34.2, 34.25).progress(59, 2, 25, saved=25)
    return t(60, "finished", exit_code=0, reason="the script finished on all ranks")


SCREEN = """
  20261130-122655-train-a1b2                                          finished
  train.py --epochs 3 · 4 ranks on node7 · closeranks 0.1.0
  started 2026-11-30 12:26:55 UTC · 1m 00s · 2 interruptions

  ETTR 81.7 %   next step 0.69 s after a break (median; longest 1.25 s)
  ██████████████████████████████████████████████████████████████▒▒▒░░░░░░░░░░─
  █ productive   49.0 s   81.7 %    ─ detect       1.10 s    1.8 %
  ▒ start-up     2.00 s    3.3 %    ┄ evidence      76 ms    0.1 %
  ▓ restart      0.18 s    0.3 %    ┃ kill          21 ms   <0.1 %
  ░ lost work    7.60 s   12.6 %
  ETTR, effective training time ratio: the share of productive time

  Generations
   gen  started   first step          ran      steps      lost  ended
     0  12:26:55      1.90 s       12.4 s         11         1  app.host_oom
     1  12:27:07       79 ms       20.4 s         20         5  app.host_oom
     2  12:27:29       90 ms       25.8 s         25         0  finished

  Incidents
     #  when        rank  cause                                down  lost work
     1  12:27:07       2  app.host_oom                       0.13 s     1.50 s
        rank 2 was killed by SIGKILL from outside
        detect 4 ms · evidence 36 ms · kill 11 ms · restart 80 ms
     2  12:27:28       0  app.host_oom                       1.25 s     6.10 s
        rank 0 was killed by SIGKILL from outside
        detect 1.10 s · evidence 40 ms · kill 10 ms · restart 0.10 s
"""


def test_the_screen_in_80_columns(timeline: Timeline) -> None:
    assert render(two_incidents(timeline).fold(), width=80, colour=False) == SCREEN


def test_the_screen_in_120_columns_has_the_phases_as_columns(timeline: Timeline) -> None:
    text = render(two_incidents(timeline).fold(), width=120, colour=False)
    heads = next(line for line in text.splitlines() if "when" in line)
    assert " ".join(heads.split()) == "# when rank cause detect evidence kill restart down lost work"
    row = next(line for line in text.splitlines() if line.strip().startswith("2  12:27:28"))
    assert row.split(maxsplit=4)[4] == "1.10 s     40 ms     10 ms    0.10 s     1.25 s     6.10 s"


def test_colours_change_nothing_but_the_bar(timeline: Timeline) -> None:
    summary = two_incidents(timeline).fold()
    plain = render(summary, width=100, colour=False)
    coloured = render(summary, width=100, colour=True)
    assert coloured != plain
    bars = str.maketrans(dict.fromkeys("█▒▓░─┄┃═▁·", "█"))
    assert ANSI.sub("", coloured).translate(bars) == plain.translate(bars)
    assert "\x1b" not in plain


def test_where_the_encoding_has_no_blocks_it_is_all_ascii(timeline: Timeline) -> None:
    text = render(two_incidents(timeline).fold(), width=80, colour=False, ascii_only=True)
    assert text.isascii()
    assert "########" in text
    assert "detect 4 ms - evidence" in text
    assert [line.rstrip() for line in text.splitlines()] == text.splitlines()


def test_the_bar_is_as_long_as_the_page_whatever_the_shares(timeline: Timeline) -> None:
    for width in (76, 80, 97, 160):
        text = render(two_incidents(timeline).fold() if width == 76 else SUMMARY, width=width, colour=False)
        bar = next(line for line in text.splitlines() if line.startswith("  ██████"))
        assert len(bar) == width - 2


def test_an_undisturbed_run_has_no_tables(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 1, 2)(100, "finished", exit_code=0)
    text = render(timeline.fold(), width=80, colour=False)
    assert "no interruptions" in text
    assert "Generations" not in text
    assert "Incidents" not in text
    assert "ETTR 98.0 %   of the time went into steps that counted" in text


def test_a_failed_run_says_why(timeline: Timeline) -> None:
    timeline.start()(1, "generation_started", generation=0)
    timeline(
        2, "detected", generation=0, incident_id="x", trigger={"kind": "exception", "ranks": [0, 1, 2, 3]}
    )
    timeline(3, "finished", exit_code=1, reason="ModuleNotFoundError at start-up on every rank: fix it")
    text = render(timeline.fold(), width=80, colour=False)
    assert text.splitlines()[1].endswith("failed, exit code 1")
    assert "  ModuleNotFoundError at start-up on every rank: fix it\n" in text
    assert re.search(r"1  12:26:57 +0-3  unknown: exception ", text)
    assert "no verdict was recorded" in text


def test_unknown_work_makes_a_range_and_a_note(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 0).progress(50, 0, 5)
    timeline.incident(0, broke=50, detected=50, verdict=50, killed=50, kill_s=0)
    timeline.generation(1, 50, 50, 50, 50)(100, "finished", exit_code=0)
    text = render(timeline.fold(), width=80, colour=False)
    assert "ETTR 50.0 % to 100.0 %" in text
    assert "No checkpoint was seen" in text
    assert re.search(r"0 s +unknown$", text, re.MULTILINE)


def test_notes_of_interrupted_and_stepless_runs_and_dropped_records(timeline: Timeline) -> None:
    timeline.start()(1, "generation_started", generation=0)(5, "journal_gap", dropped=1234)
    text = render(timeline.fold(), width=80, colour=False)
    assert "no final record" in text
    assert "1,234 records were dropped" in text
    stepless = dataclasses.replace(SUMMARY, generations=(), unknown_work_ns=1)
    assert "No step was seen" in render(stepless, width=80, colour=False)


def test_an_injected_fault_and_unkillable_processes_are_said(timeline: Timeline) -> None:
    odd = dataclasses.replace(INCIDENT, injected="kill:rank=1", leftovers=(1, 2))
    text = render(dataclasses.replace(SUMMARY, incidents=(odd,)), width=120, colour=False)
    assert "broke (injected); 2 of its processes could not be killed" in text


# --- many, long and hostile -------------------------------------------------------------------------

INCIDENT = Incident(
    id="i", generation=0, wall_ns=0, at_s=1.0, step=1, trigger="exit", detail="", leaf="app.hang", kind="",
    culprit_ranks=(1,), summary="rank 1 broke", action="", confidence=0.5, decision="", injected="",
    leftovers=(), recovered=True, detect_s=0.5, evidence_s=0.25, kill_s=0.25, backoff_s=0.0, restart_s=1.0,
    init_s=None, lost_work_s=3.0, lost_steps=3,
)  # fmt: skip
GENERATION = Generation(0, 0, 0.0, 0.5, 1.0, 50.0, 49, 0, 49.0, 0.0, Outcome.FAILED, "i")
SUMMARY = RunSummary(
    job="job", outcome=Outcome.FINISHED, exit_code=0, reason="", started_wall_ns=0, elapsed_ns=100 * 10**9,
    buckets_ns=dict.fromkeys(Bucket, 0) | {Bucket.PRODUCTIVE: 95 * 10**9, Bucket.RESTART: 5 * 10**9},
    unknown_work_ns=0, generations=(GENERATION, GENERATION), incidents=(INCIDENT,), world_size=8,
)  # fmt: skip


def test_many_incidents_stay_on_one_screen_and_are_summed_by_cause() -> None:
    leaves = ["app.hang", "comm.desync", "gpu.hbm", "net.link", "data.stall", "host.disk", "unknown"]
    incidents = tuple(
        dataclasses.replace(INCIDENT, leaf=leaves[n % 7], detect_s=10.0 - n % 7, summary="x" * 500)
        for n in range(700)
    )
    generations = tuple(dataclasses.replace(GENERATION, number=n) for n in range(701))
    summary = dataclasses.replace(
        SUMMARY, incidents=incidents, generations=generations, generations_omitted=10
    )
    for width in (80, 120):
        lines = render(summary, width=width, colour=False).splitlines()
        assert len(lines) <= 48
        assert "… and 705 earlier: see --json" in [line.strip() for line in lines]
        assert "… and 694 earlier: see --json" in [line.strip() for line in lines]
        at = next(i for i, line in enumerate(lines) if line.strip() == "Causes")
        assert lines[at + 2].split() == ["app.hang", "100", "19m", "10s", "5m", "00s"]
        assert "… and 2 other causes" in lines[at + 7]
    assert MAX_ROWS == 6


HOSTILE = st.text(
    st.characters() | st.sampled_from("\x1b\x9b\n\r\t\x00\u202e\u200b\udc80あ漢e\u0301 "), max_size=200
)


@given(
    st.builds(
        dataclasses.replace,
        st.just(INCIDENT),
        summary=HOSTILE,
        leaf=HOSTILE,
        injected=HOSTILE,
        detect_s=st.floats(0, 1e12),
        lost_work_s=st.none() | st.floats(0, 1e12),
        culprit_ranks=st.lists(st.integers(-5, 20000), max_size=20).map(tuple),
        wall_ns=st.integers(-(2**63), 2**63),
    ),
    HOSTILE,
    st.integers(0, 300),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_no_line_is_too_long_and_no_control_character_gets_through(
    incident: Incident, text: str, width: int, colour: bool, ascii_only: bool
) -> None:
    generation = dataclasses.replace(GENERATION, steps=10**9, lost_steps=None)
    summary = dataclasses.replace(
        SUMMARY,
        job=text,
        node=text,
        argv=(text, text),
        version=text,
        outcome=Outcome.FAILED,
        exit_code=3,
        reason=text,
        notes=(text,),
        incidents=(incident, dataclasses.replace(incident, id="other")),
        generations=(generation, generation),
        started_wall_ns=incident.wall_ns,
    )
    out = ANSI.sub("", render(summary, width=width, colour=colour, ascii_only=ascii_only))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u200b\ud800-\udfff]", out)
    if ascii_only:
        assert out.isascii()
    limit = min(max(width, 76), 160)
    for line in out.splitlines():
        assert columns(line) <= limit, line
    json.dumps(to_json(summary), allow_nan=False)


# --- numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (0, "0 s"),
        (0.00004, "0 s"),
        (0.0003, "0.3 ms"),
        (0.0042, "4 ms"),
        (0.0994, "99 ms"),
        (0.0996, "0.10 s"),
        (9.99, "9.99 s"),
        (9.999, "10.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1m 00s"),
        (3599.6, "1h 00m"),
        (3600 * 5 + 240, "5h 04m"),
        (86399, "1d 00h"),
        (86400 * 54 + 3600 * 3, "54d 03h"),
    ],
)
def test_durations_read_well(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (0.0, "0.0 %"),
        (0.0004, "<0.1 %"),
        (0.5, "50.0 %"),
        (0.29, "29.0 %"),
        (0.98999, "98.9 %"),
        (0.99953, "99.95 %"),
        (0.999999, "99.99 %"),
        (1.0, "100.0 %"),
    ],
)
def test_percentages_never_round_up_to_all(part: float, text: str) -> None:
    assert percent(part) == text


# --- data -------------------------------------------------------------------------------------------


def test_json_says_what_the_screen_says_in_seconds(timeline: Timeline) -> None:
    summary = two_incidents(timeline).fold()
    data = json.loads(json.dumps(to_json(summary), allow_nan=False))
    assert data["schema"] == 1
    assert (data["job"], data["outcome"], data["exit_code"]) == ("20261130-122655-train-a1b2", "finished", 0)
    assert data["started"] == "2026-11-30T12:26:55Z"
    assert data["elapsed_s"] == 60.0
    assert set(data["buckets_s"]) == {bucket.value for bucket in Bucket}
    assert sum(data["buckets_s"].values()) == pytest.approx(60.0)
    assert data["ettr"] == data["ettr_max"] == data["buckets_s"]["productive"] / 60.0
    assert [g["outcome"] for g in data["generations"]] == ["failed", "failed", "finished"]
    first = data["incidents"][0]
    assert (first["leaf"], first["culprit_ranks"], first["lost_steps"]) == ("app.host_oom", [2], 1)
    phases = ("detect_s", "evidence_s", "kill_s", "backoff_s", "restart_s")
    assert first["down_s"] == pytest.approx(sum(first[name] for name in phases))
    assert data["notes"] == []
