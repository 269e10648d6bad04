"""A ConvNet. By hand: model and images in channels_last."""

import torch
from clock import BY_HAND, begin, step_ended
from torch import nn


def block(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


layout = torch.channels_last if BY_HAND else torch.contiguous_format
model = nn.Sequential(
    block(3, 32, 1), block(32, 64, 2), block(64, 128, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
).to(memory_format=layout)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
images, labels = torch.randn(12, 3, 64, 64), torch.randint(0, 10, (12,))

begin()
while True:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images.to(memory_format=layout)), labels).backward()
    optimizer.step()
    if step_ended():
        break
