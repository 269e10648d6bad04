# tricky: Two optimizers, a detached generator, gradients of the critic left over from the generator's turn.
# steps: 400
# device: cpu

import torch
from torch import nn

torch.manual_seed(100)
real = torch.randn(4096, 2) * torch.tensor([1.0, 0.3]) + torch.tensor([2.0, -1.0])
generator = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
critic = nn.Sequential(nn.Linear(2, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(128, 1), torch.zeros(128, 1)

for step in range(200):
    fake = generator(torch.randn(128, 16))
    optimizer_d.zero_grad()
    loss_d = criterion(critic(real[torch.randint(0, 4096, (128,))]), ones) + criterion(critic(fake.detach()), zeros)
    loss_d.backward()
    optimizer_d.step()

    optimizer_g.zero_grad()
    loss_g = criterion(critic(fake), ones)
    loss_g.backward()
    optimizer_g.step()
    if step % 50 == 0:
        print(f"step {step}: critic {loss_d.item():.4f}, generator {loss_g.item():.4f}")
