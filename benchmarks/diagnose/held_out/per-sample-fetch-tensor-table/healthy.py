# subject: per-sample-fetch
# also: starved-loader
# thread: https://maxwellrules.com/data/batch_dataloaders.html
# steps: 320
# gain: yes
# device: cpu
# what: A table in memory is fetched row by row and stacked again; one index of all rows does the same.

import numpy as np
import torch
from sklearn.datasets import make_classification
from sklearn.preprocessing import scale
from torch import nn

torch.manual_seed(0)
features, labels = make_classification(
    n_samples=40960, n_features=54, n_informative=30, n_classes=4, class_sep=1.5, random_state=0
)
features = torch.tensor(scale(features), dtype=torch.float32)
labels = torch.tensor(labels, dtype=torch.int64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(54, 512)
        self.fc2 = nn.Linear(512, 512)
        self.fc3 = nn.Linear(512, 4)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        return self.fc3(x)


net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for epoch in range(8):
    losses = []
    for rows in torch.randperm(len(features)).split(1024):
        x, y = features[rows], labels[rows]
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch}: mean loss {np.mean(losses):.4f}")
