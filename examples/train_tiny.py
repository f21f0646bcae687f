"""A small but complete distributed training run: DDP, a loss average, checkpoints, resume.

    closeranks run --nproc-per-node 4 examples/train_tiny.py --steps 200
    torchrun --nproc-per-node 4 examples/train_tiny.py --steps 200

It is plain PyTorch and knows nothing of the launcher. Stopped anywhere and started again, it ends with
bit for bit the parameters of a run that nothing disturbed; the digest on the last line shows it.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BATCH, FEATURES, HIDDEN = 32, 16, 64


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"), metavar="PATH")
    parser.add_argument("--checkpoint-every", type=int, default=1, metavar="STEPS")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--sleep-ms", type=float, default=0.0, help="stand-in for the work of a larger model")
    return parser.parse_args()


def batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """The data of one step on one rank: a function of both, so that a resumed run sees the same batches."""
    generator = torch.Generator().manual_seed(step * world_size + rank)
    inputs = torch.randn(BATCH, FEATURES, generator=generator)
    return inputs, inputs.mean(dim=1, keepdim=True).mul(4.0).sin()


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write beside the old checkpoint, then replace it: whoever dies in between leaves the old one whole."""
    temporary = path.with_name(f"{path.name}.tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
    temporary.replace(path)


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The number of steps already done.

    Every rank reads the same file. None can find a newer one than the others: rank 0 writes only after a
    step, and a step needs all ranks.
    """
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def digest(model: nn.Module) -> str:
    sha256 = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sha256.update(name.encode())
        sha256.update(parameter.detach().numpy().tobytes())
    return sha256.hexdigest()


def train(args: argparse.Namespace, rank: int, world_size: int) -> nn.Module:
    """Train to ``args.steps`` from wherever the checkpoint is, and return the model."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    done = resume(args.checkpoint, model, optimizer)
    if rank == 0:
        print(f"resumed after step {done}" if done else "started from scratch", flush=True)
    ddp = DistributedDataParallel(model)
    # DDP packs its gradients anew after the first backward pass, and sums them in another order from then
    # on. One pass before the first step gives every start, fresh or resumed, the same last bits.
    ddp(batch(0, rank, world_size)[0]).sum().backward()

    for step in range(done + 1, args.steps + 1):
        inputs, targets = batch(step, rank, world_size)
        time.sleep(args.sleep_ms / 1000)
        loss = nn.functional.mse_loss(ddp(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        mean_loss /= world_size
        if rank == 0 and (step % args.log_every == 0 or step == args.steps):
            print(f"step {step} loss {mean_loss.item():.6f}", flush=True)
        if rank == 0 and (step % args.checkpoint_every == 0 or step == args.steps):
            save(args.checkpoint, step, model, optimizer)
    return model


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    # In a function of its own, so that DDP is gone before its process group: the other way round, torch
    # joins gloo's threads while it holds the GIL, and now and then they want that very lock.
    model = train(args, dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"parameters sha256 {digest(model)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
