# tricky: A loss that soon stays where it is, because the rest is noise of the labels.
# steps: 300
# device: cpu

import torch
from torch import nn


def noisy_labels(kind: torch.Tensor, classes: int, share: float) -> torch.Tensor:
    replaced = torch.rand(len(kind)) < share
    return torch.where(replaced, torch.randint(0, classes, (len(kind),)), kind)


torch.manual_seed(217)
x = torch.randn(60000, 20)
y = noisy_labels(x[:, :4].argmax(1), 4, 0.6)
model = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for step in range(300):
    rows = torch.randint(0, 60000, (200,))
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 75 == 74:
        print(f"step {step + 1}: {sum(losses[-75:]) / 75:.4f}")
