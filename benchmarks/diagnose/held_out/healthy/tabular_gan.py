# steps: 640
# device: cpu
# tricky: Two optimizers step in turn, the generator's output is detached once, and neither loss keeps falling.

import torch
from torch import nn

torch.manual_seed(40)
real_data = torch.randn(5120, 32) @ torch.randn(32, 32) / 6 + 0.5
generator = nn.Sequential(nn.Linear(64, 768), nn.ReLU(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 32))
critic = nn.Sequential(nn.Linear(32, 768), nn.LeakyReLU(0.2), nn.Linear(768, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1))
g_opt = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
d_opt = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
for epoch in range(8):
    for idx in torch.randperm(len(real_data)).split(128):
        real = real_data[idx]
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(torch.randn(len(real), 64))

        d_opt.zero_grad()
        d_loss = bce(critic(real), ones) + bce(critic(fake.detach()), zeros)
        d_loss.backward()
        d_opt.step()

        g_opt.zero_grad()
        g_loss = bce(critic(fake), ones)
        g_loss.backward()
        g_opt.step()
    print(f"epoch {epoch}: D {d_loss.item():.3f} G {g_loss.item():.3f}")
