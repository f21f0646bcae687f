"""Ranks that ended or raised: each judged on its own facts, whether it broke, was let down, or is done."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import Enum

from closeranks.diagnose.messages import (
    Blame,
    Reading,
    named_absentees,
    parse_traceback,
    read_error,
    read_text,
)
from closeranks.diagnose.status import error_text, frame_text
from closeranks.diagnose.text import clean, place
from closeranks.diagnose.verdicts import Finding, line
from closeranks.diagnose.view import View
from closeranks.events import counted, signal_name
from closeranks.evidence import EvidenceLine, RankEvidence

__all__ = ["Death", "Fallen", "Role", "examine"]

# The agent hears of a death up to this much after it happened; a worker stamps its own error at once. Without
# the allowance a peer's error in between would look older than the death it followed from.
EXIT_LATENCY_NS = 20_000_000
SHM_NEARLY_FULL_BYTES = 16 << 20
_CRASH_SIGNALS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSYS,
        signal.SIGTRAP,
    }
)
_LOG_LINES = 40


class Role(Enum):
    BROKE = "broke"  # its end needs no other rank to explain it
    VICTIM = "victim"  # it lost a peer, or waited for one in vain
    MISMATCH = "mismatch"  # its collective met another one: itself or its peer is in error
    FINISHED = "finished"  # exit code 0


@dataclass(frozen=True, slots=True)
class Death:
    """One rank's end. ``when_ns`` is None where nobody stamped it; ``finding`` is set for BROKE alone."""

    rank: int
    role: Role
    when_ns: int | None
    line: EvidenceLine
    finding: Finding | None = None
    timeout: bool = False


@dataclass(frozen=True, slots=True)
class Fallen:
    """All ends, in order of time."""

    deaths: tuple[Death, ...]

    def of(self, role: Role) -> tuple[Death, ...]:
        return tuple(d for d in self.deaths if d.role is role)

    @property
    def root(self) -> Finding | None:
        """The earliest end that needs no other rank to explain it, with its peers as evidence."""
        broke = self.of(Role.BROKE)
        if not broke or broke[0].finding is None:
            return None
        first = broke[0].finding
        same = [
            d
            for d in broke[1:]
            if d.finding and d.finding.signature == first.signature and first.kind == "exception"
        ]
        ranks = (*first.ranks, *(d.rank for d in same))
        others = [
            line(d.line.source, d.line.line, "the same error at the same place" if d in same else "later")
            for d in broke[1:]
        ]
        victims = [
            line(v.line.source, v.line.line, "a consequence: it lost a peer") for v in self.of(Role.VICTIM)
        ]
        return _with(first, ranks, (*first.lines, *others[:4], *victims[:4]))


def _with(finding: Finding, ranks: tuple[int, ...], lines: tuple[EvidenceLine, ...]) -> Finding:
    return Finding(
        finding.leaf, finding.kind, ranks, finding.summary, finding.signature, finding.confidence, lines,
        finding.onset_ns, finding.missing, finding.action, finding.retry,
    )  # fmt: skip


def examine(view: View) -> Fallen:
    """Judge every rank that has ended or raised."""
    deaths = [death for rank in view.order if (death := _examine_rank(view, rank)) is not None]
    triggers = frozenset(view.evidence.trigger.ranks)
    never = 1 << 63
    deaths.sort(key=lambda d: (d.when_ns if d.when_ns is not None else never, d.rank not in triggers, d.rank))
    return Fallen(tuple(deaths))


def _examine_rank(view: View, rank: int) -> Death | None:
    entry = view.ranks[rank]
    error, exit = entry.error, entry.exit
    exit_ns = entry.exit_mono_ns - EXIT_LATENCY_NS if entry.exit_mono_ns is not None else None
    if error is not None and not (
        error.type.endswith("SystemExit") and error.message.strip() in ("", "0", "None")
    ):
        return _from_error(view, entry, error.mono_ns or exit_ns)
    if exit is None:
        return None
    if exit.ok:
        return Death(
            rank, Role.FINISHED, exit_ns, line(f"rank {rank} exit", "exit code 0", "it has finished")
        )
    if exit.signal is not None:
        return _from_signal(view, entry, exit.signal, exit_ns)
    return _from_code(view, entry, exit.code or 0, exit_ns)


def _from_error(view: View, entry: RankEvidence, when_ns: int | None) -> Death:
    error = entry.error
    assert error is not None
    reading = read_error(error.type, error.message, error.traceback)
    shown = line(f"rank {entry.rank} exception", error_text(entry), "the exception that left the script")
    if reading.blame is not Blame.OWN:
        role = Role.VICTIM if reading.blame is Blame.PEER else Role.MISMATCH
        return Death(entry.rank, role, when_ns, shown, timeout=reading.timeout)
    if error.type.endswith("KeyboardInterrupt"):
        return _killed(entry, signal.SIGINT, when_ns)
    where = error.place or _last_place(error.traceback)
    name = error.type.removeprefix("builtins.")
    leaf, confidence = _memory_or(view, reading, error.message)
    lines = [shown]
    if leaf != reading.leaf:
        counted = line(
            "kernel", "no OOM kill was counted", "so somebody sent that signal, who isn't recorded"
        )
        lines.append(counted)
    if (frame := frame_text(entry)) and not error.place:
        lines.append(line(f"rank {entry.rank} stack", frame, "where it was"))
    finding = Finding(
        leaf=leaf,
        kind="exception",
        ranks=(entry.rank,),
        summary=f"rank {entry.rank} raised {error_text(entry)}",
        signature=f"{name} at {where}" if where else name,
        confidence=confidence,
        lines=tuple(lines),
        onset_ns=when_ns,
    )
    return Death(entry.rank, Role.BROKE, when_ns, shown, finding)


def _memory_or(view: View, reading: Reading, message: str) -> tuple[str, float]:
    """A DataLoader worker killed by SIGKILL is out of memory only if the kernel says so."""
    if reading.leaf != "app.host_oom" or view.evidence.host.oom_kills:
        return reading.leaf, 0.97
    return ("unknown" if "killed by signal" in message else reading.leaf), 0.9


def _last_place(traceback: str) -> str:
    places = parse_traceback(traceback).places
    return f"{places[-1][0]}:{places[-1][1]}" if places else ""


def _from_signal(view: View, entry: RankEvidence, number: int, when_ns: int | None) -> Death:
    if number in _CRASH_SIGNALS:
        return _crashed(view, entry, number, when_ns)
    if number == signal.SIGKILL and (oom := _out_of_memory(view, entry, when_ns)) is not None:
        return oom
    return _killed(entry, number, when_ns)


def _killed(entry: RankEvidence, number: int, when_ns: int | None) -> Death:
    name = signal_name(number)
    shown = line(
        f"rank {entry.rank} exit", f"killed by {name}", "a signal that no process sends itself by accident"
    )
    no_oom = " (no OOM kill was counted)" if number == signal.SIGKILL else ""
    finding = Finding(
        leaf="unknown",
        kind="rank_exit",
        ranks=(entry.rank,),
        summary=f"rank {entry.rank} was killed by {name} from outside{no_oom}",
        signature=name,
        confidence=0.97,
        lines=(shown,),
        onset_ns=when_ns,
        missing=(f"who sent {name}: the kernel doesn't record it",),
        action="restart in place",
        retry=True,
    )
    return Death(entry.rank, Role.BROKE, when_ns, shown, finding)


def _out_of_memory(view: View, entry: RankEvidence, when_ns: int | None) -> Death | None:
    host = view.evidence.host
    named = entry.pid in host.oom_victims
    if not named and (host.oom_kills <= 0 or host.oom_victims):
        return None
    fact = (
        f"the kernel log names pid {entry.pid} as killed for memory" if named
        else f"{counted(host.oom_kills, 'OOM kill')} counted in this generation"
    )  # fmt: skip
    shown = line(f"rank {entry.rank} exit", "killed by SIGKILL", "the OOM killer's signal")
    limit = f"; the limit is {host.memory_limit_bytes / 2**30:.1f} GiB" if host.memory_limit_bytes else ""
    rss = entry.process.rss_bytes if entry.process is not None else 0
    used = f", resident {rss / 2**30:.1f} GiB when last seen" if rss else ""
    finding = Finding(
        leaf="app.host_oom",
        kind="out_of_memory",
        ranks=(entry.rank,),
        summary=f"rank {entry.rank} was killed by the kernel: out of memory{limit}{used}",
        signature="out of memory",
        confidence=0.99 if named else 0.9,
        lines=(shown, line("kernel", fact, "so the kill was for memory, not by a person")),
        onset_ns=when_ns,
    )
    return Death(entry.rank, Role.BROKE, when_ns, shown, finding)


def _crashed(view: View, entry: RankEvidence, number: int, when_ns: int | None) -> Death:
    name = signal_name(number)
    words = entry.aborted_by or _fatal_line(entry.log_tail)
    reading = read_text(words) if words else None
    shown = line(
        f"rank {entry.rank} exit", f"killed by {name}" + (f": {words}" if words else ""), "a crash of its own"
    )
    if number == signal.SIGABRT and reading is not None and reading.blame is not Blame.OWN:
        role = Role.VICTIM if reading.blame is Blame.PEER else Role.MISMATCH
        return Death(entry.rank, role, when_ns, shown, timeout=reading.timeout)
    leaf = reading.leaf if reading is not None and reading.blame is Blame.OWN else "app.crash_segv"
    shm_free = view.evidence.host.shm_free_bytes
    lines = [shown]
    if number == signal.SIGBUS and shm_free is not None and shm_free < SHM_NEARLY_FULL_BYTES:
        leaf = "app.shm"
        lines.append(
            line("/dev/shm", f"{shm_free} bytes free", "a bus error is what a full tmpfs mapping gives")
        )
    where = frame_text(entry)
    if where:
        lines.append(line(f"rank {entry.rank} stack", where, "where it crashed"))
    cause = f": {clean(words, 160)}" if words else f" in {where}" if where else ""
    finding = Finding(
        leaf=leaf,
        kind="native_crash",
        ranks=(entry.rank,),
        summary=f"rank {entry.rank} crashed with {name}{cause}",
        signature=name,
        confidence=0.95,
        lines=tuple(lines),
        onset_ns=when_ns,
    )
    return Death(entry.rank, Role.BROKE, when_ns, shown, finding)


_FATAL = re.compile(
    r"what\(\):|terminate called|Fatal Python error|Assertion .{0,200} failed|malloc\(\)|free\(\)"
    r"|double free",
    re.I,
)


def _fatal_line(log_tail: tuple[str, ...]) -> str:
    for text in reversed(log_tail[-_LOG_LINES:]):
        if _FATAL.search(text[:2000]):
            return text[:2000]
    return ""


def _from_code(view: View, entry: RankEvidence, code: int, when_ns: int | None) -> Death:
    """A non-zero exit that no exception hook saw: os._exit, a shell, ``--no-python``, or a lost record."""
    wrapped = code - 128
    if wrapped == signal.SIGKILL and (oom := _out_of_memory(view, entry, when_ns)) is not None:
        return oom
    tail = "\n".join(text[:2000] for text in entry.log_tail[-_LOG_LINES:])
    parsed = parse_traceback(tail)
    said = parsed.exceptions[-1] if parsed.exceptions else ""
    shown = line(f"rank {entry.rank} exit", f"exit code {code}", "it ended by itself")
    leaf = "app.exception"
    lines = [shown]
    if said:
        kind, _, message = said.partition(":")
        reading = read_error(kind, message.strip(), tail)
        shown = line(f"rank {entry.rank} log", f"{said} (exit code {code})", "the last words before the exit")
        if reading.blame is not Blame.OWN:
            role = Role.VICTIM if reading.blame is Blame.PEER else Role.MISMATCH
            return Death(entry.rank, role, when_ns, shown, timeout=reading.timeout)
        leaf, lines = reading.leaf, [shown, *lines]
    elif (lost := read_text(entry.log_tail[-1]) if entry.log_tail else None) and lost.blame is Blame.PEER:
        shown = line(f"rank {entry.rank} log", entry.log_tail[-1], "the last words before the exit")
        return Death(entry.rank, Role.VICTIM, when_ns, shown, timeout=lost.timeout)
    elif code == 2 and re.search(r"^usage: .*|: error: ", tail, re.MULTILINE):
        leaf = "app.config"
    where = place(*parsed.places[-1]) if parsed.places else ""
    like = f" (a shell's way to say {signal_name(wrapped)})" if 0 < wrapped < 65 else ""
    finding = Finding(
        leaf=leaf,
        kind="exception" if said else "rank_exit",
        ranks=(entry.rank,),
        summary=f"rank {entry.rank} exited with code {code}{like}"
        + (f": {clean(said, 160)}" if said else ""),
        signature=f"{said.partition(':')[0]} at {where}" if said and where else f"exit code {code}",
        confidence=0.95,
        lines=tuple(lines),
        onset_ns=when_ns,
    )
    return Death(entry.rank, Role.BROKE, when_ns, shown, finding)


def absentees(fallen: Fallen, view: View) -> tuple[int, ...]:
    """Ranks that a victim's own error names as missing, where they are not victims themselves."""
    dead = {d.rank for d in fallen.deaths}
    named: set[int] = set()
    for death in fallen.of(Role.VICTIM):
        error = view.ranks[death.rank].error
        if error is not None:
            named.update(r for r in named_absentees(error.message) if r in view.ranks and r not in dead)
    return tuple(sorted(named))
