# subject: modules-made-in-forward
# follows: parameters-not-in-optimizer, loss-not-falling
# thread: own
# steps: 400
# gain: no
# device: cpu
# what: The projection that joins two inputs is made anew in every forward pass, with new random weights.

import torch
from torch import nn


class TwoTower(nn.Module):
    def __init__(self, users, items, width):
        super().__init__()
        self.user = nn.Sequential(nn.Linear(users, width), nn.ReLU())
        self.item = nn.Sequential(nn.Linear(items, width), nn.ReLU())
        self.project = nn.Linear(2 * width, width)
        self.score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, user, item):
        joined = torch.cat([self.user(user), self.item(item)], dim=1)
        hidden = torch.relu(self.project(joined))
        return self.score(hidden).squeeze(1)


torch.manual_seed(64)
users, items = torch.randn(400, 60), torch.randn(300, 90)
taste = torch.randn(60, 90) / 8
who, what = torch.randint(0, 400, (5120,)), torch.randint(0, 300, (5120,))
rating = ((users[who] @ taste) * items[what]).sum(1)
rating = (rating - rating.mean()) / rating.std()

model = TwoTower(60, 90, 640)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
for epoch in range(10):
    total, batches = 0.0, torch.randperm(len(rating)).split(128)
    for idx in batches:
        predicted = model(users[who[idx]], items[what[idx]])
        loss = nn.functional.mse_loss(predicted, rating[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: mse {total / len(batches):.4f}")
