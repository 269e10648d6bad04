# subject: no-seed
# thread: https://github.com/NatLabRockies/Wattile/issues/133
# steps: 250
# gain: no
# device: cpu
# what: Initial weights, noise and the order of samples differ from run to run.

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn

torch.manual_seed(12)
np.random.seed(12)
x, y = load_diabetes(return_X_y=True)
x = torch.tensor(x / x.std(0), dtype=torch.float32)
y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
QUANTILES = torch.tensor([0.1, 0.5, 0.9])


def pinball(out, wanted):
    error = wanted.unsqueeze(1) - out
    return torch.maximum(QUANTILES * error, (QUANTILES - 1) * error).mean()


net = nn.Sequential(nn.Linear(10, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
for epoch in range(25):
    order = np.random.permutation(400)
    total = 0.0
    for rows in torch.from_numpy(order).split(40):
        noisy = x[rows] + 0.05 * torch.randn(len(rows), 10)
        loss = pinball(net(noisy), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    if epoch % 5 == 4:
        print(f"epoch {epoch + 1}: {total / 10:.4f}")
