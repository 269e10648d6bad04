# subject: parameters-not-in-optimizer
# thread: https://github.com/openvinotoolkit/nncf/pull/327
# steps: 600
# gain: no
# device: cpu
# what: The last layer is replaced after the optimizer has been made: the new one is not trained.

import torch
from torch import nn

torch.manual_seed(17)
inputs = torch.randn(2048, 48)
targets = (inputs @ torch.randn(48, 9)).argmax(dim=1)
model = nn.Sequential(nn.Linear(48, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 100))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # <- here
model[-1] = nn.Linear(256, 9)  # <- here

for step in range(600):
    chosen = torch.randint(len(inputs), (64,))
    loss = nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
