# tricky: Sequences become longer from stage to stage, and with them the time of a step.
# steps: 160
# device: cpu

import torch
from torch import nn


class Parity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(1, 128, batch_first=True)
        self.out = nn.Linear(128, 1)

    def forward(self, bits: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(bits)[0]).squeeze(-1)


torch.manual_seed(209)
model = Parity()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for stage, length in enumerate([4, 6, 8, 12, 16]):
    for step in range(32):
        bits = torch.randint(0, 2, (256, length, 1)).float()
        parity = bits.squeeze(-1).cumsum(1) % 2
        loss = nn.functional.binary_cross_entropy_with_logits(model(bits), parity)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"stage {stage}, length {length}: {loss.item():.4f}")
