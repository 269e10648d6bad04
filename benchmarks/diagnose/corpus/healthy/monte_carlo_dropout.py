# tricky: Dropout is on while predictions are made without gradients, to get their spread.
# steps: 120
# device: cpu

import torch
from torch import nn

torch.manual_seed(108)
x = torch.rand(1024, 4) * 6 - 3
y = torch.sin(x).sum(1, keepdim=True) + 0.1 * torch.randn(1024, 1)
model = nn.Sequential(nn.Linear(4, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.1))
model.append(nn.Linear(512, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(120):
    chosen = torch.randint(0, 1024, (128,))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
model.eval()
for module in model:
    if isinstance(module, nn.Dropout):
        module.train()
with torch.no_grad():
    spread = torch.stack([model(x[:64]) for _ in range(20)]).std(0).mean().item()
print(f"spread of predictions {spread:.4f}")
