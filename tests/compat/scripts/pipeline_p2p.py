"""Point to point: a blocking ring, a batched exchange, and a two-stage pipeline with gradients sent back."""

import torch
import torch.distributed as dist
from torch import nn


def ring(rank, world_size):
    token = torch.zeros(1)
    if rank == 0:
        dist.send(token + 1, dst=1)
        dist.recv(token, src=world_size - 1)
    else:
        dist.recv(token, src=rank - 1)
        dist.send(token + 1, dst=(rank + 1) % world_size)
    return int(token.item())


def exchange(rank, world_size):
    mine, theirs = torch.full((3,), float(rank)), torch.empty(3)
    operations = [
        dist.P2POp(dist.isend, mine, (rank + 1) % world_size),
        dist.P2POp(dist.irecv, theirs, (rank - 1) % world_size),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return int(theirs[0].item())


def pipeline(rank, microbatches=4):
    """Rank 0 holds the first stage, rank 1 the second; the others look on."""
    torch.manual_seed(rank)
    stage = nn.Linear(4, 4)
    for index in range(microbatches):
        if rank == 0:
            out = stage(torch.full((2, 4), float(index)))
            gradient = torch.empty_like(out)
            request = dist.irecv(gradient, src=1)
            dist.send(out.detach(), dst=1)
            request.wait()
            out.backward(gradient)
        elif rank == 1:
            activations = torch.empty(2, 4)
            dist.recv(activations, src=0)
            activations.requires_grad_()
            stage(activations).square().mean().backward()
            dist.isend(activations.grad, dst=0).wait()
    return 0.0 if stage.weight.grad is None else stage.weight.grad.abs().sum().item()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"ring {ring(rank, world_size)}, exchange {exchange(rank, world_size)}")
    dist.barrier()
    print(f"pipeline gradient {pipeline(rank):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
