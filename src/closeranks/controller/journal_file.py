"""The journal's file: its format, its limits, and the store through which its one writer touches it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from closeranks.errors import JournalError

__all__ = [
    "CHECKPOINT_BYTES",
    "LIVE_FDS",
    "LIVE_LOCK",
    "MAX_DATA_BYTES",
    "MAX_JOURNAL_BYTES",
    "Record",
    "Row",
    "Store",
    "check_header",
    "check_schema",
    "decode",
    "encode",
    "lock_path",
    "wal_path",
]

MAX_DATA_BYTES = 256 * 1024
MAX_JOURNAL_BYTES = 2 * 1024**3  # four months at one record a second
CHECKPOINT_BYTES = 4 * 1024 * 1024  # of WAL: when idle; at 16 times as much in any case

_APPLICATION_ID = 0x434C5352  # "CLSR"
_SCHEMA_VERSION = 1
_SCHEMA = (
    "CREATE TABLE records (seq INTEGER PRIMARY KEY, wall_ns INTEGER NOT NULL, mono_ns INTEGER NOT NULL, "
    "generation INTEGER, kind TEXT NOT NULL, data TEXT NOT NULL)"
)
# Small pages: a record of 150 bytes dirties one page, and each dirty page goes to the WAL as a whole.
_PAGE_BYTES = 1024
_INT64_MAX = 2**63 - 1
_LOCK_ATTEMPTS = 10

# Descriptors of the journals that this process writes, by (device, inode). Reading one of them must go
# through these: an open() and close() of its own would drop SQLite's lock, and a sqlite3 shell that then
# looks at the file would, on leaving, delete the WAL under the writer.
LIVE_FDS: dict[tuple[int, int], int] = {}
LIVE_LOCK = threading.RLock()


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One fact. ``wall_ns``: since the epoch; ``mono_ns``: CLOCK_MONOTONIC on the writer's host."""

    seq: int
    kind: str
    data: dict[str, Any]
    generation: int | None
    wall_ns: int
    mono_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A record on its way to the disk. ``n`` counts appends of this writer; the disk's seq is base + n."""

    n: int
    wall_ns: int
    mono_ns: int
    generation: int | None
    kind: str
    data: str

    @classmethod
    def make(cls, n: int, kind: str, data: str, *, generation: int | None, wall_ns: int, mono_ns: int) -> Row:
        """A row that SQLite can't refuse: one it did refuse would block all that come after it."""
        name = kind[:64].encode("ascii", "backslashreplace").decode("ascii")
        return cls(
            n,
            _int64(wall_ns),
            _int64(mono_ns),
            None if generation is None else _int64(generation),
            name,
            data,
        )

    @property
    def size_bytes(self) -> int:
        return len(self.data) + 200  # what the object itself and its neighbours take, roughly


def _int64(value: int) -> int:
    return max(-_INT64_MAX, min(_INT64_MAX, int(value)))


def wal_path(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def lock_path(path: Path) -> Path:
    return path.with_name("journal.lock")


# --- data as JSON -----------------------------------------------------------------------------------


def _plain(value: object, limit: int, depth: int = 0) -> object:
    """``value`` as JSON can hold it: strings and collections cut to ``limit``, nesting to 12 levels."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        cut = len(value) - limit
        return value if cut <= 0 else f"{value[:limit]}... [{cut} characters cut]"
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if depth >= 12:
        return "... [nested too deep]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        pairs = list(value.items())[:limit]
        return {str(k)[:limit]: _plain(v, limit, depth + 1) for k, v in pairs if isinstance(k, str | int)}
    if isinstance(value, list | tuple | set | frozenset):
        items: list[object] = [_plain(v, limit, depth + 1) for v in list(value)[:limit]]
        return items if len(items) == len(value) else [*items, f"... [{len(value) - len(items)} items cut]"]
    return f"<{type(value).__name__}>"


def encode(data: Mapping[str, object]) -> str:
    """JSON of at most MAX_DATA_BYTES, pure ASCII (so that undecodable bytes in an argv are no trouble).

    Never raises for odd content: what JSON can't hold becomes a readable substitute, and what is too long
    is cut, with ``truncated_bytes`` telling the original size.
    """
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # a dataclass, NaN, a cycle: worth a second, slower look
        text = json.dumps(_plain(data, _INT64_MAX), separators=(",", ":"))
    size_bytes = len(text)
    for limit in (32_768, 4_096, 512, 64):
        if len(text) <= MAX_DATA_BYTES:
            return text
        short = _plain(data, limit)
        assert isinstance(short, dict)
        text = json.dumps({**short, "truncated_bytes": size_bytes}, separators=(",", ":"))
    return text if len(text) <= MAX_DATA_BYTES else json.dumps({"truncated_bytes": size_bytes})


def decode(text: str) -> dict[str, Any]:
    """The data of a record; {} for what is no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# --- what a journal looks like ----------------------------------------------------------------------


def check_header(path: Path, fd: int) -> None:
    """Raise JournalError unless this is a journal of a version we know; looks at 100 bytes, runs no SQL."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise JournalError(f"{path} is not a file, so it is not a journal")
    head = os.pread(fd, 100, 0)
    if len(head) < 100 or not head.startswith(b"SQLite format 3\0"):
        raise JournalError(f"{path} is not a journal: it doesn't begin like a SQLite file")
    if int.from_bytes(head[68:72], "big") != _APPLICATION_ID:
        raise JournalError(f"{path} is a SQLite file, but no journal of closeranks")
    version = int.from_bytes(head[60:64], "big")
    if version > _SCHEMA_VERSION:
        raise JournalError(
            f"{path} was written by a newer closeranks (journal version {version}; this one knows "
            f"{_SCHEMA_VERSION}): update closeranks to read it"
        )
    if version != _SCHEMA_VERSION:
        raise JournalError(f"{path} has journal version {version}, which never was: the file is damaged")
    if status.st_size > 2 * MAX_JOURNAL_BYTES:
        raise JournalError(f"{path} is larger than a journal can be ({status.st_size} bytes): not read")


def check_schema(path: Path, connection: sqlite3.Connection) -> None:
    """Raise JournalError unless the one table is ours to the letter.

    A crafted file may put a view or a virtual table there, and have our SELECT run what it likes.
    """
    query = "SELECT type, sql FROM sqlite_master WHERE name = 'records' LIMIT 2"
    if connection.execute(query).fetchall() != [("table", _SCHEMA)]:
        raise JournalError(f"{path} has no table of records as closeranks makes it: it is damaged")


# --- writing ----------------------------------------------------------------------------------------


class Store:
    """The file as its one writer sees it. Not thread-safe: one thread at a time.

    Methods may raise sqlite3.Error or OSError (worth a retry) or JournalError (the file isn't ours).
    """

    def __init__(
        self,
        path: Path,
        *,
        create: bool,
        max_bytes: int = MAX_JOURNAL_BYTES,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
    ) -> None:
        self.path = path
        self.connections = 0  # how often connected: a new connection may have made a new -wal
        self._create = create
        self._max_bytes = max_bytes
        self._checkpoint_bytes = checkpoint_bytes
        self._lock_fd = -1
        self._key: tuple[int, int] | None = None
        self._connection: sqlite3.Connection | None = None
        self._base: int | None = None
        self._wal_bytes = 0

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def connect(self) -> None:
        """Become the only writer, make the file if it is to be made, and open it."""
        self._lock()
        if self._create:
            self._build()
            self._create = False
        with LIVE_LOCK:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                check_header(self.path, fd)
                self._connection = self._open()
            except BaseException:
                os.close(fd)
                raise
            status = os.fstat(fd)
            self._key = (status.st_dev, status.st_ino)
            LIVE_FDS[self._key] = fd
        self.connections += 1
        self._sync_directory()  # the -wal is a new name in it

    def _lock(self) -> None:
        if self._lock_fd >= 0:
            return
        fd = os.open(lock_path(self.path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # A reader that asks writer_alive() holds the lock for an instant: try a few times.
            for attempt in range(1, _LOCK_ATTEMPTS + 1):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if attempt == _LOCK_ATTEMPTS:
                        owner = os.pread(fd, 100, 0).decode("ascii", "replace").strip() or "another process"
                        raise JournalError(f"{self.path} is being written by {owner}") from None
                    time.sleep(0.01)
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = fd
        with contextlib.suppress(OSError):  # the disk may be full, and this is for the message above alone
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode("ascii", "replace"), 0)

    def _build(self) -> None:
        """Put an empty journal in place in one step: whoever sees the file sees a complete one."""
        if os.path.lexists(self.path):
            raise JournalError(f"{self.path} exists already: each run has a directory of its own")
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        try:
            draft.unlink(missing_ok=True)
            with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
                connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
                connection.execute(_SCHEMA)
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")
                connection.execute("PRAGMA journal_mode = WAL")
            draft.rename(self.path)
        finally:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def _sync_directory(self) -> None:
        fd = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=0.0, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # before WAL: then there is no -shm
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode != "wal":
                raise OSError(f"the journal can't be put into WAL mode here (it stays in {mode})")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")  # its fsyncs would come inside an append
            connection.execute(f"PRAGMA max_page_count = {self._max_bytes // _PAGE_BYTES}")
            check_schema(self.path, connection)
            last = connection.execute("SELECT max(seq) FROM records").fetchone()[0]
        except BaseException as error:
            connection.close()
            if isinstance(error, sqlite3.Error) and not isinstance(error, sqlite3.OperationalError):
                raise JournalError(f"{self.path} is damaged ({error}): start a new run") from error
            raise
        if self._base is None:
            self._base = (last or 0) + 1
        return connection

    def write(self, rows: list[Row]) -> None:
        """Commit all of ``rows`` or none. Safe to repeat: a row that did arrive is not written twice."""
        connection, base = self._connection, self._base
        assert connection is not None and base is not None
        values = [(base + r.n, r.wall_ns, r.mono_ns, r.generation, r.kind, r.data) for r in rows]
        insert = "INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?, ?, ?)"
        if len(values) == 1:
            connection.execute(insert, values[0])
        else:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(insert, values)
            connection.execute("COMMIT")
        self._wal_bytes += sum(len(r.data) + 2 * _PAGE_BYTES for r in rows)

    def checkpoint_due(self, *, idle: bool) -> bool:
        return self.connected and self._wal_bytes > self._checkpoint_bytes * (1 if idle else 16)

    def checkpoint(self) -> None:
        """Move the WAL into the main file, so that it doesn't grow for ever; SQLite syncs both in order."""
        assert self._connection is not None
        self._wal_bytes = 0  # also where it fails: then the next try comes after as much again
        self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def replaced(self) -> bool:
        """Whether someone deleted or replaced the file that we write."""
        key = self._key
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return key is not None
        return key is not None and (status.st_dev, status.st_ino) != key

    def disconnect(self) -> None:
        """Let go of SQLite. Where the disk is well that checkpoints and removes the -wal."""
        connection, self._connection = self._connection, None
        with LIVE_LOCK:
            if connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    connection.close()
            fd = LIVE_FDS.pop(self._key, -1) if self._key is not None else -1
            self._key = None
            if fd >= 0:
                os.close(fd)

    def close(self) -> None:
        """Disconnect and let another writer come."""
        self.disconnect()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
