"""Unseeded random state, of every kind, differs between ranks, whatever process they were forked from."""

import random
import tempfile
import uuid

import numpy as np
import torch
import torch.distributed as dist

draws = {
    "random": random.random(),
    "numpy": float(np.random.rand()),
    "numpy generator": float(np.random.default_rng().random()),
    "torch": torch.rand(1).item(),
    "torch seed": torch.initial_seed(),
    "uuid": str(uuid.uuid4()),
    "temporary name": next(tempfile._get_candidate_names()),
}
dist.init_process_group("gloo")
gathered = [None] * dist.get_world_size()
dist.all_gather_object(gathered, draws)
for name in draws:
    different = len({values[name] for values in gathered})
    print(name, "same on all ranks" if different == 1 else "different on each rank")
dist.barrier()
dist.destroy_process_group()
