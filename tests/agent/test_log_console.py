"""The console's queue and thread on real pipes: bounded, fair, never torn, never blocking the caller."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from closeranks.agent import log_console
from closeranks.agent.log_console import BURST_BYTES, Console, Line, Source

LIMIT = 1 << 20


class Pipe:
    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.reports: list[dict[str, object]] = []
        self.console = Console(self.write_fd, LIMIT, lambda: None, self.reports.append)

    def read_until(self, end: bytes) -> bytes:
        data = b""
        while not data.endswith(end):
            data += os.read(self.read_fd, 1 << 20)
        return data


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    # The thread may sit in a write for ever; without a reader it gets EPIPE and ends.
    os.close(made.read_fd)
    made.console.put(Source(b""), b"end\n", fresh=True)
    deadline_s = time.monotonic() + 30
    while not made.console.gone:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    os.close(made.write_fd)


def test_lines_come_in_the_order_of_arrival(pipe: Pipe) -> None:
    first, second = Source(b"[0] "), Source(b"[1] ")
    expected = b""
    for number in range(1000):
        source = (first, second)[number % 3 == 0]
        line = source.prefix + b"%d\n" % number
        assert pipe.console.put(source, line, fresh=True)
        expected += line
    assert pipe.read_until(b"999\n") == expected


def test_an_open_line_is_ended_before_another_begins_and_gets_its_prefix_again(pipe: Pipe) -> None:
    asker, other = Source(b"[0] "), Source(b"[1] ")
    pipe.console.put(asker, b"[0] Name? ", fresh=True)
    pipe.console.put(asker, b"B", fresh=False)
    pipe.console.put(other, b"[1] hello\n", fresh=True)
    pipe.console.put(asker, b"ob\n[0] next\n", fresh=False)
    pipe.console.put(asker, b"[0] open", fresh=True)
    pipe.console.put(other, b"[1] again\n", fresh=True)
    pipe.console.put(asker, b"\n", fresh=False)
    pipe.console.put(asker, b"[0] end\n", fresh=True)
    assert pipe.read_until(b"end\n").decode().split("\n") == [
        "[0] Name? B", "[1] hello", "[0] ob", "[0] next", "[0] open", "[1] again", "[0] end", "",
    ]  # fmt: skip


def test_streams_that_share_a_line_are_never_separated(pipe: Pipe) -> None:
    line = Line()
    out, err, agent = Source(b"", line), Source(b"", line), Source(b"")
    pipe.console.put(err, b"\r 10%", fresh=False)
    pipe.console.put(out, b"\nprint\n", fresh=False)
    pipe.console.put(err, b"\r 20%", fresh=False)
    pipe.console.put(agent, b"agent\n", fresh=True)
    pipe.console.put(err, b"\r 30%\n", fresh=False)
    assert pipe.read_until(b"30%\n") == b"\r 10%\nprint\n\r 20%\nagent\n\r 30%\n"


def test_a_blocked_console_takes_a_bounded_amount_and_keeps_room_for_others(pipe: Pipe) -> None:
    flood, other = Source(b""), Source(b"")
    block = b"f" * 9999 + b"\n"
    taken = 0
    while pipe.console.put(flood, block, fresh=True):
        taken += 1
        assert taken < 1000
    assert taken * len(block) >= LIMIT // 2
    assert flood.queued <= LIMIT * 2 // 3 + len(block)
    assert not pipe.console.has_room(flood)
    assert pipe.console.put(other, b"other\n", fresh=True)
    assert pipe.console.put(other, b"forced\n", fresh=True, force=True)
    assert not pipe.console.idle()
    data = pipe.read_until(b"f\n")
    while data.count(b"f\n") < taken:
        data += os.read(pipe.read_fd, 1 << 20)
    assert data.count(block) == taken
    # It overtook what a stream may have waiting beyond its burst.
    assert data.index(b"other\n") < data.index(b"forced\n") < BURST_BYTES + 4 * 65536 + len(block)
    assert pipe.console.has_room(flood)


def test_force_is_bounded_too(pipe: Pipe) -> None:
    agent = Source(b"")
    block = b"a" * 9999 + b"\n"
    taken = 0
    while pipe.console.put(agent, block, fresh=True, force=True):
        taken += 1
        assert taken < 1000
    assert taken * len(block) <= 2 * LIMIT + 65536 + len(block)


def test_two_floods_share_and_a_third_stream_still_has_room(pipe: Pipe) -> None:
    floods = [Source(b""), Source(b"")]
    block = b"f" * 9999 + b"\n"
    refused = 0
    for _ in range(1000):
        refused = sum(not pipe.console.put(source, block, fresh=True) for source in floods)
    assert refused == 2
    assert abs(floods[0].queued - floods[1].queued) <= 2 * (65536 + len(block))
    assert pipe.console.put(Source(b""), block, fresh=True)


def test_the_shared_file_description_is_left_alone(pipe: Pipe) -> None:
    pipe.console.put(Source(b""), b"x\n", fresh=True)
    pipe.read_until(b"x\n")
    assert not fcntl.fcntl(pipe.write_fd, fcntl.F_GETFL) & os.O_NONBLOCK


def test_a_console_that_someone_else_made_non_blocking_works(pipe: Pipe) -> None:
    os.set_blocking(pipe.write_fd, False)
    source, data = Source(b""), b""
    for number in range(20):
        assert pipe.console.put(source, b"%d" % number + b"x" * 9999 + b"\n", fresh=True)
    while data.count(b"\n") < 20:
        data += os.read(pipe.read_fd, 5000)
    assert [int(line.rstrip(b"x")) for line in data.splitlines()] == list(range(20))
    assert pipe.reports == []


def test_a_reader_that_leaves_ends_the_tee_and_nothing_else(pipe: Pipe) -> None:
    spare, pipe.read_fd = pipe.read_fd, os.open("/dev/null", os.O_RDONLY)
    os.close(spare)
    source = Source(b"")
    pipe.console.put(source, b"x\n", fresh=True)
    deadline_s = time.monotonic() + 30
    while not pipe.console.gone:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    for _ in range(1000):
        assert pipe.console.put(source, b"x" * 10_000, fresh=True)
    assert pipe.console.idle()
    assert pipe.reports == [{"type": "console", "fd": pipe.write_fd, "error": "Broken pipe", "gone": True}]


def test_a_closed_console_is_gone_from_the_start() -> None:
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    os.close(read_fd)
    console = Console(write_fd, LIMIT, lambda: None, [].append)
    assert console.gone
    assert console.put(Source(b""), b"x\n", fresh=True)
    assert console.idle()


def test_a_full_disk_behind_the_console_is_told_once_and_does_not_end_it() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    reports: list[dict[str, object]] = []
    console = Console(fd, LIMIT, lambda: None, reports.append)
    for _ in range(3):
        console.put(Source(b""), b"x\n", fresh=True)
        deadline_s = time.monotonic() + 30
        while not console.idle():
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
    assert [(report["error"], report["gone"]) for report in reports] == [("No space left on device", False)]
    assert not console.gone
    # Its thread waits on an empty queue for good, so the fd stays open with it.


def test_a_regular_file_as_console_loses_nothing_and_asks_the_reader_to_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    write = os.write
    path = tmp_path / "console"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)

    def slow(to: int, data: bytes) -> int:
        if to == fd:
            gate.wait(30)
        return write(to, data)

    monkeypatch.setattr(log_console.os, "write", slow)
    woken = threading.Event()
    console = Console(fd, LIMIT, woken.set, [].append)
    console.watched = True
    source = Source(b"")
    total = 0
    while not console.full(source):
        assert console.put(source, b"x" * 9999 + b"\n", fresh=True)
        total += 10_000
        assert total < 100 * LIMIT
    assert console.put(source, b"one more\n", fresh=True)
    gate.set()
    assert woken.wait(30)
    deadline_s = time.monotonic() + 30
    while not console.idle():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert not console.full(source)
    assert path.stat().st_size == total + len(b"one more\n")
