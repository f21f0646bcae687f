"""Fast readers of /proc: process states, trees, and what each thread of a rank waits for.

Every function takes a process that vanishes, or that may not be looked at (hidepid, ptrace_scope, another
user), for granted: what can't be read is empty, None or "unknown", never an exception. Nothing here blocks
and nothing disturbs the process.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from closeranks.agent.procfs_host import OomBaseline, host_facts, oom_baseline
from closeranks.evidence import ProcessFacts, ThreadFacts
from closeranks.policy.waits import Wait, can_wake_itself, classify, subject_of, thread_waits

__all__ = [
    "OomBaseline",
    "ProcessTable",
    "catches",
    "descendants",
    "host_facts",
    "oom_baseline",
    "parents",
    "read_process",
    "state_of",
]

_MAX_THREADS = 512  # of one process; more than that are not looked at, and nothing is proved about them
_MAX_DESCENDANTS = 256
_MAX_LINKS = 50_000  # descriptors looked at to find who else holds a pipe
_READ_BYTES = 4096
_MAX_READ_BYTES = 1 << 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MACHINE = platform.machine()
# Signals that a process can have sent to itself later: setitimer() and alarm() leave no other trace in /proc.
_ALARMS = 1 << 13 | 1 << 25 | 1 << 26  # SIGALRM 14, SIGVTALRM 26, SIGPROF 27
_SIGCHLD = 1 << 16  # 17
# Children whose end runs nothing of the script's own: DataLoader workers and the server of their shared
# memory, by their names (the handler that the DataLoader has for SIGCHLD raises an error when a worker has
# died, and does nothing else); and Python's helpers, by their command lines, which end only with the rank.
_HARMLESS_NAMES = (b"pt_data_worker", b"torch_shm_manag")
_HARMLESS_COMMANDS = (
    b"from multiprocessing.forkserver import main",
    b"from multiprocessing.resource_tracker import main",
)


def _read(path: str, limit_bytes: int = _READ_BYTES) -> bytes | None:
    """A small file whole; None if it is gone or may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        chunks = []
        left = limit_bytes
        while left > 0:
            chunk = os.read(fd, left)
            if not chunk:
                break
            chunks.append(chunk)
            left -= len(chunk)
        return b"".join(chunks)
    except OSError:
        return None
    finally:
        os.close(fd)


def _stat_fields(path: str) -> list[bytes] | None:
    """The fields of a stat file from the state on; the name before it may hold spaces, parens, newlines."""
    data = _read(path)
    if not data:
        return None
    end = data.rfind(b")")
    fields = data[end + 2 :].split()
    return fields if end >= 0 and len(fields) > 21 else None


def state_of(pid: int) -> str | None:
    """The main thread's state letter (R S D T t Z X I); None if there is no such process."""
    data = _read(f"/proc/{pid}/stat", 512)
    if not data:
        return None
    at = data.rfind(b")") + 2
    return chr(data[at]) if 2 <= at < len(data) else None


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """Every process of one moment: pid -> parent, pid -> session. Taken once, used for all ranks."""

    parent: Mapping[int, int]
    session: Mapping[int, int]
    # inode of a pipe -> pids that hold it; filled on first need, as it costs a look at every descriptor
    _pipes: dict[str, set[int]] = field(default_factory=dict)
    _complete: list[bool] = field(default_factory=list)

    @classmethod
    def take(cls) -> ProcessTable:
        parent: dict[int, int] = {}
        session: dict[int, int] = {}
        for pid in _pids():
            fields = _stat_fields(f"/proc/{pid}/stat")
            if fields is not None:
                parent[pid] = int(fields[1])
                session[pid] = int(fields[3])
        return cls(parent, session)

    def tree(self, pid: int) -> list[int]:
        """Living descendants of ``pid``; orphans of its session too, where it leads one."""
        found = descendants(pid, self.parent)
        if self.session.get(pid) == pid:
            known = {pid, *found}
            for orphan in [other for other, leader in self.session.items() if leader == pid]:
                for other in (orphan, *descendants(orphan, self.parent)):
                    if other not in known:
                        known.add(other)
                        found.append(other)
        return found

    def held_outside(self, link: str, tree: set[int]) -> bool:
        """Whether a process beyond ``tree`` has this pipe open too; also true where that can't be known."""
        if not self._complete:
            self._complete.append(self._scan_pipes())
        return not self._complete[0] or not self._pipes.get(link, set()) <= tree

    def _scan_pipes(self) -> bool:
        left = _MAX_LINKS
        for pid in self.parent:
            for fd in _names(f"/proc/{pid}/fd"):
                left -= 1
                if left < 0:
                    return False
                link = _link(f"/proc/{pid}/fd/{fd}")
                if link.startswith("pipe:"):
                    self._pipes.setdefault(link, set()).add(pid)
        return True


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)  # noqa: PTH208 - pathlib costs three times as much here
    except OSError:
        return []


def _pids() -> Iterator[int]:
    return (int(name) for name in _names("/proc") if name.isdigit())


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return ""


def parents() -> dict[int, int]:
    """pid -> parent pid of every process there is."""
    return dict(ProcessTable.take().parent)


def descendants(pid: int, parents: Mapping[int, int] | None = None) -> list[int]:
    """All processes below ``pid``, nearest first; ``parents`` saves the scan where the caller has it."""
    table = ProcessTable.take().parent if parents is None else parents
    children: dict[int, list[int]] = {}
    for child, parent in table.items():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    seen = {pid}
    queue = [pid]
    for parent in queue:  # grows while it is walked; pids that were reused can't make it endless
        for child in children.get(parent, ()):
            if child not in seen:
                seen.add(child)
                found.append(child)
                queue.append(child)
    return found


def _status(pid: int) -> dict[str, str]:
    text = (_read(f"/proc/{pid}/status") or b"").decode("utf-8", "replace")
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def _mask(value: str | None) -> int:
    try:
        return int(value or "0", 16)
    except ValueError:
        return 0


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for this signal."""
    return bool(_mask(_status(pid).get("SigCgt")) >> (number - 1) & 1)


def _has_alarm(pid: int, status: Mapping[str, str]) -> bool:
    return bool(_mask(status.get("SigCgt")) & _ALARMS) or bool(_read(f"/proc/{pid}/timers", 64))


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.strip().isdigit() else 0


def _io_bytes(pid: int) -> int:
    total = 0
    for line in (_read(f"/proc/{pid}/io") or b"").splitlines():
        name, _, value = line.partition(b":")
        if name in (b"rchar", b"wchar") and value.strip().isdigit():
            total += int(value)
    return total


def _mapping_kind(pid: int, address: int) -> str:
    """ "private" or "shared": the memory that ``address`` of this process lies in; "" if unknown."""
    for line in (_read(f"/proc/{pid}/maps", _MAX_READ_BYTES) or b"").splitlines():
        found = re.match(rb"([0-9a-f]+)-([0-9a-f]+) ...([ps])", line)
        if found and int(found[1], 16) <= address < int(found[2], 16):
            return "shared" if found[3] == b"s" else "private"
    return ""


def _is_harmless(child: int) -> bool:
    if (_read(f"/proc/{child}/comm", 64) or b"").strip() in _HARMLESS_NAMES:
        return True
    command = _read(f"/proc/{child}/cmdline") or b""
    return any(text in command for text in _HARMLESS_COMMANDS)


class _Reader:
    """Reads the threads of one rank's tree; the tree decides whether a pipe leads outside."""

    def __init__(self, table: ProcessTable, tree: set[int]) -> None:
        self._table = table
        self._tree = tree

    def _subject(self, pid: int, syscall: str) -> str:
        asked = subject_of(syscall, _MACHINE)
        if asked is None:
            return ""
        what, value = asked
        if what == "address":
            return _mapping_kind(pid, value)
        link = _link(f"/proc/{pid}/fd/{value}")
        if link.startswith("pipe:") and self._table.held_outside(link, self._tree):
            return "outside " + link
        return link

    def _thread(self, pid: int, tid: int, inherited: str, has_alarm: bool) -> ThreadFacts | None:
        base = f"/proc/{pid}/task/{tid}"
        fields = _stat_fields(f"{base}/stat")
        if fields is None:
            return None
        state = fields[0].decode("ascii", "replace")
        name = (_read(f"{base}/comm", 64) or b"").decode("utf-8", "replace").rstrip("\n")
        wchan = syscall = ""
        if state in "SD":
            wchan = (_read(f"{base}/wchan", 128) or b"").decode("ascii", "replace")
            wchan = "" if wchan == "0" else wchan  # hidden from us
            syscall = (_read(f"{base}/syscall", 256) or b"").decode("ascii", "replace").strip()
        wait = classify(
            state,
            "" if name == inherited else name,
            wchan,
            syscall,
            self._subject(pid, syscall) if state == "S" else "",
            machine=_MACHINE,
            has_alarm=has_alarm,
        )
        return ThreadFacts(tid=tid, name=name, state=state, wchan=wchan, syscall=syscall, wait=wait.value)

    def threads(self, pid: int, has_alarm: bool, skip_tids: frozenset[int]) -> tuple[ThreadFacts, ...]:
        """Of one process, the main thread first."""
        tids = sorted(
            (int(name) for name in _names(f"/proc/{pid}/task") if name.isdigit()),
            key=lambda tid: (tid != pid, tid),
        )
        main_name = (_read(f"/proc/{pid}/comm", 64) or b"").decode("utf-8", "replace").rstrip("\n")
        chosen = [tid for tid in tids if tid not in skip_tids]
        found = [self._thread(pid, tid, main_name, has_alarm) for tid in chosen[:_MAX_THREADS]]
        facts = tuple(thread for thread in found if thread is not None)
        if len(chosen) > _MAX_THREADS:
            rest = f"{len(chosen) - _MAX_THREADS} more threads"
            facts += (ThreadFacts(tid=0, name=rest, state="", wchan="", syscall="", wait=Wait.UNKNOWN.value),)
        return facts

    def waits_of(self, pids: list[int]) -> tuple[str, ...]:
        """The distinct waits of all threads of these processes; ends at the first that proves life."""
        waits: set[str] = set()
        for pid in pids[:_MAX_DESCENDANTS]:
            threads = self.threads(pid, _has_alarm(pid, _status(pid)), frozenset())
            waits.update(thread.wait for thread in threads)
            if not threads and state_of(pid) is not None:
                waits.add(Wait.UNKNOWN.value)
            if can_wake_itself(waits):
                return tuple(sorted(waits))
        if len(pids) > _MAX_DESCENDANTS:
            waits.add(Wait.UNKNOWN.value)
        return tuple(sorted(waits))

    def heeds(self, status: Mapping[str, str], children: list[int]) -> bool:
        """Whether the end of one of these may come, and run a signal handler that isn't the DataLoader's."""
        if not _mask(status.get("SigCgt")) & _SIGCHLD:
            return False
        return can_wake_itself(self.waits_of([child for child in children if not _is_harmless(child)]))


def read_process(
    pid: int, *, skip_tids: frozenset[int] = frozenset(), table: ProcessTable | None = None
) -> ProcessFacts | None:
    """All of /proc about one rank; None if it is gone. About 30 µs a thread.

    ``skip_tids`` are left out of ``threads``. ``table`` saves a scan of all processes where several ranks
    are read at the same time. CPU (seconds) and I/O (bytes that went through read and write calls) include
    living descendants and those that were waited for.
    """
    fields = _stat_fields(f"/proc/{pid}/stat")
    if fields is None:
        return None
    table = ProcessTable.take() if table is None else table
    below = table.tree(pid)
    status = _status(pid)
    ticks = sum(int(value) for value in fields[11:15])
    io_bytes = _io_bytes(pid)
    for child in below[:_MAX_DESCENDANTS]:
        child_fields = _stat_fields(f"/proc/{child}/stat")
        if child_fields is not None:
            ticks += sum(int(value) for value in child_fields[11:15])
            io_bytes += _io_bytes(child)
    reader = _Reader(table, {pid, *below})
    threads = reader.threads(pid, _has_alarm(pid, status), skip_tids)
    child_waits: tuple[str, ...] = ()
    if below and threads and not can_wake_itself(thread_waits(threads)):
        child_waits = reader.waits_of(below)
    children = [child for child in below if table.parent.get(child) == pid]
    return ProcessFacts(
        state=fields[0].decode("ascii", "replace"),
        tracer_pid=_number(status.get("TracerPid")),
        cpu_s=ticks / _TICKS_PER_S,
        io_bytes=io_bytes,
        rss_bytes=max(0, int(fields[21])) * _PAGE_BYTES,
        threads=threads,
        children=len(below),
        child_waits=child_waits,
        heeds_children=bool(children) and reader.heeds(status, children),
    )
