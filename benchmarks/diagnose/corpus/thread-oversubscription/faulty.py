# subject: thread-oversubscription
# thread: https://github.com/transferable-samplers/transferable-samplers/pull/12
# steps: 80
# gain: yes
# device: cpu
# what: Many more threads than cores.

import torch
from torch import nn

torch.manual_seed(50)
torch.set_num_threads(32)  # <- here
x = torch.randn(2048, 256)
y = (x @ torch.randn(256, 10)).argmax(1)
blocks = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())]
model = nn.Sequential(*blocks, nn.Linear(256, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(80):
    chosen = torch.randint(0, 2048, (256,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
