# subject: costly-checkpointing
# thread: https://github.com/facebookresearch/fairscale/issues/766
# steps: 50
# gain: yes
# device: cpu
# what: Every layer of a small model is computed twice, to save a few MB.

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        halves = [(nn.Linear(256, 512), nn.Linear(512, 256)) for _ in range(6)]
        self.blocks = nn.ModuleList(nn.Sequential(wide, nn.GELU(), narrow) for wide, narrow in halves)
        self.head = nn.Linear(256, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)  # <- here
        return self.head(x)


torch.manual_seed(58)
x = torch.randn(1024, 256)
y = (x @ torch.randn(256, 5)).argmax(1)
model = Deep()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
for step in range(50):
    chosen = torch.randint(0, 1024, (64,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
