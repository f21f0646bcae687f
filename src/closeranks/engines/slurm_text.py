"""What Slurm's programs print, read: lists of hosts, nodes' states, jobs and steps. Pure; no I/O.

The text of ``scontrol show node`` and of ``squeue -o`` has kept its form from 20.11 to 24.x, which can't be
said of ``--json``. What people have typed into Slurm (reasons, names of steps) may hold anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

__all__ = [
    "MAX_HOSTS",
    "MAX_REASON_CHARS",
    "Fate",
    "JobView",
    "NodeView",
    "StepView",
    "expand_hostlist",
    "fates",
    "one_line",
    "parse_gres",
    "parse_job",
    "parse_nodes",
    "parse_steps",
    "parse_submitted",
    "refusal",
]

MAX_HOSTS = 65536  # Slurm's own bound (MAX_SLURM_NODES)
MAX_REASON_CHARS = 300
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_STAMP = re.compile(r" \[[^\[\]]*@[^\[\]]*\]$")  # who said it and when: " [root@2026-12-01T15:47:25]"
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_NOTHING = frozenset({"", "(null)", "None assigned", "n/a"})


def one_line(text: str) -> str:
    """``text`` without what would move a cursor or begin a new line, and not too long to be shown."""
    clean = _UNPRINTABLE.sub(" ", text).strip()
    return clean if len(clean) <= MAX_REASON_CHARS else clean[: MAX_REASON_CHARS - 1] + "…"


# --- hosts ------------------------------------------------------------------------------------------


def expand_hostlist(text: str) -> list[str]:
    """``node[01-03,7]-ib,login`` as single names, in order, each once. ValueError where it isn't such a list.

    Several brackets in a name are combined, as Slurm does. "(null)" and nothing are no hosts.
    """
    if text.strip() in _NOTHING:
        return []
    found: dict[str, None] = {}
    for item in _items(text.strip()):
        for name in _expand_one(item, text):
            found[name] = None
            if len(found) > MAX_HOSTS:
                raise ValueError(f"more than {MAX_HOSTS} hosts in {one_line(text)!r}")
    return list(found)


def _items(text: str) -> Iterable[str]:
    """What commas outside of brackets separate; empty items are left out."""
    depth, begin = 0, 0
    for at, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[begin:at].strip()
            begin = at + 1
        if depth not in (0, 1):
            raise ValueError(f"brackets don't match in {one_line(text)!r}")
    if depth:
        raise ValueError(f"brackets don't match in {one_line(text)!r}")
    yield text[begin:].strip()


def _expand_one(item: str, text: str) -> list[str]:
    if re.search(r"\s", item):
        raise ValueError(f"white space within a name in {one_line(text)!r}")
    names = [""] if item else []
    for part in re.split(r"(\[[^\]]*\])", item) if item else ():
        ends = _numbers(part[1:-1], text) if part.startswith("[") else [part]
        if len(names) * len(ends) > MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} hosts in {one_line(text)!r}")
        names = [name + end for name in names for end in ends]
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    """``01-03,7`` -> 01, 02, 03, 7: the first number of a range says how wide they are."""
    found = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or not match[0].isascii():
            raise ValueError(f"{one_line(part)!r} is no range of numbers in {one_line(text)!r}")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low or high - low >= MAX_HOSTS:
            raise ValueError(f"{part!r} is no range of numbers, or too long a one, in {one_line(text)!r}")
        found += [str(number).zfill(len(match[1])) for number in range(low, high + 1)]
        if len(found) > MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} hosts in {one_line(text)!r}")
    return found


# --- nodes ------------------------------------------------------------------------------------------


class Fate(Enum):
    """What a node's state means to a job that runs on it."""

    FINE = "fine"
    SILENT = "slurmctld hasn't heard from it of late, and doesn't know yet"
    DRAINS = "to be left"
    GONE = "its processes are lost"


_GONE_FLAGS = frozenset({"DOWN", "ERROR", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED"})
# FAIL: "expected to fail soon", said by an administrator of a host that is still up (sinfo(1)).
_DRAIN_FLAGS = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING"})
# Marks behind a state in its short form (sinfo(1), "NODE STATE CODES").
_MARKS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINT",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as slurmctld sees it. ``reason``: what was said when it was drained or set down, or ""."""

    name: str
    flags: frozenset[str]
    reason: str = ""
    address: str = ""

    @property
    def fate(self) -> Fate:
        if self.flags & _GONE_FLAGS:
            return Fate.GONE
        if self.flags & _DRAIN_FLAGS:
            return Fate.DRAINS
        return Fate.SILENT if "NOT_RESPONDING" in self.flags else Fate.FINE

    @property
    def words(self) -> str:
        """State and reason, for people."""
        state = "+".join(sorted(self.flags)).lower()
        return one_line(f"{state}: {self.reason}" if self.reason else state)


def _flags(state: str) -> frozenset[str]:
    """``IDLE+DRAIN``, ``DOWN*+DRAIN`` (to 20.11), ``draining@``: all of its parts in capitals."""
    found = set()
    for part in state.upper().split("+"):
        bare = part.rstrip("".join(_MARKS))
        found |= {_MARKS[mark] for mark in part[len(bare) :]}
        if bare:
            found.add(bare)
    return frozenset(found)


def parse_nodes(text: str) -> dict[str, NodeView]:
    """``scontrol show node LIST``, in its form of many lines. The first record of a name counts."""
    found: dict[str, NodeView] = {}
    for record in re.split(r"^(?=NodeName=)", text, flags=re.MULTILINE):
        name = re.match(r"NodeName=(\S+)", record)
        state = re.search(r"^\s+State=(\S+)", record, re.MULTILINE)
        if name is None or state is None or name[1] in found:
            continue
        address = re.search(r"^\s+NodeAddr=(\S+)", record, re.MULTILINE)
        reason = re.search(r"^\s+Reason=(.*)$", record, re.MULTILINE)
        said = one_line(_STAMP.sub("", reason[1].rstrip())) if reason else ""
        where = address[1] if address else ""
        found[name[1]] = NodeView(name[1], _flags(state[1]), said, where if where != "(null)" else "")
    return found


def fates(
    nodes: Iterable[str], views: Mapping[str, NodeView], allocated: Iterable[str]
) -> dict[str, tuple[Fate, str]]:
    """What each of ``nodes`` comes to, and why.

    With --no-kill a node that goes down leaves the job's list of nodes, for ever: what was on it is lost,
    even if the node is fine again by the time somebody looks.
    """
    still = set(allocated)
    found = {}
    for name in nodes:
        view = views.get(name)
        words = view.words if view is not None else "slurmctld doesn't know it any more"
        if name not in still:
            found[name] = (Fate.GONE, f"it left the allocation ({words})")
        elif view is None:
            found[name] = (Fate.SILENT, words)
        else:
            found[name] = (view.fate, view.reason or words if view.fate is Fate.DRAINS else words)
    return found


# --- jobs and steps ---------------------------------------------------------------------------------

_LIVING = frozenset(
    {"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "CONFIGURING", "STAGE_OUT", "RESV_DEL_HOLD"}
)


@dataclass(frozen=True, slots=True)
class JobView:
    """An allocation as slurmctld sees it; ``nodes`` are those that it still has."""

    state: str
    nodes: tuple[str, ...]

    @property
    def lives(self) -> bool:
        return self.state in _LIVING


def parse_job(text: str) -> JobView | None:
    """The one line of ``squeue -h -j ID -o '%T|%N'``; None when Slurm knows the job no more."""
    for line in text.splitlines():
        state, bar, nodes = line.strip().partition("|")
        if bar:
            return JobView(state.upper(), tuple(expand_hostlist(nodes)))
    return None


def parse_gres(text: str) -> dict[str, str]:
    """What a job has of GPUs and their like on each node, as ``srun --gres`` takes it: ``gpu:a100:8``.

    From ``scontrol show job -d ID``: ``Nodes=node[0-1] CPU_IDs=0-7 Mem=0 GRES=gpu:8(IDX:0-7)``.
    """
    found: dict[str, str] = {}
    for nodes, listed in re.findall(r"^\s+Nodes=(\S+) .*\bGRES=(\S*)", text, re.MULTILINE):
        kinds = re.sub(r"\([^()]*\)", "", listed).split(",")
        gres = ",".join(kind for kind in kinds if re.fullmatch(r"\w+(?::[\w.-]+)?:[1-9]\d*[KMGT]?", kind))
        found.update(dict.fromkeys(expand_hostlist(nodes), gres))
    return found


@dataclass(frozen=True, slots=True)
class StepView:
    """A step of a job. ``step_id`` is what scancel takes."""

    step_id: str
    name: str


def parse_steps(text: str) -> list[StepView]:
    """``squeue -h -s -j ID -o '%i|%j'``. The name may hold anything, even a bar."""
    found = []
    for line in text.splitlines():
        step_id, bar, name = line.strip().partition("|")
        if bar and re.fullmatch(r"\d+(?:_\d+)?(?:\+\d+)?\.\w+", step_id):
            found.append(StepView(step_id, name))
    return found


def parse_submitted(text: str) -> str | None:
    """The job id that ``sbatch --parsable`` prints: ``123`` or ``123;cluster``, maybe after a greeting."""
    for line in reversed(text.splitlines()):
        if match := re.fullmatch(r"(\d+)(?:;[\w.-]+)?", line.strip()):
            return match[1]
    return None


def refusal(stderr: str) -> str:
    """The line of a Slurm program's complaint that says why, without the program's name."""
    lines = [one_line(line) for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\b(?:error|fatal)\b|unrecognized|invalid", line, re.I)]
    said = (telling or lines or ["it said nothing"])[-1]
    return re.sub(r"^\w+: (?:(?:error|fatal): )?", "", said)
