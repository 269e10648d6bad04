# subject: anomaly-mode
# thread: https://github.com/facebookresearch/svoice/issues/17
# steps: 200
# gain: yes
# device: cpu
# what: The backward pass of every step stands in a detect_anomaly context.

import torch
from torch import nn

torch.manual_seed(60)
mixtures = torch.randn(256, 1, 256)
voices = nn.functional.avg_pool1d(mixtures, 5, stride=1, padding=2)
separator = nn.Sequential(nn.Conv1d(1, 16, 9, padding=4), nn.PReLU(), nn.Conv1d(16, 16, 9, padding=4), nn.PReLU())
separator.append(nn.Conv1d(16, 1, 1))
optimizer = torch.optim.Adam(separator.parameters(), lr=2e-3)
for step in range(200):
    chosen = torch.randint(0, 256, (8,))
    optimizer.zero_grad()
    with torch.autograd.detect_anomaly(check_nan=True):  # <- here
        loss = nn.functional.l1_loss(separator(mixtures[chosen]), voices[chosen])
        loss.backward()  # <- here
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
