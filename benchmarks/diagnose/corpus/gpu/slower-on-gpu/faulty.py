# subject: slower-on-gpu
# also: tiny-batch
# thread: https://github.com/pytorch/pytorch/issues/1088
# steps: 1000
# gain: yes
# device: cuda
# what: A model of a few hundred weights, whose kernels take longer to launch than to compute on the CPU.

import torch
from torch import nn

torch.manual_seed(215)
device = "cuda"
x = torch.randn(16, 4, device=device)
y = x.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1)).to(device)  # <- here
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1000):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 250 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
