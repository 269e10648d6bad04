# subject: graph-breaks
# thread: https://github.com/isayevlab/aimnetcentral/pull/109
# steps: 400
# gain: no
# device: cpu
# what: An .item() between the layers of a compiled model splits its graph.

import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(128, 128) for _ in range(4)])
        self.head = nn.Linear(128, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            x = x / x.detach().abs().max().clamp(min=1.0)
        return self.head(x)


torch.manual_seed(44)
x = torch.randn(1024, 128)
y = (x @ torch.randn(128, 3)).argmax(1)
model = Gated()
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(400):
    chosen = torch.randint(0, 1024, (64,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(compiled(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
