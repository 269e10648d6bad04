# subject: per-sample-fetch
# also: starved-loader
# thread: https://github.com/pytorch/pytorch/issues/26957
# steps: 192
# gain: yes
# device: cpu
# what: A table in memory behind a dataset that hands out single rows.

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Table(Dataset):
    def __init__(self, rows: int) -> None:
        rng = np.random.default_rng(1)
        self.categories = rng.integers(0, 50, (rows, 6))
        self.prices = (self.categories[:, 0] * 0.1 + self.categories[:, 1] * 0.05).astype(np.float32)

    def __len__(self) -> int:
        return len(self.prices)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.float32]:  # <- here
        return self.categories[row], self.prices[row]


torch.manual_seed(33)
loader = DataLoader(Table(16384), batch_size=1024, shuffle=True)  # <- here
model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(12):
    for categories, prices in loader:  # <- here
        loss = nn.functional.mse_loss(model(categories).squeeze(1), prices)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
