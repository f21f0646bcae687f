"""What the collective hooks need to know about process groups, call sites and tensors."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from closeranks.progress import DTYPES, WORLD_GROUP
from closeranks.worker.hooks_check import NeighbourCheck, Site
from closeranks.worker.hooks_state import STATE
from closeranks.worker.page import PageWriter

__all__ = ["DTYPE_INDEX", "GroupState", "Groups", "Sites", "describe"]

_MAX_GROUPS = 4096
_MAX_CODES = 8192
_MAX_PLACES = 4096
_MAX_DEPTH = 64
_MAX_LIST = 64  # tensors of a list that are counted

DTYPE_INDEX = {getattr(torch, name): index for index, name in enumerate(DTYPES) if hasattr(torch, name)}
_OTHER = DTYPES.index("other")
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter


def describe(tensor: Any) -> tuple[int, int]:
    """(dtype, numel) of a collective's argument as the page has them; (0, 0) where it can't be asked cheaply.

    A subclass may be symbolic, or run code of its own when asked: only plain tensors are.
    """
    kind = type(tensor)
    if kind is _Tensor or kind is _Parameter:
        return DTYPE_INDEX.get(tensor.dtype, _OTHER), tensor.numel()
    if kind is list or kind is tuple:
        dtype = numel = 0
        for item in tensor[:_MAX_LIST]:
            if type(item) is _Tensor or type(item) is _Parameter:
                dtype = DTYPE_INDEX.get(item.dtype, _OTHER)
                numel += item.numel()
        return dtype, numel
    return 0, 0


class GroupState:
    """One process group: its key in the page, and how its sequence number is read.

    gloo counts calls between two ranks as well, and some collectives several times on one rank alone;
    ``offset`` takes that out again, so that the number is the same on all ranks.
    """

    __slots__ = ("check", "group", "is_world", "key", "offset")

    def __init__(self, group: Any, key: int) -> None:
        self.group = weakref.ref(group)  # a group kept alive would outlive destroy_process_group
        self.key = key
        self.is_world = key == WORLD_GROUP
        self.offset = 0
        self.check: NeighbourCheck | None = None

    def issued(self) -> int:
        """How many collectives the group has issued, from Python and C++: equal on ranks equally far.

        Raises RuntimeError where the backend doesn't count, AttributeError once the group is gone.
        """
        group: Any = self.group()
        count: int = group._get_sequence_number_for_group()
        return count - self.offset


class Groups:
    """The groups that this process has issued collectives on."""

    def __init__(self, writer: PageWriter, sites: Sites) -> None:
        self._writer = writer
        self._sites = sites
        self._world: GroupState | None = None
        self.world_check: NeighbourCheck | None = None
        self._others: dict[int, GroupState] = {}
        self._coalescing = c10d._world.pg_coalesce_state

    def get(self, group: Any) -> GroupState | None:
        """The state of a collective's ``group`` argument; None where nothing will be issued on it."""
        if self._coalescing:
            return None  # only collected now; issued as one from C++ later
        default = c10d._world.default_pg
        if group is None or group is default:
            state = self._world
            if state is None or state.group() is not default:
                if default is None:
                    return None  # not initialised: torch will say so
                state = self._world = self._make_world(default)
            return state if default is not None else None
        state = self._others.get(id(group))
        if state is None or state.group() is not group:
            if not isinstance(group, dist.ProcessGroup):
                return None  # we aren't a member
            state = self._make_other(group)
        return state

    def world_seq(self) -> int:
        """How many collectives the default group has issued, from Python and C++; 0 without one."""
        default: Any = c10d._world.default_pg
        if default is None:
            return 0
        state = self._world
        if state is None or state.group() is not default:
            state = self._world = self._make_world(default)
        try:
            count: int = default._get_sequence_number_for_group() - state.offset
        except RuntimeError:
            return 0
        return count if count > 0 else 0

    def _make_world(self, group: Any) -> GroupState:
        state = GroupState(group, WORLD_GROUP)
        writer = self._writer
        if not STATE.world_begun:  # its making was hidden from us
            writer.begin_world()
        STATE.world_begun = False
        size = writer.local_world_size
        whole = size > 1 and group.size() == size and group.rank() == writer.rank == writer.local_rank
        if whole and _one_backend(group):
            state.check = NeighbourCheck(writer, STATE.control, self._sites.places)
        self.world_check = state.check
        return state

    def _make_other(self, group: Any) -> GroupState:
        if len(self._others) >= _MAX_GROUPS:
            self._others = {key: state for key, state in self._others.items() if state.group() is not None}
        state = GroupState(group, self.register(group))
        if len(self._others) < _MAX_GROUPS:
            self._others[id(group)] = state
        return state

    def register(self, group: Any) -> int:
        """Put a group's name and members into the page; returns its key."""
        ranks: tuple[int, ...] = ()
        with contextlib.suppress(ValueError, RuntimeError, KeyError):
            ranks = tuple(dist.get_process_group_ranks(group))
        return self._writer.intern_group(str(group.group_name), ranks)


def _one_backend(group: Any) -> bool:
    """Whether one counter counts all collectives: with gloo for the CPU and NCCL for the GPU, two do."""
    try:
        config = dist.get_backend_config(group)
    except (ValueError, RuntimeError, AttributeError):
        return False
    return len({part.rpartition(":")[2] for part in config.split(",")}) == 1


class _Code:
    __slots__ = ("code", "file_key", "sites")

    def __init__(self, code: CodeType, file_key: int, sites: dict[int, Site] | None) -> None:
        self.code = code  # held, so that its id can't become another's
        self.file_key = file_key
        self.sites = sites  # by bytecode offset, which is cheaper than a line number; None: not the script's


class Sites:
    """Finds the script's line that is about to issue a collective: the innermost outside torch and us."""

    def __init__(self, writer: PageWriter) -> None:
        self._writer = writer
        self.places: dict[tuple[int, int], Site] = {}
        self._codes: dict[int, _Code] = {}
        self._nowhere = Site(0, 0)
        self._skipped = (
            str(Path(torch.__file__).parent) + "/",
            str(Path(__file__).parents[1]) + "/",
            contextlib.__file__,
            "<frozen ",
        )

    def find(self, frame: FrameType) -> Site:
        """The site from which ``frame`` was reached, or at which it is."""
        known = self._codes.get(id(frame.f_code))
        if known is not None and known.sites is not None:
            site = known.sites.get(frame.f_lasti)
            if site is not None:
                return site
        return self._find(frame)

    def _find(self, frame: FrameType | None) -> Site:
        for _ in range(_MAX_DEPTH):
            if frame is None:
                break
            known = self._codes.get(id(frame.f_code))
            if known is None:
                known = self._learn(frame.f_code)
            sites = known.sites
            if sites is not None:
                site = sites.get(frame.f_lasti)
                if site is None:
                    site = sites[frame.f_lasti] = self._at(known.file_key, frame.f_lineno or 0)
                return site
            frame = frame.f_back
        return self._nowhere

    def _at(self, file_key: int, line: int) -> Site:
        """The site of that line: several calls on one line share it."""
        site = self.places.get((file_key, line))
        if site is None:
            if len(self.places) >= _MAX_PLACES:
                self.places.clear()
            site = self.places[file_key, line] = Site(file_key, line)
        return site

    def _learn(self, code: CodeType) -> _Code:
        if len(self._codes) >= _MAX_CODES:
            self._codes.clear()
        own = not code.co_filename.startswith(self._skipped)
        key = self._writer.intern_file(code.co_filename) if own else 0
        known = self._codes[id(code)] = _Code(code, key, {} if own else None)
        return known
