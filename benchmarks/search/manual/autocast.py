"""Wide products. By hand: a bf16 autocast around the model."""

import torch
from clock import BY_HAND, begin, step_ended
from torch import nn

model = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024), nn.GELU(), nn.Linear(1024, 100))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
x, y = torch.randn(256, 1024), torch.randint(0, 100, (256,))

begin()
while True:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=BY_HAND):
        scores = model(x)
    nn.functional.cross_entropy(scores.float(), y).backward()
    optimizer.step()
    if step_ended():
        break
