# subject: half-weights
# follows: loss-not-falling
# thread: https://github.com/workofart/ml-by-hand/pull/85
# steps: 600
# gain: no
# device: cpu
# what: Weights are kept in bfloat16, which rounds small updates away.

import torch
from torch import nn

torch.manual_seed(74)
x = torch.randn(1024, 96)
y = (x @ torch.randn(96, 5)).argmax(1)
model = nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(600):
    chosen = torch.randint(0, 1024, (64,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x[chosen])
    loss = nn.functional.cross_entropy(logits.float(), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 150 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
