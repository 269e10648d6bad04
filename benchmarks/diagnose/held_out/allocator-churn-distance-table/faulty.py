# subject: allocator-churn
# thread: own
# steps: 150
# gain: yes
# device: cpu
# what: The similarities to a bank of 24,000 features, 24 MB, are written to a new tensor in every step.

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(35)
BANK, WIDTH, BATCH = 24000, 24, 256
bank = F.normalize(torch.randn(BANK, WIDTH), dim=1)
samples = torch.randn(5120, 96)
head = nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, WIDTH))
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for step in range(150):
    batch = samples[torch.randint(len(samples), (BATCH,))]
    features = F.normalize(head(batch), dim=1)
    with torch.no_grad():
        similarities = torch.mm(features, bank.T)  # <- here
        nearest = bank[similarities.argmax(1)]
        del similarities
    loss = (2 - 2 * (features * nearest).sum(1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(f"step {step}: {loss.item():.4f}")
