# subject: scheduler-order
# thread: https://github.com/ThilinaRajapakse/pytorch-transformers-classification/issues/21
# steps: 400
# gain: no
# device: cpu
# what: A warm-up schedule moves on before the optimizer has used its rate.

import argparse
import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


def get_args():
    parser = argparse.ArgumentParser(description="classify token counts")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128)
    return parser.parse_args()


def schedule(warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

    return factor


args = get_args()
torch.manual_seed(99)
rates = 1 + 0.4 * torch.rand(6, 300)
topics = torch.randint(0, 6, (5120,))
counts = torch.log1p(torch.poisson(rates[topics]))

model = nn.Sequential(
    nn.Linear(300, 896), nn.LayerNorm(896), nn.GELU(), nn.Linear(896, 896), nn.GELU(), nn.Linear(896, 6)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scheduler = LambdaLR(optimizer, schedule(args.warmup, args.epochs * len(counts) // args.batch))
for epoch in range(args.epochs):
    model.train()
    for picked in torch.randperm(len(counts)).split(args.batch):
        loss = nn.functional.cross_entropy(model(counts[picked]), topics[picked])
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.2e}")
