# tricky: A negative loss, and layers that freeze half of their input each.
# steps: 160
# device: cpu

import math

import torch
from torch import nn


class Coupling(nn.Module):
    def __init__(self, width: int, flip: bool) -> None:
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(width // 2, 256), nn.ReLU(), nn.Linear(256, width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        log_scale, shift = self.net(a).chunk(2, dim=1)
        log_scale = torch.tanh(log_scale)
        b = b * log_scale.exp() + shift
        return torch.cat([b, a] if self.flip else [a, b], dim=1), log_scale.sum(1)


torch.manual_seed(223)
data = torch.randn(8000, 4) @ torch.randn(4, 16) / 10 + 0.05 * torch.randn(8000, 16)
layers = nn.ModuleList(Coupling(16, bool(i % 2)) for i in range(4))
optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)
for step in range(160):
    z = data[torch.randint(0, 8000, (512,))]
    volume = torch.zeros(512)
    for layer in layers:
        z, change = layer(z)
        volume = volume + change
    loss = (0.5 * z.pow(2).sum(1) + 8 * math.log(2 * math.pi) - volume).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 39:
        print(f"step {step + 1}: {loss.item():.3f} nats")
