# subject: parameters-not-in-optimizer
# thread: https://github.com/amjltc295/pytorch-golden-template/issues/76
# steps: 600
# gain: no
# device: cpu
# what: A loss has learned weights of its own, which the optimizer does not get.

import torch
from torch import nn


class PrototypeLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(6, 32))  # <- here

    def forward(self, embedded: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(-torch.cdist(embedded, self.prototypes), classes)


torch.manual_seed(18)
inputs = torch.randn(1536, 40)
classes = (inputs @ torch.randn(40, 6)).argmax(1)
model = nn.Sequential(nn.Linear(40, 256), nn.ReLU(), nn.Linear(256, 32))
criterion = PrototypeLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)  # <- here
for step in range(600):
    chosen = torch.randint(len(inputs), (64,))
    optimizer.zero_grad()
    loss = criterion(model(inputs[chosen]), classes[chosen])
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
