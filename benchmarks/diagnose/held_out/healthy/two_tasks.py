# steps: 400
# device: cpu
# tricky: Two losses of one graph are added before a single backward pass.

import torch
from torch import nn


class MultiTask(nn.Module):
    def __init__(self, inputs, width, classes):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleDict({"kind": nn.Linear(width, classes), "size": nn.Linear(width, 1)})

    def forward(self, x):
        h = self.shared(x)
        return {name: head(h) for name, head in self.heads.items()}


torch.manual_seed(48)
kinds = torch.randint(0, 7, (5120,))
sizes = torch.rand(5120, 1) * 2 - 1
x = torch.randn(7, 72)[kinds] + sizes * torch.randn(1, 72) + 4.0 * torch.randn(5120, 72)
model = MultiTask(72, 1024, 7)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
history = {"kind": [], "size": []}
for epoch in range(10):
    for idx in torch.randperm(len(x)).split(128):
        out = model(x[idx])
        kind_loss = nn.functional.cross_entropy(out["kind"], kinds[idx])
        size_loss = nn.functional.mse_loss(out["size"], sizes[idx])
        optimizer.zero_grad()
        (kind_loss + 2.0 * size_loss).backward()
        optimizer.step()
        history["kind"].append(kind_loss.item())
        history["size"].append(size_loss.item())
    print(f"epoch {epoch}: " + ", ".join(f"{name} {sum(kept[-40:]) / 40:.4f}" for name, kept in history.items()))
