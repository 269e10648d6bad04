"""A small recurrent model, whose operations are too small for two threads. By hand: torch.set_num_threads(1)."""

import torch
from clock import BY_HAND, begin, step_ended
from torch import nn

if BY_HAND:
    torch.set_num_threads(1)
cell, head = nn.GRUCell(32, 192), nn.Linear(192, 8)
optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=1e-2)
x, y = torch.randn(24, 48, 32), torch.randint(0, 8, (48,))

begin()
while True:
    optimizer.zero_grad()
    state = torch.zeros(48, 192)
    for one in x:
        state = cell(one, state)
    nn.functional.cross_entropy(head(state), y).backward()
    optimizer.step()
    if step_ended():
        break
