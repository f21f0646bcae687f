"""One incident, indexed: pages of this generation, rings by group and sequence, members of groups."""

from __future__ import annotations

from dataclasses import replace

from closeranks.diagnose.stacks import is_raising
from closeranks.diagnose.text import clean, join_ranks
from closeranks.evidence import Evidence, RankEvidence
from closeranks.progress import COLLECTIVE_SLOTS, STEP_SLOTS, WORLD_GROUP, Collective, Page

__all__ = ["P2P_OPS", "View"]

# They move a group's sequence number on some back ends and not on others, and differ on both ends by design.
P2P_OPS = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
_WORLD_NAMES = frozenset({"", "0", "default", "default_pg", "world"})


def _bounded(page: Page) -> Page:
    """No longer rings than a real page has: the evidence may have been read from anybody's file."""
    if len(page.collectives) <= COLLECTIVE_SLOTS and len(page.steps) <= STEP_SLOTS:
        return page
    return replace(page, collectives=page.collectives[-COLLECTIVE_SLOTS:], steps=page.steps[-STEP_SLOTS:])


class View:
    """Read-only indexes over an ``Evidence``; tolerant of pages that hold nonsense."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.ranks: dict[int, RankEvidence] = {}
        for entry in evidence.ranks:
            self.ranks.setdefault(entry.rank, entry)
        self.order = tuple(sorted(self.ranks))
        # A page of another generation is what its slot's previous tenant left behind.
        self.pages: dict[int, Page] = {
            rank: _bounded(entry.page)
            for rank, entry in self.ranks.items()
            if entry.page is not None and entry.page.generation == evidence.generation
        }
        self.rings: dict[int, dict[int, dict[int, Collective]]] = {
            r: self._by_group(p) for r, p in self.pages.items()
        }
        self._names: dict[int, str] = {}
        self._members: dict[int, tuple[int, ...]] = {WORLD_GROUP: self.order}
        for page in self.pages.values():
            for key, (name, members) in page.groups.items():
                self._names.setdefault(key, name)
                if key != WORLD_GROUP:
                    self._members.setdefault(key, tuple(m for m in members if m in self.ranks))
        self._shifts: dict[int, int] = {}
        self._keys = {name: key for key, name in self._names.items()}
        self.enqueued: dict[int, dict[int, tuple[int, int, str]]] = {
            rank: self._counters(entry) for rank, entry in self.ranks.items() if entry.groups
        }

    @staticmethod
    def _by_group(page: Page) -> dict[int, dict[int, Collective]]:
        groups: dict[int, dict[int, Collective]] = {}
        for record in page.collectives:
            if record.op not in P2P_OPS:
                groups.setdefault(record.group, {}).setdefault(record.seq, record)
        if len(page.collectives) >= COLLECTIVE_SLOTS:
            # The oldest sequence number may have lost a part of itself to the ring's wrap.
            first = page.collectives[0]
            ring = groups.get(first.group, {})
            if len(ring) > 1 and ring.get(first.seq) is first:
                del ring[first.seq]
        return groups

    def _counters(self, entry: RankEvidence) -> dict[int, tuple[int, int, str]]:
        counters: dict[int, tuple[int, int, str]] = {}
        for status in entry.groups:
            key = self.key_of_name(status.group)
            if key is not None:
                counters[key] = (status.last_enqueued, status.last_completed, status.pending_op)
        return counters

    def key_of_name(self, name: str) -> int | None:
        """The ring's key of a group that the flight recorder names; None if no page knows it."""
        if name in self._keys:
            return self._keys[name]
        return WORLD_GROUP if name in _WORLD_NAMES else None

    def members(self, group: int) -> tuple[int, ...]:
        return self._members.get(group, ())

    def groups(self) -> tuple[int, ...]:
        """Every group that some ring has a collective of, the default group first."""
        return tuple(sorted({group for rings in self.rings.values() for group in rings}))

    def group_label(self, group: int) -> str:
        """``the default group`` or ``group 'dp' (ranks 0,2)``."""
        if group == WORLD_GROUP:
            return "the default group"
        name = clean(self._names.get(group, "") or f"{group:08x}", 40)
        members = self.members(group)
        return f"group '{name}'" + (f" (ranks {join_ranks(members)})" if members else "")

    def open_record(self, rank: int) -> Collective | None:
        """The collective that the rank is inside of, as its own hooks saw it.

        A call that raised leaves its record open for good, but the rank is no longer inside it: that one
        counts only for a rank whose script the error has ended or is just ending, as the last thing it did.
        """
        page = self.pages.get(rank)
        if page is None or not page.collectives:
            return None
        if page.in_collective:
            return next((r for r in reversed(page.collectives) if not r.done), None)
        last, entry = page.collectives[-1], self.ranks[rank]
        return last if not last.done and (entry.error is not None or is_raising(entry.stack)) else None

    def seen_up_to(self, rank: int, group: int) -> int:
        """The highest sequence number that the rank is known to have issued in the group; -1 for none."""
        ring = self.rings.get(rank, {}).get(group)
        highest = max(ring) if ring else -1
        page = self.pages.get(rank)
        if group == WORLD_GROUP and page is not None:
            highest = max(highest, page.world_seq if page.world_seq or ring else -1)
        return highest

    def shift(self, group: int) -> int:
        """What to take from the flight recorder's numbers in this group to get the hooks' numbers.

        Both count the group's collectives, but not necessarily from the same one: where a rank stands
        inside a visible collective, the two can be laid side by side.
        """
        if group not in self._shifts:
            shifts = [
                counters[group][0] - record.seq
                for rank, counters in self.enqueued.items()
                if group in counters
                and (record := self.open_record(rank)) is not None
                and record.group == group
            ]
            self._shifts[group] = min(shifts, default=0)
        return self._shifts[group]

    def passed(self, rank: int, group: int) -> int:
        """``seen_up_to``, and beyond it what the flight recorder counted of collectives issued from C++."""
        seen = self.seen_up_to(rank, group)
        counters = self.enqueued.get(rank, {}).get(group)
        record = self.open_record(rank)
        if counters is None or (record is not None and record.group == group):
            return seen
        return max(seen, counters[0] - self.shift(group))
