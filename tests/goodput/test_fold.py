from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.goodput import fold as fold_module
from closeranks.goodput.fold import Bucket, Outcome, RunSummary, fold

from .timeline import Timeline


def buckets(summary: RunSummary) -> dict[str, float]:
    """The buckets that hold something, in seconds, exact to a nanosecond."""
    return {b.value: ns / 1e9 for b, ns in summary.buckets_ns.items() if ns}


def another(timeline: Timeline, **clocks: int) -> Timeline:
    folder = timeline.path.parent / "another"
    folder.mkdir()
    return Timeline(folder / "journal.db", **clocks)


def one_kill(t: Timeline) -> Timeline:
    """Steps of 1 s from 10 s on; a save of step 8 seen at 18 s; broke at 20.5 s; the next step at 24 s."""
    t.start().generation(0, 1, 2, 8, 10)
    for k in range(1, 11):
        t.progress(9 + k, 0, k, saved=8 if k >= 9 else None)
    t.incident(0, broke=20.5, detected=20.75, verdict=21.25, killed=22, kill_s=0.25)
    t.progress(22, 0, 11, saved=8)
    t(22.25, "decided", actions=["StartGeneration"], reason="restart 1 of 1000")
    return t.generation(1, 22.5, 22.75, 23.5, 24)


# --- exact numbers ----------------------------------------------------------------------------------


def test_an_undisturbed_run(timeline: Timeline) -> None:
    timeline.start().generation(0, 1, 2, 8, 10).progress(50, 0, 41)
    timeline(100, "finished", exit_code=0, reason="the script finished on all ranks")
    summary = timeline.fold()
    assert buckets(summary) == {"start-up": 10.0, "productive": 90.0}
    assert summary.outcome is Outcome.FINISHED
    assert (summary.elapsed_s, summary.ettr, summary.ettr_max) == (100.0, 0.9, 0.9)
    assert summary.incidents == ()
    (generation,) = summary.generations
    assert (generation.number, generation.started_s, generation.init_s) == (0, 2.0, 8.0)
    assert (generation.first_step_s, generation.ended_s, generation.steps) == (10.0, 100.0, 41)
    assert (generation.lost_steps, generation.productive_s, generation.outcome) == (0, 90.0, Outcome.FINISHED)
    assert (summary.world_size, summary.node, summary.entrypoint) == (4, "node7", "train.py")
    assert summary.argv == ("train.py", "--epochs", "3")


def test_each_phase_of_an_incident_and_the_work_since_the_checkpoint(timeline: Timeline) -> None:
    one_kill(timeline).progress(34, 1, 11, saved=10)
    timeline(44, "finished", exit_code=0, reason="done")
    summary = timeline.fold()
    assert buckets(summary) == {
        "start-up": 10.0,
        "productive": (20.5 - 10 - 3.5) + 20.0,  # step 8 was done at 17 s
        "lost work": 3.5,
        "detect": 0.25,
        "evidence": 1.0,  # to the verdict 0.5, and deciding, until the kill began
        "kill": 0.25,
        "restart": 2.0,
    }
    (incident,) = summary.incidents
    assert (incident.id, incident.generation, incident.at_s, incident.step) == ("i0", 0, 20.5, 11)
    assert incident.wall_ns == timeline.wall_ns(20.5)
    assert (incident.detect_s, incident.evidence_s, incident.kill_s) == (0.25, 1.0, 0.25)
    assert (incident.backoff_s, incident.restart_s, incident.init_s) == (0.0, 2.0, 1.5)
    assert incident.down_s == 3.5
    assert (incident.lost_work_s, incident.lost_steps) == (3.5, 3)
    assert incident.recovered
    assert (incident.trigger, incident.leaf, incident.kind) == ("exit", "app.host_oom", "rank_exit")
    assert (incident.culprit_ranks, incident.confidence) == ((2,), 0.9)
    assert incident.summary == "rank 2 was killed by SIGKILL from outside"
    assert incident.decision == "restart 1 of 1000"
    assert [g.outcome for g in summary.generations] == [Outcome.FAILED, Outcome.FINISHED]
    assert summary.generations[0].incident_id == "i0"
    assert summary.ettr == summary.ettr_max == 27.0 / 44.0


def test_the_time_of_a_checkpoint_lies_between_progress_records(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 0).progress(10, 0, 10)
    timeline.progress(20, 0, 30, saved=15)  # step 15 was done at 12.5 s
    timeline.incident(0, broke=22, detected=22, verdict=22, killed=22, kill_s=0).generation(1, 22, 22, 22, 22)
    timeline(30, "finished", exit_code=0)
    summary = timeline.fold()
    assert buckets(summary) == {"productive": 12.5 + 8, "lost work": 9.5}
    assert summary.incidents[0].lost_steps == 15


def test_a_checkpoint_at_every_step_loses_only_the_step_under_way(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 1)
    for k in range(2, 11):
        timeline.progress(k, 0, k, saved=k)
    timeline.incident(0, broke=10.5, detected=11, verdict=11, killed=11, kill_s=0)
    timeline.progress(11, 0, 10, saved=10).generation(1, 11, 11, 11, 11)
    timeline(20, "finished", exit_code=0)
    summary = timeline.fold()
    assert summary.incidents[0].lost_work_s == 0.5
    assert summary.incidents[0].lost_steps == 0


def test_without_any_checkpoint_lost_work_is_unknown_and_ettr_a_range(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 10).progress(50, 0, 40)
    timeline.incident(0, broke=60, detected=60, verdict=60, killed=60, kill_s=0)
    timeline.generation(1, 60, 60, 65, 70).progress(90, 1, 20)
    timeline(100, "finished", exit_code=0)
    summary = timeline.fold()
    assert buckets(summary) == {"start-up": 10.0, "productive": 30.0, "restart": 10.0, "unknown": 50.0}
    assert (summary.ettr, summary.ettr_max) == (0.3, 0.8)
    assert summary.incidents[0].lost_work_s is None
    assert summary.incidents[0].lost_steps is None
    assert summary.generations[0].lost_steps is None


def test_no_checkpoint_in_this_generation_but_in_an_earlier_one_loses_all_of_it(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 0).progress(10, 0, 10, saved=10)
    timeline.incident(0, broke=10, detected=10, verdict=10, killed=10, kill_s=0)
    timeline.generation(1, 10, 10, 10, 10).progress(15, 1, 5)
    timeline.incident(1, broke=16, detected=16, verdict=16, killed=16, kill_s=0)
    timeline.generation(2, 16, 16, 16, 16).progress(20, 2, 4)(20, "finished", exit_code=0)
    summary = timeline.fold()
    assert [i.lost_work_s for i in summary.incidents] == [0.0, 6.0]
    assert [i.lost_steps for i in summary.incidents] == [0, 5]
    assert buckets(summary) == {"productive": 14.0, "lost work": 6.0}


def test_the_scripts_own_step_numbers_beat_what_is_seen_of_checkpoints(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 1)
    for k in range(2, 21):
        timeline.progress(k, 0, k, saved=18 if k > 18 else None, absolute=k - 1)
    timeline.incident(0, broke=20, detected=20, verdict=20, killed=20, kill_s=0)
    # It resumes with its step 12: the newer checkpoint was no good. Steps 12..19 are done twice.
    timeline.generation(1, 20, 20, 20, 21).progress(22, 1, 2, absolute=13)(30, "finished", exit_code=0)
    summary = timeline.fold()
    assert summary.incidents[0].lost_steps == 8
    assert summary.incidents[0].lost_work_s == 8.0


def test_resuming_further_back_loses_work_of_earlier_generations_too(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 1)
    for k in range(2, 11):
        timeline.progress(k, 0, k, absolute=k - 1)
    timeline.incident(0, broke=10, detected=10, verdict=10, killed=10, kill_s=0)
    timeline.generation(1, 10, 10, 10, 11).progress(15, 1, 5, absolute=14)
    timeline.incident(1, broke=15, detected=15, verdict=15, killed=15, kill_s=0)
    timeline.generation(2, 15, 15, 15, 16).progress(18, 2, 3, absolute=6)(20, "finished", exit_code=0)
    summary = timeline.fold()
    assert [g.lost_steps for g in summary.generations] == [6, 5, 0]
    assert [g.lost_work_s for g in summary.generations] == [6.0, 4.0, 0.0]


def test_backoff_ends_when_it_should(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 0).progress(1, 0, 2, saved=2)
    timeline.incident(0, broke=1, detected=1, verdict=1, killed=1, kill_s=0)
    timeline(1, "generation_starting", generation=1, delay_s=4.0, spare=True)
    timeline(7, "generation_started", generation=1, pids=[])(8, "first_step", generation=1)
    timeline(10, "finished", exit_code=0)
    summary = timeline.fold()
    assert buckets(summary) == {"productive": 3.0, "back-off": 4.0, "restart": 3.0}
    assert (summary.incidents[0].backoff_s, summary.incidents[0].restart_s) == (4.0, 3.0)


def test_a_stop_during_backoff_counts_what_was_waited(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 0).progress(1, 0, 2, saved=2)
    timeline.incident(0, broke=1, detected=1, verdict=1, killed=1, kill_s=0)
    timeline(1, "generation_starting", generation=1, delay_s=30.0, spare=True)
    timeline(6, "stop_requested", reason="SIGTERM")(7, "finished", exit_code=94, reason="drained")
    summary = timeline.fold()
    assert buckets(summary) == {"productive": 1.0, "back-off": 5.0, "stopping": 1.0}
    assert summary.outcome is Outcome.STOPPED
    assert [g.outcome for g in summary.generations] == [Outcome.FAILED, Outcome.STOPPED]


def test_a_generation_that_fails_before_its_first_step_is_charged_to_the_incident_before(
    timeline: Timeline,
) -> None:
    timeline.start().generation(0, 0, 1, 2, 4).progress(10, 0, 6, saved=6)
    timeline.incident(0, broke=10, detected=10, verdict=11, killed=12, kill_s=1)
    timeline(13, "generation_starting", generation=1, delay_s=0)(13, "generation_started", generation=1)
    timeline.incident(1, broke=15, detected=16, verdict=16, killed=17, kill_s=1)
    timeline.generation(2, 18, 18, 19, 20)(30, "finished", exit_code=0)
    summary = timeline.fold()
    first, second = summary.incidents
    assert (first.restart_s, first.recovered) == (3.0, False)
    assert (second.detect_s, second.restart_s, second.recovered) == (1.0, 3.0, True)
    assert (second.lost_work_s, second.lost_steps) == (0.0, 0)
    assert buckets(summary) == {
        "start-up": 4.0,
        "productive": 16.0,
        "detect": 1.0,
        "evidence": 1.0,
        "kill": 2.0,
        "restart": 6.0,
    }


def test_after_the_last_failure_time_is_stopping_and_not_restart(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 5).progress(9, 0, 5, saved=2)
    timeline.incident(0, broke=10, detected=10, verdict=10, killed=11, kill_s=1)
    timeline(13, "finished", exit_code=7, reason="the same exception twice at step 5")
    summary = timeline.fold()
    assert summary.outcome is Outcome.FAILED
    assert (summary.exit_code, summary.reason) == (7, "the same exception twice at step 5")
    assert buckets(summary)["stopping"] == 2.0
    assert "restart" not in buckets(summary)
    assert summary.incidents[0].lost_steps == 3, "what no checkpoint holds is lost when the job ends so"
    assert not summary.incidents[0].recovered


def test_a_stop_that_saves_loses_nothing_and_one_that_doesnt_loses_since_the_last_save(
    timeline: Timeline,
) -> None:
    timeline.start().generation(0, 0, 0, 0, 0).progress(10, 0, 11, saved=5)
    timeline(10, "stop_requested", reason="SIGTERM from process 1").progress(12, 0, 12, saved=12)
    timeline(13, "killed", generation=0, seconds=0.5, leftovers=[])(14, "finished", exit_code=143)
    summary = timeline.fold()
    assert buckets(summary) == {"productive": 10.0, "stopping": 4.0}
    assert (summary.outcome, summary.reason) == (Outcome.STOPPED, "SIGTERM from process 1")

    unsaved = another(timeline)
    unsaved.start().generation(0, 0, 0, 0, 0).progress(10, 0, 11, saved=5)
    unsaved(10, "stop_requested", reason="SIGTERM")(14, "finished", exit_code=143)
    assert buckets(unsaved.fold()) == {"productive": 4.0, "lost work": 6.0, "stopping": 4.0}


def test_a_script_that_finishes_although_asked_to_stop_has_finished(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 0).progress(10, 0, 10)
    timeline(10, "stop_requested", reason="SIGTERM")(12, "finished", exit_code=0)
    summary = timeline.fold()
    assert summary.outcome is Outcome.FINISHED
    assert buckets(summary) == {"productive": 10.0, "stopping": 2.0}


# --- runs without an end ----------------------------------------------------------------------------


def test_a_live_run_ends_at_its_last_record_and_has_lost_nothing_yet(timeline: Timeline) -> None:
    one_kill(timeline).progress(34, 1, 11)
    summary = timeline.fold(live=True)
    assert summary.outcome is Outcome.RUNNING
    assert summary.elapsed_s == 34.0
    assert buckets(summary)["productive"] == 7.0 + 10.0
    assert summary.generations[-1].outcome is Outcome.RUNNING


def test_a_run_whose_agent_was_killed_is_interrupted_and_loses_its_tail(timeline: Timeline) -> None:
    one_kill(timeline).progress(34, 1, 11, saved=1)
    summary = timeline.fold()
    assert (summary.outcome, summary.exit_code) == (Outcome.INTERRUPTED, None)
    assert summary.generations[-1].outcome is Outcome.INTERRUPTED
    assert summary.generations[-1].lost_steps == 10
    assert buckets(summary)["lost work"] == 3.5 + 10.0


def test_killed_in_the_middle_of_an_incident(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 0).progress(5, 0, 5, saved=5)
    timeline(6, "detected", generation=0, incident_id="i0", trigger={"kind": "stopped", "ranks": [3]})
    timeline(6.5, "notice", level="info", text="capturing")
    summary = timeline.fold()
    assert buckets(summary)["evidence"] == 0.5
    assert summary.incidents[0].culprit_ranks == (3,), "the trigger's, as long as there is no verdict"
    assert summary.incidents[0].leaf == ""


def test_an_empty_journal_and_a_journal_of_one_record(timeline: Timeline) -> None:
    empty = fold([])
    assert (empty.outcome, empty.elapsed_ns, empty.ettr) == (Outcome.INTERRUPTED, 0, None)
    assert sum(empty.buckets_ns.values()) == 0
    summary = timeline.start().fold(live=True)
    assert (summary.outcome, summary.elapsed_ns, summary.ettr_max) == (Outcome.RUNNING, 0, None)


def test_another_agent_takes_over_after_a_reboot(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 1, 2, 4).progress(10, 0, 6, saved=6)
    records = list(timeline.write())
    later = another(timeline, wall_s=timeline.wall_s + 100, mono_s=3)
    later.start().generation(1, 1, 1, 2, 3).progress(9, 1, 6, saved=6)(10, "finished", exit_code=0)
    summary = fold([*records, *later.write()])
    assert buckets(summary) == {"start-up": 4.0, "productive": 13.0, "unknown": 90.0, "restart": 3.0}
    assert summary.elapsed_s == 110.0
    assert summary.unknown_work_ns == 0, "nobody worked while there was no agent"
    assert [g.outcome for g in summary.generations] == [Outcome.INTERRUPTED, Outcome.FINISHED]


# --- what a script may be like ----------------------------------------------------------------------


def test_a_script_without_steps_that_finishes_was_not_starting_all_the_time(timeline: Timeline) -> None:
    timeline.start()(1, "generation_starting", generation=0)(2, "generation_started", generation=0)
    timeline(10, "detected", generation=0, incident_id="a", trigger={})
    timeline(11, "killed", generation=0, seconds=1.0, leftovers=[])
    timeline(11, "generation_starting", generation=1)(12, "generation_started", generation=1)
    timeline(50, "finished", exit_code=0)
    summary = timeline.fold()
    assert buckets(summary) == {"start-up": 1.0, "kill": 1.0, "unknown": 48.0}
    assert (summary.ettr, summary.ettr_max) == (0.0, 0.96)
    assert summary.incidents[0].restart_s == 0.0


def test_a_script_that_never_gets_to_a_step_and_fails_was_starting(timeline: Timeline) -> None:
    timeline.start()(1, "generation_starting", generation=0)(2, "generation_started", generation=0)
    timeline(3, "detected", generation=0, incident_id="a", trigger={})(3, "killed", generation=0, seconds=0)
    timeline(4, "finished", exit_code=1)
    assert buckets(timeline.fold()) == {"start-up": 3.0, "stopping": 1.0}


def test_progress_alone_shows_that_a_step_was_made(timeline: Timeline) -> None:
    timeline.start()(1, "generation_started", generation=0).progress(5, 0, 3)(9, "finished", exit_code=0)
    assert buckets(timeline.fold()) == {"start-up": 5.0, "productive": 4.0}


def test_late_words_of_older_generations_dont_count(timeline: Timeline) -> None:
    one_kill(timeline)
    for kind in ("first_step", "detected", "killed", "init_done", "generation_started"):
        timeline(25, kind, generation=0, incident_id="late", seconds=1.0)
    timeline.progress(26, 0, 999)(34, "finished", exit_code=0)
    summary = timeline.fold()
    assert buckets(summary)["productive"] == 7.0 + 10.0
    assert len(summary.incidents) == 1
    assert [g.steps for g in summary.generations] == [11, 1]


def test_a_suspicion_and_its_evidence_cost_nothing(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 0).progress(1, 0, 1)
    timeline(5, "suspected", trigger={"kind": "suspect"})(6, "evidence", incident_id="s", seconds=1.0)
    timeline(7, "verdict", incident_id="s", verdict={"leaf": "unknown"})(8, "suspicion_cleared")
    timeline(10, "finished", exit_code=0)
    summary = timeline.fold()
    assert buckets(summary) == {"productive": 10.0}
    assert summary.incidents == ()


def test_without_a_time_of_the_break_the_last_progress_stands_for_it(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 0).progress(1, 0, 2, saved=2)
    last = timeline.mono_ns(4)
    timeline(9, "detected", generation=0, incident_id="i", last_progress_mono_ns=last, trigger=None)
    summary = timeline.fold()
    assert buckets(summary)["detect"] == 5.0


def test_a_record_that_is_written_after_the_capture_says_when_it_was_known(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 0).progress(1, 0, 2, saved=2)
    timeline.progress(6.5, 0, 3, saved=3)  # a last look at the pages; what it shows was so at 5 s
    moments = {"broke_mono_ns": timeline.mono_ns(5), "detected_mono_ns": timeline.mono_ns(6)}
    timeline(7, "detected", generation=0, incident_id="i", trigger={"kind": "exit"}, **moments)
    timeline(7, "evidence", generation=0, incident_id="i", seconds=1.0)
    timeline(9, "killed", generation=0, seconds=0.5, leftovers=[])
    timeline(9, "generation_starting", generation=1, delay_s=0)(10, "first_step", generation=1)
    timeline(11, "verdict", generation=0, incident_id="i", verdict={"leaf": "app.hang"})
    timeline(15, "finished", exit_code=0)
    summary = timeline.fold()
    assert buckets(summary) == {
        "productive": 10.0,
        "detect": 1.0,
        "evidence": 2.5,
        "kill": 0.5,
        "restart": 1.0,
    }
    assert summary.incidents[0].leaf == "app.hang"
    assert summary.incidents[0].lost_work_s == 0.0


def test_a_break_outside_of_the_generation_is_brought_into_it(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 1, 2, 4).progress(5, 0, 2, saved=2)
    timeline(9, "detected", generation=0, incident_id="i", broke_mono_ns=timeline.mono_ns(-50))
    summary = timeline.fold()
    assert buckets(summary) == {"start-up": 4.0, "detect": 5.0}
    other = another(timeline)
    other.start().generation(0, 0, 1, 2, 4).progress(9, 0, 5, saved=5)
    other(9, "detected", generation=0, incident_id="i", broke_mono_ns=other.mono_ns(5000))
    assert buckets(other.fold()) == {"start-up": 4.0, "productive": 5.0}


def test_an_injected_fault_and_unkillable_processes_are_told(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 0)
    timeline(1, "fault_injected", spec="kill:rank=2,step=5", rank=2, generation=0, step=5)
    timeline(2, "detected", generation=0, incident_id="i", trigger={"kind": "exit"})
    timeline(3, "killed", generation=0, seconds=0.5, leftovers=[4711])
    (incident,) = timeline.fold().incidents
    assert incident.injected == "kill:rank=2,step=5"
    assert incident.leftovers == (4711,)


def test_dropped_records_are_counted(timeline: Timeline) -> None:
    timeline.start()(1, "journal_gap", dropped=3)(2, "journal_gap", dropped=4)(3, "journal_gap")
    assert timeline.fold().dropped_records == 7


def test_points_are_thinned_and_the_loss_is_still_right(timeline: Timeline) -> None:
    timeline.start().generation(0, 0, 0, 0, 1)
    records = list(timeline.write())
    many = [
        Odd(
            "progress",
            {"generation": 0, "step": k, "checkpoints": k // 1000, "checkpoint_step": k // 1000 * 1000},
            0,
            timeline.mono_ns(k),
        )
        for k in range(2, 20_500)
    ]
    broke = Odd("detected", {"generation": 0, "incident_id": "i"}, 0, timeline.mono_ns(20_500))
    summary = fold([*records, *many, broke])
    assert summary.incidents[0].lost_work_s == pytest.approx(500.0, abs=1e-6)


def test_more_generations_than_are_kept_still_sum_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_module, "MAX_GENERATIONS", 5)
    records = [Odd("run_started", {}, 0, 0)]
    for n in range(20):
        t = n * 10_000_000_000
        records.append(Odd("generation_started", {"generation": n}, t, t))
        records.append(Odd("first_step", {"generation": n}, t, t + 1_000_000_000))
        records.append(Odd("detected", {"generation": n, "incident_id": f"i{n}"}, t, t + 9_000_000_000))
    summary = fold(records)
    assert len(summary.generations) == len(summary.incidents) == 5
    assert summary.generations_omitted == 15
    assert sum(summary.buckets_ns.values()) == summary.elapsed_ns == 199_000_000_000


# --- any order, any content -------------------------------------------------------------------------


@dataclass
class Odd:
    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    wall_ns: int = 0
    mono_ns: int = 0
    generation: int | None = None


KINDS = [*fold_module._HANDLERS, "run_started", "journal_gap", "evidence", "suspected", "notice", "rubbish"]
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**400),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.sampled_from(["rank", "ranks"]), st.integers(), max_size=2),
)  # fmt: skip
SENSIBLE = st.fixed_dictionaries(
    {},
    optional={
        "generation": st.integers(0, 4),
        "incident_id": st.sampled_from(["a", "b"]),
        "step": st.integers(0, 50),
        "absolute_step": st.none() | st.integers(0, 200),
        "checkpoints": st.integers(0, 3),
        "checkpoint_step": st.integers(0, 50),
        "delay_s": st.floats(0, 20),
        "seconds": st.floats(0, 20),
        "broke_mono_ns": st.integers(0, 10**12),
        "last_progress_mono_ns": st.integers(0, 10**12),
        "detected_mono_ns": st.integers(0, 10**12),
        "exit_code": st.integers(0, 2),
        "trigger": st.just({"kind": "exit", "ranks": [1], "detail": "x"}),
        "verdict": st.just({"leaf": "app.hang", "culprits": [{"rank": 1}], "confidence": 0.5}),
        "dropped": st.integers(0, 9),
    },
)
FIELDS = [
    *("generation", "step", "delay_s", "seconds", "broke_mono_ns", "trigger", "verdict", "exit_code"),
    *("incident_id", "leftovers", "argv", "entrypoint", "world_size", "checkpoints", "absolute_step", "spec"),
]
HOSTILE = st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=6)


@st.composite
def journals(
    draw: st.DrawFn, data: st.SearchStrategy[dict[str, Any]], steps: st.SearchStrategy[int]
) -> list[Odd]:
    now = 10**11
    records = []
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=40)):
        now += draw(steps)
        records.append(Odd(kind, draw(data), now, now))
    return records


def check(summary: RunSummary) -> None:
    assert sum(summary.buckets_ns.values()) == summary.elapsed_ns
    assert min(summary.buckets_ns.values()) >= 0
    assert 0 <= summary.unknown_work_ns <= summary.buckets_ns[Bucket.UNKNOWN]
    if summary.elapsed_ns:
        assert 0 <= (summary.ettr or 0) <= (summary.ettr_max or 0) <= 1
    productive_s = sum(g.productive_s for g in summary.generations)
    assert productive_s == pytest.approx(summary.seconds(Bucket.PRODUCTIVE), abs=1e-6, rel=1e-9)
    lost_s = sum(g.lost_work_s or 0 for g in summary.generations)
    assert lost_s == pytest.approx(summary.seconds(Bucket.LOST), abs=1e-6, rel=1e-9)
    for name in ("detect", "evidence", "kill"):
        charged_s = sum(getattr(i, f"{name}_s") for i in summary.incidents)
        assert charged_s == pytest.approx(summary.seconds(Bucket(name)), abs=1e-6, rel=1e-9)
    for incident in summary.incidents:
        assert min(incident.restart_s, incident.backoff_s, incident.down_s, incident.lost_work_s or 0) >= 0
        assert json.dumps(incident.culprit_ranks)
    for generation in summary.generations:
        assert generation.lost_steps is None or 0 <= generation.lost_steps <= generation.steps


@given(journals(SENSIBLE, st.integers(0, 5 * 10**9)), st.booleans())
@settings(max_examples=400, deadline=None)
def test_buckets_sum_to_elapsed_whatever_the_order_of_records(records: list[Odd], live: bool) -> None:
    check(fold(records, live=live))


@given(journals(HOSTILE, st.integers(-(10**13), 10**13)), st.booleans())
@settings(max_examples=250, deadline=None)
def test_buckets_sum_to_elapsed_whatever_records_hold(records: list[Odd], live: bool) -> None:
    check(fold(records, live=live))


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(-(2**63), 2**63), st.integers(-(2**63), 2**63)),
        max_size=20,
    )
)
@settings(max_examples=400, deadline=None)
def test_clocks_may_jump_as_they_like(moments: list[tuple[str, int, int]]) -> None:
    check(fold([Odd(kind, {"generation": 0}, wall, mono) for kind, wall, mono in moments]))
