# subject: accumulation-not-averaged
# thread: https://github.com/karpathy/nanoGPT/issues/206
# steps: 100
# gain: no
# device: cpu
# what: Mean losses of eight micro-batches are added up: the gradient is eight times that of the whole batch.

import torch
from torch import nn

torch.manual_seed(9)
MICRO_STEPS = 8
tokens = torch.arange(40000) * 7 % 61 + torch.randint(0, 3, (40000,))
model = nn.Sequential(nn.Embedding(64, 48), nn.Flatten(), nn.Linear(48 * 16, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(0, len(tokens) - 17, (size,))
    windows = torch.stack([tokens[start : start + 17] for start in starts.tolist()])
    return windows[:, :16], windows[:, 16]


for step in range(100):
    for _ in range(MICRO_STEPS):
        x, y = batch(24)
        loss = nn.functional.cross_entropy(model(x), y)
        (loss / MICRO_STEPS).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 33 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
