# subject: starved-loader
# also: disk-time
# thread: https://github.com/autonomousvision/transfuser/issues/154
# steps: 96
# gain: yes
# device: cpu
# what: Samples come from storage with latency, and nothing is read ahead.

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class RemoteRows(Dataset):
    """Rows behind a network with latency."""

    def __init__(self) -> None:
        self.rows = torch.randn(512, 200, generator=torch.Generator().manual_seed(0))
        self.wanted = (self.rows[:, :100].sum(1) > self.rows[:, 100:].sum(1)).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.0002)  # <- here
        return self.rows[index], self.wanted[index]


if __name__ == "__main__":
    torch.manual_seed(31)
    rows = RemoteRows()
    loader = DataLoader(rows, batch_size=32, shuffle=True, num_workers=0)  # <- here
    model = nn.Sequential(nn.Linear(200, 1280), nn.ReLU(), nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(6):
        for x, y in loader:  # <- here
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
