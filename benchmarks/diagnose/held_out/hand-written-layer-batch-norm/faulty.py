# subject: hand-written-layer
# also: python-time
# thread: own
# steps: 250
# gain: yes
# device: cpu
# what: Batch normalisation out of means, variances and square roots.

import torch
from torch import nn


class Normalise(nn.Module):
    def __init__(self, width: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))
        self.momentum, self.eps = momentum, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return (x - self.mean) / torch.sqrt(self.var + self.eps) * self.scale + self.shift
        mean = x.mean(0)
        var = ((x - mean) ** 2).mean(0)  # <- here
        with torch.no_grad():
            self.mean += self.momentum * (mean - self.mean)
            self.var += self.momentum * (var - self.var)
        return (x - mean) / torch.sqrt(var + self.eps) * self.scale + self.shift  # <- here


def block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs), Normalise(outputs), nn.ReLU()]


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
