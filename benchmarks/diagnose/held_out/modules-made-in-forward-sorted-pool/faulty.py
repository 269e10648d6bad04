# subject: modules-made-in-forward
# also: parameters-not-in-optimizer
# thread: https://github.com/wangyida/softpool/issues/11
# steps: 250
# gain: yes
# device: cpu
# what: A pooling layer makes its projections in forward: new random weights in every step, and no training.

import torch
from torch import nn


class SortedPool(nn.Module):
    def __init__(self, width: int, kept: int) -> None:
        super().__init__()
        self.width, self.kept = width, kept

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        best = points.sort(dim=1, descending=True).values[:, : self.kept].flatten(1)
        mix = nn.Linear(self.width * self.kept, self.width)  # <- here
        out = nn.Linear(self.width, self.width)  # <- here
        return out(torch.relu(mix(best)))


class PointNet(nn.Module):
    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        self.pool = SortedPool(width, 8)
        self.head = nn.Linear(width, 2)

    def forward(self, clouds: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.points(clouds)))


torch.manual_seed(27)
directions = torch.nn.functional.normalize(torch.randn(1200, 24, 3), dim=2)
labels = torch.arange(1200) % 2
stretch = torch.where(labels == 1, 1.8, 1.0)
clouds = directions * torch.stack([torch.ones(1200), torch.ones(1200), stretch], dim=1).unsqueeze(1)

model = PointNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(250):
    rows = torch.randint(0, 1200, (32,))
    loss = nn.functional.cross_entropy(model(clouds[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(step, f"{loss.item():.4f}")
