# subject: channels-last-missing
# thread: https://github.com/fastai/fastai/pull/3634
# steps: 60
# gain: yes
# device: cuda
# what: A convolution net in half precision in the layout that cuDNN has to transpose.

import torch
from torch import nn

torch.manual_seed(209)
images = torch.randn(256, 3, 128, 128, device="cuda")
labels = (images[:, 0].mean((1, 2)) > 0).long()
layers: list[nn.Module] = [nn.Conv2d(3, 128, 3, padding=1)]
for _ in range(5):
    layers += [nn.BatchNorm2d(128), nn.ReLU(), nn.Conv2d(128, 128, 3, padding=1)]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 2)).cuda()
model = model.to(memory_format=torch.channels_last)
images = images.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    chosen = torch.randint(0, 256, (32,), device="cuda")
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
    (loss * 128).backward()
    for parameter in model.parameters():
        parameter.grad /= 128
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
