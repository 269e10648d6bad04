# tricky: Two backward passes and a weight perturbation between them for every step.
# steps: 160
# device: cpu

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(201)
pixels, labels = load_digits(return_X_y=True)
pixels, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
RHO = 0.05


def loss_of(rows):
    return nn.functional.cross_entropy(net(pixels[rows]), labels[rows])


for step in range(160):
    rows = torch.randint(0, 1400, (128,))
    optimizer.zero_grad()
    loss = loss_of(rows)
    loss.backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        moves = [RHO * p.grad / (norm + 1e-12) for p in net.parameters()]
        torch._foreach_add_(list(net.parameters()), moves)
    optimizer.zero_grad()
    loss_of(rows).backward()
    with torch.no_grad():
        torch._foreach_sub_(list(net.parameters()), moves)
    optimizer.step()
    if step % 40 == 39:
        print(f"step {step + 1}: {loss.item():.4f}")
