# steps: 180
# device: cpu
# tricky: The dataset's dict grows in the first epoch, until every sample is in it.

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class CachedCurves(Dataset):
    """Makes each curve once and remembers it."""

    def __init__(self, count):
        self.count = count
        self.cache = {}

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if i not in self.cache:
            rng = np.random.default_rng(i)
            frequency = rng.uniform(1, 6)
            curve = np.sin(frequency * np.linspace(0, 6, 256)) + 0.3 * rng.standard_normal(256)
            self.cache[i] = (torch.tensor(curve, dtype=torch.float32), torch.tensor([frequency], dtype=torch.float32))
        return self.cache[i]


torch.manual_seed(16)
loader = DataLoader(CachedCurves(3840), batch_size=128, shuffle=True)
model = nn.Sequential(
    nn.Linear(256, 1024),
    nn.ReLU(),
    nn.Linear(1024, 1024),
    nn.ReLU(),
    nn.Linear(1024, 1024),
    nn.ReLU(),
    nn.Linear(1024, 1024),
    nn.ReLU(),
    nn.Linear(1024, 1),
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
for epoch in range(6):
    total = 0.0
    for curves, frequencies in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(curves), frequencies)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: mse {total / len(loader):.4f}")
