# tricky: A loss that has long reached its floor, which is noise, and a scheduler that sees it.
# steps: 1200
# device: cpu

import torch
from torch import nn

torch.manual_seed(118)
x = torch.randn(4096, 32)
y = x @ torch.randn(32, 1) / 2 + torch.randn(4096, 1)
model = nn.Linear(32, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=2)
for epoch in range(30):
    total = 0.0
    for _ in range(40):
        chosen = torch.randint(0, 4096, (128,))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[chosen]), y[chosen])
        loss.backward()
        optimizer.step()
        total += loss.item()
    scheduler.step(total / 40)
    print(f"epoch {epoch}: loss {total / 40:.4f}, rate {scheduler.get_last_lr()[0]:.1e}")
