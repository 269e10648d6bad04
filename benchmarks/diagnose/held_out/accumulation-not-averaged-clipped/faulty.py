# subject: accumulation-not-averaged
# thread: https://github.com/agokrani/distillKitPlus/issues/5
# steps: 150
# gain: no
# device: cpu
# what: The mean losses of four micro-batches are summed before clipping and stepping.

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--micro-batch", type=int, default=48)
parser.add_argument("--updates", type=int, default=150)
args = parser.parse_args()

torch.manual_seed(13)
x = torch.randn(20000, 100)
teacher = torch.randn(100, 20)
y = (x @ teacher + torch.randn(20000, 20)).argmax(1)

model = nn.Sequential(
    nn.Linear(100, 384), nn.GELU(), nn.LayerNorm(384), nn.Linear(384, 384), nn.GELU(), nn.Linear(384, 20)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
micro_step = update = 0
while update < args.updates:
    rows = torch.randint(0, len(x), (args.micro_batch,))
    loss = F.cross_entropy(model(x[rows]), y[rows])
    loss.backward()  # <- here
    micro_step += 1
    if micro_step % args.accumulate == 0:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
        update += 1
        if update % 30 == 0:
            print(f"update {update}: loss {loss.item():.4f}, gradient norm {norm.item():.2f}")
