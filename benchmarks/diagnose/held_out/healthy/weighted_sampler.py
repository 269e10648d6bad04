# tricky: A sampler draws rare classes more often; a batch is fetched at once.
# steps: 240
# device: cpu

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, WeightedRandomSampler


class Rare(Dataset):
    def __init__(self, count: int = 6000) -> None:
        self.x = torch.randn(count, 40)
        self.y = (self.x[:, :3].sum(1) > 3.2).long()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[rows], self.y[rows]


torch.manual_seed(205)
data = Rare()
weights = 1.0 / torch.bincount(data.y).float()[data.y]
sampler = BatchSampler(WeightedRandomSampler(weights, 6000), batch_size=200, drop_last=True)
loader = DataLoader(data, sampler=sampler, batch_size=None)
model = nn.Sequential(nn.Linear(40, 640), nn.ReLU(), nn.Dropout(0.2), nn.Linear(640, 640), nn.ReLU(), nn.Linear(640, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
for epoch in range(8):
    model.train()
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        found = (model(data.x).argmax(1) == 1)[data.y == 1].float().mean().item()
    print(f"epoch {epoch}: loss {loss.item():.4f}, rare ones found {found:.3f}")
