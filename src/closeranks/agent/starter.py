"""Starting a generation: spares become ranks, each with its order, its pipes and a store of its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from closeranks.agent import env
from closeranks.agent.world import Placement, Rank, World

if TYPE_CHECKING:
    from closeranks.agent.supervisor import Supervisor

__all__ = ["Starter"]

_DEAD_TIMEOUT_S = 5.0


class Starter:
    """Makes worlds, and clears away what they leave."""

    def __init__(self, owner: Supervisor, store_dir: Path) -> None:
        self._owner = owner
        self._store_dir = store_dir
        entry = owner.config.entrypoint
        self._entry = {"kind": entry.kind, "target": entry.target, "args": list(entry.args)}
        if entry.kind == "script":
            self._entry["path"] = os.path.abspath(entry.target)  # noqa: PTH100 - keeps symlinks

    async def start(self, generation: int, delay_s: float, placement: Placement) -> World | None:
        """Start every rank under this generation; None if the job was told to stop meanwhile.

        Raises ZygoteError when no workers can be made.
        """
        owner = self._owner
        if owner.is_unwanted(generation):
            return None
        note = {"delay_s": delay_s, "spare": owner.slots.ready}
        owner.controller.note("generation_starting", note, generation=generation)
        spares = await owner.slots.take()
        world = World(generation, spares, owner, placement)
        if owner.is_unwanted(generation):
            world.kill()
            await world.wait_dead(_DEAD_TIMEOUT_S)
            world.close()
            return None
        self.discard_world()
        owner.world = world
        owner.prepare_world(world)
        port = owner.config.master_port or env.free_port()
        (self._store_dir / f"g{generation}").mkdir(parents=True, exist_ok=True)
        for rank in world.ranks:
            self._go(world, rank, port)
        pids = [rank.pid for rank in world.ranks]
        owner.controller.note("generation_started", {"pids": pids}, generation=generation)
        return world

    def _go(self, world: World, rank: Rank, port: int) -> None:
        owner = self._owner
        out = owner.log_path(world.generation, rank.rank, "out")
        err = owner.log_path(world.generation, rank.rank, "err")
        with contextlib.suppress(OSError):  # a rank may write its error file there before it prints anything
            out.parent.mkdir(parents=True, exist_ok=True)
        stdout_fd, stderr_fd = owner.pump.attach(
            world.generation, rank.rank, rank.local_rank, out, err, world_size=world.placement.world_size
        )
        try:
            world.go(rank, self._order(world, rank, port, out.parent), stdout_fd, stderr_fd)
        except ConnectionError:
            pass  # the spare died since it said hello: its pidfd tells, and the incident takes its course
        finally:
            os.close(stdout_fd)
            os.close(stderr_fd)

    def _order(self, world: World, rank: Rank, port: int, logs: Path) -> dict[str, Any]:
        owner, config, placement = self._owner, self._owner.config, world.placement
        variables = env.rank_environment(
            config,
            rank=rank.rank,
            world_size=placement.world_size,
            local_rank=rank.local_rank,
            local_world_size=len(world.ranks),
            node_rank=placement.node_rank,
            node_count=placement.node_count,
            generation=world.generation,
            master_port=port,
            run_id=config.run_id,
            run_dir=str(owner.run_dir),
            error_file=str(logs / f"{rank.rank}.error.json"),
        )
        return {
            "generation": world.generation,
            "rank": rank.rank,
            "local_rank": rank.local_rank,
            "local_world_size": len(world.ranks),
            "entry": self._entry,
            "env": variables,
            "store": placement.store or str(self._store_dir / f"g{world.generation}" / "store"),
            "faults": owner.faults.orders(world.generation, rank.rank),
            "numa_binding": config.numa_binding,
            "file_limit": owner.file_limit,
        }

    def discard_world(self) -> None:
        """Let go of the last world, and remove its store."""
        owner = self._owner
        if owner.world is None:
            return
        world, owner.world = owner.world, None
        owner.incidents.forget_world()
        directory = self._store_dir / f"g{world.generation}"
        with contextlib.suppress(OSError):
            for path in directory.iterdir():
                path.unlink()
            directory.rmdir()
        owner.pump.forget(world.generation)
        world.close()
