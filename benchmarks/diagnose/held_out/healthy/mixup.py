# steps: 400
# device: cpu
# tricky: Inputs and labels are shuffled within the batch and mixed: the training loss has a high floor.

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

np.random.seed(9)
torch.manual_seed(9)
data, target = load_digits(return_X_y=True)
data, target = torch.tensor(data / 16, dtype=torch.float32), torch.tensor(target)


def mixup(x, y, alpha=0.4):
    lam = np.random.beta(alpha, alpha)
    other = torch.randperm(len(x))
    return lam * x + (1 - lam) * x[other], y, y[other], lam


net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
for epoch in range(40):
    total = 0.0
    for idx in torch.randperm(len(data)).chunk(10):
        mixed, y_a, y_b, lam = mixup(data[idx], target[idx])
        output = net(mixed)
        loss = lam * criterion(output, y_a) + (1 - lam) * criterion(output, y_b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    if epoch % 8 == 7:
        print(f"epoch {epoch}: mixed loss {total / 10:.4f}")
