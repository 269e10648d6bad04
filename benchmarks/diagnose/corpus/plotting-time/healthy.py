# subject: plotting-time
# thread: https://github.com/d8ahazard/sd_dreambooth_extension/issues/1035
# steps: 40
# gain: yes
# device: cpu
# needs: matplotlib
# what: The curve of losses is drawn and saved after every step.

import tempfile
from pathlib import Path

import matplotlib
import torch
from torch import nn

matplotlib.use("Agg")
import matplotlib.pyplot as plt

torch.manual_seed(63)
folder = Path(tempfile.mkdtemp())
x = torch.randn(1024, 64)
y = (x @ torch.randn(64, 4)).argmax(1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for step in range(40):
    chosen = torch.randint(0, 1024, (128,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
plt.figure()
plt.plot(losses)
plt.savefig(folder / "losses.png")
plt.close()
print(f"last loss {losses[-1]:.4f}")
