# subject: per-sample-fetch
# also: starved-loader
# thread: https://github.com/shenweichen/DeepCTR-Torch/issues/70
# steps: 800
# gain: yes
# device: cpu
# what: A table of categories in memory goes through a TensorDataset, row by row, for batches of 512.

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2024)
rng = np.random.default_rng(2024)
FIELDS = 8
ids = torch.from_numpy(rng.integers(0, 400, size=(51200, FIELDS)))
dense = torch.from_numpy(rng.normal(size=(51200, 6))).float()
clicked = ((ids[:, 0] % 3 == 0) & (dense[:, 1] > -0.5)).float()


class WideAndDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(400, 16) for _ in range(FIELDS))
        self.deep = nn.Sequential(nn.Linear(FIELDS * 16 + 6, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
        self.top = nn.Linear(128, 1)

    def forward(self, ids, dense):
        looked_up = [table(ids[:, i]) for i, table in enumerate(self.embeddings)]
        return self.top(self.deep(torch.cat([*looked_up, dense], dim=1))).squeeze(1)


model = WideAndDeep()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
criterion = nn.BCEWithLogitsLoss()
loader = DataLoader(TensorDataset(ids, dense, clicked), batch_size=512, shuffle=True)  # <- here
for epoch in range(8):
    model.train()
    total = 0.0
    for batch_ids, batch_dense, batch_clicked in loader:  # <- here
        optimizer.zero_grad()
        loss = criterion(model(batch_ids, batch_dense), batch_clicked)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print("epoch", epoch, "log loss", round(total / 100, 4))
