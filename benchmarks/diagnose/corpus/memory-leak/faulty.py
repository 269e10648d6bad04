# subject: memory-leak
# also: graph-kept-by-logging
# thread: https://github.com/TRI-ML/packnet-sfm/issues/47
# steps: 150
# gain: no
# device: cpu
# what: Outputs of all batches are kept in a list that nobody empties.

import torch
from torch import nn

torch.manual_seed(53)
images = torch.rand(256, 1, 32, 32)
encoder = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))
optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
outputs = []
for step in range(150):
    batch = images[torch.randint(0, 256, (32,))]
    restored = encoder(batch + 0.1 * torch.randn_like(batch))
    loss = nn.functional.mse_loss(restored, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    outputs.append({"image": restored.detach(), "input": batch})  # <- here
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
