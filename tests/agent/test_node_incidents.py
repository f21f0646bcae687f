"""A node's evidence goes out in one message: whole where there is room, else what tells most."""

from __future__ import annotations

from dataclasses import replace

import pytest

from closeranks.agent.capture import Captured
from closeranks.agent.node_incidents import MAX_EVIDENCE_BYTES, fitted
from closeranks.cluster_events import cluster_incident_id
from closeranks.config import ChannelConfig
from closeranks.controller.casebook import Casebook
from closeranks.diagnose import diagnose
from closeranks.diagnose.codec import evidence_from_json
from closeranks.events import ExitStatus
from closeranks.evidence import ErrorRecord, Evidence, Frame, ProcessFacts, RankEvidence, ThreadFacts, Trigger
from closeranks.frames import encode
from closeranks.progress import COLLECTIVE_SLOTS, STEP_SLOTS, Collective, Page, Phase, Step

LOST = ErrorRecord("RuntimeError", "Connection closed by peer [10.0.0.2]:1", "train.py:5", 3, 0, "Traceback")


def page(rank: int) -> Page:
    record = Collective(1, 0, "all_reduce", "float32", 10**6, 1, 5, "/home/user/job/train.py", False, 10**15)
    return Page(
        rank=rank, generation=4, pid=100 + rank, ticks=9, tick_ns=1, step=3, step_ns=1, phase=Phase.TRAIN,
        phase_ns=1, in_collective=True, world_seq=7, checkpoints=0, checkpoint_step=0, absolute_step=None,
        faults_fired=0, desync_rank=None, desync_seq=0, init_done=True, user_phase="",
        steps=tuple(Step(n, n, 10**15) for n in range(STEP_SLOTS)),
        collectives=tuple(replace(record, seq=n) for n in range(COLLECTIVE_SLOTS)), rings=True,
    )  # fmt: skip


def full(rank: int, *, line_chars: int = 200, traceback: str = "Traceback") -> RankEvidence:
    """A victim of whom everything is known."""
    threads = tuple(ThreadFacts(n, "python", "S", "futex_wait_queue", "futex", "futex") for n in range(20))
    return RankEvidence(
        rank, 100 + rank, page(rank), exit=ExitStatus(code=1), exit_mono_ns=90,
        error=replace(LOST, traceback=traceback), process=ProcessFacts("S", 0, 1.0, 1, 10**9, threads),
        stack=tuple(Frame("/home/user/job/train.py", n, "step") for n in range(20)),
        native_stack=tuple("ncclAllReduce" * 5 for _ in range(40)),
        log_tail=tuple("x" * line_chars for _ in range(100)),
    )  # fmt: skip


def captured(*ranks: RankEvidence, text_chars: int = 0) -> Captured:
    evidence = Evidence("g0004", 4, len(ranks), Trigger("exit", (0,), "", 50), ranks)
    texts = {item.rank: "s" * text_chars for item in ranks} if text_chars else {}
    return Captured(evidence, texts, dict(texts), 0.1)


def killed(rank: int) -> RankEvidence:
    return replace(full(rank), exit=ExitStatus(signal=9), exit_mono_ns=50, error=None)


def size_bytes(parts: tuple[dict, dict]) -> int:
    message = {"type": "failed", "generation": 4, "durable": True, "evidence": parts[0], "texts": parts[1]}
    return len(encode(message, ChannelConfig().max_frame_bytes))


def test_where_there_is_room_everything_goes() -> None:
    found = captured(killed(0), full(1), text_chars=5000)
    evidence, texts = fitted(found)
    assert evidence_from_json(evidence) == found.evidence
    assert texts == {
        "stacks": {"0": "s" * 5000, "1": "s" * 5000},
        "native": {"0": "s" * 5000, "1": "s" * 5000},
    }


def test_one_rank_s_text_is_cut() -> None:
    _, texts = fitted(captured(killed(0), text_chars=1 << 20))
    assert len(texts["stacks"]["0"]) == 16_384


@pytest.mark.parametrize("ranks", [8, 16, 64])
@pytest.mark.parametrize("line_chars", [200, 2000])
def test_a_node_full_of_victims_fits_and_the_verdict_is_the_same(ranks: int, line_chars: int) -> None:
    found = captured(killed(0), *(full(n, line_chars=line_chars) for n in range(1, ranks)), text_chars=20_000)
    parts = fitted(found)
    assert size_bytes(parts) <= ChannelConfig().max_frame_bytes
    evidence = evidence_from_json(parts[0])
    assert [item.rank for item in evidence.ranks] == list(range(ranks))
    assert diagnose(evidence).culprit_ranks == diagnose(found.evidence).culprit_ranks == (0,)


def test_texts_go_first_and_then_what_is_oldest() -> None:
    found = captured(*(full(n) for n in range(8)), text_chars=16_000)
    evidence, texts = fitted(captured(*(full(n) for n in range(8))))
    assert texts == {"stacks": {}, "native": {}} or texts == {}
    assert fitted(found)[1] == {}
    kept = evidence_from_json(evidence).ranks[0]
    assert kept.page is not None and kept.page.collectives
    assert kept.page.collectives[-1].seq == COLLECTIVE_SLOTS - 1, "the newest is what tells"


def test_characters_count_as_what_they_take_on_the_line() -> None:
    odd = replace(full(0), log_tail=("\udce9ü\n" * 600,) * 100)
    parts = fitted(captured(odd, odd))
    assert size_bytes(parts) <= ChannelConfig().max_frame_bytes


def test_whatever_the_ranks_raised_it_fits() -> None:
    """A worker reports up to 32 KiB of traceback; what is too large is a bug for who sends it, each time it
    is said again."""
    ranks = [full(n, traceback="Traceback\n" + "x" * 32_000) for n in range(64)]
    assert size_bytes(fitted(captured(killed(0), *ranks[1:]))) <= MAX_EVIDENCE_BYTES * 1.5


def test_agents_and_controller_call_an_incident_by_the_same_name() -> None:
    assert cluster_incident_id(7) == Casebook.incident_id(7) == "g0007"
