"""Data-parallel training: averaged gradients, no_sync accumulation, a checkpoint round trip."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        with model.no_sync():
            model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if step % 2 == 1:
            print(f"step {step} loss {loss.item():.3f}")

    buffer = io.BytesIO()
    torch.save(model.module.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    total = sum(value.double().sum().item() for value in state.values())
    print(f"rank {rank} of {dist.get_world_size()}: parameters add up to {total:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
