# tricky: Forward hooks collect activations in one epoch of five, and are removed after it.
# steps: 200
# device: cpu

import torch
from torch import nn

torch.manual_seed(219)
x = torch.randn(5120, 48)
y = (x[:, :2].prod(1) > 0).long()
model = nn.Sequential(nn.Linear(48, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
for epoch in range(5):
    seen, handles = [], []
    if epoch == 3:
        for layer in model:
            if isinstance(layer, nn.ReLU):
                hook = lambda layer, inputs, output: seen.append(output.detach().mean().item())  # noqa: E731
                handles.append(layer.register_forward_hook(hook))
    for rows in torch.randperm(5120).split(128):
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for handle in handles:
        handle.remove()
    means = f", mean activation {sum(seen) / len(seen):.3f}" if seen else ""
    print(f"epoch {epoch}: {loss.item():.4f}{means}")
