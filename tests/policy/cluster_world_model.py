"""A make-believe cluster for the policy of many nodes: agents that obey or die, and a network that loses.

Time goes in quarters of a second. Everything random comes from one ``Random``, so that a seed replays a walk.
What an agent owes is written down in closeranks.policy.cluster and closeranks.cluster_events; ``Agent`` is
that, and nothing better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from cluster_lab import failure

from closeranks.cluster_events import (
    CheckHealth,
    ClusterAction,
    ClusterEvent,
    DrainReady,
    DrainRequested,
    EngineDrains,
    KillNode,
    NodeAttached,
    NodeDown,
    NodeFailed,
    NodeGone,
    NodeHealth,
    NodeHeartbeat,
    NodeLeft,
    NodeReady,
    NodeStarted,
    NodeSucceeded,
    OpenStore,
    PrepareDrain,
    ReleaseNode,
    RequestNode,
    StartNode,
    StopNode,
    StoreLost,
    StoreOpened,
    Tick,
)
from closeranks.config import BudgetConfig, ClusterConfig
from closeranks.events import FailureKind, Finish, Progress, RunStarted, StopRequested
from closeranks.policy.cluster import decide, durable, holds_lease, initial, restore
from closeranks.policy.cluster_state import Link, Stage, Standing

STEP_S = 0.25
Order = OpenStore | StartNode | KillNode | StopNode | PrepareDrain | CheckHealth


@dataclass
class Agent:
    """One agent process. It holds its lease from when it sent the newest message that was answered."""

    node: str
    session: str
    born_s: float
    alive: bool = True
    deaf: bool = False  # takes no orders, as a broken agent would; its lease still ends
    connection: int = 0
    attached: bool = False
    lease_end_s: float = 0.0
    running: int | None = None
    starts_s: float = 0.0
    kill_s: float | None = None  # when its ranks will be dead
    newest: int = -1  # generation it knows
    beats_s: float = 0.0

    def has_ranks(self, now_s: float) -> bool:
        return self.running is not None and now_s >= self.starts_s


@dataclass
class Chaos:
    """Odds, per step, of what goes wrong."""

    crash: float = 0.004
    restart: float = 0.1
    host_dies: float = 0.002
    rank_fails: float = 0.004
    breaks: float = 0.004
    freezes: float = 0.002
    leaves: float = 0.001
    drains: float = 0.002
    rival: float = 0.001
    deaf: float = 0.001
    store_dies: float = 0.001
    controller_dies: float = 0.001
    loses: float = 0.02
    doubles: float = 0.05
    stop: float = 0.0003
    succeed: float = 0.0003


@dataclass
class Message:
    due_s: float
    event: ClusterEvent
    sent_s: float
    sender: Agent | None
    connection: int


@dataclass
class Model:
    """The cluster, the network and the controller around the policy."""

    random: Random
    config: ClusterConfig
    names: list[str]
    budget: BudgetConfig = field(default_factory=lambda: BudgetConfig(default_max_restarts=10_000))
    chaos: Chaos = field(default_factory=Chaos)

    def __post_init__(self) -> None:
        self.state = initial(self.config, self.budget)
        self.now_s = 0.0
        self.agents: list[Agent] = []
        self.up: list[Message] = []
        self.down: list[tuple[float, Agent, int, Order]] = []
        self.acks: list[tuple[float, Agent, int, float]] = []
        self.cut: dict[str, float] = {}  # node -> until when nothing gets through
        self.journal = durable(self.state)
        self.controller_back_s: float | None = None
        self.sessions = 0
        self.connections = 0
        self.end: Finish | None = None
        self.stopped = False
        self.planned = 0
        self.unfit: set[str] = set()
        self.started: list[int] = []
        self.requested = 0
        self.counts: dict[str, int] = {}
        self.take(RunStarted())
        for name in self.names:
            self.spawn(name)

    # --- the controller ---------------------------------------------------------------------------------

    def take(self, event: ClusterEvent) -> None:
        """Hand one fact to the policy, check what it decides, and send it."""
        before = self.state
        self.state, actions = decide(before, event, self.now_s)
        if actions or isinstance(event, Tick):  # as the controller does
            self.journal = durable(self.state)
        assert not (before.finished and actions), "decided after the end"
        self._check(event, actions)
        saved = isinstance(event, DrainReady) and before.world is not None
        if saved and not any(member.ended_at_s is not None for member in before.world.members.values()):
            assert self.state.job.budget == before.job.budget, "a drain was charged to the budget"
        for action in actions:
            self._send(action)

    def _check(self, event: ClusterEvent, actions: tuple[ClusterAction, ...]) -> None:
        for name, node in self.state.nodes.items():
            if node.standing is not Standing.GOOD:
                self.unfit.add(name)
        if isinstance(event, NodeHealth) and event.ok and event.node in self.state.nodes:
            passed = self.state.nodes[event.node].standing is Standing.GOOD
            self.unfit -= {event.node} if passed else set()
        self.stopped |= isinstance(event, StopRequested)
        starts = [action for action in actions if isinstance(action, StartNode)]
        if starts:
            self._check_starts(starts)
        for action in actions:
            if isinstance(action, OpenStore):
                node = self.state.nodes[action.node]
                assert node.link is Link.ATTACHED and node.standing is Standing.GOOD
                assert node.drain_due_s is None
        planned = [action for action in actions if "as planned" in getattr(action, "text", "")]
        self.planned += len(planned)
        job = self.state.job
        assert job.generation <= job.budget.restarts + self.planned, "a generation that nothing paid for"

    def _check_starts(self, starts: list[StartNode]) -> None:
        assert not self.stopped, "started after a request to stop"
        (generation,) = {start.generation for start in starts}
        assert not self.started or generation == self.started[-1] + 1, "numbers are used once and in order"
        self.started.append(generation)
        assert self.live() <= {generation}, "started while an older generation had live ranks"
        ranks = sorted(rank for s in starts for rank in range(s.first_rank, s.first_rank + s.ranks))
        assert ranks == list(range(starts[0].world_size)), "every rank exactly once"
        assert sorted(start.node_rank for start in starts) == list(range(starts[0].node_count))
        assert self.config.min_nodes <= len(starts) <= self.config.max_nodes
        assert len({start.node for start in starts}) == len(starts)
        assert {start.store for start in starts} == {f"{self.state.world.store_node}:{generation}"}
        assert not self.unfit & {start.node for start in starts}, "an excluded node in a world"

    def _send(self, action: ClusterAction) -> None:
        self.counts[type(action).__name__] = self.counts.get(type(action).__name__, 0) + 1
        match action:
            case Finish():
                assert not self.live(), "finished while ranks live"
                self.end = action
            case RequestNode(count):
                self.requested += count
            case ReleaseNode(node):
                for agent in self.agents:
                    if agent.node == node and agent.alive:
                        self.die(agent)
            case OpenStore() | StartNode() | KillNode() | StopNode() | PrepareDrain() | CheckHealth():
                node = self.state.nodes[action.node]
                # Of two nodes that are lost at once, the first one's loss still has the second one killed.
                is_end = isinstance(action, KillNode | StopNode)
                assert node.link is Link.ATTACHED or is_end, "an order to nobody"
                agent = self.find(action.node, node.session)
                if agent is not None:
                    self.down.append((self.now_s + self.delay_s(), agent, agent.connection, action))

    def find(self, node: str, session: str) -> Agent | None:
        return next((a for a in self.agents if a.node == node and a.session == session and a.alive), None)

    # --- the network ------------------------------------------------------------------------------------

    def delay_s(self) -> float:
        return self.random.choice((0.0, 0.0, 0.0, 0.25, 0.25, 0.5))

    def say(self, agent: Agent, event: ClusterEvent) -> None:
        """A message on its way to the controller: maybe lost, with the connection, maybe twice."""
        if self.random.random() < self.chaos.loses:
            agent.connection = self.new_connection()
            agent.attached = False
            return
        message = Message(self.now_s + self.delay_s(), event, self.now_s, agent, agent.connection)
        self.up.append(message)
        if self.random.random() < self.chaos.doubles:
            self.up.append(replace(message, due_s=self.now_s + self.random.randrange(40) * STEP_S))

    def new_connection(self) -> int:
        self.connections += 1
        return self.connections

    def is_cut(self, node: str) -> bool:
        return self.cut.get(node, -1.0) > self.now_s

    # --- one step ---------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now_s += STEP_S
        for agent in self.agents:
            self._live(agent)
        if self.controller_back_s is not None:
            self._refuse()
        self._deliver_down()
        self._deliver_up()
        if self.controller_back_s is None and not self.end:
            self.take(Tick())
        self.agents = [a for a in self.agents if a.alive or a.running is not None]
        assert len(self.live()) <= 1, f"two worlds: generations {sorted(self.live())} at {self.now_s}"

    def live(self) -> set[int]:
        """The generations of which ranks are alive at this moment."""
        return {a.running for a in self.agents if a.running is not None and a.has_ranks(self.now_s)}

    def _live(self, agent: Agent) -> None:
        """What an agent does by itself: kill when told or when its lease is over, attach, beat."""
        if agent.kill_s is not None and self.now_s >= agent.kill_s:
            generation, agent.running, agent.kill_s = agent.running, None, None
            if agent.alive and generation is not None:
                self.say(agent, NodeDown(agent.node, generation))
        if not agent.alive:
            return
        if self.now_s >= agent.lease_end_s:
            if agent.running is not None:
                self.kill(agent, within_s=agent.lease_end_s + self.config.fence_margin_s)
            if agent.attached:  # what is on its way on that connection must not count any more
                agent.attached, agent.connection = False, self.new_connection()
        if self.now_s < agent.beats_s:
            return
        agent.beats_s = self.now_s + (self.config.lease_s if agent.attached else 3.0)
        if agent.attached:
            self.say(agent, NodeHeartbeat(agent.node, agent.session))
        else:
            agent.connection = self.new_connection()
            self.say(agent, NodeAttached(agent.node, agent.session, 2, agent.node, agent.running))

    def kill(self, agent: Agent, within_s: float | None = None) -> None:
        """Its ranks die within the time that is left, whatever the agent says or hears meanwhile."""
        latest_s = self.now_s + 2.0 if within_s is None else within_s
        steps = max(0, int((latest_s - self.now_s) / STEP_S))
        due_s = self.now_s + self.random.randint(0, steps) * STEP_S
        agent.kill_s = due_s if agent.kill_s is None else min(agent.kill_s, due_s)

    def _refuse(self) -> None:
        """The controller's process is gone and its host says so: agents with a lease go on for the grace."""
        for agent in self.agents:
            if agent.alive and agent.attached and not self.is_cut(agent.node) and self.random.random() < 0.5:
                agent.attached, agent.connection = False, self.new_connection()
                if self.now_s < agent.lease_end_s:
                    agent.lease_end_s = max(agent.lease_end_s, self.now_s + self.config.reattach_wait_s)
        assert self.controller_back_s is not None
        if self.now_s >= self.controller_back_s:
            self.controller_back_s = None
            self.state = restore(self.journal, self.now_s)

    def _deliver_up(self) -> None:
        due = [message for message in self.up if message.due_s <= self.now_s]
        self.up = [message for message in self.up if message.due_s > self.now_s]
        self.random.shuffle(due)
        for message in due:
            sender = message.sender
            if self.controller_back_s is not None or self.end:
                continue
            if sender is not None and self.is_cut(sender.node):
                if not isinstance(message.event, NodeHeartbeat):
                    self._lost(sender, message.connection)
                continue
            self.take(message.event)
            if sender is not None:
                self._answer(sender, message)

    def _answer(self, agent: Agent, message: Message) -> None:
        if not isinstance(message.event, NodeHeartbeat | NodeAttached):
            return
        if holds_lease(self.state, agent.node, agent.session):
            self.acks.append((self.now_s + self.delay_s(), agent, message.connection, message.sent_s))
        elif agent.connection == message.connection:
            agent.attached, agent.connection = False, self.new_connection()

    def _lost(self, agent: Agent, connection: int) -> None:
        """A message that is lost takes its connection with it, sooner or later."""
        if agent.connection == connection:
            agent.attached, agent.connection = False, self.new_connection()

    def _deliver_down(self) -> None:
        for due_s, agent, connection, sent_s in [a for a in self.acks if a[0] <= self.now_s]:
            del due_s
            if agent.alive and agent.connection == connection and not self.is_cut(agent.node):
                agent.attached = True
                agent.lease_end_s = max(agent.lease_end_s, sent_s + self.config.lease_length_s)
                agent.beats_s = min(agent.beats_s, sent_s + self.config.lease_s)
        self.acks = [ack for ack in self.acks if ack[0] > self.now_s]
        due = [order for order in self.down if order[0] <= self.now_s]
        self.down = [order for order in self.down if order[0] > self.now_s]
        for _, agent, connection, order in due:
            if self.is_cut(agent.node):
                self._lost(agent, connection)
            elif agent.alive and agent.connection == connection:
                self._obey(agent, order)

    def _obey(self, agent: Agent, order: Order) -> None:
        if agent.deaf:
            return
        match order:
            case OpenStore(node, generation):
                self.say(agent, StoreOpened(node, generation, f"{node}:{generation}"))
            case StartNode(node, generation):
                if generation <= agent.newest or self.now_s >= agent.lease_end_s:
                    if agent.running is None:
                        self.say(agent, NodeDown(node, generation))
                    return
                assert agent.running is None, "told to start while older ranks live"
                agent.newest, agent.running = generation, generation
                agent.starts_s = self.now_s + order.delay_s
                self.say(agent, NodeStarted(node, generation))
            case KillNode(node, generation) | StopNode(node, generation):
                agent.newest = max(agent.newest, generation)
                if agent.running == generation:
                    self.kill(agent)
                else:
                    self.say(agent, NodeDown(node, generation))
            case PrepareDrain(node, generation):
                self.say(agent, DrainReady(node, generation))
            case CheckHealth(node, _, check):
                self.say(agent, NodeHealth(node, self.random.random() < 0.8, "checked", check))

    # --- what goes wrong --------------------------------------------------------------------------------

    def recover(self) -> None:
        """Nothing goes wrong any more, and what is broken comes back."""
        self.chaos = replace(self.chaos, loses=0.0, doubles=0.0)
        for agent in self.agents:
            agent.deaf = False
        for name in self.names:
            if not any(agent.node == name and agent.alive for agent in self.agents):
                self._maybe(0.1, lambda name=name: self.spawn(name))

    def is_running(self) -> bool:
        """Whether every member of the world has live ranks of it."""
        world = self.state.world
        if world is None or world.stage is not Stage.RUNNING or self.controller_back_s is not None:
            return False
        return all(
            (agent := self.find(member.node, member.session)) is not None
            and agent.running == world.generation
            and agent.has_ranks(self.now_s)
            for member in world.members.values()
        )

    def spawn(self, name: str) -> Agent:
        self.sessions += 1
        agent = Agent(name, f"s{self.sessions}", self.now_s)
        self.agents.append(agent)
        return agent

    def die(self, agent: Agent) -> None:
        """The agent's process ends; its keeper kills the ranks as soon as it can."""
        agent.alive = False
        if agent.running is not None:
            self.kill(agent, within_s=self.now_s + self.config.fence_margin_s)

    def go_wrong(self) -> None:
        """Whatever the odds say, at this step."""
        chaos, odds = self.chaos, self.random.random
        living = [agent for agent in self.agents if agent.alive]
        for name in self.names:
            if not any(agent.node == name for agent in living) and odds() < chaos.restart:
                self.spawn(name)
        for agent in living:
            self._maybe(chaos.crash, lambda a=agent: self.die(a))
            self._maybe(chaos.host_dies, lambda a=agent: self._host_dies(a.node))
            self._maybe(chaos.breaks, lambda a=agent: self._break(a))
            self._maybe(chaos.freezes, lambda a=agent: self._cut(a.node))
            self._maybe(chaos.leaves, lambda a=agent: self._leave(a))
            self._maybe(chaos.rival, lambda a=agent: self.spawn(a.node))
            self._maybe(chaos.deaf, lambda a=agent: setattr(a, "deaf", True))
            if agent.alive and agent.running is not None:
                self._maybe(chaos.rank_fails, lambda a=agent: self._rank_fails(a))
        self._whole_job(living)

    def _whole_job(self, living: list[Agent]) -> None:
        chaos, world = self.chaos, self.state.world
        name = self.random.choice(self.names)
        self._maybe(
            chaos.drains, lambda: self._tell(DrainRequested(name, self.random.choice((0, 5, 60)), "d"))
        )
        self._maybe(chaos.drains, lambda: self._tell(EngineDrains(name, "engine")))
        self._maybe(chaos.stop, lambda: self._tell(StopRequested("test", 15)))
        self._maybe(chaos.controller_dies, self._controller_dies)
        if world is not None and world.stage is Stage.RUNNING:
            self._maybe(0.2, lambda: self._tell(Progress(world.generation, 3)))
            self._maybe(chaos.store_dies, lambda: self._tell(StoreLost(world.store_node, world.generation)))
            self._maybe(chaos.succeed, lambda: self._succeed(world.generation))
        for agent in living:
            self._maybe(0.05, lambda a=agent: self.say(a, NodeReady(a.node, a.session)))

    def _maybe(self, odds: float, what: Callable[[], object]) -> None:
        if self.random.random() < odds:
            what()

    def _tell(self, event: ClusterEvent) -> None:
        """From the controller's own side: an engine, a person."""
        if self.controller_back_s is None and not self.end:
            self.take(event)

    def _host_dies(self, node: str) -> None:
        """Everything on the host ends at once; the engine says so some time later, perhaps twice."""
        for agent in self.agents:
            if agent.node == node:
                agent.alive, agent.running, agent.kill_s = False, None, None
        known = self.state.nodes.get(node)
        session = known.session if known is not None and self.random.random() < 0.5 else ""
        for _ in range(self.random.randint(0, 2)):
            late_s = self.random.randrange(80) * STEP_S
            gone = NodeGone(node, "power", session)
            self.up.append(Message(self.now_s + late_s, gone, self.now_s, None, 0))

    def _break(self, agent: Agent) -> None:
        agent.attached, agent.connection, agent.beats_s = False, self.new_connection(), self.now_s

    def _cut(self, node: str) -> None:
        self.cut[node] = self.now_s + self.random.randrange(1, 40) * STEP_S

    def _leave(self, agent: Agent) -> None:
        agent.running, agent.kill_s = None, None
        self.say(agent, NodeLeft(agent.node, agent.session, "bye"))
        agent.alive = False

    def _rank_fails(self, agent: Agent) -> None:
        assert agent.running is not None
        kinds = [kind for kind in FailureKind if kind is not FailureKind.INIT_STALL]
        what = failure(agent.running, self.random.choice(kinds), durable_progress=self.random.random() < 0.97)
        culprits = tuple(self.random.sample(self.names, self.random.randint(0, 2)))
        self.say(agent, NodeFailed(agent.node, what, culprits))
        if self.random.random() < 0.5:
            self.kill(agent)

    def _controller_dies(self) -> None:
        if self.controller_back_s is None:
            self.controller_back_s = self.now_s + self.random.randrange(1, 60) * STEP_S

    def _succeed(self, generation: int) -> None:
        for agent in self.agents:
            if agent.alive and agent.running == generation and agent.has_ranks(self.now_s):
                agent.running, agent.kill_s = None, None
                self.say(agent, NodeSucceeded(agent.node, generation))
                self.say(agent, NodeDown(agent.node, generation))
