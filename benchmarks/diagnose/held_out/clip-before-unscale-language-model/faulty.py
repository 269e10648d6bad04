# subject: clip-before-unscale
# follows: loss-not-falling
# thread: https://github.com/pytorch/examples/issues/1196
# steps: 240
# gain: no
# device: cpu
# what: A small character model trained with a GradScaler clips gradients that still carry the scale of the loss.

import torch
import torch.nn.functional as F
from torch import nn

TEXT = (
    "the quick brown fox jumps over the lazy dog while seven wizards make toxic brew for the evil queen and jack "
    "pack my box with five dozen liquor jugs how vexingly quick daft zebras jump sphinx of black quartz judge my vow "
) * 40
letters = sorted(set(TEXT))
data = torch.tensor([letters.index(c) for c in TEXT])
BLOCK = 12


class Characters(nn.Module):
    """The next letter from the last BLOCK."""

    def __init__(self, width=24):
        super().__init__()
        self.table = nn.Embedding(len(letters), width)
        self.body = nn.Sequential(nn.Linear(BLOCK * width, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh())
        self.out = nn.Linear(128, len(letters))

    def forward(self, ids):
        return self.out(self.body(self.table(ids).flatten(1)))


class Trainer:
    def __init__(self, model, max_norm=1.0):
        self.model, self.max_norm = model, max_norm
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)

    def batch(self):
        starts = torch.randint(0, len(data) - BLOCK - 1, (128,))
        rows = starts[:, None] + torch.arange(BLOCK)
        return data[rows], data[starts + BLOCK]

    def step(self):
        ids, following = self.batch()
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(ids)
            loss = F.cross_entropy(out.float(), following)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)  # <- here
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


if __name__ == "__main__":
    torch.manual_seed(6)
    trainer = Trainer(Characters())
    for i in range(240):
        loss = trainer.step()
        if i % 40 == 0:
            print(f"{i:4d}: {loss:.3f}")
