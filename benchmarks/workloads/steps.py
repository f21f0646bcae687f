"""The workload of benchmarks/launch.py: plain PyTorch that knows nothing of whoever launches it.

A step is 20 ms of sleep and one all_reduce of 1,000 floats; rank 0 saves a checkpoint after each. Every rank
appends ``monotonic_ns pid step`` to a file of its own, which is all that the benchmark looks at.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--sleep-ms", type=float, default=20.0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    checkpoint = args.dir / "checkpoint.pt"
    step = torch.load(checkpoint)["step"] + 1 if checkpoint.exists() else 0
    agreed = torch.tensor([step])
    dist.broadcast(agreed, src=0)
    with (args.dir / f"rank{rank}.log").open("a", buffering=1) as log:
        for step in range(int(agreed), args.steps):
            time.sleep(args.sleep_ms / 1e3)
            gradient = torch.ones(1000)
            dist.all_reduce(gradient)
            if rank == 0:
                torch.save({"step": step, "gradient": gradient}, checkpoint.with_suffix(".tmp"))
                checkpoint.with_suffix(".tmp").replace(checkpoint)
            log.write(f"{time.monotonic_ns()} {os.getpid()} {step}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
