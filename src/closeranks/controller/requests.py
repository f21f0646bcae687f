"""What people ask of a running job over many nodes: its state, a drain, a fault on purpose."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from closeranks.cluster_events import DrainRequested
from closeranks.errors import UsageError
from closeranks.faults import format_spec, parse_spec
from closeranks.policy.cluster_state import Link, Stage

if TYPE_CHECKING:
    from closeranks.controller.service import ClusterService

__all__ = ["Requests"]

_INJECT_S = 5.0


class Requests:
    """Answers them for one controller."""

    def __init__(self, owner: ClusterService) -> None:
        self._owner = owner
        self._asked: dict[str, asyncio.Future[dict[str, Any]]] = {}

    def injected(self, request: str, reply: Mapping[str, Any]) -> None:
        """A node says what came of a fault."""
        asked = self._asked.pop(request, None)
        if asked is not None and not asked.done():
            asked.set_result(dict(reply))

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A request on the control socket."""
        kind = request.get("type")
        if kind == "status":
            return {"ok": True, **self.status()}
        if kind == "drain":
            reply = self._drain(request)
            if self._owner.job.shared is not None:
                await self._owner.job.shared.settled()
            return reply
        if kind == "inject":
            return await self._inject(str(request.get("spec", "")))
        return {"ok": False, "error": f"unknown request {kind!r}"}

    def status(self) -> dict[str, Any]:
        state, world = self._owner.job.state, self._owner.job.state.world
        members = world.members if world is not None and world.stage is not Stage.ENDED else {}
        return {
            "generation": world.generation if world is not None else None,
            "stage": world.stage.value if world is not None else "forming",
            "world_size": sum(member.ranks for member in members.values()),
            "step": self._owner.board.step,
            "incidents": self._owner.casebook.count,
            "nodes": [
                {
                    "node": node.name,
                    "link": node.link.value,
                    "standing": node.standing.value,
                    "reason": node.drain_reason or node.standing_reason,
                    "draining": node.drain_due_s is not None,
                    "ready": node.ready,
                    "session": node.session,
                    "address": node.address,
                    "ranks": [members[node.name].first_rank, members[node.name].ranks]
                    if node.name in members
                    else None,
                }
                for node in state.nodes.values()
            ],
        }

    def _drain(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name, state = str(request.get("node", "")), self._owner.job.state
        if name not in state.nodes:
            known = ", ".join(sorted(state.nodes)[:20]) or "none yet"
            return {"ok": False, "error": f"this job has no node {name!r}; its nodes are {known}"}
        deadline_s = request.get("deadline_s")
        if not isinstance(deadline_s, int | float):
            deadline_s = state.config.drain_deadline_s
        self._owner.dispatch(
            DrainRequested(name, float(deadline_s), str(request.get("reason") or "asked for"))
        )
        world = state.world
        seated = world.members if world is not None else {}
        spares = sum(
            node.link is Link.ATTACHED and node.drain_due_s is None and node.name not in seated
            for node in self._owner.job.state.nodes.values()
        )
        return {
            "ok": True, "node": name, "deadline_s": deadline_s, "spares": spares, "seated": name in seated,
        }  # fmt: skip

    async def _inject(self, text: str) -> dict[str, Any]:
        try:
            spec = parse_spec(text)
        except UsageError as error:
            return {"ok": False, "error": str(error)}
        world = self._owner.job.state.world
        if world is None or world.stage is not Stage.RUNNING:
            return {"ok": False, "error": "no rank runs at the moment; try again once the job has started"}
        size = sum(member.ranks for member in world.members.values())
        number = spec.rank if spec.rank is not None else random.randrange(size)
        member = next(
            (m for m in world.members.values() if m.first_rank <= number < m.first_rank + m.ranks), None
        )
        if member is None:
            return {"ok": False, "error": f"there is no rank {number}: ranks are 0 to {size - 1}"}
        request = secrets.token_hex(8)
        asked: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[request] = asked
        order = {"type": "inject", "id": request, "spec": format_spec(replace(spec, rank=number))}
        if not self._owner.sessions.send(member.node, order):
            self._asked.pop(request)
            return {"ok": False, "error": f"node {member.node} can't be reached at the moment"}
        try:
            return await asyncio.wait_for(asked, _INJECT_S)
        except TimeoutError:
            return {"ok": False, "error": f"node {member.node} did not answer"}
        finally:
            self._asked.pop(request, None)
