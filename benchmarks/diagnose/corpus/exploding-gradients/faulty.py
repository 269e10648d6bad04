# subject: exploding-gradients
# follows: loss-not-falling
# thread: https://github.com/pytorch/pytorch/issues/2623
# steps: 120
# gain: no
# device: cpu
# what: A recurrent net with large weights over 100 steps, and no clipping.

import torch
from torch import nn

torch.manual_seed(72)
series = torch.cumsum(torch.randn(64, 101, 4) * 0.1, dim=1)
cell, head = nn.RNN(4, 64, nonlinearity="relu", batch_first=True), nn.Linear(64, 4)
nn.init.orthogonal_(cell.weight_hh_l0, gain=1.5)  # <- here
parameters = [*cell.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(parameters, lr=1e-3)
for step in range(120):
    batch = series[torch.randint(0, 64, (16,))]
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(head(cell(batch[:, :-1])[0]), batch[:, 1:])
    loss.backward()  # <- here
    optimizer.step()
    if step % 30 == 0:
        print(f"step {step}: loss {loss.item():.4g}")
