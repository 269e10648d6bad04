# subject: scheduler-order
# thread: https://github.com/facebookresearch/ParlAI/issues/2042
# steps: 300
# gain: no
# device: cpu
# what: A warm-up with inverse square root decay is advanced at the top of each update.

import torch
from torch import nn


def rate(step: int, warmup: int = 60) -> float:
    step += 1
    return min(step / warmup, (warmup / step) ** 0.5)


def batch(count: int, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences to be sorted."""
    digits = torch.randint(0, 10, (count, length))
    return digits, digits.sort(dim=1).values


class Sorter(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.digit = nn.Embedding(10, width)
        self.place = nn.Parameter(torch.randn(12, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 10)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(self.digit(digits) + self.place))


torch.manual_seed(30)
model = Sorter()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
for update in range(300):
    digits, target = batch(64)
    loss = nn.functional.cross_entropy(model(digits).flatten(0, 1), target.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if update % 50 == 49:
        print(f"{update + 1}: loss {loss.item():.4f}, rate {scheduler.get_last_lr()[0]:.2e}")
