# subject: huge-softmax
# thread: own
# steps: 150
# gain: yes
# device: cpu
# what: A skip-gram model takes a softmax over all of 20,000 words for each pair.

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(58)
WORDS, WIDTH, NEGATIVES = 20000, 48, 16
popularity = 1 / torch.arange(1, WORDS + 1).float()


def pairs(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A word and one of its neighbours."""
    centre = torch.multinomial(popularity, count, replacement=True)
    return centre, (centre + torch.randint(1, 5, (count,))) % WORDS


class SkipGram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Embedding(WORDS, WIDTH)
        self.context = nn.Embedding(WORDS, WIDTH)
        nn.init.uniform_(self.centre.weight, -0.5, 0.5)
        nn.init.uniform_(self.context.weight, -0.5, 0.5)

    def forward(self, centre: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        vectors = self.centre(centre)
        others = torch.multinomial(popularity, NEGATIVES, replacement=True)
        near = (vectors * self.context(context)).sum(1)
        far = vectors @ self.context(others).T
        return -F.logsigmoid(near).mean() - F.logsigmoid(-far).mean(0).sum()


model = SkipGram()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
for step in range(150):
    centre, context = pairs(256)
    loss = model(centre, context)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(f"step {step}: {loss.item():.3f}")
