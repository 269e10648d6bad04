# steps: 360
# device: cpu
# tricky: A bank keeps features of earlier batches, but it has a fixed size and is overwritten in place.

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(33)


class MemoryBank:
    def __init__(self, size, dim):
        self.features = F.normalize(torch.randn(size, dim), dim=1)
        self.position = 0

    @torch.no_grad()
    def push(self, batch):
        where = (self.position + torch.arange(len(batch))) % len(self.features)
        self.features[where] = batch
        self.position = int(where[-1]) + 1


groups = torch.randn(50, 100)
x = groups[torch.randint(0, 50, (5120,))] + 0.5 * torch.randn(5120, 100)
encoder = nn.Sequential(
    nn.Linear(100, 1024),
    nn.ReLU(),
    nn.Linear(1024, 512),
    nn.ReLU(),
    nn.Linear(512, 64),
    nn.BatchNorm1d(64, affine=False),
)
optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-4)
bank = MemoryBank(1024, 64)
with torch.no_grad():
    bank.push(F.normalize(encoder(x[:1024]), dim=1))
for epoch in range(9):
    total = 0.0
    for idx in torch.randperm(len(x)).split(128):
        one = F.normalize(encoder(x[idx] + 0.3 * torch.randn(len(idx), 100)), dim=1)
        two = F.normalize(encoder(x[idx] + 0.3 * torch.randn(len(idx), 100)), dim=1)
        positive = (one * two).sum(1, keepdim=True)
        negative = one @ bank.features.T
        logits = torch.cat([positive, negative], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(idx), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bank.push(two.detach())
        total += loss.item()
    print(f"epoch {epoch}: {total / 40:.4f}")
