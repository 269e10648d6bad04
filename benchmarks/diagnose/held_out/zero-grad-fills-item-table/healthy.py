# subject: zero-grad-fills
# thread: own
# steps: 200
# gain: yes
# device: cpu
# what: The gradient of a large table of items is filled with zeros before each backward pass.

import torch
from torch import nn

torch.manual_seed(76)
ITEMS, WIDTH = 60000, 64


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.user = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH))
        nn.init.normal_(self.items.weight, std=0.1)

    def forward(self, seen: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
        user = self.user(self.items(seen).mean(1))
        return (user * self.items(candidate)).sum(1)


model = Recommender()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(200):
    seen = torch.randint(0, ITEMS, (192, 12))
    liked = torch.rand(192) < 0.5
    candidate = torch.where(liked, (seen[:, 0] + 1) % ITEMS, torch.randint(0, ITEMS, (192,)))
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(seen, candidate), liked.float())
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step}: {loss.item():.4f}")
