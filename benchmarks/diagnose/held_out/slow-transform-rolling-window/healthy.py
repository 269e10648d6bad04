# subject: slow-transform
# also: starved-loader, python-time, per-sample-fetch
# thread: https://github.com/ivadomed/ivadomed/issues/977
# steps: 200
# gain: yes
# device: cpu
# what: Each window of a series is smoothed point by point in Python whenever it is fetched.

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

HISTORY, SPAN = 96, 8


class Windows(Dataset):
    def __init__(self, series):
        self.series = series.astype(np.float32)
        padded = np.concatenate([np.zeros(1), np.cumsum(self.series, dtype=np.float64)])
        self.smooth = np.zeros_like(self.series)
        self.smooth[SPAN - 1 :] = (padded[SPAN:] - padded[:-SPAN]) / SPAN

    def __len__(self):
        return 3200

    def __getitem__(self, start):
        begin = start + SPAN
        x = self.smooth[begin : begin + HISTORY]
        return torch.from_numpy(x), torch.tensor([self.series[begin + HISTORY]])


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(HISTORY, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, 1)
        )

    def forward(self, x):
        return self.net(x)


def main():
    torch.manual_seed(17)
    t = np.arange(4000)
    noise = np.random.default_rng(17).normal(size=4000)
    data = Windows(np.sin(t / 11) + 0.4 * np.sin(t / 3.7) + 0.05 * noise)
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = Forecast()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    for epoch in range(4):
        model.train()
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        scheduler.step()
        print(f"epoch {epoch}: {total / len(loader):.5f}")


main()
