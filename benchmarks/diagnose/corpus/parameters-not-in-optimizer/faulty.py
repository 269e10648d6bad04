# subject: parameters-not-in-optimizer
# thread: https://github.com/pytorch/pytorch/issues/715
# steps: 600
# gain: no
# device: cpu
# what: Hidden layers in a Python list are no parameters of the model, and are never trained.

import torch
from torch import nn


class Network(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.entry = nn.Linear(32, 128)
        self.hidden = [nn.Linear(128, 128) for _ in range(depth)]  # <- here
        self.classifier = nn.Linear(128, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.entry(x))
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.classifier(x)


torch.manual_seed(16)
inputs = torch.randn(2048, 32)
targets = (inputs @ torch.randn(32, 3)).argmax(dim=1)
model = Network(depth=3)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # <- here
for step in range(600):
    chosen = torch.randint(len(inputs), (64,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen])
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
