# subject: evaluation-in-train-mode
# thread: https://github.com/ipolharvard/ethos-ares/issues/20
# steps: 200
# gain: no
# device: cpu
# what: The estimate of the loss has a no_grad decorator and no eval(): dropout stays on while it is measured.

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1337)
EVENTS, CONTEXT = 60, 16
transition = torch.softmax(3 * torch.randn(EVENTS, EVENTS), dim=1)
timeline = [0]
for _ in range(12000):
    timeline.append(int(torch.multinomial(transition[timeline[-1]], 1)))
timeline = torch.tensor(timeline)
train_part, val_part = timeline[:10000], timeline[10000:]


def get_batch(part: torch.Tensor, count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(part) - CONTEXT - 1, (count, 1))
    return part[starts + torch.arange(CONTEXT)], part[starts[:, 0] + CONTEXT]


class NextEvent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.event = nn.Embedding(EVENTS, 32)
        self.body = nn.Sequential(
            nn.Linear(32 * CONTEXT, 384), nn.GELU(), nn.Dropout(0.3), nn.Linear(384, 384), nn.GELU()
        )
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(384, EVENTS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.event(ids).flatten(1)))


@torch.no_grad()
def estimate_loss() -> float:
    model.eval()
    losses = []
    for _ in range(10):
        ids, following = get_batch(val_part)
        losses.append(F.cross_entropy(model(ids), following))
    model.train()
    return torch.stack(losses).mean().item()


model = NextEvent()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for iteration in range(200):
    if iteration % 20 == 0:
        print(f"iteration {iteration}: validation loss {estimate_loss():.4f}")
    ids, following = get_batch(train_part)
    loss = F.cross_entropy(model(ids), following)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
