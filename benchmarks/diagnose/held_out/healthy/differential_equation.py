# tricky: Derivatives of the network with respect to its inputs, with create_graph, twice in each step.
# steps: 200
# device: cpu

import torch
from torch import nn

torch.manual_seed(211)
net = nn.Sequential(nn.Linear(1, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(200):
    t = (6 * torch.rand(256, 1)).requires_grad_()
    u = net(t)
    (speed,) = torch.autograd.grad(u.sum(), t, create_graph=True)
    (force,) = torch.autograd.grad(speed.sum(), t, create_graph=True)
    origin = torch.zeros(1, 1, requires_grad=True)
    start = net(origin)
    (start_speed,) = torch.autograd.grad(start.sum(), origin, create_graph=True)
    residual = (force + 0.2 * speed + u).pow(2).mean()
    loss = residual + (start - 1).pow(2).sum() + start_speed.pow(2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        print(f"step {step + 1}: residual {residual.item():.5f}, all {loss.item():.5f}")
