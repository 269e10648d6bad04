# subject: repeated-to
# thread: https://github.com/Lightning-AI/pytorch-lightning/issues/1978
# steps: 160
# gain: yes
# device: cpu
# what: A constant table is converted to float in every forward pass.

import torch
from torch import nn


class Filterbank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bank = torch.randint(-2, 3, (4096, 1024))
        self.head = nn.Linear(1024, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(x @ self.bank.to(x.dtype) / 64))  # <- here


torch.manual_seed(38)
signals = torch.randn(512, 4096)
kinds = signals[:, :4].argmax(1)
model = Filterbank()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(160):
    chosen = torch.randint(0, 512, (16,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(signals[chosen]), kinds[chosen])
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
