"""The last lines of a log, bounded and safe to show."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.log_files import BoundedFile
from closeranks.agent.log_tail import MAX_LINE_CHARS, printable, tail


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_the_newest_lines_in_order(tmp_path: Path) -> None:
    path = write(tmp_path / "0.out", b"".join(b"line %d\n" % i for i in range(1000)))
    assert tail(path, 3) == ("line 997", "line 998", "line 999")
    assert len(tail(path)) == 50
    assert tail(str(path), 5000)[0] == "line 0"


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", ()),
        (b"\n", ("",)),
        (b"no line feed", ("no line feed",)),
        (b"a\n\nb\n", ("a", "", "b")),
        (b"windows\r\nlines\r\n", ("windows", "lines")),
        (b"\r 10%\r 20%\r 30%\nnext\n", (" 30%", "next")),
        (b"50%\r", ("50%",)),
        (b"tab\there\n", ("tab\there",)),
        (b"caf\xe9 \xff\n", ("caf\ufffd \ufffd",)),
        ("é ✓ 日本\n".encode(), ("é ✓ 日本",)),
    ],
)
def test_what_a_line_is(tmp_path: Path, data: bytes, lines: tuple[str, ...]) -> None:
    assert tail(write(tmp_path / "0.out", data)) == lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[H cleared", " cleared"),
        ("\x1b]0;a title\x07after", "after"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP1$r\x1b\\dcs", "dcs"),
        ("\x1bcreset", "reset"),
        ("half \x1b[", "half \\x1b["),
        ("\x1b]never ended", "\\x1b]never ended"),
        ("bell\x07 nul\x00 back\x08 del\x7f", "bell\\x07 nul\\x00 back\\x08 del\\x7f"),
        ("c1 \x9b31m", "c1 \\x9b31m"),
        ("abc\u202edef\u2066", "abc\\u202edef\\u2066"),
        ("line\u2028sep", "line\\u2028sep"),
        ("tab\tstays", "tab\tstays"),
    ],
)
def test_nothing_drives_the_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(max_size=300))
def test_no_text_leaves_a_control_character(text: str) -> None:
    shown = printable(text)
    assert not [c for c in shown if c != "\t" and (ord(c) < 32 or 127 <= ord(c) < 160)]
    assert len(shown) <= MAX_LINE_CHARS


@given(st.binary(max_size=400), st.integers(-1, 20), st.integers(-1, 500))
def test_any_bytes_and_bounds(data: bytes, max_lines: int, max_bytes: int) -> None:
    path = Path(f"/tmp/closeranks-test-tail-{os.getpid()}")
    try:
        lines = tail(write(path, data), max_lines, max_bytes)
    finally:
        path.unlink()
    assert len(lines) <= max(0, max_lines)
    assert not any("\n" in line or "\x1b" in line for line in lines)


def test_it_reads_no_more_than_it_may_and_drops_the_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "0.out"
    with path.open("wb") as file:
        file.seek(10 << 30)  # sparse: 10 GiB that nobody reads
        file.write(b"\n".join(b"%06d" % i for i in range(100_000)) + b"\n")
    started_s = time.monotonic()
    lines = tail(path, 100_000, 1000)
    assert time.monotonic() - started_s < 5
    assert lines[-1] == "099999"
    assert len(lines) == 142, (
        "1000 bytes are 142 whole lines of 7, and the 6 bytes of a torn one are left out"
    )


def test_long_lines_are_cut(tmp_path: Path) -> None:
    (line,) = tail(write(tmp_path / "0.out", b"x" * 60_000 + b"\n"))
    assert len(line) == MAX_LINE_CHARS
    assert line.endswith("x…")


def test_it_follows_a_flood_into_the_tail_segments(tmp_path: Path) -> None:
    path = tmp_path / "0.out"
    file = BoundedFile(str(path), 8192)
    for number in range(20_000):
        file.append(b"%06d\n" % number)
    file.close()
    assert tail(path, 2) == ("019998", "019999")
    newest_bytes = Path(f"{path}.tail").stat().st_size
    lines = [int(line) for line in tail(path, 10_000, newest_bytes + 1000) if line[0] != "["]
    assert lines == list(range(lines[0], 20_000)), "across segments, without a hole"
    assert len(lines) > newest_bytes // 7
    everything = tail(path, 10_000, 1 << 20)
    assert everything[0] == "000000"
    hole = next(i for i, line in enumerate(everything) if line.startswith("[closeranks: the first "))
    assert int(everything[hole + 2]) > int(everything[hole - 1]) + 1, "a hole has its note"


def test_what_cannot_be_read_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("missing", "fifo", "loop", ".", "nul\0"):
        assert tail(f"{tmp_path}/{name}") == ()
