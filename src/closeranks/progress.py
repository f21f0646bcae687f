"""The progress page: what a rank is doing, in shared memory, written in under a microsecond a time.

The agent creates one memfd for all its ranks, ``PAGE_BYTES`` per local rank; every worker maps all of it,
writes its own page alone, and may read its neighbours' to see a collective mismatch before it happens. The
pages outlive the workers, so what a killed rank was doing is still there to read.

Layout of one page, little-endian, each field written by one ``struct.pack_into`` (an aligned 8-byte store
is atomic on the machines we run on; a reader tolerates a record that is half new):

    0     header          HEADER (below), 256 bytes
    256   step ring       STEP_SLOTS x STEP (step, world_seq, mono_ns)
    2048  collective ring COLLECTIVE_SLOTS x COLLECTIVE
    8192  string table    records of STRING (key, kind, length) + UTF-8 bytes, ``strings_bytes`` used

Times are CLOCK_MONOTONIC nanoseconds: they don't jump with the wall clock, and don't count a suspend.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from enum import IntEnum

__all__ = [
    "COLLECTIVE",
    "COLLECTIVES_OFFSET",
    "COLLECTIVE_SLOTS",
    "Collective",
    "DTYPES",
    "Field",
    "OPS",
    "PAGE_BYTES",
    "Page",
    "Phase",
    "SETUP_COLLECTIVES",
    "STEP",
    "STEPS_OFFSET",
    "STEP_SLOTS",
    "STRING",
    "STRINGS_BYTES",
    "STRINGS_OFFSET",
    "STRING_FILE",
    "STRING_GROUP",
    "Step",
    "WORLD_GROUP",
    "key_of",
    "read_page",
]

PAGE_BYTES = 16384
MAGIC = 0x47505243  # "CRPG"
VERSION = 1


class Field(IntEnum):
    """Byte offsets of the header's fields; all are u64 unless said."""

    MAGIC_VERSION = 0  # MAGIC | VERSION << 32
    RANK = 8
    GENERATION = 16
    PID = 24
    TICKS = 32  # grows by one at every sign of life
    TICK_NS = 40  # when
    STEP = 48  # optimizer steps completed in this generation
    STEP_NS = 56
    PHASE = 64  # Phase
    PHASE_NS = 72
    IN_COLLECTIVE = 80  # 0, or 1 while a Python-visible collective is open
    WORLD_SEQ = 88  # the default group's sequence number when last read
    COLLECTIVES = 96  # collectives ever recorded (ring head)
    STEPS = 104  # step records ever written (ring head)
    STRINGS_BYTES = 112
    CHECKPOINTS = 120  # checkpoint saves completed
    CHECKPOINT_STEP = 128  # STEP at the last completed save
    ABSOLUTE_STEP = 136  # step + 1 as the script itself counts (closeranks.step(n)), 0 = never told
    FAULT_FIRED = 144  # bit i: injected fault i has been carried out
    DESYNC = 152  # 0, or 1 + the neighbour whose record differs
    DESYNC_SEQ = 160
    INIT_DONE = 168  # 1 after init_process_group returned
    # The default group's newest collective, for its neighbours to find. u32: times the group was made << 24,
    # plus collectives on it since; u32, written before it: that collective's place in the ring, counted on.
    WORLD_POSITION = 176
    WORLD_PLACE = 180
    # While a rank is held after a step in which it issued fewer collectives than in all before: how many it
    # issued | how many it usually does << 32. 0: it isn't held.
    SHORT_STEP = 184
    USER_PHASE = 192  # 32 bytes, UTF-8, zero-padded: closeranks.phase("...")
    HELD = 224  # 1 while the rank waits, its checkpoint saved, for the restart that it was told of
    # Until when this node may act for the job, on CLOCK_BOOTTIME (ns), written by the agent; 0: there is no
    # lease, as the job is on this machine alone.
    LEASE_END_NS = 232


HEADER_BYTES = 256
STEPS_OFFSET = 256
STEP = struct.Struct("<QQQ")  # step, world_seq, mono_ns
STEP_SLOTS = 64
COLLECTIVES_OFFSET = 2048
# seq in its group, group key, op, dtype, numel, step, line, file key, state (1 entered, 2 done), mono_ns
COLLECTIVE = struct.Struct("<QIHHQIIIIQ")
COLLECTIVE_SLOTS = 128
STRINGS_OFFSET = 8192
STRINGS_BYTES = PAGE_BYTES - STRINGS_OFFSET
STRING = struct.Struct("<IHH")  # key, kind, length
STRING_FILE = 1  # text: a source path
STRING_GROUP = 2  # text: "name|0,1,2": group name and its global ranks
SETUP_COLLECTIVES = 8
WORLD_GROUP = 0  # the group key of the default process group

assert STEPS_OFFSET + STEP.size * STEP_SLOTS <= COLLECTIVES_OFFSET
assert COLLECTIVES_OFFSET + COLLECTIVE.size * COLLECTIVE_SLOTS <= STRINGS_OFFSET
assert COLLECTIVE.size == 48


class Phase(IntEnum):
    """What the rank is in. Thresholds are learned per phase, so that a save is not measured as a step."""

    WAITING = 0  # a spare: no script yet
    START = 1  # script started, no process group yet: imports, model building
    INIT = 2  # inside init_process_group
    TRAIN = 3
    DATA = 4  # waiting for the DataLoader
    BACKWARD = 5
    OPTIMIZER = 6
    CHECKPOINT = 7  # saving or loading
    USER = 8  # named by closeranks.phase()
    EXIT = 9  # the script is over; interpreter shutdown


OPS = (
    "unknown", "all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "barrier", "send", "recv", "all_gather_into_tensor", "reduce_scatter_tensor",
    "all_to_all_single", "all_reduce_coalesced", "all_gather_coalesced", "broadcast_object_list",
    "all_gather_object", "gather_object", "scatter_object_list", "monitored_barrier", "batch_isend_irecv",
    "isend", "irecv",
)  # fmt: skip
DTYPES = (
    "none", "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "other",
)  # fmt: skip


def key_of(text: str) -> int:
    """The 32-bit key of a string-table entry (CRC-32; never 0, which is WORLD_GROUP and "no file")."""
    return zlib.crc32(text.encode("utf-8", "replace")) or 1


@dataclass(frozen=True, slots=True)
class Step:
    """One completed step: its number in this generation, the default group's sequence then, and when."""

    step: int
    world_seq: int
    mono_ns: int


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as its rank issued it; ``seq`` counts within ``group`` (WORLD_GROUP = default)."""

    seq: int
    group: int
    op: str
    dtype: str
    numel: int
    step: int
    line: int
    file: str
    done: bool
    mono_ns: int

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "an unknown line"


@dataclass(frozen=True, slots=True)
class Page:
    """A progress page, decoded."""

    rank: int
    generation: int
    pid: int
    ticks: int
    tick_ns: int
    step: int
    step_ns: int
    phase: Phase
    phase_ns: int
    in_collective: bool
    world_seq: int
    checkpoints: int
    checkpoint_step: int
    absolute_step: int | None
    faults_fired: int
    desync_rank: int | None
    desync_seq: int
    init_done: bool
    user_phase: str
    steps: tuple[Step, ...] = ()
    collectives: tuple[Collective, ...] = ()
    groups: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    rings: bool = False  # steps, collectives and groups were read; empty then means that there are none
    held: bool = False
    short_step: tuple[int, int] | None = None  # held: collectives issued in its last step, and usually

    @property
    def phase_name(self) -> str:
        return self.user_phase if self.phase is Phase.USER and self.user_phase else self.phase.name.lower()

    @property
    def progress_steps(self) -> int:
        """Steps for judging progress: the optimizer's, or of a script without one, its collectives.

        The first ``SETUP_COLLECTIVES`` on the default group belong to set-up (DDP's checks and broadcasts).
        """
        return self.step if self.step else max(0, self.world_seq - SETUP_COLLECTIVES)

    def last(self, group: int | None = None) -> Collective | None:
        """The newest collective (of one group, or of any)."""
        for record in reversed(self.collectives):
            if group is None or record.group == group:
                return record
        return None


def _u64(view: memoryview, offset: int) -> int:
    return int.from_bytes(view[offset : offset + 8], "little")


def _strings(view: memoryview, used: int) -> dict[tuple[int, int], str]:
    table: dict[tuple[int, int], str] = {}
    at, end = STRINGS_OFFSET, STRINGS_OFFSET + min(used, STRINGS_BYTES)
    while at + STRING.size <= end:
        key, kind, length = STRING.unpack_from(view, at)
        at += STRING.size
        if at + length > end:
            break
        table[kind, key] = bytes(view[at : at + length]).decode("utf-8", "replace")
        at += length
    return table


def _parse_group(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, members = text.rpartition("|")
    return name, tuple(int(m) for m in members.split(",") if m.isdigit())


def read_page(view: memoryview, *, rings: bool = True) -> Page | None:
    """Decode one page of ``PAGE_BYTES`` bytes; None where no worker has written one yet.

    ``rings=False`` leaves steps, collectives and groups empty: a cheap look at the header.
    Garbage (a script that scribbles over the mapping) yields odd values, never an exception.
    """
    if _u64(view, Field.MAGIC_VERSION) != MAGIC | VERSION << 32:
        return None
    steps: list[Step] = []
    collectives: list[Collective] = []
    groups: dict[int, tuple[str, tuple[int, ...]]] = {}
    if rings:
        head = _u64(view, Field.STEPS)
        for i in range(max(0, head - STEP_SLOTS), head):
            steps.append(Step(*STEP.unpack_from(view, STEPS_OFFSET + i % STEP_SLOTS * STEP.size)))
        table = _strings(view, _u64(view, Field.STRINGS_BYTES))
        groups = {key: _parse_group(text) for (kind, key), text in table.items() if kind == STRING_GROUP}
        head = _u64(view, Field.COLLECTIVES)
        for i in range(max(0, head - COLLECTIVE_SLOTS), head):
            at = COLLECTIVES_OFFSET + i % COLLECTIVE_SLOTS * COLLECTIVE.size
            seq, group, op, dtype, numel, step, line, file_key, state, mono_ns = COLLECTIVE.unpack_from(
                view, at
            )
            collectives.append(
                Collective(
                    seq=seq, group=group, op=OPS[op] if op < len(OPS) else OPS[0],
                    dtype=DTYPES[dtype] if dtype < len(DTYPES) else "other", numel=numel, step=step,
                    line=line,
                    file=table.get((STRING_FILE, file_key), ""), done=state == 2, mono_ns=mono_ns,
                )
            )  # fmt: skip
    phase = _u64(view, Field.PHASE)
    absolute = _u64(view, Field.ABSOLUTE_STEP)
    desync = _u64(view, Field.DESYNC)
    short = _u64(view, Field.SHORT_STEP)
    user = bytes(view[Field.USER_PHASE : Field.USER_PHASE + 32]).rstrip(b"\0").decode("utf-8", "replace")
    return Page(
        rank=_u64(view, Field.RANK),
        generation=_u64(view, Field.GENERATION),
        pid=_u64(view, Field.PID),
        ticks=_u64(view, Field.TICKS),
        tick_ns=_u64(view, Field.TICK_NS),
        step=_u64(view, Field.STEP),
        step_ns=_u64(view, Field.STEP_NS),
        phase=Phase(phase) if phase <= max(Phase) else Phase.TRAIN,
        phase_ns=_u64(view, Field.PHASE_NS),
        in_collective=bool(_u64(view, Field.IN_COLLECTIVE)),
        world_seq=_u64(view, Field.WORLD_SEQ),
        checkpoints=_u64(view, Field.CHECKPOINTS),
        checkpoint_step=_u64(view, Field.CHECKPOINT_STEP),
        absolute_step=absolute - 1 if absolute else None,
        faults_fired=_u64(view, Field.FAULT_FIRED),
        desync_rank=desync - 1 if desync else None,
        desync_seq=_u64(view, Field.DESYNC_SEQ),
        init_done=bool(_u64(view, Field.INIT_DONE)),
        user_phase=user,
        steps=tuple(steps),
        collectives=tuple(collectives),
        groups=groups,
        rings=rings,
        held=bool(_u64(view, Field.HELD)),
        short_step=(short & 0xFFFFFFFF, short >> 32) if short else None,
    )
