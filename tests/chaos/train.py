"""Trains until told to stop. The parameters are a function of the steps made, so that a doubled or a lost one
shows; and each rank notes every completed step, so that two worlds at once show, too."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = Path(os.environ["CHAOS_FOLDER"])
STEP_S = float(os.environ.get("CHAOS_STEP_S", "0.01"))
MODULUS = 2**31 - 1


def checkpoint(step: int, value: int) -> None:
    temporary = FOLDER / "checkpoint.pt.tmp"
    torch.save({"step": step, "value": value}, temporary)
    temporary.replace(FOLDER / "checkpoint.pt")


def main() -> None:
    dist.init_process_group("gloo")
    rank, generation = dist.get_rank(), int(os.environ["CLOSERANKS_GENERATION"])
    step, value = 0, 1
    if (FOLDER / "checkpoint.pt").exists():
        saved = torch.load(FOLDER / "checkpoint.pt", weights_only=True)
        step, value = saved["step"], saved["value"]
    model = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([model], lr=0.0)
    trace = (FOLDER / f"trace-{generation}-{rank}-{os.getpid()}").open("w", buffering=1)
    trace.write(f"begin {step} {value} {dist.get_world_size()}\n")
    while True:
        time.sleep(STEP_S)
        stop = torch.tensor([int((FOLDER / "stop").exists())])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            break
        part = torch.tensor([(step + 1) * 7919], dtype=torch.int64)
        dist.broadcast(part, src=0)
        model.grad = torch.zeros(1)
        optimizer.step()
        step, value = step + 1, (value * 48271 + int(part.item())) % MODULUS
        if rank == 0:
            checkpoint(step, value)
        trace.write(f"step {step} {value} {time.clock_gettime_ns(time.CLOCK_BOOTTIME)}\n")
        dist.barrier()
    print(f"rank {rank} ends at step {step} with {value}", flush=True)
    dist.destroy_process_group()


main()
