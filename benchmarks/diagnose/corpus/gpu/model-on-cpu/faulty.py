# subject: model-on-cpu
# thread: own
# steps: 40
# gain: yes
# device: cuda
# what: A machine with a GPU, and a script that never moves its model there.

import torch
from torch import nn

torch.manual_seed(205)
device = torch.device("cpu")  # <- here
images = torch.randn(512, 3, 64, 64, device=device)
labels = (images[:, 0].mean((1, 2)) > 0).long()
layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2)).to(device)  # <- here
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(40):
    chosen = torch.randint(0, 512, (32,), device=device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
