# subject: zero-grad-fills
# thread: https://github.com/Lightning-AI/pytorch-lightning/issues/6534
# steps: 120
# gain: yes
# device: cpu
# what: Gradients are filled with zeros, which the next backward pass reads and adds to.

import torch
from torch import nn

torch.manual_seed(76)
x = torch.randn(512, 1024)
y = (x @ torch.randn(1024, 8)).argmax(1)
model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(120):
    chosen = torch.randint(0, 512, (8,))
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
