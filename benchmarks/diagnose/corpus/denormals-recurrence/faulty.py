# subject: denormals
# thread: https://github.com/pytorch/pytorch/issues/4737
# steps: 80
# gain: yes
# device: cpu
# what: A recurrence halves its activations in every step, until they are denormal.

import torch
from torch import nn

torch.manual_seed(49)
signal = torch.randn(256, 64)
target = signal.mean(1, keepdim=True)
readout = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))
optimizer = torch.optim.Adam(readout.parameters(), lr=3e-3)
echo = torch.randn(64, 1024) * 1e-36
for step in range(80):
    for _ in range(20):
        echo = echo * 0.9 + echo.roll(1, 1) * 0.02  # <- here
    echo = echo.clamp(min=1e-42)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(readout(signal) + echo.mean(), target)
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.6f}")
