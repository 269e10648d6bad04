# subject: missing-zero-grad
# follows: exploding-gradients, loss-not-falling
# thread: https://github.com/Hsintien-Ng/idinvert_pytorch-reproduced/issues/1
# steps: 600
# gain: no
# device: cpu
# what: The gradients of a GAN's critic are never cleared, only those of the generator.

import torch
from torch import nn

torch.manual_seed(19)


def real_points(count: int) -> torch.Tensor:
    angles = torch.rand(count) * 6.2832
    return torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(count, 2)


generator = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
critic = nn.Sequential(nn.Linear(2, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
optimizer_G = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(192, 1), torch.zeros(192, 1)

for iteration in range(300):
    fake = generator(torch.randn(192, 8))
    loss_D = criterion(critic(real_points(192)), ones) + criterion(critic(fake.detach()), zeros)
    loss_D.backward()  # <- here
    optimizer_D.step()  # <- here

    optimizer_G.zero_grad()
    loss_G = criterion(critic(fake), ones)
    loss_G.backward()
    optimizer_G.step()
    if iteration % 50 == 0:
        radius = fake.detach().norm(dim=1)
        print(f"{iteration:4d}  D {loss_D.item():.3f}  G {loss_G.item():.3f}  radius {radius.mean():.2f}")
