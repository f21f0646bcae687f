"""The journal: everything that happened to a job, in order, in one SQLite file in WAL mode.

What a record survives, and how:

- SIGKILL of the agent: ``append`` returns when its transaction is in the page cache (synchronous=NORMAL),
  so nothing acknowledged is lost. A stalled disk is the exception: ``backlog`` and ``problem`` say so.
- Power loss: a thread fdatasyncs the ``-wal`` file at most every 100 ms while there is something new, so the
  last 100 ms (and what a sync under way had not finished) may be missing. It syncs through a descriptor of
  its own. Closing any descriptor of a file drops this process's POSIX locks on that file, but SQLite takes
  its locks on the main file and never on the ``-wal``, so that is sound; syncing by a checkpoint instead
  would write every page twice.
- A full, read-only or hung disk: only a writer thread touches SQLite. ``append`` waits for it ``ACK_WAIT_S``
  at most, and not at all while the disk is known to be bad; records wait in memory, within bounds.

The writer holds SQLite's lock exclusively, which keeps the WAL index in its heap: with the usual shared
``-shm`` mapping, a file system that fails under it is a SIGBUS for the agent. Readers therefore copy the
files and never open the live ones with SQLite, so no reader can disturb the job, not even from another host.
A second writer is kept out by flock on ``journal.lock``.
"""

from __future__ import annotations

import signal
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from os import O_CLOEXEC, O_RDONLY, fdatasync
from os import close as close_fd
from os import open as open_fd
from pathlib import Path

from closeranks.controller.journal_file import (
    MAX_DATA_BYTES,
    MAX_JOURNAL_BYTES,
    Record,
    Row,
    Store,
    encode,
    wal_path,
)
from closeranks.controller.journal_reader import read, writer_alive
from closeranks.errors import JournalError

__all__ = [
    "ACK_WAIT_S",
    "GAP_KIND",
    "Journal",
    "MAX_DATA_BYTES",
    "MAX_WAITING_BYTES",
    "MAX_WAITING_RECORDS",
    "Record",
    "SYNC_INTERVAL_S",
    "read",
    "writer_alive",
]

ACK_WAIT_S = 0.05  # a busy disk is usual where checkpoints are written; the agent has ranks to watch
SYNC_INTERVAL_S = 0.1
MAX_WAITING_RECORDS = 10_000
MAX_WAITING_BYTES = 64 * 1024 * 1024
GAP_KIND = "journal_gap"  # data: {"dropped": n}; the writer adds it where records had to be dropped

_BATCH_RECORDS = 1000
_IDLE_S = 0.25
_STALL_TOLD_S = 1.0
_RETRY_FIRST_S = 0.25
_RETRY_MAX_S = 5.0
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


class Journal:
    """The one writer of a journal. Thread-safe. Not to be used in a forked child: it has no threads there.

    ``create`` and ``open_for_append`` raise JournalError for what is no journal of ours or already has a
    writer; a disk that is full or read-only is no error but a ``problem``: the job goes on.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.RLock()  # reentrant: a signal handler may append while append runs
        self._work = threading.Condition(self._lock)  # the writer waits here for records
        self._done = threading.Condition(self._lock)  # append waits here for its commit
        self._queue: deque[Row] = deque()
        self._in_flight: list[Row] = []
        self._held_bytes = 0
        self._next_n = 0
        self._committed_n = -1
        self._dropped = 0
        self._dropped_untold = 0
        self._closing = False
        self._failing: str | None = None
        self._upkeep_failing: str | None = None
        self._stalled_at_s: float | None = None
        self._replaced = False
        self._dirty = threading.Event()
        self._stop = threading.Event()
        self._writer = threading.Thread(target=self._write_loop, name="journal-writer", daemon=True)
        self._syncer = threading.Thread(target=self._sync_loop, name="journal-syncer", daemon=True)

    @classmethod
    def create(cls, path: Path | str, *, max_bytes: int = MAX_JOURNAL_BYTES) -> Journal:
        """A new journal. JournalError where one exists already, or where its directory doesn't."""
        path = Path(path)
        if not path.parent.is_dir():
            raise JournalError(f"{path} can't be created: {path.parent} is not a directory")
        return cls.begin(Store(path, create=True, max_bytes=max_bytes))

    @classmethod
    def open_for_append(cls, path: Path | str, *, max_bytes: int = MAX_JOURNAL_BYTES) -> Journal:
        """Go on with an existing journal, whatever way its last writer ended."""
        path = Path(path)
        if not path.is_file():
            raise JournalError(f"{path} doesn't exist: there is no journal to go on with")
        return cls.begin(Store(path, create=False, max_bytes=max_bytes))

    @classmethod
    def begin(cls, store: Store) -> Journal:
        """Start on a store; ``create`` and ``open_for_append`` are the usual ways here."""
        journal = cls(store)
        try:
            store.connect()
        except JournalError:
            store.close()
            raise
        except (OSError, sqlite3.Error) as error:
            journal._failing = str(error)
        journal._writer.start()
        journal._syncer.start()
        return journal

    def append(
        self,
        kind: str,
        data: Mapping[str, object],
        *,
        generation: int | None = None,
        wall_ns: int,
        mono_ns: int,
    ) -> None:
        """Add a record; returns when it is committed, and after ``ACK_WAIT_S`` in any case. Raises nothing.

        ``data`` beyond MAX_DATA_BYTES of JSON is cut and marked with ``truncated_bytes``.
        """
        self.append_all([(kind, data)], generation=generation, wall_ns=wall_ns, mono_ns=mono_ns)

    def append_all(
        self,
        records: Sequence[tuple[str, Mapping[str, object]]],
        *,
        generation: int | None = None,
        wall_ns: int,
        mono_ns: int,
    ) -> None:
        """Add records of one moment, each a kind and its data, as ``append`` does; wait once for them all."""
        texts = [(kind, encode(data)) for kind, data in records]
        stamps = {"wall_ns": wall_ns, "mono_ns": mono_ns}
        row: Row | None = None
        with self._lock:
            if self._closing:
                self._dropped += len(texts)
                return
            for kind, text in texts:
                made = Row.make(self._next_n, kind, text, generation=generation, **stamps)
                self._next_n += 1
                if self._admit(made):
                    row = made
            if row is None:
                return
            last_n = row.n
            self._work.notify()
            if self._failing is not None or self._stalled_at_s is not None:
                return
            asked_s = time.monotonic()
            settled = self._done.wait_for(
                lambda: self._committed_n >= last_n or self._failing is not None, ACK_WAIT_S
            )
            if not settled:
                self._stalled_at_s = asked_s

    def _admit(self, row: Row) -> bool:
        """Queue ``row``. At the bound the oldest progress goes first: a newer one says more than it did."""
        while self.backlog >= MAX_WAITING_RECORDS or self._held_bytes + row.size_bytes > MAX_WAITING_BYTES:
            self._dropped += 1
            self._dropped_untold += 1
            if not self._queue:
                return False
            at = next((i for i, queued in enumerate(self._queue) if queued.kind == "progress"), 0)
            self._held_bytes -= self._queue[at].size_bytes
            del self._queue[at]
        self._queue.append(row)
        self._held_bytes += row.size_bytes
        return True

    @property
    def backlog(self) -> int:
        """Records that wait in memory. 0: all that were appended are committed, or counted as dropped."""
        return len(self._queue) + len(self._in_flight)

    @property
    def dropped(self) -> int:
        """Records that were lost: too many waited, or they came after the close."""
        return self._dropped

    @property
    def problem(self) -> str | None:
        """What keeps records from the disk, as one sentence for people; None while all is well."""
        with self._lock:
            path, waiting = self._store.path, self.backlog
            told = f"; {waiting} records wait in memory" if waiting else ""
            told += f"; {self._dropped} were dropped" if self._dropped else ""
            if self._replaced:
                return f"{path} was deleted or replaced while the job runs: what it records now is lost"
            if self._failing is not None:
                return f"{path} can't be written ({self._failing}){told}"
            stalled_s = 0.0 if self._stalled_at_s is None else time.monotonic() - self._stalled_at_s
            if stalled_s >= _STALL_TOLD_S:
                return f"{path}: the disk has not answered for {stalled_s:.0f} s{told}"
            if self._upkeep_failing is not None:
                return f"{path} can't be made durable ({self._upkeep_failing}): a power loss may cost records"
            return None

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is waiting; False where that takes longer.

        For who writes in bulk: appends that don't wait for a slow disk would be dropped at the bound.
        """
        with self._lock:
            return self._done.wait_for(lambda: self.backlog == 0, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, and end. On a bad disk: one last try, for at most ``timeout_s`` seconds."""
        with self._lock:
            self._closing = True
            self._work.notify_all()
        self._stop.set()
        self._dirty.set()
        deadline_s = time.monotonic() + timeout_s
        for thread in (self._writer, self._syncer):
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the writer thread

    def _write_loop(self) -> None:
        _block_signals()
        retry_s = _RETRY_FIRST_S
        while True:
            batch, closing = self._take()
            try:
                if not self._store.connected:
                    self._store.connect()
                if batch:
                    self._store.write(batch)
            except (OSError, sqlite3.Error, JournalError) as error:
                self._give_back(batch, str(error))
                self._store.disconnect()
                if closing:
                    break
                self._stop.wait(retry_s)
                retry_s = min(2 * retry_s, _RETRY_MAX_S)
                continue
            retry_s = _RETRY_FIRST_S
            self._settle(batch)
            if closing and not batch:
                break
            self._checkpoint(idle=not batch)
        self._store.close()

    def _take(self) -> tuple[list[Row], bool]:
        with self._lock:
            if not self._queue and not self._closing:
                self._work.wait(_IDLE_S)
            if self._queue and self._dropped_untold:
                last = self._queue[-1]
                gap = Row.make(
                    self._next_n,
                    GAP_KIND,
                    encode({"dropped": self._dropped_untold}),
                    generation=None,
                    wall_ns=last.wall_ns,
                    mono_ns=last.mono_ns,
                )
                self._next_n += 1
                self._dropped_untold = 0
                self._queue.append(gap)
                self._held_bytes += gap.size_bytes
            self._in_flight = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH_RECORDS))]
            return self._in_flight, self._closing

    def _give_back(self, batch: list[Row], why: str) -> None:
        with self._lock:
            self._queue.extendleft(reversed(batch))
            self._in_flight = []
            self._failing = why
            self._done.notify_all()

    def _settle(self, batch: list[Row]) -> None:
        with self._lock:
            self._in_flight = []
            self._failing = None
            if not self._queue:
                self._stalled_at_s = None
            if batch:
                self._held_bytes -= sum(row.size_bytes for row in batch)
                self._committed_n = batch[-1].n
                self._done.notify_all()
        if batch:
            self._dirty.set()

    def _checkpoint(self, *, idle: bool) -> None:
        if not self._store.checkpoint_due(idle=idle):
            return
        try:
            self._store.checkpoint()
        except sqlite3.Error as error:
            # The WAL holds everything and goes on growing; appends need not stop for that.
            self._upkeep_failing = str(error)

    # --- the syncer thread

    def _sync_loop(self) -> None:
        _block_signals()
        fd, connection = -1, 0
        while not self._stop.is_set():
            self._dirty.wait()
            self._dirty.clear()
            if self._stop.is_set():  # the last close checkpoints, syncs, and removes the -wal
                break
            try:
                if connection != self._store.connections:
                    connection = self._store.connections
                    if fd >= 0:
                        close_fd(fd)
                        fd = -1
                    fd = open_fd(wal_path(self._store.path), O_RDONLY | O_CLOEXEC)
                fdatasync(fd)
                self._replaced = self._store.replaced()
                self._upkeep_failing = None
            except OSError as error:
                connection = 0  # look for the file anew
                self._upkeep_failing = str(error)
            self._stop.wait(SYNC_INTERVAL_S)
        if fd >= 0:
            close_fd(fd)


def _block_signals() -> None:
    # Signals belong to the agent's main thread, which may take them from a signalfd: blocked here, then.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
