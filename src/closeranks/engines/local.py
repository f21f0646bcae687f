"""All nodes on one host: each agent is a process here, or on another host through a command of the user's.

For trying things out and for tests; and, with ``hosts`` and ``prefix``, for any few machines that can be
reached by a command such as ssh. Options:

    hosts=a,b,c     the nodes' names (default: node0, node1, ..., as many as are wanted)
    prefix=COMMAND  put before the agent's command, with {node} for the node's name: "ssh {node}", say
    listen=ADDRESS  the controller's address, where the nodes are elsewhere; TLS is used then
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
from collections import deque
from collections.abc import AsyncIterator

from closeranks.cluster_events import NodeGone
from closeranks.engines.base import EngineFact, JobSpec, Join, agent_command
from closeranks.errors import UsageError

__all__ = ["LocalEngine"]

_OPTIONS = ("hosts", "prefix", "listen")
_END_S = 10.0  # for an agent to end its ranks, then SIGTERM; and as long again, then SIGKILL
_MAX_FACTS = 4096
_COUNTER = "nodes-started"


class LocalEngine:
    """Implements engines.base.Engine. Raises UsageError for options that it doesn't know."""

    name = "local"

    def __init__(self, spec: JobSpec) -> None:
        unknown = sorted(set(spec.options) - set(_OPTIONS))
        if unknown:
            raise UsageError(f"the local engine has no option {unknown[0]!r}; it has {', '.join(_OPTIONS)}")
        self._spec = spec
        self._hosts = [host for host in spec.options.get("hosts", "").split(",") if host]
        self._prefix = shlex.split(spec.options.get("prefix", ""))
        self._join: Join | None = None
        self._agents: dict[str, asyncio.subprocess.Process] = {}
        self._tried: deque[str] = deque(self._hosts)  # the one that was used longest ago comes first
        self._named = 0
        self._facts: asyncio.Queue[EngineFact | None] = asyncio.Queue(_MAX_FACTS)
        self._watching: set[asyncio.Task[None]] = set()
        self._closed = False

    def runs_here(self) -> bool:
        return True

    def listen_address(self) -> str | None:
        return self._spec.options.get("listen")

    def start(self, join: Join) -> None:
        self._join = join

    async def place(self, count: int, reason: str, taken: frozenset[str] = frozenset()) -> int:
        placed = 0
        while placed < count and not self._closed and (node := self._next_node(taken)) is not None:
            if not await self._start_agent(node):
                break
            placed += 1
        return placed

    async def release(self, node: str, reason: str) -> None:
        agent = self._agents.get(node)
        if agent is not None:
            await _end([agent], _END_S)

    async def facts(self) -> AsyncIterator[EngineFact]:
        while (fact := await self._facts.get()) is not None:
            yield fact

    async def close(self) -> None:
        self._closed = True
        await _end(list(self._agents.values()), _END_S)
        with contextlib.suppress(asyncio.QueueFull):
            self._facts.put_nowait(None)

    def render(self) -> str:
        assert self._join is None, "an engine that runs has nothing to render"
        join = Join("CONTROLLER", None)
        names = self._hosts or [f"node{n}" for n in range(self._spec.all_nodes)]
        return "".join(shlex.join(self._command(name, join, "SESSION")) + "\n" for name in names)

    def submit(self) -> str:
        raise UsageError("the local engine has no scheduler to submit to; closeranks run starts the job here")

    # --- agents

    def _next_node(self, taken: frozenset[str]) -> str | None:
        if not self._hosts:
            while (name := f"node{self._next_number()}") in taken:
                pass
            return name
        free = [host for host in self._tried if host not in self._agents and host not in taken]
        if not free:
            return None
        self._tried.remove(free[0])
        self._tried.append(free[0])
        return free[0]

    def _next_number(self) -> int:
        """A name is used once, also by the engine of a controller that comes after this one."""
        counter = self._spec.run_dir / _COUNTER
        with contextlib.suppress(OSError, ValueError):  # the first one, or a disk that fails
            self._named = max(self._named, int(counter.read_text()))
        with contextlib.suppress(OSError):
            counter.write_text(f"{self._named + 1}\n")
        self._named += 1
        return self._named - 1

    def _command(self, node: str, join: Join, session: str) -> list[str]:
        prefix = [part.replace("{node}", node) for part in self._prefix]
        return [*prefix, *agent_command(self._spec, join, node=node, session=session)]

    async def _start_agent(self, node: str) -> bool:
        assert self._join is not None, "placed before it was started"
        session = secrets.token_hex(8)
        try:
            agent = await asyncio.create_subprocess_exec(
                *self._command(node, self._join, session),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env=dict(os.environ),
            )
        except OSError as error:
            self._tell(NodeGone(node, f"its agent can't be started: {error}"))
            return False
        self._agents[node] = agent
        task = asyncio.get_running_loop().create_task(self._watch(node, session, agent))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
        return True

    async def _watch(self, node: str, session: str, agent: asyncio.subprocess.Process) -> None:
        code = await agent.wait()
        if self._agents.get(node) is agent:
            del self._agents[node]
        if self._closed:
            return
        # What ends by itself has seen its ranks dead. A guard that was killed leaves them to the kernel, and
        # a prefix may have lost its host: then only the lease is proof.
        certain = code >= 0 and not self._prefix
        how = f"its agent ended with code {code}" if code >= 0 else f"its agent was killed (signal {-code})"
        self._tell(NodeGone(node, how, session if certain else ""))

    def _tell(self, fact: EngineFact) -> None:
        with contextlib.suppress(asyncio.QueueFull):  # the lease will tell
            self._facts.put_nowait(fact)


async def _end(agents: list[asyncio.subprocess.Process], patience_s: float) -> None:
    """Wait for agents that were told to end; those that don't are told by signal."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        left = [agent for agent in agents if agent.returncode is None]
        if not left:
            return
        if number is not None:
            for agent in left:
                with contextlib.suppress(ProcessLookupError):
                    agent.send_signal(number)
        waits = [asyncio.ensure_future(agent.wait()) for agent in left]
        _, pending = await asyncio.wait(waits, timeout=patience_s)
        for wait in pending:
            wait.cancel()
