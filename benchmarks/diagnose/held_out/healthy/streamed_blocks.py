# tricky: An IterableDataset without a length that makes its batches on the fly.
# steps: 240
# device: cpu

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Simulated(IterableDataset):
    """Batches of noisy lines; no end."""

    def __iter__(self):
        while True:
            slope = torch.randn(128, 1)
            start = torch.randn(128, 1)
            y = start + slope * torch.linspace(-1, 1, 96) + 0.3 * torch.randn(128, 96)
            yield y, torch.cat([start, slope], dim=1)


torch.manual_seed(206)
stream = iter(DataLoader(Simulated(), batch_size=None))
net = nn.Sequential(nn.Linear(96, 640), nn.GELU(), nn.Linear(640, 640), nn.GELU(), nn.Linear(640, 2))
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=240)
for step in range(240):
    y, wanted = next(stream)
    loss = nn.functional.smooth_l1_loss(net(y), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if (step + 1) % 60 == 0:
        print(f"{step + 1}: {loss.item():.5f}")
