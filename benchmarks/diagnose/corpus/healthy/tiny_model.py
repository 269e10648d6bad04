# tricky: Steps of a few hundred microseconds, because the problem is small.
# steps: 1500
# device: cpu

import torch
from sklearn.datasets import load_iris
from torch import nn

torch.manual_seed(112)
iris = load_iris()
x = torch.tensor(iris.data, dtype=torch.float32)
y = torch.tensor(iris.target)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(1500):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if epoch % 300 == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
