# subject: python-time
# also: slow-transform
# thread: https://github.com/pytorch/pytorch/issues/39842
# steps: 180
# gain: yes
# device: cpu
# what: Between two steps a batch is assembled by Python from nested lists.

import torch
from torch import nn

torch.manual_seed(62)
table = torch.randn(1024, 300)
labels = (table @ torch.randn(300, 3)).argmax(1)
model = nn.Sequential(nn.Linear(300, 256), nn.ReLU(), nn.Linear(256, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(180):
    chosen = torch.randint(0, 1024, (128,))
    batch = table[chosen] / 2
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch), labels[chosen])
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
