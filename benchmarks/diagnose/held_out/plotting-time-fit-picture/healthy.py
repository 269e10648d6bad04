# subject: plotting-time
# also: disk-time
# thread: own
# steps: 150
# gain: yes
# device: cpu
# needs: matplotlib
# what: A picture of the fit is drawn and saved every third step.

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

plt.switch_backend("Agg")
torch.manual_seed(2)
out = Path(tempfile.mkdtemp())
x = torch.linspace(-3, 3, 400).unsqueeze(1)
y = torch.sin(2 * x) + 0.3 * x + 0.1 * torch.randn_like(x)
net = nn.Sequential(nn.Linear(1, 900), nn.Tanh(), nn.Linear(900, 900), nn.Tanh(), nn.Linear(900, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)


def picture(name: str, fitted: torch.Tensor) -> None:
    figure, axes = plt.subplots(figsize=(5, 4))
    axes.scatter(x[:, 0].numpy(), y[:, 0].numpy(), s=4)
    axes.plot(x[:, 0].numpy(), fitted[:, 0].numpy(), color="red")
    figure.savefig(out / name)
    plt.close(figure)


for step in range(150):
    fitted = net(x)
    loss = nn.functional.mse_loss(fitted, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 149:
        picture(f"{step:03d}.png", fitted.detach())
    if step % 50 == 49:
        print(f"step {step + 1}: {loss.item():.4f}")
