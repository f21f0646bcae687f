"""Evidence in, verdict out: the rank that broke, not those that suffered from it.

Every rule looks at the same facts and may offer one finding; here they are put in order. What needs no other
rank to explain it comes first, the earliest of it; then mismatches, standstills and early leavers; and where
nothing decides, the verdict is "unknown", says what would have decided, and accuses nobody.
"""

from __future__ import annotations

from dataclasses import replace

from closeranks.diagnose.collectives import Desync, find_desync
from closeranks.diagnose.deaths import Fallen, Role, absentees, examine
from closeranks.diagnose.hang_cause import find_frozen, find_hang_cause, find_short_step
from closeranks.diagnose.hang_words import host_block, waiting_lines
from closeranks.diagnose.text import clean, fold_ranks
from closeranks.diagnose.verdicts import Finding, line, to_verdict
from closeranks.diagnose.view import View
from closeranks.evidence import Evidence, Verdict
from closeranks.progress import Phase

__all__ = ["diagnose"]

# What a mismatch can lead to a moment later: an assertion on garbage, an abort. A signal from outside or the
# OOM killer has its own cause.
_MAY_FOLLOW_A_MISMATCH = frozenset({"exception", "native_crash"})
_SELF_EXPLAINED = frozenset(
    {"app.env_import", "app.config", "app.cuda_oom", "app.host_oom", "app.shm", "storage.full"}
)

_STANDSTILLS = frozenset({"blocked", "deadlock", "hang_timeout", "early_exit", "init_stall"})

# Generations are ended for these: leaf, kind and a sentence for when no rule finds more than that.
_PROOFS = {
    "desync": ("comm.desync", "unknown", "ranks are in different collectives"),
    "deadlock": ("comm.desync", "deadlock", "all ranks wait for each other"),
    "early_exit": ("comm.desync", "early_exit", "a rank ended with exit code 0 while others wait for it"),
    "blocked": ("app.hang", "host_block", "a rank is blocked for ever while others wait for it"),
    "stopped": ("app.hang", "frozen_process", "a rank was stopped by a signal"),
    "init_stall": ("comm.bootstrap", "init_stall", "init_process_group did not come to an end"),
    "hang_timeout": ("unknown", "unknown", "no sign of life for as long as --hang-timeout allows"),
}
_NAMES_ITS_RANKS = frozenset({"blocked", "stopped"})  # a proof about these ranks themselves


def diagnose(evidence: Evidence) -> Verdict:
    """Which rank broke, and how. Pure; odd evidence leads to "unknown", never to an exception."""
    view = View(evidence)
    return to_verdict(_with_proof(view, _decide(view)), evidence)


def _decide(view: View) -> Finding:
    fallen = examine(view)
    desync = find_desync(view, fallen)
    frozen = find_frozen(view, fallen)
    root = fallen.root
    if root is not None and desync is not None and _explains(desync, root):
        root = None
    first = _earliest(root, frozen)
    if (
        desync is not None
        and desync.decided
        and desync.hard
        and root is None
        and not _before(frozen, desync.finding)
    ):
        return desync.finding
    suspect = view.evidence.trigger.kind == "suspect"
    if first is not None:
        return replace(first, action="wait", retry=False) if suspect and first is frozen else first
    held = _held_by_a_debugger(view)
    if held is not None and not fallen.deaths:
        return held
    if desync is not None and (desync.decided or desync.hard) and not (suspect and not desync.hard):
        return desync.finding
    if fallen.of(Role.MISMATCH):
        circle = find_hang_cause(view, fallen)
        told = circle is not None and bool(circle.ranks) and circle.leaf == "comm.desync"
        return circle if told and circle is not None else _mismatch_without_sides(view, fallen)
    named = absentees(fallen, view)
    if named:
        return host_block(view, {}, named, tuple(d.rank for d in fallen.of(Role.VICTIM)), 0.75)
    cause = find_short_step(view, fallen) or find_hang_cause(view, fallen)
    if suspect:
        return _only_a_suspicion(view, cause)
    if cause is not None and _may_conclude(view, fallen, cause):
        return cause
    if desync is not None and desync.proved:
        return desync.finding
    if view.evidence.trigger.kind == "init_stall":
        return _init_stall(view)
    return _unknown(view, fallen)


def _may_conclude(view: View, fallen: Fallen, cause: Finding) -> bool:
    """Whether anything claims that nobody moves, or that ranks clash: ranks that wait look the same in
    health."""
    kind = view.evidence.trigger.kind
    finished = {death.rank for death in fallen.of(Role.FINISHED)}
    return (
        kind in _STANDSTILLS
        or (kind == "desync" and cause.leaf == "comm.desync")
        or any(death.timeout for death in fallen.of(Role.VICTIM))
        or bool(finished & set(cause.ranks))
        or cause.kind == "unanswered"
    )


def _before(finding: Finding | None, other: Finding) -> bool:
    """Whether ``finding`` exists and is older than ``other``, as far as both are dated."""
    if finding is None or not finding.ranks:
        return False
    return finding.onset_ns is None or other.onset_ns is None or finding.onset_ns < other.onset_ns


def _explains(desync: Desync, root: Finding) -> bool:
    """Whether the mismatch came first and this end may have followed from it, on another rank."""
    return (
        desync.hard
        and desync.decided
        and root.kind in _MAY_FOLLOW_A_MISMATCH
        and root.leaf not in _SELF_EXPLAINED
        and not set(root.ranks) & set(desync.finding.ranks)
        and _before(desync.finding, root)
    )


def _earliest(root: Finding | None, frozen: Finding | None) -> Finding | None:
    if root is None or frozen is None or not frozen.ranks:
        return root or frozen
    return frozen if _before(frozen, root) else root


def _with_proof(view: View, finding: Finding) -> Finding:
    """What was proved is said, whatever the rules made of it: a generation was ended for it."""
    trigger = view.evidence.trigger
    if trigger.kind not in _PROOFS or finding.ranks or finding.leaf != "unknown":
        return finding
    leaf, kind, words = _PROOFS[trigger.kind]
    proved = clean(trigger.detail, 300) or words
    if finding.kind != "unknown" or finding.confidence >= 0.5:  # all of them suspended, or in a debugger
        return replace(finding, summary=f"{proved}; {finding.summary}")
    ranks = tuple(r for r in trigger.ranks if r in view.ranks) if trigger.kind in _NAMES_ITS_RANKS else ()
    return replace(
        finding,
        leaf=leaf,
        kind=kind,
        ranks=ranks,
        summary=proved if ranks else f"{proved}; which rank is in error isn't recorded",
        signature=f"{trigger.kind} without a cause",
        confidence=0.6 if trigger.kind != "hang_timeout" else 0.3,
    )


def _held_by_a_debugger(view: View) -> Finding | None:
    tracer_of = {
        rank: p.tracer_pid for rank in view.order
        if (p := view.ranks[rank].process) is not None and (p.tracer_pid > 0 or p.state == "t")
    }  # fmt: skip
    if not tracer_of:
        return None
    held = tuple(tracer_of)
    tracers = ", ".join(str(pid) for pid in sorted(set(tracer_of.values())))
    seen = line(f"{fold_ranks(held)} /proc", f"traced by pid {tracers}", "someone is looking at it")
    return Finding(
        leaf="unknown",
        kind="unknown",
        ranks=(),
        summary=f"{fold_ranks(held)} {'is' if len(held) == 1 else 'are'} held by a debugger or profiler",
        signature="held by a debugger",
        confidence=0.9,
        lines=(seen,),
        missing=("nothing is broken as far as can be seen; detach the debugger to go on",),
        action="wait",
        retry=False,
    )


def _mismatch_without_sides(view: View, fallen: Fallen) -> Finding:
    """An abort says that collectives clashed, but the rings don't show where."""
    clashed = fallen.of(Role.MISMATCH)
    lines = [
        line(d.line.source, d.line.line, "gloo aborts whoever receives too many bytes, not whoever sent them")
        for d in clashed
    ]
    lines += waiting_lines(
        view, (r for r in view.order if r not in {d.rank for d in clashed}), "what the others did"
    )
    return Finding(
        leaf="comm.desync",
        kind="size_mismatch",
        ranks=(),
        summary=f"{fold_ranks(d.rank for d in clashed)} received more bytes than expected: ranks were in "
        "different collectives; which of them was in error isn't recorded",
        signature="collective mismatch",
        confidence=0.5,
        lines=tuple(lines),
        onset_ns=clashed[0].when_ns,
        missing=("the ranks' own records of the collectives that clashed",),
    )


def _only_a_suspicion(view: View, cause: Finding | None) -> Finding:
    """Slow is not broken: say who is waited for, accuse nobody."""
    words = cause.summary if cause is not None else "the ranks have been silent for longer than usual"
    lines = cause.lines if cause is not None else tuple(waiting_lines(view, view.order, "what it does"))
    return Finding(
        leaf="unknown",
        kind="unknown",
        ranks=(),
        summary=f"nothing is proved to be broken: {words}",
        signature="suspicion",
        confidence=0.3,
        lines=lines,
        missing=("proof that it can't go on by itself; a slow rank looks the same",),
        action="wait",
        retry=False,
    )


def _init_stall(view: View) -> Finding:
    """Everyone is in init_process_group and nothing moves; or someone has not come to it."""
    outside = tuple(
        r for r in view.order
        if (p := view.pages.get(r)) is not None
        and not p.init_done and p.phase in (Phase.WAITING, Phase.START)
    )  # fmt: skip
    if outside and 2 * len(outside) <= len(view.order):
        inside = tuple(r for r in view.order if r not in outside)
        return host_block(view, {}, outside, inside, 0.75)
    return Finding(
        leaf="comm.bootstrap",
        kind="init_stall",
        ranks=(),
        summary="init_process_group did not come to an end: the ranks wait to meet each other",
        signature="init_process_group stalls",
        confidence=0.8,
        lines=tuple(waiting_lines(view, view.order, "where it waits")),
        missing=("which connection does not come about",),
    )


def _unknown(view: View, fallen: Fallen) -> Finding:
    """Nothing decides."""
    victims = fallen.of(Role.VICTIM)
    lines = [
        line(v.line.source, v.line.line, "a consequence: it lost or waited for a peer") for v in victims[:6]
    ]
    lines += waiting_lines(
        view, (r for r in view.order if r not in {v.rank for v in victims}), "what it does"
    )
    missing = []
    if len(view.pages) < len(view.order):
        missing.append(f"progress pages of {fold_ranks(r for r in view.order if r not in view.pages)}")
    if victims and len(victims) == len(fallen.deaths):
        missing.append("the end of the rank that the others lost: an exit, an exception, a kernel log line")
    unseen = [
        r
        for r in view.order
        if not view.ranks[r].stack and view.ranks[r].exit is None and view.ranks[r].error is None
    ]
    if unseen:
        missing.append(f"stacks of {fold_ranks(unseen)}")
    timed_out = bool(victims) and all(v.timeout for v in victims) and len(victims) == len(fallen.deaths)
    who = fold_ranks(v.rank for v in victims)
    if timed_out:
        summary = f"{who} timed out in a collective, and nothing shows who did not come"
    elif victims:
        summary = f"{who} lost a peer, and nothing shows which one broke"
    else:
        summary = (
            "nothing in the evidence says which rank broke"
            if not _healthy(fallen, view) or view.evidence.trigger.kind in _PROOFS
            else "nothing is wrong as far as can be seen"
        )
    clash = next((p for p in view.pages.values() if p.desync_rank is not None), None)
    if clash is not None and not victims:
        summary = (
            f"a worker saw another collective than its own at #{clash.desync_seq}, and its record is gone"
        )
    idle = not victims and view.evidence.trigger.kind not in _PROOFS
    return Finding(
        leaf="comm.timeout"
        if timed_out
        else "comm.desync"
        if clash is not None and not victims
        else "unknown",
        kind="unknown",
        ranks=(),
        summary=summary,
        signature="timeouts only"
        if timed_out
        else "peers lost only"
        if victims
        else f"unknown after {view.evidence.trigger.kind}",
        confidence=0.3 if victims else 0.2,
        lines=tuple(lines),
        missing=tuple(missing) or ("a sign of what went wrong",),
        action="wait" if idle else None,
        retry=False if idle else None,
    )


def _healthy(fallen: Fallen, view: View) -> bool:
    finished = len(fallen.of(Role.FINISHED))
    return not fallen.deaths or finished == len(view.order)
