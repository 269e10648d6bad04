# tricky: Layers without gradients at first, which are unfrozen and added to the optimizer later.
# steps: 240
# device: cpu

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(215)
pixels, labels = load_digits(return_X_y=True)
pixels, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
body = nn.ModuleList([nn.Linear(64, 480), nn.Linear(480, 480)])
head = nn.Linear(480, 10)
for layer in body:
    layer.requires_grad_(False)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)


def forward(x):
    for layer in body:
        x = torch.relu(layer(x))
    return head(x)


for phase in range(3):
    if phase:
        thawed = body[-phase]
        thawed.requires_grad_(True)
        optimizer.add_param_group({"params": thawed.parameters(), "lr": 1e-3 * 0.5**phase})
    for step in range(80):
        rows = torch.randint(0, 1500, (160,))
        loss = nn.functional.cross_entropy(forward(pixels[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = (forward(pixels[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    print(f"phase {phase}: loss {loss.item():.4f}, held out {right:.3f}")
