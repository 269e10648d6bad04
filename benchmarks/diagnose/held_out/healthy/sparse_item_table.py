# tricky: Two optimizers step together, one of them on sparse gradients.
# steps: 500
# device: cpu

import torch
from torch import nn

torch.manual_seed(212)
users = torch.randint(0, 5000, (64000,))
items = torch.randint(0, 3000, (64000,))
stars = torch.sin(users.float() * 0.37) + torch.cos(items.float() * 0.73)


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(5000, 64, sparse=True)
        self.item = nn.Embedding(3000, 64, sparse=True)
        self.head = nn.Sequential(nn.Linear(128, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 1))

    def forward(self, user, item):
        return self.head(torch.cat([self.user(user), self.item(item)], dim=1)).squeeze(1)


model = Factors()
tables = torch.optim.SparseAdam([model.user.weight, model.item.weight], lr=2e-2)
rest = torch.optim.Adam(model.head.parameters(), lr=1e-3)
for epoch in range(2):
    total = 0.0
    for rows in torch.randperm(64000).split(512):
        loss = nn.functional.mse_loss(model(users[rows], items[rows]), stars[rows])
        tables.zero_grad()
        rest.zero_grad()
        loss.backward()
        tables.step()
        rest.step()
        total += loss.item()
    print(f"epoch {epoch}: {total / 125:.4f}")
