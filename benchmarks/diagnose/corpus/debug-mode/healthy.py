# subject: debug-mode
# also: python-time
# thread: https://github.com/pytorch/torchtitan/pull/430
# steps: 200
# gain: yes
# device: cpu
# what: A profiler that was meant for a look stays around the whole training.

import torch
from torch import nn

torch.manual_seed(79)
x = torch.randn(512, 64)
y = (x @ torch.randn(64, 5)).argmax(1)
blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(10)]
model = nn.Sequential(*blocks, nn.Linear(64, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def train() -> None:
    for step in range(200):
        chosen = torch.randint(0, 512, (32,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()
        optimizer.step()
        if step % 67 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


train()
