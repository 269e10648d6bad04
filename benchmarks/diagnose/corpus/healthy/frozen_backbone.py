# tricky: Most parameters are left out of the optimizer on purpose, and part of the model is in evaluation mode.
# steps: 250
# device: cpu

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(106)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
backbone = nn.Sequential(nn.Conv2d(1, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU())
backbone.append(nn.Flatten())
backbone.requires_grad_(False)
head = nn.Sequential(nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
head.train()
backbone.eval()
for step in range(250):
    chosen = torch.randint(0, 1500, (64,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(head(backbone(images[chosen])), labels[chosen])
    loss.backward()
    optimizer.step()
    if step % 62 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
