"""Operations just large enough to be split among threads. By hand: torch.set_num_threads(1)."""

import torch
from clock import BY_HAND, begin, step_ended
from torch import nn

if BY_HAND:
    torch.set_num_threads(1)
layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
x, y = torch.randn(32, 256), torch.randint(0, 10, (32,))

begin()
while True:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    if step_ended():
        break
