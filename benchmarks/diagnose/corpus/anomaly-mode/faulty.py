# subject: anomaly-mode
# thread: https://github.com/yenchenlin/nerf-pytorch/issues/42
# steps: 400
# gain: yes
# device: cpu
# what: Anomaly detection was left on after a search for NaN.

import torch
from torch import nn

torch.autograd.set_detect_anomaly(True)  # <- here
torch.manual_seed(59)
points = torch.rand(4096, 3) * 2 - 1
density = (points.norm(dim=1, keepdim=True) < 0.8).float()


def encode(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, *(wave(x * 2.0**k) for k in range(5) for wave in (torch.sin, torch.cos))], dim=1)


model = nn.Sequential(nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
model.append(nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(400):
    chosen = torch.randint(0, 4096, (256,))
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(encode(points[chosen])), density[chosen])
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
