# subject: channels-last-missing
# thread: https://github.com/pytorch/pytorch/pull/117845
# steps: 120
# gain: yes
# device: cpu
# what: A small residual network in the default layout, which oneDNN reorders around every convolution.

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


def network(channels: int = 32) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.ReLU())
    return nn.Sequential(
        stem,
        Block(channels),
        Block(channels),
        nn.MaxPool2d(2),
        Block(channels),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 4),
    )


torch.manual_seed(22)
images = torch.rand(400, 3, 48, 48)
labels = torch.arange(400) % 4
for quarter in range(4):
    top, left = 24 * (quarter // 2), 24 * (quarter % 2)
    images[labels == quarter, :, top : top + 24, left : left + 24] += 0.3
model = network().to(memory_format=torch.channels_last)
images = images.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for epoch in range(10):
    model.train()
    total = 0.0
    for rows in torch.randperm(400)[:384].split(32):
        out = model(images[rows].contiguous(memory_format=torch.channels_last))
        loss = nn.functional.cross_entropy(out, labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: {total / 12:.4f}")
