# subject: python-time
# thread: https://github.com/varsha33/LCL_loss/issues/2
# steps: 160
# gain: yes
# device: cpu
# what: A contrastive loss builds its mask of pairs with two nested loops.

import torch
import torch.nn.functional as F
from torch import nn


class SupervisedContrast(nn.Module):
    def __init__(self, temperature: float = 0.2) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = F.normalize(features, dim=1)
        count = len(labels)
        scores = features @ features.T / self.temperature
        mask = (labels[:, None] == labels[None, :]).float()
        mask.fill_diagonal_(0.0)
        scores = scores - 1e9 * torch.eye(count)
        log_share = scores - torch.logsumexp(scores, dim=1, keepdim=True)
        return -((mask * log_share).sum(1) / mask.sum(1).clamp(min=1)).mean()


def main() -> None:
    torch.manual_seed(62)
    centres = torch.randn(8, 300)
    encoder = nn.Sequential(nn.Linear(300, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 64))
    criterion = SupervisedContrast()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 160)
    for step in range(160):
        labels = torch.randint(0, 8, (96,))
        x = centres[labels] + 3 * torch.randn(96, 300)
        loss = criterion(encoder(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 40 == 39:
            print(f"step {step + 1}: {loss.item():.4f}")


main()
