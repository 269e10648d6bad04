"""A hidden state goes from step to step, cut from its graph."""

import torch
from torch import nn

torch.manual_seed(0)
network, head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 1)
optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()])
state = None

for _ in range(200):
    out, state = network(torch.randn(4, 12, 8), state)
    state = tuple(one.detach() for one in state)
    loss = head(out).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
