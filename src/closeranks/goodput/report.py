"""A run on one screen: text for people, and the same as plain data for programs. Pure."""

from __future__ import annotations

import statistics
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from closeranks.goodput.summary import NS, PHASES, Bucket, Generation, Incident, Outcome, RunSummary

__all__ = ["duration", "percent", "render", "to_json"]

MAX_ROWS = 6  # of each table: the newest; more incidents than that are told shorter, and summed by cause
MIN_WIDTH = 76
MAX_WIDTH = 160
_WIDE = 110  # from here on an incident's phases are columns, below they are a line of their own
_MAX_CAUSES = 5
_ETTR = "ETTR, effective training time ratio: the share of productive time"

# Bucket: ASCII, block character without colours, colour of the 256.
_LOOKS = {
    Bucket.PRODUCTIVE: ("#", "█", 71),
    Bucket.START_UP: ("=", "▒", 110),
    Bucket.RESTART: ("+", "▓", 67),
    Bucket.LOST: ("x", "░", 167),
    Bucket.DETECT: (".", "─", 178),
    Bucket.EVIDENCE: (":", "┄", 180),
    Bucket.KILL: ("!", "┃", 173),
    Bucket.BACK_OFF: ("-", "═", 146),
    Bucket.STOPPING: ("~", "▁", 245),
    Bucket.UNKNOWN: ("?", "·", 240),
}
_OUTCOME_COLOURS = {
    Outcome.FINISHED: 71,
    Outcome.FAILED: 167,
    Outcome.STOPPED: 179,
    Outcome.RUNNING: 110,
    Outcome.INTERRUPTED: 179,
}


# --- numbers ----------------------------------------------------------------------------------------


def duration(seconds: float | None) -> str:
    """Three figures or so, eight characters at most: 4 ms, 0.14 s, 42.1 s, 12m 03s, 3h 04m, 2d 05h."""
    if seconds is None:
        return "unknown"
    if seconds < 0.00005:
        return "0 s"
    if seconds < 0.00095:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 24:
        return f"{hours}h {minutes:02}m"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days}d {hours:02}h"


def percent(part: float) -> str:
    """Rounded down, so that 99.99 % never reads as all of it; more figures where little is missing."""
    digits = 2 if 0.999 <= part < 1 else 1
    scale = 10**digits
    shown = int(part * 100 * scale + 1e-9) / scale
    return f"{shown:.{digits}f} %" if shown or not part else "<0.1 %"


def _count(number: int) -> str:
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:,.1f}M"


def _clock(wall_ns: int, summary: RunSummary) -> str:
    pattern = "%H:%M:%S" if summary.elapsed_s < 20 * 3600 else "%m-%d %H:%M"
    return _utc(wall_ns, pattern)


def _utc(wall_ns: int | None, pattern: str) -> str:
    if wall_ns is None:
        return "?"
    try:
        return datetime.fromtimestamp(wall_ns / NS, tz=UTC).strftime(pattern)
    except (OverflowError, ValueError, OSError):  # a clock that was never set
        return "?"


# --- text on a terminal -----------------------------------------------------------------------------


def _clean(text: str) -> str:
    """One line, and nothing in it that a terminal acts upon: journals hold what a script printed."""
    shown = (" " if c in "\n\r\t" else c if unicodedata.category(c)[0] != "C" else "\ufffd" for c in text)
    return " ".join("".join(shown).split())


def _width(text: str) -> int:
    """Columns that ``text`` takes: two for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def _cut(text: str, width: int) -> tuple[str, str]:
    """The longest beginning that fits, and the rest."""
    used = 0
    for i, c in enumerate(text):
        used += _width(c)
        if used > width:
            return text[:i], text[i:]
    return text, ""


@dataclass(frozen=True, slots=True)
class _Page:
    """How this terminal wants it."""

    width: int
    colour: bool
    ascii_only: bool

    @property
    def dot(self) -> str:
        return " - " if self.ascii_only else " · "

    @property
    def ellipsis(self) -> str:
        return "..." if self.ascii_only else "…"

    def clean(self, text: str) -> str:
        text = _clean(text)
        return text.encode("ascii", "replace").decode("ascii") if self.ascii_only else text

    def style(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text

    def bold(self, text: str) -> str:
        return self.style(text, "1")

    def dim(self, text: str) -> str:
        return self.style(text, "2")

    def tint(self, text: str, colour: int) -> str:
        return self.style(text, f"38;5;{colour}")

    def fit(self, text: str, width: int) -> str:
        """Cut to ``width`` columns, with a mark where something is missing."""
        if _width(text) <= width:
            return text
        return _cut(text, max(0, width - len(self.ellipsis)))[0].rstrip() + self.ellipsis

    def pad(self, text: str, width: int, *, right: bool = False) -> str:
        text = self.fit(text, width)
        space = " " * (width - _width(text))
        return space + text if right else text + space

    def wrap(self, text: str, width: int, lines: int) -> list[str]:
        """At most ``lines`` lines of at most ``width`` columns."""
        out: list[str] = []
        rest = text
        while rest and len(out) < lines - 1:
            line, left = _cut(rest, width)
            if left and " " in line and not left.startswith(" "):
                line, _, word = line.rpartition(" ")
                left = word + left
            out.append(line.rstrip())
            rest = left.lstrip()
        return [*out, self.fit(rest, width)] if rest else out or [""]

    def bar(self, bucket: Bucket, cells: int = 1) -> str:
        plain, block, colour = _LOOKS[bucket]
        glyph = plain if self.ascii_only else "█" if self.colour else block
        return self.tint(glyph * cells, colour)


# --- the screen -------------------------------------------------------------------------------------


def render(summary: RunSummary, *, width: int, colour: bool, ascii_only: bool = False) -> str:
    """The report as lines of at most ``width`` columns (76 to 160 are honoured), with a final newline.

    ``colour``: ANSI sequences may be used; ``ascii_only``: the output's encoding has no block characters.
    """
    page = _Page(min(max(width, MIN_WIDTH), MAX_WIDTH), colour, ascii_only)
    parts = [_header(summary, page), _buckets(summary, page)]
    if len(summary.generations) > 1:
        parts.append(_generations(summary, page))
    if summary.incidents:
        parts.append(_incidents(summary, page))
    if len(summary.incidents) > MAX_ROWS:
        parts.append(_causes(summary, page))
    parts.append(
        [
            page.dim(line)
            for note in _notes(summary)
            for line in page.wrap(page.clean(note), page.width - 4, 4)
        ]
    )
    lines = [""]
    for part in parts:
        if part:
            lines += [f"  {line}".rstrip() for line in part] + [""]
    return "\n".join(lines)


def _header(summary: RunSummary, page: _Page) -> list[str]:
    inner = page.width - 4
    outcome = summary.outcome.value
    if summary.exit_code and summary.outcome is not Outcome.FINISHED:
        outcome += f", exit code {summary.exit_code}"
    name = page.fit(page.clean(summary.job) or "a run", inner - len(outcome) - 2)
    gap = " " * (inner - _width(name) - len(outcome))
    lines = [page.bold(name) + gap + page.tint(outcome, _OUTCOME_COLOURS[summary.outcome])]
    ranks = (
        "" if summary.world_size is None else f"{summary.world_size} rank{'s' * (summary.world_size != 1)}"
    )
    where = " on ".join(part for part in (ranks, page.clean(summary.node)) if part)
    made_by = f"closeranks {page.clean(summary.version)}" if summary.version else ""
    command = page.clean(" ".join(summary.argv) or summary.entrypoint)
    tail = page.fit(page.dot.join(part for part in (where, made_by) if part), 2 * inner // 3)
    command = page.fit(command, inner - _width(tail) - len(page.dot))
    lines.append(page.dot.join(part for part in (command, tail) if part))
    began = _utc(summary.started_wall_ns, "%Y-%m-%d %H:%M:%S UTC")
    count = len(summary.incidents) + summary.unrecorded_incidents
    facts = [f"started {began}", duration(summary.elapsed_s)]
    facts.append(f"{count or 'no'} interruption{'s' * (count != 1)}")
    lines.append(page.fit(page.dot.join(facts), inner))
    if summary.reason and summary.outcome is not Outcome.FINISHED:
        lines += page.wrap(page.clean(summary.reason), inner, 3)
    return [lines[0], *(page.dim(line) for line in lines[1:])]


def _recovery(summary: RunSummary) -> str:
    downs = [incident.down_s for incident in summary.incidents if incident.recovered]
    if not downs:
        return "of the time went into steps that counted"
    middle, longest = duration(statistics.median(downs)), duration(max(downs))
    if middle == longest:
        return f"next step {middle} after a break"
    return f"next step {middle} after a break (median; longest {longest})"


def _cells(summary: RunSummary, count: int) -> dict[Bucket, int]:
    """``count`` cells shared out by time; largest remainder, so that they are exactly ``count``."""
    elapsed_ns = summary.elapsed_ns
    if not elapsed_ns:
        return {}
    whole = {b: ns * count // elapsed_ns for b, ns in summary.buckets_ns.items()}
    by_rest = sorted(whole, key=lambda b: summary.buckets_ns[b] * count % elapsed_ns, reverse=True)
    for bucket in by_rest[: count - sum(whole.values())]:
        whole[bucket] += 1
    return whole


def _buckets(summary: RunSummary, page: _Page) -> list[str]:
    inner = page.width - 4
    low, high = summary.ettr, summary.ettr_max
    if low is None or high is None:
        return [page.dim("nothing has been recorded yet")]
    shown = percent(low) if low == high else f"{percent(low)} to {percent(high)}"
    head = f"ETTR {shown}"
    told = page.dim(page.fit(f"   {_recovery(summary)}", inner - len(head)))
    lines = [page.bold(head) + told]
    cells = _cells(summary, inner)
    lines.append("".join(page.bar(bucket, cells[bucket]) for bucket in _LOOKS))
    used = [bucket for bucket in _LOOKS if summary.buckets_ns[bucket]]
    entries = [
        f"{page.bar(b)} {b.value:<10} {duration(summary.seconds(b)):>8} "
        + page.dim(f"{percent(summary.buckets_ns[b] / summary.elapsed_ns):>8}")
        for b in used
    ]
    columns = (inner + 4) // 36
    height = -(-len(entries) // columns)
    for row in range(height):
        line = "    ".join(entries[i] for i in range(row, len(entries), height))
        lines.append(line)
    lines.append(page.dim(page.fit(_ETTR, inner)))
    return lines


def _table(
    page: _Page, heads: Sequence[str], rows: Iterable[Sequence[str]], widths: Sequence[int]
) -> list[str]:
    """``widths`` below 0 are right-aligned."""

    def line(cells: Sequence[str]) -> str:
        padded = [page.pad(c, abs(w), right=w < 0) for c, w in zip(cells, widths, strict=True)]
        return "  ".join(padded).rstrip()

    return [page.dim(line(heads)), *(line(row) for row in rows)]


def _more(hidden: int, page: _Page) -> list[str]:
    return [page.dim(f"{page.ellipsis} and {hidden:,} earlier: see --json")] if hidden > 0 else []


def _generations(summary: RunSummary, page: _Page) -> list[str]:
    shown = summary.generations[-MAX_ROWS:]
    clock = 8 if summary.elapsed_s < 20 * 3600 else 11
    widths = [-4, clock, -10, -11, -9, -8]
    ended = page.width - 4 - sum(abs(w) for w in widths) - 2 * len(widths)
    rows = [
        (
            str(g.number),
            _clock(g.wall_ns, summary),
            "none" if g.first_step_s is None else duration(g.first_step_s - g.started_s),
            duration(g.ended_s - g.started_s),
            _count(g.steps),
            "unknown" if g.lost_steps is None else _count(g.lost_steps),
            _how_ended(g, summary, page),
        )
        for g in shown
    ]
    heads = ("gen", "started", "first step", "ran", "steps", "lost", "ended")
    hidden = len(summary.generations) - len(shown) + summary.generations_omitted
    return [page.bold("Generations"), *_table(page, heads, rows, [*widths, ended]), *_more(hidden, page)]


def _how_ended(generation: Generation, summary: RunSummary, page: _Page) -> str:
    if generation.outcome is not Outcome.FAILED or generation.incident_id is None:
        return generation.outcome.value
    for incident in reversed(summary.incidents):
        if incident.id == generation.incident_id and incident.generation == generation.number:
            return _cause(incident, page)
    return generation.outcome.value


def _cause(incident: Incident, page: _Page) -> str:
    """The leaf; where that is unknown, at least what was seen."""
    leaf, seen = page.clean(incident.leaf), page.clean(incident.kind or incident.trigger)
    if leaf and leaf != "unknown":
        return leaf
    return f"unknown: {seen}" if seen and seen != "unknown" else "unknown"


def _why(incident: Incident, page: _Page) -> str:
    text = page.clean(incident.summary or incident.detail) or "no verdict was recorded"
    if incident.injected:
        text += " (injected)"
    if incident.leftovers:
        text += f"; {len(incident.leftovers)} of its processes could not be killed"
    return text


def _ranks(ranks: Sequence[int]) -> str:
    """0-3 for neighbours, 0,2 for others, and 12x where that gets too long for its column."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return (text if len(text) <= 6 else f"{len(set(ranks)):,}x") or "?"


def _phase_s(incident: Incident, bucket: Bucket) -> float:
    name = {Bucket.BACK_OFF: "backoff_s"}.get(bucket, f"{bucket.value}_s")
    value: float = getattr(incident, name)
    return value


def _incidents(summary: RunSummary, page: _Page) -> list[str]:
    shown = summary.incidents[-MAX_ROWS:]
    hidden = len(summary.incidents) - len(shown)
    wide = page.width >= _WIDE
    phases = [p for p in PHASES if any(_phase_s(i, p) for i in shown)]
    numbers = ([-8] * len(phases) if wide else []) + [-9, -9]
    fixed = [-4, 8 if summary.elapsed_s < 20 * 3600 else 11, -6]
    cause = page.width - 4 - sum(abs(w) for w in fixed + numbers) - 2 * (len(fixed) + len(numbers))
    widths = [*fixed, cause, *numbers]
    heads = ("#", "when", "rank", "cause", *([p.value for p in phases] if wide else []), "down", "lost work")
    lines = _table(page, heads, [], widths)
    for number, incident in enumerate(shown, hidden + 1):
        times = [duration(_phase_s(incident, p)) for p in phases]
        name = _cause(incident, page)
        cells = (
            str(number),
            _clock(incident.wall_ns, summary),
            _ranks(incident.culprit_ranks),
            name,
            *(times if wide else []),
        )
        row = (*cells, duration(incident.down_s), duration(incident.lost_work_s))
        lines += _table(page, heads, [row], widths)[1:]
        indent, room = " " * 6, page.width - 10
        lines += [indent + line for line in page.wrap(_why(incident, page), room, 1 if hidden else 2)]
        if not wide and not hidden:
            told = page.dot.join(f"{p.value} {t}" for p, t in zip(phases, times, strict=True))
            lines += [indent + page.dim(line) for line in page.wrap(told, room, 2)]
    return [page.bold("Incidents"), *lines, *_more(hidden, page)]


def _causes(summary: RunSummary, page: _Page) -> list[str]:
    """With many incidents: what they were about, the costliest first."""
    count: Counter[str] = Counter()
    down: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for incident in summary.incidents:
        name = _cause(incident, page)
        count[name] += 1
        down[name] += round(incident.down_s * NS)
        lost[name] += round((incident.lost_work_s or 0) * NS)
    ranked = sorted(count, key=lambda name: down[name] + lost[name], reverse=True)
    rows = [
        (name, f"{count[name]:,}", duration(down[name] / NS), duration(lost[name] / NS))
        for name in ranked[:_MAX_CAUSES]
    ]
    lines = _table(page, ("cause", "times", "down", "lost work"), rows, [24, -7, -11, -11])
    rest = len(ranked) - _MAX_CAUSES
    more = [page.dim(f"{page.ellipsis} and {rest} other causes: see --json")] if rest > 0 else []
    return [page.bold("Causes"), *lines, *more]


def _notes(summary: RunSummary) -> list[str]:
    notes = list(summary.notes)
    if summary.outcome is Outcome.INTERRUPTED:
        why = "the agent was killed, or the machine went down"
        if not summary.killed:
            why = "the agent was killed, or its last records could not be written"
        notes.append(f"Interrupted: there is no final record: {why}. Times end at the last one.")
    if summary.unknown_work_ns and any(g.steps for g in summary.generations):
        notes.append(
            "No checkpoint was seen, so how much work was done twice can't be known: ETTR is a range. "
            "closeranks.step(n) in the script tells."
        )
    elif summary.unknown_work_ns:
        notes.append("No step was seen in this script, so what it did with its time can't be told from here.")
    if summary.dropped_records:
        notes.append(
            f"{summary.dropped_records:,} records were dropped while the journal could not be written."
        )
    return notes


# --- data -------------------------------------------------------------------------------------------


def to_json(summary: RunSummary) -> dict[str, Any]:
    """Everything the report knows, as plain data; times in seconds, ratios from 0 to 1."""
    return {
        "schema": 1,
        "job": summary.job,
        "outcome": summary.outcome.value,
        "exit_code": summary.exit_code,
        "reason": summary.reason,
        "started": _utc(summary.started_wall_ns, "%Y-%m-%dT%H:%M:%SZ"),
        "elapsed_s": summary.elapsed_s,
        "ettr": summary.ettr,
        "ettr_max": summary.ettr_max,
        "buckets_s": {bucket.value: summary.seconds(bucket) for bucket in Bucket},
        "unknown_work_s": summary.unknown_work_ns / NS,
        "argv": list(summary.argv),
        "entrypoint": summary.entrypoint,
        "world_size": summary.world_size,
        "node": summary.node,
        "closeranks": summary.version,
        "generations": [asdict(generation) for generation in summary.generations],
        "generations_omitted": summary.generations_omitted,
        "incidents": [{**asdict(incident), "down_s": incident.down_s} for incident in summary.incidents],
        "dropped_records": summary.dropped_records,
        "unrecorded_incidents": summary.unrecorded_incidents,
        "notes": _notes(summary),
    }
