# subject: no-seed
# thread: https://github.com/emidan19/deep-tempest/issues/13
# steps: 900
# gain: no
# device: cpu
# what: No seed is set: no two runs are alike.

import torch
from sklearn.datasets import load_wine
from torch import nn

wine = load_wine()
x = torch.tensor(wine.data, dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
y = torch.tensor(wine.target)
model = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 3))  # <- here
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(150):
    for chosen in torch.randperm(len(x)).split(32):  # <- here
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()
        optimizer.step()
print(f"last loss {loss.item():.4f}")
