"""What the fault tests break: unmodified PyTorch with DDP, one explicit collective, checkpoints."""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def slow_on_purpose(kind: str, step: int, rank: int) -> None:
    """The slow-but-alive list: what a healthy job may do for a long time."""
    if kind == "evaluate-busy" and rank == 0 and step == 20:
        until = time.monotonic() + 6
        while time.monotonic() < until:
            torch.ones(64, 64) @ torch.ones(64, 64)
    if kind == "evaluate-asleep" and rank == 0 and step == 20:
        time.sleep(6)
    if kind == "checkpoint" and rank == 0 and step == 20:
        file = SlowFile()
        torch.save({"x": torch.ones(10)}, file)
    if kind == "first-step" and step == 1:
        time.sleep(5)
    if kind == "uneven" and step % 10 == 0:
        time.sleep(1.5)


class SlowFile:
    """A file on a slow disk."""

    def write(self, data: bytes) -> int:
        time.sleep(0.5)
        return len(data)

    def flush(self) -> None:
        time.sleep(0.5)


class SlowData(torch.utils.data.Dataset):
    def __init__(self, size: int, pause_at: int) -> None:
        self.size, self.pause_at = size, pause_at

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.pause_at:
            time.sleep(6)
        return torch.ones(4, 8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--slow", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done = 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint)
        model.load_state_dict(state["model"])
        done = state["step"]
    ddp = DistributedDataParallel(model)
    pause_at = 20 if args.slow == "data" and rank == 0 else -1
    loader = iter(
        torch.utils.data.DataLoader(SlowData(args.steps + 1, pause_at), batch_size=None, num_workers=0)
    )
    for step in range(done + 1, args.steps + 1):
        time.sleep(0.01)
        slow_on_purpose(args.slow, step, rank)
        loss = ddp(next(loader)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step}, args.checkpoint.with_suffix(".tmp"))
            args.checkpoint.with_suffix(".tmp").replace(args.checkpoint)
    digest = sum(float(p.double().sum()) for p in model.parameters())
    print(f"end {digest!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
