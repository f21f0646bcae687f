"""The journal survives what kills its writer, and never kills or blocks the job itself.

Power loss can't be tested here: that would take a machine to switch off. What is tested instead is that
fdatasync is called on the -wal after appends, and not more often than promised.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.controller import journal as journal_module
from closeranks.controller import journal_reader
from closeranks.controller.journal import (
    ACK_WAIT_S,
    GAP_KIND,
    MAX_DATA_BYTES,
    MAX_WAITING_BYTES,
    MAX_WAITING_RECORDS,
    Journal,
    Record,
    read,
    writer_alive,
)
from closeranks.controller.journal_file import Row, Store, encode
from closeranks.errors import JournalError

# Appends n, n+1, ... as fast as it can and says so on stdout, each when it is committed.
# Small checkpoints, so that kills fall into them as well.
WRITER = """
import itertools, sys
from pathlib import Path
from closeranks.controller.journal import Journal
from closeranks.controller.journal_file import Store
path, first = Path(sys.argv[1]), int(sys.argv[2])
journal = Journal.begin(Store(path, create=not path.exists(), checkpoint_bytes=4_000))
for n in itertools.count(first):
    journal.append("tick", {"n": n, "pad": "x" * (n % 3000)}, generation=1, wall_ns=n, mono_ns=n)
    if journal.flush(60):
        print(n, flush=True)
"""


def start_writer(path: Path, first: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(first)], stdout=subprocess.PIPE, text=True, bufsize=1
    )


def kill(process: subprocess.Popen[str]) -> list[int]:
    """SIGKILL it; all the numbers that it acknowledged and that weren't read yet."""
    process.send_signal(signal.SIGKILL)
    assert process.stdout is not None
    lines = [line for line in process.stdout if line.endswith("\n")]
    process.wait()
    process.stdout.close()
    return [int(line) for line in lines]


def add(journal: Journal, n: int, kind: str = "tick", **data: object) -> None:
    journal.append(kind, {"n": n, **data}, generation=0, wall_ns=1000 + n, mono_ns=n)


def numbers(path: Path) -> list[int]:
    return [record.data["n"] for record in read(path)]


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "run dir 'with\" odd \udcff name"
    folder.mkdir()
    return folder / "journal.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with Journal.create(path) as made:
        yield made


# --- what goes in comes out -------------------------------------------------------------------------


def test_records_come_back_in_order_and_whole(path: Path) -> None:
    with Journal.create(path) as journal:
        journal.append("run_started", {"argv": ["a\udcffb", "ü", "\x00"], "x": None}, wall_ns=5, mono_ns=3)
        journal.append("first_step", {"generation": 4, "t": 0.25}, generation=4, wall_ns=7, mono_ns=6)
        assert journal.problem is None
        assert journal.backlog == 0
    assert list(read(path)) == [
        Record(1, "run_started", {"argv": ["a\udcffb", "ü", "\x00"], "x": None}, None, 5, 3),
        Record(2, "first_step", {"generation": 4, "t": 0.25}, 4, 7, 6),
    ]


def test_a_closed_journal_is_two_files_and_can_be_continued(path: Path) -> None:
    with Journal.create(path) as journal:
        add(journal, 0)
    assert sorted(p.name for p in path.parent.iterdir()) == ["journal.db", "journal.lock"]
    with Journal.open_for_append(path) as journal:
        add(journal, 1)
    assert [(r.seq, r.data["n"]) for r in read(path)] == [(1, 0), (2, 1)]


def test_many_threads_may_append(journal: Journal, path: Path) -> None:
    threads = [
        threading.Thread(target=lambda i=i: [add(journal, i * 1000 + k) for k in range(100)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: journal.backlog == 0)
    found = numbers(path)
    assert sorted(found) == sorted(i * 1000 + k for i in range(4) for k in range(100))
    for i in range(4):
        own = [n for n in found if n // 1000 == i]
        assert own == sorted(own)


def test_progress_can_be_thinned_and_what_matters_of_it_stays(path: Path) -> None:
    with Journal.create(path) as journal:
        for n in range(1000):
            add(journal, n, kind="verdict" if n in (333, 334, 777) else "progress")
    found = [(r.kind, r.data["n"]) for r in read(path, max_progress=50)]
    progress = [n for kind, n in found if kind == "progress"]
    assert [n for kind, n in found if kind == "verdict"] == [333, 334, 777]
    assert {332, 776, 999} <= set(progress)
    assert 50 <= len(progress) <= 53
    assert max(b - a for a, b in itertools.pairwise(progress)) <= 21
    assert len(list(read(path, max_progress=1000))) == 1000
    assert [r.data["n"] for r in read(path, max_progress=0)] == [332, 333, 334, 776, 777, 999]


def test_append_after_close_is_counted_and_harmless(path: Path) -> None:
    journal = Journal.create(path)
    journal.close()
    add(journal, 1)
    journal.close()
    assert journal.dropped == 1
    assert numbers(path) == []


@dataclass(frozen=True)
class Fact:
    leaf: str
    ranks: tuple[int, ...]


def test_odd_data_becomes_json(journal: Journal, path: Path) -> None:
    cycle: dict[str, object] = {}
    cycle["self"] = cycle
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    odd = {"fact": Fact("app.hang", (1, 2)), "nan": math.nan, "set": {7}, "path": Path("/a/b"), "o": object()}
    journal.append("odd", odd, wall_ns=2**80, mono_ns=-(2**80), generation=2**70)
    journal.append("cycle", cycle, wall_ns=0, mono_ns=0)
    journal.append("deep", {"deep": deep}, wall_ns=0, mono_ns=0)
    journal.append("kind-ü" + "x" * 1000, {(1, 2): 3, "kept": 1}, wall_ns=0, mono_ns=0)  # type: ignore[dict-item]
    first, second, third, fourth = read(path)
    assert first.data == {
        "fact": {"leaf": "app.hang", "ranks": [1, 2]},
        "nan": None,
        "set": [7],
        "path": "/a/b",
        "o": "<object>",
    }
    assert (first.wall_ns, first.mono_ns, first.generation) == (2**63 - 1, -(2**63 - 1), 2**63 - 1)
    assert "nested too deep" in json.dumps(second.data)
    assert "nested too deep" in json.dumps(third.data)
    assert fourth.data == {"kept": 1}
    assert fourth.kind.startswith("kind-\\xfcxxx")
    assert len(fourth.kind) <= 70


def test_long_data_is_cut_and_marked_and_keeps_its_short_fields(journal: Journal, path: Path) -> None:
    traceback = "line\n" * 200_000
    journal.append("verdict", {"leaf": "app.hang", "traceback": traceback}, wall_ns=0, mono_ns=0)
    journal.append("many", {str(i): "v" * 100 for i in range(100_000)}, wall_ns=0, mono_ns=0)
    journal.append("at bound", {"s": "x" * (MAX_DATA_BYTES - len('{"s":""}'))}, wall_ns=0, mono_ns=0)
    first, second, third = read(path)
    assert first.data["leaf"] == "app.hang"
    assert first.data["traceback"].startswith("line\nline\n")
    assert "characters cut" in first.data["traceback"]
    assert first.data["truncated_bytes"] > len(traceback)
    assert second.data["truncated_bytes"] > 10_000_000
    assert len(json.dumps(second.data)) <= MAX_DATA_BYTES
    assert "truncated_bytes" not in third.data


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=4))
@settings(max_examples=200, deadline=None)
def test_whatever_is_encoded_is_bounded_ascii_json(data: dict[str, object]) -> None:
    text = encode(data)
    assert text.isascii()
    assert len(text) <= MAX_DATA_BYTES
    assert json.loads(text).keys() == data.keys()


# --- SIGKILL, and readers beside the writer ---------------------------------------------------------


def test_thirty_sigkills_lose_nothing_acknowledged(path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    acknowledged: set[int] = set()
    first = 0
    for round_ in range(30):
        process = start_writer(path, first)
        assert process.stdout is not None
        acknowledged.add(int(process.stdout.readline()))
        time.sleep(chance.uniform(0.0, 0.15))
        acknowledged.update(kill(process))
        found = numbers(path)
        missing = acknowledged - set(found)
        assert not missing, f"seed {seed}, round {round_}: lost {sorted(missing)[:5]}"
        assert found == sorted(set(found)), f"seed {seed}, round {round_}: out of order"
        first = found[-1] + 1
    assert found == list(range(len(found)))
    with Journal.open_for_append(path):
        pass
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def test_a_reader_beside_a_busy_writer_always_sees_one_whole_state(path: Path) -> None:
    process = start_writer(path)
    assert process.stdout is not None
    try:
        for _ in range(40):
            acknowledged = int(process.stdout.readline())
            found = numbers(path)
            assert found == list(range(len(found)))
            assert found[-1] >= acknowledged
    finally:
        kill(process)


def test_reading_a_left_over_wal_needs_no_right_to_write_there(path: Path, tmp_path: Path) -> None:
    process = start_writer(path)
    assert process.stdout is not None
    acknowledged = int(process.stdout.readline())
    acknowledged = max([acknowledged, *kill(process)])
    copy = tmp_path / "copy"
    shutil.copytree(path.parent, copy)
    assert (copy / "journal.db-wal").stat().st_size > 0
    before = {p.name: p.read_bytes() for p in copy.iterdir()}
    copy.chmod(0o500)
    assert numbers(copy / "journal.db")[-1] >= acknowledged
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == before
    copy.chmod(0o700)


def test_reading_in_the_writers_own_process_keeps_the_lock(journal: Journal, path: Path) -> None:
    add(journal, 1)
    assert numbers(path) == [1]
    peek = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('SELECT * FROM records')"
    done = subprocess.run([sys.executable, "-c", peek, path], capture_output=True, text=True, check=False)
    assert "locked" in done.stderr
    add(journal, 2)
    assert numbers(path) == [1, 2]


def test_reading_leaves_no_files_and_no_descriptors(
    journal: Journal, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spool))
    for n in range(10):
        add(journal, n)
    before = open_descriptors()
    for _ in range(10):
        read(path)  # never begun
        partly = read(path)
        assert next(partly).data == {"n": 0}
        assert list(spool.iterdir()) == []
        del partly
    assert open_descriptors() == before


def test_a_full_tmpdir_is_a_clear_error(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    with pytest.raises(JournalError, match="TMPDIR"):
        read(path)


# --- one writer -------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_and_the_first_goes_on(journal: Journal, path: Path) -> None:
    assert writer_alive(path)
    for _ in range(2):
        with pytest.raises(JournalError, match=f"being written by process {os.getpid()}"):
            Journal.open_for_append(path)
    add(journal, 1)
    assert numbers(path) == [1]


def test_another_process_is_refused_until_the_writer_dies(path: Path) -> None:
    process = start_writer(path)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(JournalError, match=f"being written by process {process.pid}"):
        Journal.open_for_append(path)
    assert writer_alive(path)
    kill(process)
    assert not writer_alive(path)
    with Journal.open_for_append(path) as journal:
        assert journal.problem is None


def test_asking_whether_a_writer_lives_never_keeps_one_out(path: Path) -> None:
    Journal.create(path).close()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            writer_alive(path)

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        for _ in range(20):
            Journal.open_for_append(path).close()
    finally:
        stop.set()
        asker.join()


def test_create_refuses_an_existing_file_and_a_missing_directory(path: Path) -> None:
    Journal.create(path).close()
    with pytest.raises(JournalError, match="exists already"):
        Journal.create(path)
    with pytest.raises(JournalError, match="not a directory"):
        Journal.create(path.parent / "nowhere" / "journal.db")
    with pytest.raises(JournalError, match="doesn't exist"):
        Journal.open_for_append(path.parent / "other.db")


# --- files that aren't journals ---------------------------------------------------------------------


def other_sqlite(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE records (seq INTEGER PRIMARY KEY)")
    connection.close()


def changed(path: Path, *statements: str) -> None:
    Journal.create(path).close()
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def endless_view(path: Path) -> None:
    changed(
        path,
        "DROP TABLE records",
        "CREATE VIEW records AS WITH RECURSIVE n(seq) AS (SELECT 1 UNION ALL SELECT seq + 1 FROM n) "
        "SELECT seq, 0 AS wall_ns, 0 AS mono_ns, 0 AS generation, 'x' AS kind, '{}' AS data FROM n",
    )


def zeroed(path: Path) -> None:
    Journal.create(path).close()
    content = bytearray(path.read_bytes())
    content[100:] = bytes(len(content) - 100)
    path.write_bytes(content)


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (lambda p: p.write_text("not a database " * 100), "doesn't begin like a SQLite file"),
    "empty": (lambda p: p.touch(), "doesn't begin like a SQLite file"),
    "cut short": (lambda p: p.write_bytes(b"SQLite format 3\0"), "doesn't begin like a SQLite file"),
    "other sqlite": (other_sqlite, "no journal of closeranks"),
    "newer": (lambda p: changed(p, "PRAGMA user_version = 2"), "newer closeranks.*update"),
    "version 0": (lambda p: changed(p, "PRAGMA user_version = 0"), "never was"),
    "view": (endless_view, "damaged"),
    "other columns": (lambda p: changed(p, "ALTER TABLE records ADD COLUMN x"), "damaged"),
    "zeroed": (zeroed, "damaged"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_give_a_clear_error_to_reader_and_writer(name: str, path: Path) -> None:
    make, message = BAD_FILES[name]
    make(path)
    content = path.read_bytes()
    with pytest.raises(JournalError, match=message):
        read(path)
    with pytest.raises(JournalError, match=message):
        Journal.open_for_append(path)
    assert path.read_bytes() == content
    assert not writer_alive(path)


def test_a_missing_file_a_directory_and_a_fifo_are_refused_at_once(path: Path) -> None:
    with pytest.raises(JournalError, match="can't be read: No such file"):
        read(path)
    os.mkfifo(path)
    with pytest.raises(JournalError, match="not a file"):
        read(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(JournalError, match="not a file"):
        read(path)


def test_a_file_larger_than_any_journal_is_not_copied(path: Path) -> None:
    Journal.create(path).close()
    os.truncate(path, 2**40)  # sparse: it takes no room here, but its copy would
    with pytest.raises(JournalError, match="larger than a journal can be"):
        read(path)


def test_a_junk_wal_is_ignored_and_a_fifo_in_its_place_refused(path: Path) -> None:
    with Journal.create(path) as journal:
        add(journal, 1)
    wal = path.with_name("journal.db-wal")
    wal.write_bytes(b"junk" * 1000)
    assert numbers(path) == [1]
    wal.unlink()
    os.mkfifo(wal)
    with pytest.raises(JournalError, match="not a file"):
        read(path)


def test_what_lies_before_the_damage_is_still_readable(path: Path) -> None:
    with Journal.create(path) as journal:
        for n in range(2000):
            add(journal, n, pad="x" * 50)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 1024 * 1024
    content[middle : middle + 20 * 1024] = os.urandom(20 * 1024)
    path.write_bytes(content)
    found: list[int] = []
    with pytest.raises(JournalError, match="damaged after record"):
        for record in read(path):
            found.append(record.data["n"])
    assert found == list(range(len(found)))
    assert len(found) > 100


def test_rows_of_wrong_types_are_skipped_and_broken_json_is_empty(path: Path) -> None:
    with Journal.create(path) as journal:
        add(journal, 1)
    with sqlite3.connect(path) as connection:
        insert = "INSERT INTO records (wall_ns, mono_ns, kind, data) VALUES (?, ?, ?, ?)"
        connection.execute(insert, ("noon", 1, "a", "{}"))
        connection.execute(insert, (1, 1, b"\xff", "{}"))
        connection.execute(insert, (1, 1, "nested", "[" * 100_000))
        connection.execute(insert, (1, 1, "list", "[1]"))
    connection.close()
    assert [(r.kind, r.data) for r in read(path)] == [("tick", {"n": 1}), ("nested", {}), ("list", {})]


# --- bad disks --------------------------------------------------------------------------------------

# The kernel itself refuses to let files grow (EFBIG), then the limit is lifted: a disk that was full.
FULL_DISK = """
import resource, sys, time
from closeranks.controller.journal import Journal
journal = Journal.create(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
n = 0
deadline = time.monotonic() + 60
while journal.problem is None and time.monotonic() < deadline:
    journal.append("tick", {"n": n}, wall_ns=n, mono_ns=n)
    journal.flush(0.1)
    n += 1
print(journal.problem)
for n in range(n, n + 200):
    journal.append("tick", {"n": n}, wall_ns=n, mono_ns=n)
print(journal.backlog)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
while journal.problem is not None and time.monotonic() < deadline:
    time.sleep(0.02)
print(journal.problem, journal.backlog, journal.dropped, n)
journal.close()
"""


def test_a_full_disk_is_a_problem_and_not_an_end(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, path],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=True,
        timeout=120,
    )
    problem, backlog, after = done.stdout.splitlines()
    assert "can't be written" in problem
    assert int(backlog) >= 200
    assert after.startswith("None 0 0 ")
    assert numbers(path) == list(range(int(after.split()[-1]) + 1))
    assert done.stderr == ""


def test_the_journals_own_limit_and_the_limit_of_waiting_records(path: Path) -> None:
    with Journal.create(path, max_bytes=40 * 1024) as journal:
        n = 0
        while journal.problem is None:
            add(journal, n)
            n += 1
        assert "full" in journal.problem
        add(journal, n, kind="verdict")
        for k in range(n + 1, n + 1 + MAX_WAITING_RECORDS + 500):
            add(journal, k, kind="progress")
        assert journal.backlog == MAX_WAITING_RECORDS
        assert journal.dropped >= 500
        assert f"{MAX_WAITING_RECORDS} records wait in memory" in journal.problem
        with journal._lock:  # its writer moves them from one to the other
            kinds = {row.kind for row in (*journal._queue, *journal._in_flight)}
        assert "verdict" in kinds, "progress is dropped first"
    assert 100 < len(numbers(path)) <= n


def test_dropped_records_leave_a_gap_record(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_WAITING_RECORDS", 10)
    store = HangingStore(path, create=True)
    with Journal.begin(store) as journal:
        store.hang()
        for n in range(30):
            add(journal, n)
        assert journal.backlog == 10
        assert journal.dropped == 20
        store.let_go()
        wait_until(lambda: journal.backlog == 0)
        assert journal.problem is None
    records = list(read(path))
    gaps = [r.data["dropped"] for r in records if r.kind == GAP_KIND]
    assert gaps == [20]
    assert [r.data["n"] for r in records if r.kind == "tick"][-9:] == list(range(21, 30))


def test_waiting_records_are_bounded_in_bytes(path: Path) -> None:
    store = HangingStore(path, create=True)
    with Journal.begin(store) as journal:
        store.hang()
        for n in range(MAX_WAITING_BYTES // 200_000 + 50):
            add(journal, n, pad="x" * 200_000)
        assert 0 < journal.dropped <= 51
        assert sum(row.size_bytes for row in [*journal._queue, *journal._in_flight]) <= MAX_WAITING_BYTES
        store.let_go()


class HangingStore(Store):
    """A disk that stops to answer, as a network file system does; nothing here can really freeze one."""

    def __init__(self, path: Path, *, create: bool) -> None:
        super().__init__(path, create=create)
        self._well = threading.Event()
        self._well.set()

    def hang(self) -> None:
        self._well.clear()

    def let_go(self) -> None:
        self._well.set()

    def write(self, rows: list[Row]) -> None:
        self._well.wait()
        super().write(rows)


def test_a_hung_disk_doesnt_block_the_job(path: Path) -> None:
    store = HangingStore(path, create=True)
    journal = Journal.begin(store)
    add(journal, 0)
    store.hang()
    started = time.monotonic()
    for n in range(1, 1000):
        add(journal, n)
    assert time.monotonic() - started < 10, "only the first append may wait, and that briefly"
    assert journal.backlog == 999
    wait_until(lambda: journal.problem is not None)
    assert "has not answered" in (journal.problem or "")
    started = time.monotonic()
    journal.close(timeout_s=0.2)
    assert time.monotonic() - started < 10
    store.let_go()
    wait_until(lambda: not writer_alive(path))
    assert numbers(path) == list(range(1000)), "what waited is written when the disk comes back"


class SlowStore(Store):
    """A disk that takes longer than an append waits, each time."""

    def write(self, rows: list[Row]) -> None:
        time.sleep(2 * ACK_WAIT_S)
        super().write(rows)


def test_who_writes_in_bulk_to_a_slow_disk_loses_nothing_with_flush(path: Path) -> None:
    with Journal.begin(SlowStore(path, create=True)) as journal:
        for n in range(2 * MAX_WAITING_RECORDS):
            add(journal, n)
            if n % 5000 == 0:
                assert journal.flush(60)
                assert journal.backlog == 0
        assert not journal.flush(0)
        assert journal.flush(60)
        assert (journal.dropped, journal.problem) == (0, None)
    assert numbers(path) == list(range(2 * MAX_WAITING_RECORDS))


def test_a_read_only_place_is_a_problem_at_creation_too(tmp_path: Path) -> None:
    started = time.monotonic()
    with Journal.create("/sys/kernel/journal.db") as journal:  # not even root can create a file there
        add(journal, 1)
        assert "can't be written" in (journal.problem or "")
        assert journal.backlog == 1
    assert time.monotonic() - started < 10


def test_deleting_the_run_directory_is_noticed_and_survived(path: Path) -> None:
    with Journal.create(path) as journal:
        add(journal, 1)
        wait_until(lambda: not journal._dirty.is_set())
        shutil.rmtree(path.parent)

        def noticed() -> bool:
            add(journal, 2)
            return "deleted or replaced" in (journal.problem or "")

        wait_until(noticed)


# --- durability -------------------------------------------------------------------------------------


def test_the_wal_is_synced_soon_and_not_too_often(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[float, str]] = []

    def watched(fd: int) -> None:
        synced.append((time.monotonic(), str(Path(f"/proc/self/fd/{fd}").readlink())))
        os.fdatasync(fd)

    monkeypatch.setattr(journal_module, "fdatasync", watched)
    with Journal.create(path) as journal:
        for n in range(300):
            add(journal, n)
            time.sleep(0.002)
        count = len(synced)
        wait_until(lambda: len(synced) > count or not journal._dirty.is_set())
        time.sleep(0.3)
        quiet = len(synced)
        time.sleep(0.3)
        assert len(synced) == quiet, "nothing new: nothing to sync"
    assert len(synced) >= 3
    assert {name for _, name in synced} == {f"{path}-wal"}
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(synced)]
    assert min(gaps) >= 0.09


def test_the_wal_doesnt_grow_for_ever(path: Path) -> None:
    with Journal.begin(Store(path, create=True, checkpoint_bytes=20_000)) as journal:
        for n in range(3000):
            add(journal, n, pad="x" * 100)
        assert path.with_name("journal.db-wal").stat().st_size < 2_000_000
        assert numbers(path) == list(range(3000))


def test_no_descriptor_or_thread_is_left(path: Path) -> None:
    Journal.create(path).close()
    before = (open_descriptors(), threading.active_count())
    for n in range(5):
        with Journal.open_for_append(path) as journal:
            add(journal, n)
            time.sleep(0.02)
    assert (open_descriptors(), threading.active_count()) == before


def test_signals_stay_with_the_main_thread(journal: Journal) -> None:
    add(journal, 0)
    for thread in (journal._writer, journal._syncer):
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk:")).split()[1], 16)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD):
            assert blocked >> (number - 1) & 1


def test_a_copy_that_never_settles_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Journal.create(path).close()
    states = iter(range(10_000))
    monkeypatch.setattr(journal_reader, "_state", lambda _: (next(states),))
    monkeypatch.setattr(journal_reader, "_COPY_ATTEMPTS", 5)
    with pytest.raises(JournalError, match="kept changing"):
        read(path)
    assert next(states) == 10
