# subject: cudnn-benchmark-changing-shapes
# follows: allocator-churn
# thread: https://github.com/pytorch/vision/pull/5985
# steps: 60
# gain: yes
# device: cuda
# what: cuDNN tries all its algorithms for each new size of image, and nearly every image has one.

import torch
from torch import nn

torch.manual_seed(210)
layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sizes = torch.randint(160, 320, (60, 2)).tolist()
for step, (height, width) in enumerate(sizes):
    images = torch.randn(4, 3, height, width, device="cuda")
    labels = (images[:, 0].mean((1, 2)) > 0).long()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
