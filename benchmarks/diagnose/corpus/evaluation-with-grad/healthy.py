# subject: evaluation-with-grad
# thread: https://github.com/hszhao/semseg/issues/60
# steps: 48
# gain: no
# device: cpu
# what: Validation builds a graph that is never used.

import torch
from torch import nn

torch.manual_seed(11)
train_images = torch.randn(256, 3, 24, 24)
val_images = torch.randn(1024, 3, 24, 24)
projection = torch.randn(3, 4)
train_masks = torch.einsum("bchw,ck->bkhw", train_images, projection).argmax(1)
val_masks = torch.einsum("bchw,ck->bkhw", val_images, projection).argmax(1)
layers = [nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 4, 1)]
model = nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


def validate() -> float:
    model.eval()
    right = 0.0
    for batch, wanted in zip(val_images.split(128), val_masks.split(128), strict=True):
        with torch.no_grad():
            output = model(batch)
        right += (output.argmax(1) == wanted).float().mean().item()
    return right / 8


for epoch in range(6):
    model.train()
    for batch, wanted in zip(train_images.split(32), train_masks.split(32), strict=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), wanted)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}, validation {validate():.1%}")
