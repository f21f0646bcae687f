"""What the progress hooks cost: one sign of life, each hooked operation, and a whole 10 ms training step.

Run: ``python benchmarks/heartbeat.py [--rounds 9] [--steps 60]``. One process, gloo, no agent. Operations
are timed around a stand-in that does nothing (gloo's own noise is larger than the hooks), as the best of the
rounds. The step is real
(a model that takes about 10 ms, a DataLoader, two all_reduces, SGD), hooks on and off in turn, as medians.

The peer: a heartbeat of NVIDIA's resiliency extension 0.4.1 (``send_heartbeat``, a message over a Unix
socket) was measured at 91.7 us on a 2-core machine.
"""

from __future__ import annotations

import argparse
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
CALLS = 50


class Silence:
    """An agent that never asks for anything."""

    def send(self, message: Any) -> bool:
        return True

    def receive(self) -> None:
        return None


def best_ns(function: Callable[[], object], rounds: int) -> float:
    """Nanoseconds a call, less what an empty call costs."""

    def once(what: Callable[[], object]) -> float:
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            what()
        return (time.perf_counter_ns() - start) / CALLS

    return min(once(function) for _ in range(rounds)) - min(once(lambda: None) for _ in range(rounds))


def stand_in(*args: object, **kwargs: object) -> None:
    """In place of the operation."""


def time_operations(writer: PageWriter, rounds: int) -> dict[str, float]:
    """Each hooked operation without neighbours to compare with."""
    call = next(call for name, call in hooks_collectives.calls() if name == "all_reduce")
    all_reduce = hooks_collectives.wrap(stand_in, call)
    data = hooks_training.wrap_next(stand_in)
    backward = hooks_training.within(Phase.BACKWARD, stand_in)
    tensor = torch.ones(1024)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step() -> None:
        hooks_training.before_optimizer_step(optimizer, (), {})
        hooks_training.after_optimizer_step(optimizer, (), {})

    return {
        "a sign of life (tick)": best_ns(writer.tick, rounds),
        "a phase, in and out": best_ns(lambda: writer.leave_phase(writer.enter_phase(Phase.DATA)), rounds),
        "closeranks.step()": best_ns(closeranks.step, rounds),
        "data fetch": best_ns(lambda: data(None), rounds),
        "backward": best_ns(backward, rounds),
        "optimizer step": best_ns(step, rounds),
        "all_reduce, alone": best_ns(lambda: all_reduce(tensor), rounds),
    }


def time_neighbours(writer: PageWriter, rounds: int) -> dict[str, float]:
    """all_reduce where the other ranks of the host came first, and last.

    Each partner's page is our own here: so they are always at the same collective as we.
    """
    call = next(call for name, call in hooks_collectives.calls() if name == "all_reduce")
    all_reduce = hooks_collectives.wrap(stand_in, call)
    tensor = torch.ones(1024)
    recorder = STATE.recorder
    assert recorder is not None
    state = recorder.groups.get(None)
    assert state is not None
    results = {}
    for ranks in (2, 4, 8):
        writer.local_world_size = ranks
        check = state.check = NeighbourCheck(writer, STATE.control, recorder.sites.places)
        partners = check._partners
        results[f"all_reduce, {ranks} ranks, the others are behind"] = best_ns(
            lambda: all_reduce(tensor), rounds
        )
        check._partners = tuple(
            (0, POSITION_U32, PLACE_U32, RING_WORD, near) for _, _, _, _, near in partners
        )
        results[f"all_reduce, {ranks} ranks, the others came first"] = best_ns(
            lambda: all_reduce(tensor), rounds
        )
        assert check._compared[0] == writer.world_position(), "nothing was compared"
    state.check = None
    return results


def make_step() -> Callable[[], None]:
    """A training step of about 10 ms."""
    width = 256
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = 64
    while True:
        data = torch.ones(batch, width)
        start = time.perf_counter()
        model(data).sum().backward()
        if time.perf_counter() - start > 0.008 or batch > 65536:
            break
        batch *= 2
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


def time_steps(rounds: int, steps: int) -> tuple[float, float]:
    """Median step in ms with the hooks on, and off, in alternating batches."""
    step = make_step()
    for _ in range(5):
        step()
    on: list[float] = []
    off: list[float] = []
    recorder = STATE.recorder
    for turn in range(2 * rounds):
        live = turn % 2 == 0
        STATE.active, STATE.recorder = live, recorder if live else None
        for _ in range(steps):
            start = time.perf_counter_ns()
            step()
            (on if live else off).append((time.perf_counter_ns() - start) / 1e6)
    STATE.active, STATE.recorder = True, recorder
    return statistics.median(on), statistics.median(off)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    pages = mmap.mmap(-1, PAGE_BYTES * MAX_RANKS)
    writer = PageWriter(pages, 0, MAX_RANKS, 0, 0)
    hooks.install(writer, Silence())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))

    operations = time_operations(writer, arguments.rounds)
    operations |= time_neighbours(writer, arguments.rounds)
    for name, ns in operations.items():
        print(f"{ns:9.0f} ns  {name}")
    tick = operations["a sign of life (tick)"]
    peer = f"a heartbeat of NVRx ({NVRX_HEARTBEAT_NS / 1000} us)"
    print(f"{NVRX_HEARTBEAT_NS / tick:9.0f} x   cheaper than {peer}")
    typical = sum(operations[name] for name in ("data fetch", "backward", "optimizer step"))
    typical += 2 * operations["all_reduce, 2 ranks, the others came first"]
    print(f"{typical / 1000:9.1f} us  a typical step: data, backward, two all_reduces of 2 ranks, optimizer")
    on_ms, off_ms = time_steps(arguments.rounds, arguments.steps)
    print(f"{on_ms:9.3f} ms  real step, hooks on; {off_ms:.3f} ms off; ratio {on_ms / off_ms:.5f}")


if __name__ == "__main__":
    main()
