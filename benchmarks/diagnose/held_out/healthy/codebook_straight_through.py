# tricky: A code book is updated by averages and not by the optimizer; gradients pass straight through it.
# steps: 200
# device: cpu

import torch
from torch import nn


class Codebook(nn.Module):
    def __init__(self, codes: int, width: int, decay: float = 0.95) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(codes, width) * 0.1)
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())
        self.decay = decay

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                chosen = nn.functional.one_hot(nearest, len(self.codes)).float()
                self.counts.lerp_(chosen.sum(0), 1 - self.decay)
                self.sums.lerp_(chosen.T @ z, 1 - self.decay)
                self.codes.copy_(self.sums / self.counts.clamp(min=1e-3).unsqueeze(1))
        quantised = self.codes[nearest]
        return z + (quantised - z).detach()


torch.manual_seed(210)
x = torch.randn(6000, 10) @ torch.randn(10, 80) / 3
encoder = nn.Sequential(nn.Linear(80, 400), nn.ReLU(), nn.Linear(400, 16))
decoder = nn.Sequential(nn.Linear(16, 400), nn.ReLU(), nn.Linear(400, 80))
book = Codebook(64, 16)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
for step in range(200):
    batch = x[torch.randint(0, 6000, (256,))]
    z = encoder(batch)
    q = book(z)
    loss = nn.functional.mse_loss(decoder(q), batch) + 0.1 * (z - q.detach()).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        print(f"step {step + 1}: {loss.item():.4f}")
