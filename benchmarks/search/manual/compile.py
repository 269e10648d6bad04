"""Many pointwise operations. By hand: torch.compile(model)."""

import torch
from clock import BY_HAND, begin, step_ended
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        y = self.up(self.norm(x))
        y = 0.5 * y * (1 + torch.tanh(0.7978845608 * (y + 0.044715 * y**3)))
        return x + self.scale * torch.sigmoid(x) * self.down(y)


model = nn.Sequential(*(Block(128) for _ in range(6)), nn.Linear(128, 10))
forward = torch.compile(model) if BY_HAND else model
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
x, y = torch.randn(1024, 128), torch.randint(0, 10, (1024,))

begin()
while True:
    optimizer.zero_grad()
    nn.functional.cross_entropy(forward(x), y).backward()
    optimizer.step()
    if step_ended():
        break
