# subject: hidden-sync
# thread: https://github.com/lucidrains/x-transformers/pull/355
# steps: 300
# gain: yes
# device: cuda
# what: The truth of a tensor decides in Python whether gradients are finite.

import torch
from torch import nn

torch.manual_seed(202)
x = torch.randn(8192, 128, device="cuda")
y = torch.tanh(x[:, :4])
blocks = [nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(16)]
model = nn.Sequential(*blocks, nn.Linear(128, 4)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
for step in range(300):
    chosen = torch.randint(0, 8192, (512,), device="cuda")
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[chosen]), y[chosen])
    loss.backward()
    for parameter in model.parameters():
        if not torch.isfinite(parameter.grad).all():  # <- here
            parameter.grad = None
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
