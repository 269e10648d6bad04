# subject: recompilations
# thread: own
# steps: 180
# gain: yes
# device: cpu
# what: Crops grow by one sample every few steps, and a model compiled for fixed shapes is compiled again for each size.

import torch
from torch import nn

torch.manual_seed(41)
torch._dynamo.config.recompile_limit = 128
signal = torch.cumsum(torch.randn(20000, generator=torch.Generator().manual_seed(1)), 0)
signal = (signal - signal.mean()) / signal.std()


class Denoiser(nn.Module):
    def __init__(self, channels: int = 48) -> None:
        super().__init__()
        self.lift = nn.Linear(1, channels)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(channels, channels), nn.GELU()) for _ in range(6))
        self.drop = nn.Linear(channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x.unsqueeze(-1))
        for block in self.blocks:
            x = x + block(x) + x.mean(1, keepdim=True)
        return self.drop(x).squeeze(-1)


model = Denoiser()
compiled = torch.compile(model, backend="aot_eager", dynamic=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(180):
    length = 100 + step // 6
    starts = torch.randint(0, len(signal) - length, (32,))
    clean = torch.stack([signal[s : s + length] for s in starts.tolist()])
    noisy = clean + 0.2 * torch.randn_like(clean)
    loss = nn.functional.mse_loss(compiled(noisy), clean)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 59:
        print(f"length {length}: loss {loss.item():.4f}")
