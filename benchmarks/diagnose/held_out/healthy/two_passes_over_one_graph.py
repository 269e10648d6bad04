# tricky: The graph of the shared layers is retained, since a second loss goes back through it.
# steps: 240
# device: cpu

import torch
from torch import nn

torch.manual_seed(216)
x = torch.randn(4000, 50)
wanted = x[:, :4].mean(1, keepdim=True)
domain = (torch.rand(4000) < 0.5).long()
x[domain == 1, 40:] += 1.0
shared = nn.Sequential(nn.Linear(50, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
value, judge = nn.Linear(256, 1), nn.Linear(256, 2)
optimizer = torch.optim.Adam([*shared.parameters(), *value.parameters(), *judge.parameters()], lr=5e-4)
for step in range(240):
    rows = torch.randint(0, 4000, (160,))
    features = shared(x[rows])
    fit = nn.functional.mse_loss(value(features), wanted[rows])
    guess = nn.functional.cross_entropy(judge(features), domain[rows])
    optimizer.zero_grad()
    fit.backward(retain_graph=True)
    norm = torch.stack([p.grad.norm() for p in shared.parameters()]).norm()
    guess.backward()
    optimizer.step()
    if step % 60 == 59:
        print(f"step {step + 1}: fit {fit.item():.4f}, domain {guess.item():.4f}, norm of fit {norm.item():.3f}")
