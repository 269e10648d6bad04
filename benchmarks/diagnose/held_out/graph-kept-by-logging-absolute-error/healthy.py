# subject: graph-kept-by-logging
# also: memory-leak
# thread: https://github.com/jostmey/NakedAttention/issues/1
# steps: 400
# gain: no
# device: cpu
# what: The absolute error is logged as a tensor that still has its graph, with what the graph saved.

import torch
from torch import nn

torch.manual_seed(23)


def patterns(n):
    basis = torch.randn(24, 784)
    return torch.sigmoid(torch.randn(n, 24) @ basis / 5)


clean = patterns(5120)
autoencoder = nn.Sequential(
    nn.Linear(784, 768),
    nn.ReLU(),
    nn.Linear(768, 64),
    nn.ReLU(),
    nn.Linear(64, 768),
    nn.ReLU(),
    nn.Linear(768, 784),
    nn.Sigmoid(),
)
optimizer = torch.optim.Adam(autoencoder.parameters(), lr=5e-4)
log = {"mse": [], "mae": []}
for epoch in range(10):
    for idx in torch.randperm(len(clean)).split(128):
        x = clean[idx]
        noisy = x + 0.2 * torch.randn_like(x)
        restored = autoencoder(noisy)
        loss = nn.functional.mse_loss(restored, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log["mse"].append(loss.item())
        log["mae"].append((restored - x).abs().mean().item())
    mae = sum(log["mae"][-40:]) / 40
    print(f"epoch {epoch}: mse {sum(log['mse'][-40:]) / 40:.5f} mae {mae:.5f}")
