# subject: logging-time
# also: python-time
# thread: https://github.com/EugenHotaj/pytorch-generative/issues/10
# steps: 600
# gain: yes
# device: cpu
# what: A line for every weight and step goes to the terminal, which is flushed each time.

import sys

import torch
from torch import nn

torch.manual_seed(65)
x = torch.randn(512, 16)
y = x.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(600):
    chosen = torch.randint(0, 512, (64,))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        print(step, name, parameter.grad, file=sys.stderr, flush=True)  # <- here
