# tricky: retain_graph and create_graph that are needed: the penalty is differentiated twice.
# steps: 200
# device: cpu

import torch
from torch import nn

torch.manual_seed(101)
real = torch.randn(2048, 8) + 1
critic = nn.Sequential(nn.Linear(8, 256), nn.Softplus(), nn.Linear(256, 256), nn.Softplus(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)


def penalty(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    mix = torch.rand(len(a), 1)
    between = (mix * a + (1 - mix) * b).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True, retain_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


for step in range(200):
    a, b = real[torch.randint(0, 2048, (128,))], torch.randn(128, 8)
    optimizer.zero_grad()
    loss = critic(b).mean() - critic(a).mean() + 10 * penalty(a, b)
    loss.backward()
    optimizer.step()
    if step % 67 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
