# subject: training-in-eval-mode
# thread: https://github.com/pytorch/tutorials/issues/1624
# steps: 384
# gain: no
# device: cpu
# what: A test function switches a model with batch norm to evaluation; the train function never switches back.

import torch
from torch import nn


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)  # <- here
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model.eval()  # <- here
    with torch.no_grad():
        print(f"accuracy {(model(x).argmax(1) == y).float().mean().item():.1%}")


torch.manual_seed(15)
x = 3 * torch.randn(2304, 40) + 1
y = (x @ torch.randn(40, 4)).argmax(1)
batches = list(zip(x[:2048].split(64), y[:2048].split(64), strict=True))
model = nn.Sequential(nn.Linear(40, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256), nn.BatchNorm1d(256))
model.extend([nn.ReLU(), nn.Linear(256, 4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(12):
    train(model, optimizer, batches)
    test(model, x[2048:], y[2048:])
