"""What the progress hooks cost: one sign of life, each hooked operation, and a whole 10 ms training step.

Run: ``python benchmarks/heartbeat.py [--rounds 400] [--steps 400]``. One process, gloo, no agent. Operations
are timed around a stand-in that does nothing (gloo's own noise is larger than the hooks), as the best of the
rounds. The step is real (a model that takes about 10 ms, a DataLoader, two all_reduces, SGD), hooks on and
off in turn, as medians: there each hook runs once after milliseconds of matrix products, with none of its
code and data left in the CPU's caches, and takes several times as long as in a loop.

The peer: a heartbeat of NVIDIA's resiliency extension 0.4.1 (``send_heartbeat``, a message over a Unix
socket) was measured at 91.7 us on a 2-core machine.
"""

from __future__ import annotations

import argparse
import functools
import mmap
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import closeranks
from closeranks.progress import PAGE_BYTES, Phase
from closeranks.worker import hooks, hooks_collectives, hooks_training
from closeranks.worker.hooks_check import NeighbourCheck
from closeranks.worker.hooks_state import STATE
from closeranks.worker.page import PLACE_U32, POSITION_U32, RING_WORD, PageWriter

NVRX_HEARTBEAT_NS = 91_700
MAX_RANKS = 8
CALLS = 50  # short windows: some of them are undisturbed on a busy machine
STEP_MS = 9.0  # forward and backward; the rest of the step makes it about 10


class Silence:
    """An agent that never asks for anything."""

    def send(self, message: Any) -> bool:
        return True

    def receive(self) -> None:
        return None


def best_ns(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Nanoseconds a call, less what an empty call costs; all in turn, so that a busy spell hits all alike."""
    best = dict.fromkeys(["", *functions], float("inf"))
    for _ in range(rounds):
        for name, function in [("", lambda: None), *functions.items()]:
            start = time.perf_counter_ns()
            for _ in range(CALLS):
                function()
            best[name] = min(best[name], (time.perf_counter_ns() - start) / CALLS)
    empty = best.pop("")
    return {name: ns - empty for name, ns in best.items()}


def stand_in(*args: object, **kwargs: object) -> None:
    """In place of the operation."""


def operations(writer: PageWriter) -> dict[str, Callable[[], object]]:
    """Each hooked operation, without neighbours to compare with."""
    data = hooks_training.wrap_next(stand_in)
    backward = hooks_training.within(Phase.BACKWARD, stand_in)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    def step() -> None:
        hooks_training.before_optimizer_step(optimizer, (), {})
        hooks_training.after_optimizer_step(optimizer, (), {})

    return {
        "a sign of life (tick)": writer.tick,
        "a phase, in and out": lambda: writer.leave_phase(writer.enter_phase(Phase.DATA)),
        "closeranks.step()": closeranks.step,
        "data fetch": lambda: data(None),
        "backward": backward,
        "optimizer step": step,
    }


def collectives(writer: PageWriter) -> dict[str, Callable[[], object]]:
    """all_reduce alone, and where the other ranks of the host came first, and last.

    Each partner's page is our own here: so they are always at the same collective as we.
    """
    call = next(call for name, call in hooks_collectives.calls() if name == "all_reduce")
    all_reduce = hooks_collectives.wrap(stand_in, call)
    tensor = torch.ones(1024)
    recorder = STATE.recorder
    assert recorder is not None
    state = recorder.groups.get(None)
    assert state is not None

    def issue(check: NeighbourCheck | None) -> None:
        state.check = check
        all_reduce(tensor)

    found: dict[str, Callable[[], object]] = {"all_reduce, alone": lambda: issue(None)}
    for ranks in (2, 4, 8):
        writer.local_world_size = ranks
        behind, first = (NeighbourCheck(writer, STATE.control, recorder.sites.places) for _ in range(2))
        first._partners = tuple((0, POSITION_U32, PLACE_U32, RING_WORD, near) for *_, near in first._partners)
        found[f"all_reduce, {ranks} ranks, the others are behind"] = functools.partial(issue, behind)
        found[f"all_reduce, {ranks} ranks, the others came first"] = functools.partial(issue, first)
        issue(first)
        assert first._compared[0] == writer.world_position, "nothing was compared"
    return found


def make_step() -> Callable[[], None]:
    """A training step of about 10 ms."""
    width = 256
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def compute_ms(data: torch.Tensor) -> float:
        start = time.perf_counter()
        model(data).sum().backward()
        return (time.perf_counter() - start) * 1e3

    batch = 64
    data = torch.ones(batch, width)
    while min(compute_ms(data) for _ in range(9)) < STEP_MS and batch < 65536:
        batch = batch * 5 // 4
        data = torch.ones(batch, width)
    dataset = torch.utils.data.TensorDataset(torch.ones(4, width))
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    flag = torch.ones(2)

    def step() -> None:
        next(iter(loader))
        optimizer.zero_grad()
        model(data).sum().backward()
        dist.all_reduce(flag)
        dist.all_reduce(flag)
        optimizer.step()

    return step


def time_steps(steps: int) -> tuple[float, float]:
    """Median step in ms with the hooks on, and off, in turn."""
    step = make_step()
    for _ in range(10):
        step()
    on: list[float] = []
    off: list[float] = []
    recorder = STATE.recorder
    for turn in range(2 * steps):
        live = turn % 2 == 0
        STATE.active, STATE.recorder = live, recorder if live else None
        start = time.perf_counter_ns()
        step()
        (on if live else off).append((time.perf_counter_ns() - start) / 1e6)
    STATE.active, STATE.recorder = True, recorder
    return statistics.median(on), statistics.median(off)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    pages = mmap.mmap(-1, PAGE_BYTES * MAX_RANKS)
    writer = PageWriter(pages, 0, MAX_RANKS, 0, 0)
    hooks.install(writer, Silence())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))

    ns = best_ns(operations(writer) | collectives(writer), arguments.rounds)
    for name, cost in ns.items():
        print(f"{cost:9.0f} ns  {name}")
    peer = f"a heartbeat of NVRx ({NVRX_HEARTBEAT_NS / 1000} us)"
    print(f"{NVRX_HEARTBEAT_NS / ns['a sign of life (tick)']:9.0f} x   cheaper than {peer}")
    typical = sum(ns[name] for name in ("data fetch", "backward", "optimizer step"))
    typical += 2 * ns["all_reduce, 2 ranks, the others came first"]
    print(f"{typical / 1000:9.1f} us  a typical step: data, backward, two all_reduces of 2 ranks, optimizer")
    on_ms, off_ms = time_steps(arguments.steps)
    print(f"{typical / 1e6 / off_ms:9.3%}     of a step of {off_ms:.1f} ms, with warm caches")
    cold_us = (on_ms - off_ms) * 1e3
    print(f"{cold_us:9.1f} us  a real step: {on_ms:.3f} ms with hooks, {off_ms:.3f} ms without")
    print(f"{cold_us / 1e3 / off_ms:9.3%}     of that step, with caches as it leaves them")


if __name__ == "__main__":
    main()
