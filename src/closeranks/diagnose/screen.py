"""One incident on one screen: which rank, why, what the others did, what happens next. Text in, text out.

Nothing that a rank printed reaches the terminal as it is: every foreign string loses its control characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from closeranks.diagnose.stacks import user_frame
from closeranks.diagnose.status import stack_text, status_text
from closeranks.diagnose.text import clean, fold_ranks, to_ascii, width_of
from closeranks.diagnose.view import View
from closeranks.evidence import Evidence, EvidenceLine, Verdict

__all__ = ["render", "to_ascii"]

MAX_LINES = 18
MAX_TRACEBACK_LINES = 12
_LABEL = 9  # columns of "   why   "
_MIN_WIDTH = 40

_PLURALS = {"waits": "wait", "is": "are", "was": "were", "sleeps": "sleep", "runs": "run", "holds": "hold"}
# Frames of our hooks and faults, which stand between a script and torch: they say nothing about the script.
_OWN_FRAME = re.compile(r'  File "[^"]*/closeranks/worker/\w+\.py", line \d+, in ')
_BOLD, _DIM, _RED, _YELLOW, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[33m", "\x1b[0m"


def render(
    evidence: Evidence,
    verdict: Verdict,
    *,
    width: int = 100,
    colour: bool = False,
    next_step: str = "",
    run_hint: str = "",
    clock: str = "",
) -> str:
    """The screen of one incident, ``width`` columns wide, with a newline at its end.

    ``next_step`` says what is done about it ("generation 3"), ``run_hint`` where its files are, ``clock`` the
    time of day. Without ``colour`` there is no escape sequence in it; ``to_ascii`` makes it plain ASCII.
    """
    width = max(_MIN_WIDTH, width)
    view = View(evidence)
    trace = _traceback(view, verdict)
    rows = _labelled("why", _why(view, verdict, bool(trace)))
    rows += _labelled("where", [] if trace else _where(view, verdict))
    rows += _labelled("error", trace)
    rows += _labelled("lacks", [] if verdict.culprits else [clean(m, 200) for m in verdict.missing[:2]])
    rows += _labelled("files", [clean(run_hint, 400)] if run_hint else [])
    lines = _head(evidence, verdict, clean(next_step, 80), clock, width, colour)
    room = MAX_LINES + len(trace) - len(lines)
    lines += [_row(label, text, width, colour) for label, text in _limit(rows, room)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _labelled(label: str, texts: Iterable[str]) -> list[tuple[str, str]]:
    """The label before the first of the texts alone."""
    return [(label if i == 0 else "", text) for i, text in enumerate(texts)]


def _head(
    evidence: Evidence, verdict: Verdict, next_step: str, clock: str, width: int, colour: bool
) -> list[str]:
    """The rule, what happened and how sure that is, and what it is called and leads to."""
    confidence = f"confidence {round(verdict.confidence * 100)} %"
    tint = _BOLD + (_RED if verdict.culprits else _YELLOW)
    summary = _wrap(clean(verdict.summary, 400), width - 3 - len(confidence) - 3, 3)
    kind = verdict.kind if verdict.kind != verdict.leaf else ""
    terms = " · ".join(part for part in (verdict.leaf, kind, verdict.action, next_step) if part)
    return [
        _paint(_rule(evidence, clock, width), _DIM, colour),
        _title(summary[0], confidence, width, tint, colour),
        *(f"   {_paint(more, tint, colour)}" for more in summary[1:]),
        "   " + _fit(terms, width - 3),
    ]


def _rule(evidence: Evidence, clock: str, width: int) -> str:
    name = clean(evidence.incident_id, 40) or "?"
    left = f"── incident {name} · generation {evidence.generation} "
    right = f" {clean(clock, 20)} ──" if clock else ""
    return left + "─" * max(2, width - width_of(left) - width_of(right)) + right


def _title(summary: str, confidence: str, width: int, tint: str, colour: bool) -> str:
    gap = max(3, width - 3 - width_of(summary) - len(confidence))
    return f"   {_paint(summary, tint, colour)}{' ' * gap}{_paint(confidence, _DIM, colour)}"


def _row(label: str, text: str, width: int, colour: bool) -> str:
    return f"   {_paint(label.ljust(_LABEL - 3), _DIM, colour)}{_fit(text, width - _LABEL)}"


def _paint(text: str, code: str, colour: bool) -> str:
    return f"{code}{text}{_RESET}" if colour and text else text


def _fit(text: str, columns: int) -> str:
    """Cut to that many columns."""
    if width_of(text) <= columns:
        return text
    while text and width_of(text) > columns - 1:
        text = text[: max(0, min(len(text) - 1, columns - 1))]
    return text.rstrip() + "…"


def _wrap(text: str, columns: int, most: int) -> list[str]:
    """Break at spaces into at most ``most`` lines; the last one is cut."""
    lines: list[str] = []
    words = text.split(" ")
    while words:
        taken = [words.pop(0)]
        while words and width_of(" ".join((*taken, words[0]))) <= columns and len(lines) < most - 1:
            taken.append(words.pop(0))
        if len(lines) == most - 1:
            taken += words
            words = []
        lines.append(_fit(" ".join(taken), columns))
    return lines or [""]


def _why(view: View, verdict: Verdict, has_trace: bool) -> list[str]:
    """The culprits' evidence, then what each other group of ranks did, in aligned columns."""
    culprits = set(verdict.culprit_ranks)
    rows: list[tuple[str, str]] = []
    for entry in verdict.evidence:
        who, text = _split_source(entry, view)
        if who is not None and culprits and not who <= culprits:
            continue  # the others have their own lines below
        if has_trace and entry.source.endswith(" exception"):
            continue
        if entry.source.endswith("stack"):
            continue  # under "where"
        rows.append((_subject(entry, who), _agreeing(text, len(who or ()))))
    rows = rows[:5]
    named = {name for name, _ in rows}
    for ranks, status in _grouped(view, (r for r in view.order if r not in culprits)):
        if fold_ranks(ranks) not in named:
            rows.append((fold_ranks(ranks), _agreeing(status, len(ranks))))
    column = min(24, max((len(name) for name, _ in rows), default=0))
    before = ["", *(name for name, _ in rows)]
    return [
        f"{(name if name != last else '').ljust(column)}  {text}"
        for last, (name, text) in zip(before, rows[:9], strict=False)
    ]


def _agreeing(text: str, ranks: int) -> str:
    """What one rank does, told of so many: ``ranks 0,2  wait in ...``."""
    verb, space, rest = text.partition(" ")
    return f"{_PLURALS.get(verb, verb)}{space}{rest}" if ranks > 1 else text


def _split_source(entry: EvidenceLine, view: View) -> tuple[frozenset[int] | None, str]:
    """The ranks that a line is about, None for none: sources read ``rank 1 exit`` or ``ranks 0,2-3 ring``."""
    word, _, rest = clean(entry.source, 80).partition(" ")
    text = clean(entry.line, 300)
    if word not in ("rank", "ranks"):
        return None, text
    numbers = rest.partition(" ")[0]
    ranks: set[int] = set()
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            ranks.update(r for r in view.order if int(first) <= r <= int(last or first))
    return frozenset(ranks), text


def _subject(entry: EvidenceLine, who: frozenset[int] | None) -> str:
    return fold_ranks(who) if who else clean(entry.source, 24)


def _grouped(view: View, ranks: Iterable[int]) -> list[tuple[list[int], str]]:
    """Ranks that do the same together, the largest group first, at most four groups."""
    same: dict[str, list[int]] = {}
    for rank in ranks:
        same.setdefault(status_text(view, rank), []).append(rank)
    ordered = sorted(same.items(), key=lambda item: (-len(item[1]), item[1][0]))
    groups = [(who, text) for text, who in ordered[:4]]
    rest = sorted(rank for _, who in ordered[4:] for rank in who)
    return groups + ([(rest, "others still")] if rest else [])


def _where(view: View, verdict: Verdict) -> list[str]:
    """The culprit's stack, and that of one who waits."""
    culprits = [r for r in verdict.culprit_ranks if r in view.ranks]
    # Of a rank that only reports its lost peer or is on its way out, the stack shows libraries alone.
    others = [r for r in view.order if r not in culprits and user_frame(view.ranks[r].stack) is not None]
    shown = [(r, text) for r in (*culprits, *others) if (text := stack_text(view.ranks[r]))]
    return [f"rank {rank}'s stack: {text}" for rank, text in shown[: 2 if culprits else 1]]


def _traceback(view: View, verdict: Verdict) -> list[str]:
    """The last lines of the traceback that ended the culprit, indentation kept. Where it only lost a peer in
    the end, its traceback explains nothing."""
    if verdict.kind != "exception":
        return []
    for rank in verdict.culprit_ranks:
        error = view.ranks[rank].error if rank in view.ranks else None
        if error is not None and error.traceback.strip():
            lines = _without_own_frames(error.traceback[-32768:].rstrip().splitlines())
            shown = [" " * (len(text) - len(text.lstrip(" "))) + clean(text, 300) for text in lines]
            shown = [text[2:] if text.startswith("  ") else text for text in shown if text.strip(" ^~")]
            return shown[-MAX_TRACEBACK_LINES:]
    return []


def _without_own_frames(lines: list[str]) -> list[str]:
    kept: list[str] = []
    hidden = False
    for text in lines:
        if text.startswith("  File "):
            hidden = _OWN_FRAME.match(text) is not None
        elif not text.startswith("    "):
            hidden = False
        if not hidden:
            kept.append(text)
    return kept


def _limit(rows: list[tuple[str, str]], room: int) -> list[tuple[str, str]]:
    """Drop evidence lines from the end of the longest part, never the last row (where the files are)."""
    while len(rows) > max(2, room):
        unlabelled = [i for i, (label, _) in enumerate(rows) if not label]
        if not unlabelled:
            break
        rows = [row for i, row in enumerate(rows) if i != unlabelled[-1]]
    return rows
