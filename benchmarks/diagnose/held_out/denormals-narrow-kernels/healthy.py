# subject: denormals
# thread: https://github.com/pytorch/pytorch/issues/23862
# steps: 400
# gain: yes
# device: cpu
# what: Features of narrow Gaussian kernels: many of them lie between 1e-45 and 1e-38.

import torch
from torch import nn

torch.manual_seed(68)
torch.set_flush_denormal(True)
x = torch.rand(2048, 3)
centres = torch.rand(600, 3)
y = torch.sin(6 * x[:, :1]) * torch.cos(5 * x[:, 1:2]) + x[:, 2:]
WIDTH = 0.09


class KernelNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(600, 256), nn.Tanh(), nn.Linear(256, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.out(features)


features = torch.exp(-torch.cdist(x, centres).square() / (2 * WIDTH**2))
model = KernelNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(400):
    rows = torch.randint(0, 2048, (256,))
    loss = nn.functional.mse_loss(model(features[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 80 == 79:
        print(f"{step + 1}: {loss.item():.5f}")
