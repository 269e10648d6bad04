# subject: per-sample-fetch
# also: starved-loader
# thread: https://github.com/pytorch/pytorch/issues/106704
# steps: 900
# gain: yes
# device: cpu
# what: A Dataset over a NumPy table turns every row into tensors of its own, which are then stacked again.

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(5)
np.random.seed(5)


class Tumours(Dataset):
    def __init__(self, copies=40):
        x, y = load_breast_cancer(return_X_y=True)
        x = StandardScaler().fit_transform(x)
        x = np.concatenate([x + 0.05 * np.random.randn(*x.shape) for _ in range(copies)])
        self.x, self.y = x.astype(np.float32), np.tile(y, copies)

    def __len__(self):
        return len(self.y)

    def __getitems__(self, rows):
        return torch.from_numpy(self.x[rows]), torch.from_numpy(self.y[rows])


data = Tumours()
loader = DataLoader(data, batch_size=256, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)
net = nn.Sequential(
    nn.Linear(30, 384),
    nn.BatchNorm1d(384),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(384, 384),
    nn.ReLU(),
    nn.Linear(384, 2),
)
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
step = 0
while step < 900:
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(net(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % 100 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}")
        if step == 900:
            break
