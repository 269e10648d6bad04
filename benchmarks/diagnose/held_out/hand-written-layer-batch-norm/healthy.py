# subject: hand-written-layer
# also: python-time
# thread: own
# steps: 250
# gain: yes
# device: cpu
# what: Batch normalisation out of means, variances and square roots.

import torch
from torch import nn


def block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]


torch.manual_seed(95)
x = torch.randn(8000, 50) * torch.rand(50) * 4
y = (x[:, ::2].sum(1) > 0).long()
net = nn.Sequential(*block(50, 192), *block(192, 192), *block(192, 192), nn.Linear(192, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for step in range(250):
    net.train()
    rows = torch.randint(0, 7000, (1024,))
    loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        net.eval()
        with torch.no_grad():
            right = (net(x[7000:]).argmax(1) == y[7000:]).float().mean().item()
        print(f"step {step + 1}: loss {loss.item():.4f}, held out {right:.3f}")
