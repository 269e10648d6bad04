# subject: reserved-unused
# thread: https://github.com/pytorch/pytorch/issues/46379
# steps: 100
# gain: no
# device: cuda
# what: One large evaluation at the start leaves 8 GB reserved that the training never uses.

import torch
from torch import nn

torch.manual_seed(214)
model = nn.Sequential(nn.Linear(256, 8192), nn.ReLU(), nn.Linear(8192, 10)).cuda()
with torch.no_grad():
    before = sum(model(torch.randn(131072, 256, device="cuda")).mean().item() for _ in range(2))  # <- here
print(f"mean output at the start {before / 2:.4f}")
x = torch.randn(4096, 256, device="cuda")
y = x[:, :10].argmax(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(100):
    chosen = torch.randint(0, 4096, (128,), device="cuda")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
