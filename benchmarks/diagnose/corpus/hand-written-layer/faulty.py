# subject: hand-written-layer
# thread: https://github.com/pytorch/pytorch/issues/1959
# steps: 80
# gain: yes
# device: cpu
# what: Layer normalisation and GELU written out of single operators.

import torch
from torch import nn


class LayerNorm(nn.Module):  # <- here
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = (x - mean).pow(2).mean(dim=-1, keepdim=True)
        return self.scale * (x - mean) / torch.sqrt(variance + 1e-5) + self.shift  # <- here


torch.manual_seed(77)
tokens = torch.randint(0, 64, (256, 64))
blocks = [nn.Sequential(LayerNorm(128), nn.Linear(128, 128), nn.ReLU()) for _ in range(4)]
model = nn.Sequential(nn.Embedding(64, 128), *blocks, nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(80):
    chosen = torch.randint(0, 256, (16,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens[chosen]).flatten(0, 1), (tokens[chosen] * 5 % 64).flatten())
    loss.backward()
    optimizer.step()
    if step % 16 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
