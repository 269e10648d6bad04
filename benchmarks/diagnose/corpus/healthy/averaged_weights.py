# tricky: A second model whose parameters are in no optimizer: the moving average of the first.
# steps: 240
# device: cpu

import copy

import torch
from torch import nn

torch.manual_seed(105)
x = torch.randn(2048, 64)
y = (x @ torch.randn(64, 6)).argmax(1)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 6))
average = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(240):
    chosen = torch.randint(0, 1536, (64,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for kept, new in zip(average.parameters(), model.parameters(), strict=True):
            kept.lerp_(new, 0.02)
    if step % 40 == 39:
        with torch.no_grad():
            right = (average(x[1536:]).argmax(1) == y[1536:]).float().mean().item()
        print(f"step {step + 1}: loss {loss.item():.4f}, accuracy of the average {right:.1%}")
