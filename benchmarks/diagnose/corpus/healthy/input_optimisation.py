# tricky: The optimizer trains an input and no parameter of the model, which stays in evaluation mode.
# steps: 400
# device: cpu

import torch
from torch import nn

torch.manual_seed(124)
model = nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.Conv2d(16, 16, 5), nn.ReLU(), nn.Flatten())
model.append(nn.Linear(16 * 24 * 24, 10))
model.eval().requires_grad_(False)
image = torch.zeros(4, 1, 32, 32, requires_grad=True)
optimizer = torch.optim.Adam([image], lr=0.02)
wanted = torch.tensor([1, 3, 5, 7])
for step in range(400):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(image), wanted) + 1e-3 * image.square().sum()
    loss.backward()
    optimizer.step()
    if step % 133 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
