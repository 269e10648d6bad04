"""Two optimizers in turn."""

import torch
from small import digest
from torch import nn

torch.manual_seed(0)
generator, critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
one, two = torch.optim.Adam(generator.parameters()), torch.optim.RMSprop(critic.parameters())
for _ in range(60):
    fake = generator(torch.randn(16, 4))
    two.zero_grad()
    (critic(fake.detach()).mean() - critic(torch.randn(16, 2)).mean()).backward()
    two.step()
    one.zero_grad()
    (-critic(fake).mean()).backward()
    one.step()
print(digest(generator), digest(critic))
