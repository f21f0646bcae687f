"""Sees a collective mismatch before it does harm: two ranks about to meet in different collectives.

gloo pairs a rank's n-th collective with its peers' n-th, whatever they are. After a skipped one, gradients
of different steps are averaged in silence; after a wrong size the process aborts in C++. All ranks of one
host share their progress pages, so whoever comes to a collective second can see that the first is elsewhere.

False alarms would kill a healthy job, so every rule is either a property of the collective itself or has
been observed to hold in this very process for a while:

* the operation must be the same on all ranks; size and dtype too, where the operation demands it;
* the completed optimizer steps must be the same, once they have been the same at this line for long enough
  (a script in which they ever differ before that isn't in lockstep, and the rule is off for good);
* two lines that have each met themselves on the other rank many times, and never anything else, don't meet.

What DDP issues from C++ can't be compared. But its number can be counted, after each optimizer step: a rank
that has issued fewer than in all steps before is held there, before the script saves what it has made of that
step, until the others have completed it, too. If they did the same, that is at once. If they wait for what
this rank has left out, it is for ever, and the agent sees who keeps whom waiting; the page says why, and a
message what proves it, where the others' collective is seen from Python.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from closeranks.progress import DTYPES, OPS
from closeranks.worker.hooks_state import THREAD_NAME, ControlLine, name_thread
from closeranks.worker.page import (
    PAGE_U32S,
    PAGE_WORDS,
    PLACE_U32,
    POSITION_U32,
    RECORD_WORDS,
    RING_MASK,
    RING_WORD,
    PageWriter,
    Record,
)

__all__ = ["NeighbourCheck", "Site"]

_LOCKSTEP_STEPS = 8  # where the line is visited in each step
_LOCKSTEP_STEPS_SPARSE = 32  # where it is visited every so many steps: equal numbers may be chance
_PAIRED = 8
_WAIT_FOR_KILL_S = 10.0
_WAIT_SLICE_S = 0.01
_HOLD_S = 30.0
_HOLD_STEPS = 20  # or as long as so many steps take, where that is longer
_HOLD_SLICE_S = 0.005
_MOST_NEEDED = 2**20

_U32 = 2**32 - 1
_SAME_SHAPE = frozenset(
    OPS.index(name)
    for name in ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
)
_BROADCAST = OPS.index("broadcast")
_BARRIERS = frozenset((OPS.index("barrier"), OPS.index("monitored_barrier")))
_NO_DTYPE = DTYPES.index("none")  # no tensor, or one that can't be asked
_BYTES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


class Site:
    """A line of the script that issues collectives, and what was learned about it."""

    __slots__ = (
        "file_key", "in_lockstep", "line", "line_bits", "loose", "matches", "mixed", "paired", "period",
        "run", "seq", "step",
    )  # fmt: skip

    def __init__(self, file_key: int, line: int) -> None:
        self.file_key = file_key
        self.line = line
        self.line_bits = line << 32
        self.step = 0  # at our last visit
        self.period = 0  # steps between two visits that were not in the same step
        self.run = 0  # how often in a row it was that many
        self.in_lockstep = False  # both ranks have kept one pace for so long that the next step can be told
        self.seq = 0  # of the last comparison that matched: two neighbours, or two looks, count once
        self.matches = 0  # how often the neighbour had made as many, at this pace
        self.paired = 0  # how often the neighbour was at the same line
        self.mixed = False  # the neighbour has been at another line, too
        self.loose = False  # the neighbour has used another dtype of the same size

    def visited(self, step: int) -> None:
        """We are here in another step than last time: at what pace?"""
        advance = step - self.step
        if advance == self.period:
            self.run += 1
        else:
            self.period, self.run, self.matches = advance, 0, 0
        self.step = step
        # Not every visit can be compared, but about every second one.
        needed = _LOCKSTEP_STEPS if advance == 1 else _LOCKSTEP_STEPS_SPARSE
        self.in_lockstep = self.run >= needed and self.matches >= _LOCKSTEP_STEPS

    def matched(self, seq: int) -> None:
        """The neighbour was here too, after as many steps."""
        if seq != self.seq:
            self.seq = seq
            self.paired += 1
            self.matches += 1


# What we have issued: sequence number, record, site, whether the step rule applies, and whether it is armed.
_Issued = tuple[int, Record, Site, bool, bool]


class NeighbourCheck:
    """Compares this rank's collectives on the default group with those of other ranks.

    Those are the two at distance 1, from which what is normal is learned, and those at distance 2, 4, ...:
    the ones with which gloo's rings and trees exchange data.
    """

    def __init__(
        self, writer: PageWriter, control: ControlLine, places: Mapping[tuple[int, int], Site]
    ) -> None:
        rank, size = writer.local_rank, writer.local_world_size
        distances = [1 << bit for bit in range(size.bit_length()) if 1 << bit < size]
        partners = {(rank + sign * distance) % size for distance in distances for sign in (1, -1)}
        near = {(rank + 1) % size, (rank - 1) % size}
        self._writer = writer
        self._control = control
        # Per partner: its rank, where its position and place are, where its ring begins, learned from or not.
        self._partners = tuple(
            (
                partner,
                partner * PAGE_U32S + POSITION_U32,
                partner * PAGE_U32S + PLACE_U32,
                partner * PAGE_WORDS + RING_WORD,
                partner in near,
            )
            for partner in sorted(partners, key=lambda partner: (partner not in near, partner))
        )
        self._compared = [0] * size  # up to which of our positions, with each of them
        self._last: _Issued | None = None
        self._places = places  # all sites of this process, by file key and line
        self._near = tuple(sorted(near - {rank}))
        self._step_rule = True
        self._off = False
        # What the default group issues in a step, from Python and C++.
        self._counted = 0  # up to here
        self._usual = 0
        self._streak = 0  # for so many steps in a row
        self._needed = _LOCKSTEP_STEPS
        self._step_ended_ns = 0

    def check(self, seq: int, kind: int, numel: int, site: Site, main_thread: bool) -> None:
        """Compare our newest record with the others'; on a proved mismatch say so and await the kill.

        Where another isn't there yet, it will compare; we look at its previous one instead, so that both
        sides learn what normal is.
        """
        if self._off:
            return
        writer, compared, last = self._writer, self._compared, self._last
        words, u32 = writer.all_words, writer.all_u32
        step = writer.step
        step_line = step | site.line_bits
        position = writer.world_position
        # Another thread's collectives have no place in the main thread's steps.
        stepping = self._step_rule and main_thread
        armed = stepping and site.in_lockstep
        ours = seq, (kind, numel, step_line, site.file_key), site, stepping, armed
        for partner, position_at, place_at, ring, near in self._partners:
            theirs = u32[position_at]
            if theirs == position:
                slot = ring + (u32[place_at] & RING_MASK) * RECORD_WORDS
                if (
                    words[slot + 3] == step_line
                    and words[slot + 2] == numel
                    and words[slot + 1] == kind
                    and words[slot] == seq
                ):
                    compared[partner] = position
                    if seq != site.seq:
                        site.matched(seq)
                    continue
            elif theirs < position and (
                not near or last is None or theirs != position - 1 or compared[partner] == theirs
            ):
                continue  # not there yet, and known up to where it is
            self._compare(partner, theirs, position, ours)
        self._last = ours
        if stepping and step != site.step:
            site.visited(step)

    def _compare(self, partner: int, theirs: int, position: int, ours: _Issued) -> None:
        """The long way: records that differ, that lie further back, or the ones before these."""
        if theirs < position:
            assert self._last is not None
            position, ours = position - 1, self._last
        record = self._writer.record_of(partner, position, ours[0])
        if record is not None:
            self._compared[partner] = position
            self._judge(partner, record, ours)

    def _judge(self, neighbour: int, theirs: Record, ours: _Issued) -> None:
        seq, mine, site, _, _ = ours
        if mine == theirs:
            site.matched(seq)
        elif self._differs(mine, theirs, site) or self._out_of_step(theirs, ours):
            self._desync(neighbour, seq)

    def _differs(self, mine: Record, theirs: Record, site: Site) -> bool:
        """Whether these two can't be one collective."""
        op, dtype = mine[0] >> 32 & 0xFFFF, mine[0] >> 48
        their_op, their_dtype = theirs[0] >> 32 & 0xFFFF, theirs[0] >> 48
        if op != their_op:
            return True
        if op not in _SAME_SHAPE or _NO_DTYPE in (dtype, their_dtype):
            return False
        if mine[1] != theirs[1]:
            return True
        if dtype == their_dtype:
            return False
        if op != _BROADCAST or _BYTES.get(DTYPES[dtype]) != _BYTES.get(DTYPES[their_dtype]):
            return True
        # A broadcast only moves bytes: another dtype of the same size may be a script's habit.
        broke = site.paired >= _PAIRED and not site.loose
        site.loose = True
        return broke

    def _out_of_step(self, theirs: Record, ours: _Issued) -> bool:
        """The same collective as far as it shows; but is it the same step, and the same line?"""
        seq, mine, site, stepping, armed = ours
        if (mine[2] >> 32, mine[3]) != (theirs[2] >> 32, theirs[3]):
            return self._crossed(mine, theirs, site)
        if mine[2] == theirs[2]:
            site.matched(seq)
        elif armed:
            return True
        elif stepping:
            self._step_rule = False
        return False

    def _crossed(self, mine: Record, theirs: Record, site: Site) -> bool:
        """Our line has met another one: a mismatch only if both have always met themselves so far."""
        if mine[0] >> 32 & 0xFFFF in _BARRIERS:
            return False  # barriers carry nothing, so that it does no harm
        other = self._places.get((theirs[3], theirs[2] >> 32))
        proved = (
            other is not None
            and not (site.mixed or other.mixed)
            and site.paired >= _PAIRED
            and other.paired >= _PAIRED
        )
        site.mixed = True
        if other is not None:
            other.mixed = True
        return proved

    def step_done(self, step: int, counted: int) -> None:
        """The main optimizer has completed ``step``; the default group has issued ``counted`` by now."""
        issued = counted - self._counted
        self._counted = counted
        now_ns = time.monotonic_ns()
        took_ns, self._step_ended_ns = now_ns - self._step_ended_ns, now_ns
        step_of = self._writer.step_of
        ahead = [step_of(neighbour) - step for neighbour in self._near]
        together = all(-1 <= steps <= 1 for steps in ahead)
        if issued == self._usual:
            self._streak = self._streak + 1 if together else 0
            return
        # A step that nothing held us together in: the others may not have ended the one before it yet.
        close = all(-2 <= steps <= 1 for steps in ahead)
        short = issued < self._usual and self._streak >= self._needed and close and not self._off
        usual, self._usual, self._streak = self._usual, issued, 0
        if short:
            said = {"type": "short_step", "step": step, "seq": counted, "issued": issued, "usual": usual}
            self._control.send(said)
            self._writer.hold(issued, usual)
            self._hold_until_the_others_complete(step, said, max(_HOLD_S, _HOLD_STEPS * took_ns / 1e9))
            self._writer.hold()
            # It was nothing, or nobody cared: ask for twice the regularity before doing this again.
            self._needed = min(2 * self._needed, _MOST_NEEDED)
            self._step_ended_ns = time.monotonic_ns()

    def _hold_until_the_others_complete(self, step: int, said: dict[str, object], limit_s: float) -> None:
        """Wait, as one waits for ever: that is what the agent must see, if this is what keeps all others.

        So a thread of its own, under the name of those that always poll, looks after the neighbours.
        """
        position = self._writer.world_position
        release = threading.Lock()
        release.acquire()

        def watch() -> None:
            name_thread()
            deadline = time.monotonic() + limit_s
            proved = False
            try:
                while time.monotonic() < deadline:
                    if all(self._writer.step_of(neighbour) >= step for neighbour in self._near):
                        break
                    for neighbour in () if proved else self._near:
                        if self._is_past_us(neighbour, position, step):
                            proved = True
                            self._control.send({**said, "proved_by": neighbour})
                            break
                    time.sleep(_HOLD_SLICE_S)
            finally:
                release.release()

        try:
            threading.Thread(target=watch, name=THREAD_NAME, daemon=True).start()
        except RuntimeError:
            return  # no thread to be had: then we can't wait either
        release.acquire()

    def _is_past_us(self, neighbour: int, position: int, step: int) -> bool:
        """In a collective that we haven't issued, of a step that we have completed: there is no way back."""
        writer = self._writer
        return writer.is_inside(neighbour, position + 1) and writer.step_of(neighbour) < step

    def _desync(self, neighbour: int, seq: int) -> None:
        """Say so, and don't issue it: until the agent has ended this generation no harm is done."""
        self._off = True
        self._writer.flag_desync(neighbour, seq)
        self._control.send({"type": "desync", "neighbour": neighbour, "seq": seq})
        deadline = time.monotonic() + _WAIT_FOR_KILL_S
        while time.monotonic() < deadline:
            time.sleep(_WAIT_SLICE_S)
