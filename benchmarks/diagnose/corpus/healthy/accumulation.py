# tricky: Several backward passes between two steps, averaged as they should be.
# steps: 120
# device: cpu

import torch
from torch import nn

torch.manual_seed(102)
x = torch.randn(4096, 64)
y = (x @ torch.randn(64, 8)).argmax(1)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
every = 4
for step in range(120):
    shown = 0.0
    for _ in range(every):
        chosen = torch.randint(0, 4096, (32,))
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen]) / every
        loss.backward()
        shown += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 24 == 0:
        print(f"step {step}: loss {shown:.4f}")
