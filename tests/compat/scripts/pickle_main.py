"""Classes and functions of __main__: pickled, saved by torch, sent to a spawned process, inspected."""

import dataclasses
import inspect
import io
import multiprocessing
import pickle
import typing

import torch
from torch import nn


@dataclasses.dataclass
class Config:
    width: int = 4
    name: typing.Optional["str"] = None


class Net(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.layer = nn.Linear(config.width, 1)


def describe(config: Config) -> str:
    return f"{config} in {__name__}"


def main():
    config = pickle.loads(pickle.dumps(Config(6, "six")))
    print(config, type(config) is Config, type(config).__module__)
    buffer = io.BytesIO()
    torch.save(Net(config), buffer)
    buffer.seek(0)
    net = torch.load(buffer, weights_only=False)
    print(type(net) is Net, net.config, tuple(net.layer.weight.shape))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(describe, (Config(1, "one"),)))
    print(typing.get_type_hints(Config)["width"], inspect.getsource(describe).splitlines()[0])


if __name__ == "__main__":
    main()
