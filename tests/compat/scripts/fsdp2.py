"""Fully sharded training on CPU: parameters are DTensors, gathered and reduce-scattered from C++ hooks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        loss = model(torch.randn(8, 16, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    weight = model[0].weight
    total = sum(parameter.full_tensor().double().sum().item() for parameter in model.parameters())
    print(f"local {tuple(weight.to_local().shape)} of {tuple(weight.shape)}, sum {total:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
