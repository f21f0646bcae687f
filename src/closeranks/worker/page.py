"""Writes this rank's progress page (layout: closeranks.progress), and reads its neighbours'.

Everything here is on the training's path, so it does as little as Python lets it: fields are native stores
through a memoryview (one ``mov`` each, where ``struct`` with ``<`` stores byte by byte; ``L`` converts large
integers in half the time that ``Q`` does), counters live in Python integers and are never read back.

A record is written before the head that makes it visible, so a reader never takes an unfinished one.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
from time import CLOCK_BOOTTIME, clock_gettime_ns
from time import monotonic_ns as _now

from closeranks.progress import (
    COLLECTIVE,
    COLLECTIVE_SLOTS,
    COLLECTIVES_OFFSET,
    MAGIC,
    OPS,
    PAGE_BYTES,
    STEP,
    STEP_SLOTS,
    STEPS_OFFSET,
    STRING,
    STRING_FILE,
    STRING_GROUP,
    STRINGS_BYTES,
    STRINGS_OFFSET,
    VERSION,
    Field,
    Phase,
    key_of,
)

__all__ = [
    "P2P_OPS",
    "PAGE_U32S",
    "PAGE_WORDS",
    "PLACE_U32",
    "POSITION_U32",
    "PageWriter",
    "RECORD_WORDS",
    "RING_MASK",
    "RING_WORD",
    "Record",
]

assert sys.byteorder == "little", "the progress page is little-endian and written with native stores"

# Calls between two ranks: they have no place in the order of a group's collectives.
P2P_OPS = frozenset(OPS.index(name) for name in ("send", "recv", "batch_isend_irecv", "isend", "irecv"))

_NATIVE_COLLECTIVE = struct.Struct("@LIHHLIIIIL")  # COLLECTIVE's layout, stored a field at a time
assert _NATIVE_COLLECTIVE.size == COLLECTIVE.size
_pack = _NATIVE_COLLECTIVE.pack_into
_RECORD_BYTES = COLLECTIVE.size
_RECORD_U32S = _RECORD_BYTES // 4
_STATE_AT = COLLECTIVES_OFFSET // 4 + 9  # of a record's u32s
RING_MASK = COLLECTIVE_SLOTS - 1
assert COLLECTIVE_SLOTS & RING_MASK == 0

# In 64-bit words from the start of a page.
PAGE_WORDS = PAGE_BYTES // 8
RECORD_WORDS = _RECORD_BYTES // 8
RING_WORD = COLLECTIVES_OFFSET // 8
_STEP_WORDS = STEP.size // 8
_STEPS = STEPS_OFFSET // 8
_TICKS, _TICK_NS = Field.TICKS // 8, Field.TICK_NS // 8
_STEP, _STEP_NS = Field.STEP // 8, Field.STEP_NS // 8
_PHASE, _PHASE_NS = Field.PHASE // 8, Field.PHASE_NS // 8
_IN_COLLECTIVE, _WORLD_SEQ = Field.IN_COLLECTIVE // 8, Field.WORLD_SEQ // 8
_COLLECTIVES, _STEP_HEAD = Field.COLLECTIVES // 8, Field.STEPS // 8
_DESYNC, _DESYNC_SEQ = Field.DESYNC // 8, Field.DESYNC_SEQ // 8
_FAULT_FIRED = Field.FAULT_FIRED // 8
# In 32-bit ones.
PAGE_U32S = PAGE_BYTES // 4
POSITION_U32, PLACE_U32 = Field.WORLD_POSITION // 4, Field.WORLD_PLACE // 4

_USER_BYTES = 32
_U64 = 2**64 - 1
_U32 = 2**32 - 1
_ENTERED, _DONE = 1, 2
_EPOCH_BITS = 24
_FAR = 100  # a partner's record further back may be overwritten while we read it

# group | op << 32 | dtype << 48, numel, step | line << 32, file key
Record = tuple[int, int, int, int]


class PageWriter:
    """The only writer of one rank's page.

    ``mapping`` holds the pages of all ``local_world_size`` ranks of the host. Raises ValueError if it is
    too small. Once the mapping is released under it, every method raises ValueError, but ``collective_enter``
    TypeError; the latter raises ``struct.error``, too, for a number that the record has no room for.
    """

    __slots__ = (
        "_bytes", "_checkpoints", "_collectives", "_interned", "_lock", "_open", "_own", "_own_u32",
        "_steps", "_strings_used", "_ticks", "_user", "all_u32", "all_words", "generation",
        "local_rank", "local_world_size", "phase", "rank", "step",
        "world_position",
    )  # fmt: skip

    def __init__(
        self,
        mapping: mmap.mmap | memoryview,
        local_rank: int,
        local_world_size: int,
        rank: int,
        generation: int,
    ) -> None:
        if not 0 <= local_rank < local_world_size or len(mapping) < PAGE_BYTES * local_world_size:
            raise ValueError(
                f"no page for local rank {local_rank} of {local_world_size} in {len(mapping)} bytes"
            )
        self.rank = rank
        self.generation = generation
        self.local_rank = local_rank
        self.local_world_size = local_world_size
        self.step = 0  # completed in this generation
        # How often the default group was made, and its collectives since. Two ranks' records can be of the
        # same collective only where this is equal.
        self.world_position = 0
        self.phase: int = Phase.WAITING
        self._lock = threading.Lock()
        self._map(memoryview(mapping))
        self._write_header()

    def _map(self, view: memoryview) -> None:
        whole = view.cast("B")[: PAGE_BYTES * self.local_world_size]
        self.all_words = whole.cast("L")
        self.all_u32 = whole.cast("I")
        assert self.all_words.itemsize == 8
        start = self.local_rank * PAGE_BYTES
        self._bytes = whole[start : start + PAGE_BYTES]
        self._own = self._bytes.cast("L")
        self._own_u32 = self._bytes.cast("I")

    def _write_header(self) -> None:
        """Start the page over: what an older generation left there must not be read as ours."""
        self._put(Field.MAGIC_VERSION, 0)
        self._bytes[:] = bytes(PAGE_BYTES)
        self._ticks = self._collectives = self._steps = self._strings_used = self._checkpoints = 0
        self.world_position = 0
        self._open = 0
        self._interned: dict[tuple[int, str], int] = {}
        self.phase = Phase.WAITING
        self._user = ""
        self._put(Field.RANK, self.rank)
        self._put(Field.GENERATION, self.generation)
        self._put(Field.PID, os.getpid())
        self.enter_phase(Phase.WAITING)
        self._put(Field.MAGIC_VERSION, MAGIC | VERSION << 32)

    def detach(self) -> None:
        """Write to a private page from now on: a forked child must not speak for the rank."""
        step = self.step
        self.step = 0
        self._lock = threading.Lock()
        self._map(memoryview(bytearray(PAGE_BYTES * self.local_world_size)))
        self._write_header()
        self.step = step

    def _put(self, field: int, value: int) -> None:
        self._own[field // 8] = value & _U64

    # --- signs of life ------------------------------------------------------------------------------

    def tick(self) -> None:
        """A sign of life."""
        own = self._own
        self._ticks = own[_TICKS] = self._ticks + 1
        own[_TICK_NS] = _now()

    def enter_phase(self, phase: int) -> int:
        """Go into a phase, which is a sign of life. Returns the one before, to go back to."""
        own = self._own
        previous = self.phase
        self.phase = own[_PHASE] = phase
        own[_PHASE_NS] = own[_TICK_NS] = _now()
        self._ticks = own[_TICKS] = self._ticks + 1
        return previous

    set_phase = leave_phase = enter_phase

    def enter_user_phase(self, name: str) -> tuple[int, str]:
        """Go into a phase that the script names; returns what ``leave_user_phase`` takes to go back."""
        previous = self.phase, self._user
        self._write_user(name)
        self.enter_phase(Phase.USER)
        return previous

    def leave_user_phase(self, previous: tuple[int, str]) -> None:
        """Back to what ``enter_user_phase`` found."""
        self._write_user(previous[1])
        self.enter_phase(previous[0])

    def _write_user(self, user: str) -> None:
        self._user = user
        text = user.encode("utf-8", "replace")[:_USER_BYTES].decode("utf-8", "ignore").encode()
        self._bytes[Field.USER_PHASE : Field.USER_PHASE + _USER_BYTES] = text.ljust(_USER_BYTES, b"\0")

    # --- steps --------------------------------------------------------------------------------------

    def step_done(self, world_seq: int, phase: int | None = None) -> None:
        """One more step is complete; ``world_seq`` is the default group's sequence number now.

        With ``phase``, that is entered as well.
        """
        own = self._own
        self.step = step = self.step + 1
        slot = _STEPS + self._steps % STEP_SLOTS * _STEP_WORDS
        own[slot] = step
        own[slot + 1] = own[_WORLD_SEQ] = world_seq
        now = _now()
        own[slot + 2] = own[_STEP_NS] = own[_TICK_NS] = now
        self._steps = own[_STEP_HEAD] = self._steps + 1
        own[_STEP] = step
        self._ticks = own[_TICKS] = self._ticks + 1
        if phase is not None:
            self.phase = own[_PHASE] = phase
            own[_PHASE_NS] = now

    def absolute_step(self, number: int) -> None:
        """The step as the script itself counts it, over all generations. Negative numbers count as 0."""
        self._put(Field.ABSOLUTE_STEP, min(max(number, 0) + 1, _U64))
        self.tick()

    def checkpoint_done(self, step: int | None = None) -> None:
        """A save is complete; ``step`` (default: now) is the step whose state it holds."""
        self._checkpoints += 1
        self._put(Field.CHECKPOINT_STEP, self.step if step is None else step)
        self._put(Field.CHECKPOINTS, self._checkpoints)
        self.tick()

    @property
    def saves(self) -> int:
        """Checkpoints completed by this rank in its generation."""
        return self._checkpoints

    def lease_is_over(self) -> bool:
        """Whether others may have taken this node's place in the job by now."""
        end_ns: int = self._own[Field.LEASE_END_NS // 8]
        return bool(0 < end_ns < clock_gettime_ns(CLOCK_BOOTTIME))

    def set_held(self, held: bool) -> None:
        """We wait at the beginning of a step, our checkpoint saved, for a restart that is planned."""
        self._put(Field.HELD, int(held))
        self.tick()

    # --- collectives --------------------------------------------------------------------------------

    def begin_world(self) -> None:
        """A default process group is about to be made: records of an older one have no partners any more."""
        self.world_position = ((self.world_position >> _EPOCH_BITS) + 1 & 0xFF) << _EPOCH_BITS
        self._own_u32[POSITION_U32] = self.world_position

    def init_done(self) -> None:
        """``init_process_group`` has returned."""
        self._put(Field.INIT_DONE, 1)
        self.tick()

    def world_seq(self, world_seq: int) -> None:
        """The default group's sequence number, as just read."""
        self._own[_WORLD_SEQ] = world_seq

    def collective_enter(
        self, seq: int, group_key: int, op: int, dtype: int, numel: int, file_key: int, line: int
    ) -> int:
        """Record a collective that is about to be issued and may block; ``seq`` 0: its backend doesn't count.

        Returns its token.
        """
        own = self._own
        token = self._collectives
        now = _now()
        _pack(
            self._bytes, COLLECTIVES_OFFSET + (token & RING_MASK) * _RECORD_BYTES,
            seq, group_key, op, dtype, numel, self.step, line, file_key, _ENTERED, now,
        )  # fmt: skip
        self._collectives = own[_COLLECTIVES] = token + 1
        if not group_key and op not in P2P_OPS:
            u32 = self._own_u32
            u32[PLACE_U32] = token & _U32
            self.world_position = u32[POSITION_U32] = self.world_position + 1
            if seq:
                own[_WORLD_SEQ] = seq - 1
        self._open += 1
        own[_IN_COLLECTIVE] = 1
        self._ticks = own[_TICKS] = self._ticks + 1
        own[_TICK_NS] = now
        return token

    def collective_exit(self, token: int) -> None:
        """The call has returned: the collective is done, or under way if it was asynchronous."""
        own = self._own
        if self._collectives - token <= COLLECTIVE_SLOTS:  # else the slot is a later record's by now
            self._own_u32[_STATE_AT + (token & RING_MASK) * _RECORD_U32S] = _DONE
        self._open = left = self._open - 1
        if left <= 0:
            self._open = own[_IN_COLLECTIVE] = 0
        self._ticks = own[_TICKS] = self._ticks + 1
        own[_TICK_NS] = _now()

    def collective_failed(self) -> None:
        """The call has raised: its record stays open for good, but nobody is inside it any more."""
        self._open = max(self._open - 1, 0)
        if not self._open:
            self._own[_IN_COLLECTIVE] = 0
        self.tick()

    def wait_enter(self, token: int) -> None:
        """About to wait for an asynchronous collective; ``token`` is that of its record."""
        if self._collectives - token <= COLLECTIVE_SLOTS:
            self._own_u32[_STATE_AT + (token & RING_MASK) * _RECORD_U32S] = _ENTERED
        self._open += 1
        self._own[_IN_COLLECTIVE] = 1
        self.tick()

    # --- neighbours ---------------------------------------------------------------------------------

    def record_of(self, local_rank: int, position: int, seq: int) -> Record | None:
        """A neighbour's record at ``position``; None if it isn't there, not any more, or not at ``seq``.

        The order of both ranks' Python calls and torch's own count must agree. Where they don't, something
        that can't be seen from here (calls from C++ between two ranks) has moved one of them, and nothing
        follows from a difference.
        """
        words, u32 = self.all_words, self.all_u32
        ahead = u32[local_rank * PAGE_U32S + POSITION_U32] - position
        if not 0 <= ahead <= _FAR:
            return None
        # Read after the position, which is written after it: at worst it is of a newer record, whose sequence
        # number then tells.
        at = u32[local_rank * PAGE_U32S + PLACE_U32]
        ring = local_rank * PAGE_WORDS + RING_WORD
        for _ in range(_FAR if ahead else 0):
            at -= 1
            kind = words[ring + (at & RING_MASK) * RECORD_WORDS + 1]
            if not kind & _U32 and kind >> 32 & 0xFFFF not in P2P_OPS:
                ahead -= 1
                if not ahead:
                    break
        slot = ring + (at & RING_MASK) * RECORD_WORDS
        if ahead or words[slot] != seq:
            return None
        return words[slot + 1], words[slot + 2], words[slot + 3], words[slot + 4] & _U32

    def step_of(self, local_rank: int) -> int:
        """How many steps a neighbour has completed."""
        steps: int = self.all_words[local_rank * PAGE_WORDS + _STEP]
        return steps

    def is_inside(self, local_rank: int, position: int) -> bool:
        """Whether a neighbour's newest collective on the default group is at ``position``, and still open."""
        u32 = self.all_u32
        if u32[local_rank * PAGE_U32S + POSITION_U32] != position:
            return False
        at = (u32[local_rank * PAGE_U32S + PLACE_U32] & RING_MASK) * _RECORD_U32S
        return bool(u32[local_rank * PAGE_U32S + _STATE_AT + at] == _ENTERED)

    def neighbour_record(self, local_rank: int, seq: int) -> tuple[int, int, int, int, int, int] | None:
        """A neighbour's (op, dtype, numel, step, line, file key) where we are; None: not there yet."""
        found = self.record_of(local_rank, self.world_position, seq)
        if found is None:
            return None
        kind, numel, step_line, file_key = found
        return kind >> 32 & 0xFFFF, kind >> 48, numel, step_line & _U32, step_line >> 32, file_key

    def flag_desync(self, neighbour: int, seq: int) -> None:
        """That neighbour is in another collective than ours at ``seq``; the first finding stays."""
        own = self._own
        if not own[_DESYNC]:
            own[_DESYNC_SEQ] = seq
            own[_DESYNC] = neighbour + 1

    def hold(self, issued: int = 0, usual: int = 0) -> None:
        """We are held after a step with fewer collectives than usual; without arguments: not any more."""
        self._put(Field.SHORT_STEP, (issued & _U32) | (usual & _U32) << 32)

    # --- faults and names ---------------------------------------------------------------------------

    def fault_fired(self, number: int) -> None:
        """Injected fault ``number`` (0 to 63) is about to be carried out."""
        self._own[_FAULT_FIRED] |= 1 << number

    def intern_file(self, path: str) -> int:
        """The key of a source path; 0 once the string table is full."""
        return self._intern(STRING_FILE, path)

    def intern_group(self, name: str, ranks: tuple[int, ...]) -> int:
        """The key of a process group other than the default one; ``ranks`` are global.

        The key holds even where the string table has no room for its text: it tells groups apart.
        """
        text = f"{name}|{','.join(map(str, ranks))}"
        self._intern(STRING_GROUP, text)
        return key_of(text)

    def _intern(self, kind: int, text: str) -> int:
        known = self._interned.get((kind, text))
        if known is not None:
            return known
        encoded = text.encode("utf-8", "replace")
        size = STRING.size + len(encoded)
        with self._lock:
            used = self._strings_used
            fits = len(encoded) < 2**16 and used + size <= STRINGS_BYTES
            key = key_of(text) if fits else 0
            if fits:
                at = STRINGS_OFFSET + used
                STRING.pack_into(self._bytes, at, key, kind, len(encoded))
                self._bytes[at + STRING.size : at + size] = encoded
                self._strings_used = used + size
                self._put(Field.STRINGS_BYTES, used + size)
            if len(self._interned) < 4096:
                self._interned[kind, text] = key
        return key
