"""Prefixes, partial lines, carriage returns, a console without room: on a console that only remembers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.log_console import Source
from closeranks.agent.log_files import LogFile
from closeranks.agent.log_lines import MAX_LINE_BYTES, ConsoleStream, LineFilter, coloured


class Paper:
    """What a console needs to offer; keeps what was put, and is full when told so."""

    def __init__(self) -> None:
        self.shown: list[tuple[bool, bytes]] = []
        self.room = True

    def put(self, _source: Source, data: bytes, *, fresh: bool, force: bool = False) -> bool:
        if not self.room:
            return False
        self.shown.append((fresh, data))
        return True

    def has_room(self, _source: Source) -> bool:
        return self.room

    @property
    def text(self) -> bytes:
        return b"".join(data for _, data in self.shown)


def stream(paper: Paper, *, prefix: bytes = b"[3] ", raw: bool = False, reports: list[Any] | None = None):
    log = LogFile("/nowhere/3.out", 1 << 20)
    report = (reports if reports is not None else []).append
    source = Source(b"" if raw else prefix)
    return ConsoleStream(paper, source, raw=raw, rank=3, log=log, report=report)  # type: ignore[arg-type]


@given(
    st.binary(max_size=300).map(lambda b: b.replace(b"\r", b"r")), st.lists(st.integers(0, 300), max_size=9)
)
def test_lines_are_the_same_however_they_arrive(text: bytes, cuts: list[int]) -> None:
    paper = Paper()
    view = stream(paper)
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    for start, end in itertools.pairwise(edges):
        view.feed(text[start:end], 0.0)
    view.finish()
    whole = text if text.endswith(b"\n") or not text else text + b"\n"
    assert paper.text == b"".join(b"[3] " + line + b"\n" for line in whole.split(b"\n")[:-1])


@given(st.lists(st.binary(max_size=80), max_size=20))
def test_raw_bytes_pass_through_untouched_and_at_once(parts: list[bytes]) -> None:
    paper = Paper()
    view = stream(paper, raw=True)
    for count in range(len(parts)):
        view.feed(parts[count], 0.0)
        assert paper.text == b"".join(parts[: count + 1])
    view.finish()
    assert paper.text == b"".join(parts)


@given(st.lists(st.text("ab\r\n", max_size=12), max_size=12))
def test_carriage_returns_never_raise_and_never_reach_the_console(parts: list[str]) -> None:
    paper = Paper()
    view = stream(paper)
    for number, part in enumerate(parts):
        view.feed(part.encode(), float(number))
        view.tick(number + 0.5)
    view.finish()
    assert b"\r" not in paper.text
    assert not paper.text or paper.text.endswith(b"\n")
    lines = "".join(parts).replace("\r\n", "\n").split("\n")
    finals = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    # What each line looked like last is on the console (in two pieces where it paused in between).
    shown = paper.text.decode().replace("[3] ", "").replace("\n", "")
    assert all(final in shown for final in finals)


def test_windows_line_ends_are_line_ends_also_across_reads() -> None:
    paper = Paper()
    view = stream(paper)
    view.feed(b"one\r\ntwo\r", 0.0)
    view.feed(b"\nthree\r\n", 0.0)
    assert paper.text == b"[3] one\n[3] two\n[3] three\n"


def test_progress_updates_are_at_most_ten_a_second_and_the_last_is_shown() -> None:
    paper = Paper()
    view = stream(paper)
    now_s = 100.0
    for percent in range(1001):
        view.feed(b"\r%d%%" % percent, now_s)
        view.tick(now_s)
        now_s += 0.001
    view.feed(b"\n", now_s)
    lines = paper.text.splitlines()
    assert 9 <= len(lines) <= 12
    assert lines[0] == b"[3] 0%"
    assert lines[-1] == b"[3] 1000%"


def test_a_partial_line_shows_after_silence_and_goes_on_without_a_second_prefix() -> None:
    paper = Paper()
    view = stream(paper)
    view.feed(b"Name? ", 10.0)
    view.tick(10.1)
    assert paper.shown == []
    assert view.waiting
    view.tick(10.21)
    assert paper.shown == [(True, b"[3] Name? ")]
    assert not view.waiting
    view.feed(b"Bob\nnext\n", 11.0)
    assert paper.shown[1:] == [(False, b"Bob\n[3] next\n")]


def test_an_update_after_a_shown_partial_begins_a_new_line() -> None:
    paper = Paper()
    view = stream(paper)
    view.feed(b" 10%", 10.0)
    view.tick(11.0)
    view.feed(b"\r 20%\n", 11.0)
    assert paper.text == b"[3]  10%\n[3]  20%\n"


def test_a_bar_with_its_carriage_return_behind_shows_when_it_pauses() -> None:
    paper = Paper()
    view = stream(paper)
    view.feed(b"10%\r", 1.0)
    view.tick(1.3)
    assert paper.text == b"[3] 10%\n"


@pytest.mark.parametrize("read", [1000, MAX_LINE_BYTES])
def test_a_line_without_end_is_split_and_memory_stays_bounded(read: int) -> None:
    paper = Paper()
    view = stream(paper)
    total = 300_000
    data = b"x" * total
    for at in range(0, total, read):
        view.feed(data[at : at + read], 0.0)
        assert len(view._carry) <= 2 * MAX_LINE_BYTES
    view.feed(b"\nshort\n", 0.0)
    lines = paper.text.split(b"\n")[:-1]
    assert lines[-1] == b"[3] short"
    assert max(len(line) for line in lines) <= MAX_LINE_BYTES + 4
    assert b"".join(line[4:] for line in lines[:-1]) == data


def test_without_room_whole_lines_are_dropped_and_counted() -> None:
    paper, reports = Paper(), []
    view = stream(paper, reports=reports)
    view.feed(b"a\nb\n", 0.0)
    paper.room = False
    view.feed(b"c\nd\nbegin", 0.0)
    view.feed(b"ning\ne\nhal", 0.0)
    paper.room = True
    view.feed(b"f\ng\n", 0.0)
    lines = paper.text.decode().splitlines()
    assert lines[:2] == ["[3] a", "[3] b"]
    assert lines[2] == "[closeranks: 5 lines of rank 3 not shown here; all of it is in /nowhere/3.out]"
    assert lines[3:] == ["[3] g"]
    assert reports == [{"type": "dropped", "rank": 3, "lines": 5, "path": "/nowhere/3.out"}]


def test_the_notice_comes_without_new_output_too_and_after_the_end() -> None:
    for end in (False, True):
        paper = Paper()
        view = stream(paper)
        paper.room = False
        view.feed(b"a\n", 0.0)
        if end:
            view.finish()
        assert view.waiting
        view.tick(1.0)
        assert paper.shown == []
        paper.room = True
        view.tick(2.0)
        assert b"1 lines of rank 3 not shown" in paper.text
        assert not view.waiting


def test_the_notice_promises_the_whole_only_where_the_file_has_it() -> None:
    paper = Paper()
    view = stream(paper)
    view._log.total = 1 << 20  # more than the first half of the bound
    paper.room = False
    view.feed(b"a\n", 0.0)
    paper.room = True
    view.tick(1.0)
    assert b"; the log is in /nowhere/3.out]" in paper.text


def test_colour_is_around_the_prefix_alone() -> None:
    assert coloured(b"[0] ", 0) == b"\x1b[36m[0]\x1b[0m "
    assert coloured(b"[1] ", 1) != coloured(b"[2] ", 2)
    assert coloured(b"[1000000] ", 1_000_000).endswith(b"\x1b[0m ")


def test_filter_keeps_matching_lines_with_prefix_across_reads() -> None:
    kept: list[bytes] = []
    lines = LineFilter((b"loss", b"step"), b"[1] ", kept.append)
    for part in (b"noise\nlo", b"ss 1\nother\nste", b"p 2\nlast loss"):
        lines.feed(part)
    lines.finish()
    assert b"".join(kept) == b"[1] loss 1\n[1] step 2\n[1] last loss\n"


def test_filter_does_not_hoard_an_endless_line() -> None:
    kept: list[bytes] = []
    lines = LineFilter((b"x",), b"", kept.append)
    for _ in range(100):
        lines.feed(b"x" * 10_000)
        assert len(lines._carry) <= MAX_LINE_BYTES + 10_000
    lines.finish()
    assert sum(part.count(b"x") for part in kept) == 1_000_000
