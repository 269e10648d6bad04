# steps: 480
# device: cpu
# tricky: The gradient penalty needs a gradient of a gradient: create_graph is meant.

import torch
from torch import nn

torch.manual_seed(90)
target = torch.randn(3840, 24) @ torch.randn(24, 24) / 5
generator = nn.Sequential(nn.Linear(48, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 24))
critic = nn.Sequential(nn.Linear(24, 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))


def gradient_penalty(real, fake):
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(2, dim=1) - 1).pow(2).mean()


step = 0
for epoch in range(12):
    for idx in torch.randperm(len(target)).split(128):
        real = target[idx]
        fake = generator(torch.randn(len(idx), 48)).detach()
        critic_loss = critic(fake).mean() - critic(real).mean() + 10 * gradient_penalty(real, fake)
        opt_c.zero_grad()
        critic_loss.backward()
        opt_c.step()
        step += 1
        if step % 3 == 0:
            generator_loss = -critic(generator(torch.randn(len(idx), 48))).mean()
            opt_g.zero_grad()
            generator_loss.backward()
            opt_g.step()
    print(f"epoch {epoch}: critic {critic_loss.item():.3f} generator {generator_loss.item():.3f}")
