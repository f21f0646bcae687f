"""Writes journals by hand, with times in seconds since the start, through the real Journal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from closeranks.controller.journal import Journal, Record, read
from closeranks.goodput.fold import RunSummary, fold

WALL_S = 1_796_041_615  # 2026-11-30 12:26:55 UTC
MONO_S = 5_000


@dataclass
class Timeline:
    path: Path
    wall_s: int = WALL_S
    mono_s: int = MONO_S
    records: list[tuple[str, dict[str, Any], float]] = field(default_factory=list)

    def __call__(self, t_s: float, kind: str, **data: Any) -> Timeline:
        self.records.append((kind, data, t_s))
        return self

    def mono_ns(self, t_s: float) -> int:
        return self.mono_s * 10**9 + round(t_s * 1e9)

    def wall_ns(self, t_s: float) -> int:
        return self.wall_s * 10**9 + round(t_s * 1e9)

    def start(self, t_s: float = 0.0, **data: Any) -> Timeline:
        shape = {"argv": ["train.py", "--epochs", "3"], "entrypoint": "train.py", "world_size": 4}
        return self(t_s, "run_started", **shape, node="node7", version="0.1.0", pid=77, config={}, **data)

    def generation(self, n: int, starting: float, started: float, init: float, first: float) -> Timeline:
        self(starting, "generation_starting", generation=n, delay_s=0.0, spare=n > 0)
        self(started, "generation_started", generation=n, pids=[1, 2, 3, 4])
        self(init, "init_done", generation=n)
        return self(first, "first_step", generation=n)

    def progress(
        self, t_s: float, n: int, step: int, *, saved: int | None = None, absolute: int | None = None
    ) -> Timeline:
        return self(
            t_s,
            "progress",
            generation=n,
            step=step,
            absolute_step=absolute,
            checkpoints=0 if saved is None else 1 + saved,
            checkpoint_step=saved or 0,
        )

    def incident(
        self,
        n: int,
        *,
        broke: float,
        detected: float,
        verdict: float,
        killed: float,
        kill_s: float,
        rank: int = 2,
    ) -> Timeline:
        name = f"i{n}"
        trigger = {"kind": "exit", "ranks": [rank], "detail": f"rank {rank} was killed by SIGKILL"}
        self(
            detected,
            "detected",
            generation=n,
            incident_id=name,
            trigger=trigger,
            broke_mono_ns=self.mono_ns(broke),
            last_progress_mono_ns=self.mono_ns(broke - 0.5),
        )
        self(verdict, "evidence", incident_id=name, seconds=verdict - detected)
        found = {
            "leaf": "app.host_oom",
            "kind": "rank_exit",
            "culprits": [{"scope": "rank", "rank": rank}],
            "summary": f"rank {rank} was killed by SIGKILL from outside",
            "action": "restart",
            "confidence": 0.9,
        }
        self(verdict, "verdict", incident_id=name, verdict=found)
        return self(killed, "killed", generation=n, seconds=kill_s, leftovers=[])

    def write(self) -> Iterator[Record]:
        with Journal.create(self.path) as journal:
            for kind, data, t_s in self.records:
                wall_ns, mono_ns = self.wall_ns(t_s), self.mono_ns(t_s)
                journal.append(
                    kind, data, wall_ns=wall_ns, mono_ns=mono_ns, generation=data.get("generation")
                )
            assert journal.problem is None
        return read(self.path)

    def fold(self, *, live: bool = False) -> RunSummary:
        return fold(self.write(), job="20261130-122655-train-a1b2", live=live)
