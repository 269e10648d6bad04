# subject: loss-not-falling
# also: vanishing-gradients
# thread: https://github.com/BrainJS/brain.js/issues/98
# steps: 800
# gain: no
# device: cpu
# what: Inputs that are not normalised saturate the sigmoid at the end: its gradient is zero from the first step.

import torch
from torch import nn

torch.manual_seed(70)
x = torch.rand(2048, 64) * 255
y = (x[:, :32].mean(1) > x[:, 32:].mean(1)).float()
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
x = (x - 127.5) / 74
for step in range(800):
    chosen = torch.randint(0, 2048, (64,))
    optimizer.zero_grad()
    probability = torch.sigmoid(model(x[chosen])).squeeze(1)
    loss = nn.functional.mse_loss(probability, y[chosen])
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
