"""Reading a journal, live or left over, without ever touching the file that the job writes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from closeranks.controller.journal_file import (
    LIVE_FDS,
    LIVE_LOCK,
    MAX_DATA_BYTES,
    MAX_JOURNAL_BYTES,
    Record,
    check_header,
    check_schema,
    decode,
    lock_path,
    wal_path,
)
from closeranks.errors import JournalError

__all__ = ["read", "writer_alive"]

_WAL_HEADER_BYTES = 32
_COPY_ATTEMPTS = 50
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # not blocked by a FIFO in the file's place


def writer_alive(path: Path | str) -> bool:
    """Whether some process has this journal open for writing right now."""
    try:
        fd = os.open(lock_path(Path(path)), _READ_FLAGS)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def read(path: Path | str, *, max_progress: int | None = None) -> Iterator[Record]:
    """All records committed so far, in order, whether the job runs, ended, or was killed.

    Works on a copy (in TMPDIR, its names gone again at once), so it needs no right to write beside the
    journal. Raises JournalError at the call when the file is missing, foreign, newer or unreadable, and
    from the iterator when it turns out damaged further on: what came before is good.

    ``max_progress`` thins the records of kind "progress", of which a long run has millions: about so many
    evenly spaced ones are given, and always the last before a record of another kind, and the very last.
    """
    path = Path(path)
    try:
        folder = Path(tempfile.mkdtemp(prefix="closeranks-journal-"))
    except OSError as error:
        raise JournalError(f"no place to copy {path} to ({error}): set TMPDIR to a writable one") from error
    try:
        _copy_consistently(path, folder / "journal.db")
        connection = _open_copy(path, folder / "journal.db")
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # SQLite has both files open and needs no names
    records = _records(path, connection, max_progress)
    next(records)  # into its try block: from here on, dropping the iterator closes the connection
    return (record for record in records if record is not None)


def _open_copy(path: Path, copy: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(copy, isolation_level=None, check_same_thread=False)
    try:
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 4 * MAX_DATA_BYTES)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN")
        check_schema(path, connection)  # the first read: opens the -wal, and pins this state
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise JournalError(f"{path} is damaged ({error})") from error
        raise
    return connection


_ALL = "SELECT seq, kind, data, generation, wall_ns, mono_ns FROM records AS r"
_THINNED = """ WHERE kind <> 'progress' OR seq % ? = 0 OR NOT EXISTS (
    SELECT 1 FROM records AS next WHERE next.seq = r.seq + 1 AND next.kind = 'progress')"""


def _select(connection: sqlite3.Connection, max_progress: int | None) -> sqlite3.Cursor:
    if max_progress is not None:
        total = connection.execute("SELECT max(seq) FROM records").fetchone()[0] or 0
        every = -(-total // max(1, max_progress))
        if every > 1:
            return connection.execute(f"{_ALL}{_THINNED} ORDER BY seq", (every,))
    return connection.execute(f"{_ALL} ORDER BY seq")


def _records(path: Path, connection: sqlite3.Connection, max_progress: int | None) -> Iterator[Record | None]:
    last = 0
    with contextlib.closing(connection):
        yield None
        try:
            for seq, kind, data, generation, wall_ns, mono_ns in _select(connection, max_progress):
                if seq <= last:  # a b-tree that was tampered with can lead in circles
                    raise JournalError(f"{path} is damaged after record {last}")
                last = seq
                if not (isinstance(kind, str) and isinstance(data, str)):
                    continue
                if not (isinstance(wall_ns, int) and isinstance(mono_ns, int)):
                    continue
                number = generation if isinstance(generation, int) else None
                yield Record(seq, kind, decode(data), number, wall_ns, mono_ns)
        except sqlite3.Error as error:
            raise JournalError(f"{path} is damaged after record {last} ({error})") from error


def _copy_consistently(path: Path, copy: Path) -> None:
    """Copy the main file, then the -wal, so that together they are one state of a live journal.

    The writer changes the main file only in a checkpoint, and then every page it writes there still stands
    in the -wal, until that is restarted; a restart gives its header a new salt. So when the header is the
    same before and after, whatever was torn in the copy of the main file is covered by the copy of the
    -wal. A half-written last transaction fails its checksum, and SQLite's recovery leaves it out.
    """
    for attempt in range(_COPY_ATTEMPTS):
        try:
            with LIVE_LOCK:
                before = _state(path)
                _copy_main(path, copy)
                _copy_wal(path, copy)
                if _state(path) == before:
                    return
        except OSError as error:
            raise JournalError(f"{path} can't be read: {error.strerror or error}") from error
        time.sleep(0.002 * attempt)
    raise JournalError(f"{path} kept changing while it was read: try again")


def _state(path: Path) -> tuple[object, ...]:
    main = path.stat()
    fd = _open_wal(path)
    if fd is None:
        return (main.st_ino, main.st_size, main.st_mtime_ns)
    try:
        return (main.st_ino, os.pread(fd, _WAL_HEADER_BYTES, 0))
    finally:
        os.close(fd)


def _copy_main(path: Path, copy: Path) -> None:
    status = path.stat()
    live_fd = LIVE_FDS.get((status.st_dev, status.st_ino), -1)
    fd = live_fd if live_fd >= 0 else os.open(path, _READ_FLAGS)
    try:
        check_header(path, fd)
        _copy_fd(fd, copy)
    finally:
        if live_fd < 0:
            os.close(fd)


def _open_wal(path: Path) -> int | None:
    # SQLite locks nothing in the -wal, so opening and closing it is harmless even in the writer's process.
    try:
        fd = os.open(wal_path(path), _READ_FLAGS)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise JournalError(f"{wal_path(path)} is not a file")
    return fd


def _copy_wal(path: Path, copy: Path) -> None:
    fd = _open_wal(path)
    if fd is None:
        wal_path(copy).unlink(missing_ok=True)
        return
    try:
        _copy_fd(fd, wal_path(copy))
    finally:
        os.close(fd)


def _copy_fd(fd: int, copy: Path) -> None:
    """Copy by offset: the descriptor may be shared with the writer's process."""
    size_bytes = min(os.fstat(fd).st_size, 2 * MAX_JOURNAL_BYTES)
    offset = 0
    with copy.open("wb") as target:
        while offset < size_bytes:
            chunk = os.pread(fd, min(1 << 20, size_bytes - offset), offset)
            if not chunk:
                break
            target.write(chunk)
            offset += len(chunk)
