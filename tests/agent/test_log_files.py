"""Bounded log files and the thread that writes them, on real file systems: small, full, read-only, hung."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent import log_files
from closeranks.agent.log_files import MIN_BOUND_BYTES, BoundedFile, FileWriter, LogFile

NOTES_BYTES = 600  # our own lines: one in the head, one in each of two segments


def on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.glob(path.name + "*"))


def store(path: Path, bound: int, data: bytes, chunk: int) -> None:
    file = BoundedFile(str(path), bound)
    for at in range(0, len(data), chunk):
        assert file.append(data[at : at + chunk])[1] is None
    file.close()


def kept(path: Path) -> bytes:
    """The output that a reader finds, in the documented order, without our own lines."""
    parts = [
        part.read_bytes() for part in (path, Path(f"{path}.tail.1"), Path(f"{path}.tail")) if part.exists()
    ]
    lines = b"".join(parts).splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"[closeranks: "))


def test_below_the_bound_a_file_is_byte_for_byte(tmp_path: Path) -> None:
    data = os.urandom(99_000)
    path = tmp_path / "0.out"
    store(path, 200_000, data, 777)
    assert path.read_bytes() == data
    assert [entry.name for entry in tmp_path.iterdir()] == ["0.out"]


@pytest.mark.parametrize("chunk", [13, 1001, 65_533, 1_000_012])
@pytest.mark.parametrize("bound", [MIN_BOUND_BYTES, 20_000, 300_000])
def test_a_flood_keeps_the_first_and_the_newest_within_the_bound(
    tmp_path: Path, bound: int, chunk: int
) -> None:
    data = b"".join(b"line %07d\n" % number for number in range(80_000))
    path = tmp_path / "0.out"
    store(path, bound, data, chunk)
    assert on_disk(path) <= bound + NOTES_BYTES
    text = kept(path)
    lines = text.split(b"\n")
    assert lines[0] == b"line 0000000"
    assert lines[-2:] == [b"line 0079999", b""]
    assert all(len(line) == 12 for line in lines[:-1]), "cuts are at line ends"
    numbers = [int(line[5:]) for line in lines[:-1]]
    gaps = sum(second != first + 1 for first, second in itertools.pairwise(numbers))
    assert gaps == 1, "one hole, between the first and the newest"
    assert len(text) >= bound // 2, "it does keep about as much as it may"


def test_the_notes_say_where_one_is(tmp_path: Path) -> None:
    path = tmp_path / "3.err"
    store(path, 8192, b"x" * 99 + b"\n", 100)
    data = (b"x" * 99 + b"\n") * 200
    store(path, 8192, data, 4096)
    last = path.read_bytes().splitlines()[-1].decode()
    assert last.startswith("[closeranks: the first 4,000 bytes end here; the newest ones go on in ")
    assert "3.err.tail.1 (older) and 3.err.tail]" in last
    assert Path(f"{path}.tail").read_text().splitlines()[0].startswith("[closeranks: 3.err continued")


def test_segments_name_their_place_in_the_output(tmp_path: Path) -> None:
    path = tmp_path / "0.out"
    data = b"".join(b"%09d\n" % number for number in range(0, 100_000, 10))  # each line is its own offset
    store(path, 40_000, data, 1000)
    for name in ("0.out.tail", "0.out.tail.1"):
        note, first = (tmp_path / name).read_text().splitlines()[:2]
        offset = int(note.split("from byte ")[1].split(" ")[0].replace(",", ""))
        assert int(first) == offset


@given(st.lists(st.binary(max_size=3000), max_size=20))
def test_any_bytes_stay_within_the_bound_and_the_end_is_kept(parts: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "0.out"
        file = BoundedFile(str(path), MIN_BOUND_BYTES)
        for part in parts:
            assert file.append(part) == (len(part), None)
        file.close()
        assert on_disk(path) <= MIN_BOUND_BYTES + NOTES_BYTES
        data = b"".join(parts)
        if len(data) <= MIN_BOUND_BYTES // 2 - max(map(len, parts), default=0):
            assert data == (path.read_bytes() if path.exists() else b"")
        newest = Path(f"{path}.tail") if Path(f"{path}.tail").exists() else path
        last_line = data.rpartition(b"\n")[2][-100:]
        assert not data or newest.read_bytes().endswith(last_line[-50:])


def test_a_second_writer_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    path = tmp_path / "0.out"
    store(path, 1 << 20, b"one\n", 10)
    store(path, 1 << 20, b"two\n", 10)
    assert path.read_bytes() == b"one\ntwo\n"
    lines = b"".join(b"%07d\n" % number for number in range(5000))
    store(path, 16_384, lines[:30_000], 1000)
    store(path, 16_384, lines[30_000:], 1000)
    assert on_disk(path) <= 16_384 + NOTES_BYTES
    assert kept(path).endswith(lines[-2000:])


# --- the thread -----------------------------------------------------------------------------------------


class Desk:
    """A FileWriter, and what it told."""

    def __init__(self) -> None:
        self.reports: list[dict[str, object]] = []
        self.woken = threading.Event()
        self.writer = FileWriter(self.woken.set, self.reports.append)

    def settle(self) -> None:
        token = object()
        self.writer.mark(token)
        deadline_s = time.monotonic() + 30
        done: list[object] = []
        while token not in done:
            done += self.writer.done()
            assert time.monotonic() < deadline_s
            time.sleep(0.001)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@contextlib.contextmanager
def tmpfs(directory: Path, options: str) -> Iterator[Path]:
    """A small file system of its own; skips where this user may not mount."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "closeranks-test", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def test_directories_and_files_appear_with_the_first_byte(tmp_path: Path, desk: Desk) -> None:
    path = tmp_path / "logs" / "7" / "0.out"
    log = LogFile(str(path), 1 << 20)
    desk.settle()
    assert not path.parent.exists()
    desk.writer.put(log, b"hello\n")
    desk.settle()
    assert path.read_bytes() == b"hello\n"
    assert log.complete
    assert desk.reports == []


def test_a_full_disk_is_told_once_and_the_hole_is_noted_when_there_is_room_again(
    tmp_path: Path, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "RETRY_FIRST_S", 0.0)
    with tmpfs(tmp_path / "small", "size=64k") as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(b"b" * 40_000)
        logs = [LogFile(str(disk / f"{rank}.out"), 1 << 20) for rank in (0, 1)]
        for log in logs:
            log.retry_delay_s = 0.0
        for _ in range(50):
            for log in logs:
                desk.writer.put(log, b"x" * 999 + b"\n")
        desk.settle()
        assert [(report["type"], report["error"]) for report in desk.reports] == [
            ("disk", os.strerror(errno.ENOSPC))
        ]
        assert not logs[0].complete
        ballast.unlink()
        for log in logs:
            desk.writer.put(log, b"after\n")
        desk.settle()
        for log in logs:
            lines = Path(log.path).read_text().splitlines()
            assert lines[-1] == "after"
            assert lines[-2].startswith("[closeranks: ")
            assert lines[-2].endswith(f"bytes left out here: {os.strerror(errno.ENOSPC)}]")
            lost = int(lines[-2].split()[1].replace(",", ""))
            stored = sum(line.count("x") for line in lines) + sum(len(line) == 999 for line in lines)
            assert abs(50_000 - lost - stored) <= 1  # the line feed of a torn line
        assert len(desk.reports) == 1


def test_retries_are_not_made_for_every_block(tmp_path: Path, desk: Desk) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    log = LogFile(str(blocked / "0.out"), 1 << 20)  # below a file: can't be
    for _ in range(1000):
        desk.writer.put(log, b"data\n")
    desk.settle()
    assert len(desk.reports) == 1
    assert desk.reports[0]["error"] == os.strerror(errno.ENOTDIR)
    assert log.retry_delay_s == 2 * log_files.RETRY_FIRST_S, "one attempt was made"


def test_a_read_only_disk_and_dev_full_are_errors_not_ends(tmp_path: Path, desk: Desk) -> None:
    full = tmp_path / "full.out"
    full.symlink_to("/dev/full")
    desk.writer.put(LogFile(str(full), 1 << 20), b"data\n")
    desk.settle()
    assert [report["error"] for report in desk.reports] == [os.strerror(errno.ENOSPC)]
    with tmpfs(tmp_path / "ro", "ro") as disk:
        desk.writer.put(LogFile(str(disk / "0.out"), 1 << 20), b"data\n")
        desk.settle()
        assert desk.reports[1:] == [
            {"type": "disk", "error": os.strerror(errno.EROFS), "path": str(disk / "0.out")}
        ]


def test_a_fifo_in_place_of_a_log_holds_nothing_up(tmp_path: Path, desk: Desk) -> None:
    os.mkfifo(tmp_path / "0.out")
    desk.writer.put(LogFile(str(tmp_path / "0.out"), 1 << 20), b"data\n")
    desk.settle()
    assert len(desk.reports) == 1


def test_dev_null_takes_it_all_and_gets_no_tail(desk: Desk) -> None:
    log = LogFile("/dev/null", MIN_BOUND_BYTES)
    for _ in range(100):
        desk.writer.put(log, b"x" * 1000)
    desk.settle()
    assert desk.reports == []
    assert not Path("/dev/null.tail").exists()
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


class Hung(BoundedFile):
    """A disk that does not answer until told to."""

    def __init__(self, path: str) -> None:
        super().__init__(path, 1 << 30)
        self.answer = threading.Event()

    def append(self, data: bytes) -> tuple[int, OSError | None]:
        self.answer.wait(60)
        return super().append(data)


def test_a_hung_disk_first_slows_then_loses_its_own_stream_and_memory_stays_bounded(
    tmp_path: Path, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "STALL_S", 0.2)
    log = LogFile(str(tmp_path / "0.out"), 1 << 30)
    hung = Hung(log.path)
    log.file = hung
    block = b"x" * 65535 + b"\n"
    count = 0
    while not desk.writer.full(log):
        desk.writer.put(log, block)
        count += 1
        assert count < 1000
    deadline_s = time.monotonic() + 30
    while desk.writer.full(log):  # the reader pauses, until it's clear that waiting doesn't help
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    for _ in range(100):
        desk.writer.put(log, block)
    assert log.in_flight <= log_files.STREAM_IN_FLIGHT_BYTES + len(block)
    assert [report["path"] for report in desk.reports] == [log.path]
    hung.answer.set()
    desk.settle()
    desk.writer.put(log, b"back\n")
    desk.settle()
    lines = Path(log.path).read_text().splitlines()
    assert lines[-1] == "back"
    assert lines[-2] == f"[closeranks: {100 * 65536:,} bytes left out here: the disk did not answer]"
    assert len(lines) == count + 2
