# subject: per-sample-fetch
# also: starved-loader
# thread: https://github.com/pytorch/pytorch/issues/4959
# steps: 200
# gain: yes
# device: cpu
# what: Rows of a tensor are fetched one at a time and stacked again.

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(32)
rows = torch.randn(20480, 40)
targets = (rows @ torch.randn(40, 1)).squeeze(1)
dataset = TensorDataset(rows, targets)
loader = DataLoader(dataset, batch_size=1024, shuffle=True)  # <- here
model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(10):
    for x, y in loader:  # <- here
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
