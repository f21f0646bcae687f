"""What the fault tests break: unmodified PyTorch with DDP, one explicit collective, checkpoints."""

import argparse
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def slow_on_purpose(kind: str, step: int, rank: int, slow_s: float) -> None:
    """The slow-but-alive list: what a healthy job may do for a long time."""
    if kind == "evaluate-busy" and rank == 0 and step == 20:
        until = time.monotonic() + slow_s
        while time.monotonic() < until:
            torch.ones(64, 64) @ torch.ones(64, 64)
    if kind == "evaluate-asleep" and rank == 0 and step == 20:
        time.sleep(slow_s)
    if kind == "checkpoint" and rank == 0 and step == 20:
        torch.save({"x": torch.ones(10)}, SlowFile(slow_s / 12))  # a dozen writes
    if kind == "first-step" and step == 1:
        time.sleep(slow_s)
    if kind == "uneven" and step % 10 == 0:
        time.sleep(1.5)


class SlowFile:
    """A file on a slow disk."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def write(self, data: bytes) -> int:
        time.sleep(self.pause_s)
        return len(data)

    def flush(self) -> None:
        time.sleep(self.pause_s)


class SlowData(torch.utils.data.Dataset):
    def __init__(self, size: int, pause_at: int, pause_s: float, computes: bool) -> None:
        self.size, self.pause_at, self.pause_s, self.computes = size, pause_at, pause_s, computes

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.pause_at and self.computes:
            until = time.monotonic() + self.pause_s
            while time.monotonic() < until:
                torch.ones(64, 64) @ torch.ones(64, 64)
        elif index == self.pause_at:
            time.sleep(self.pause_s)
        return torch.ones(4, 8)


def through_a_thread(batches: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What scripts do that fetch ahead by themselves: the main thread waits for a queue, without a limit."""
    fetched: queue.Queue[torch.Tensor] = queue.Queue(maxsize=2)

    def fetch() -> None:
        for batch in batches:
            fetched.put(batch)

    threading.Thread(target=fetch, daemon=True).start()
    while True:
        yield fetched.get()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--slow", default="")
    parser.add_argument("--slow-s", type=float, default=6.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--ahead", action="store_true", help="batches come through a thread and a queue")
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
    pause_at = 20 if args.slow.startswith("data") and rank == 0 else -1
    data = SlowData(args.steps + 1, pause_at, args.slow_s, args.slow == "data-busy")
    keep = args.persistent and args.workers > 0
    batches = torch.utils.data.DataLoader(
        data, batch_size=None, num_workers=args.workers, persistent_workers=keep
    )
    loader = through_a_thread(batches) if args.ahead else iter(batches)
    for step in range(done + 1, args.steps + 1):
        time.sleep(0.01)
        slow_on_purpose(args.slow, step, rank, args.slow_s)
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
