# tricky: Negatives are mined in every batch without gradients, from embeddings that have some.
# steps: 200
# device: cpu

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(203)
pixels, labels = load_digits(return_X_y=True)
pixels, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
encoder = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 32))
optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-4)
for step in range(200):
    rows = torch.randint(0, len(labels), (160,))
    z, kind = F.normalize(encoder(pixels[rows]), dim=1), labels[rows]
    with torch.no_grad():
        distance = torch.cdist(z, z)
        same = kind[:, None] == kind[None, :]
        positive = torch.where(same, distance, torch.full_like(distance, -1.0)).argmax(1)
        negative = torch.where(same, torch.full_like(distance, 9.0), distance).argmin(1)
    loss = F.triplet_margin_loss(z, z[positive], z[negative], margin=0.3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        print(f"{step + 1}: {loss.item():.4f}")
