"""What people do with optimizers: schedulers, closures, scalers, hooks, copies; any warning is an error."""

import copy
import io
import warnings

import torch
from torch import nn

warnings.simplefilter("error")


class Halving(torch.optim.Optimizer):
    """A hand-written one, with a step() of its own."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


def main():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    data = torch.ones(2, 4)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    calls = []
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        scaler.scale(model(data).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
    handle.remove()
    print("scheduler", scheduler.get_last_lr(), calls)

    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        lbfgs.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    print("closure returns a loss:", lbfgs.step(closure).item() >= 0.0)

    clone = copy.deepcopy(optimizer)
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    print(type(clone).__name__, type(torch.load(buffer, weights_only=False)).__name__)
    weights = nn.Parameter(torch.ones(2))
    Halving([weights]).step()
    print("own class", weights.tolist(), Halving.step.__name__, torch.optim.SGD.step.__name__)


if __name__ == "__main__":
    main()
