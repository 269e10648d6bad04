# subject: clip-before-unscale
# follows: loss-not-falling
# thread: https://github.com/milesial/Pytorch-UNet/pull/470
# steps: 60
# gain: no
# device: cpu
# what: A small segmentation net in half precision, clipped while the gradients are scaled.

import torch
from torch import nn

torch.manual_seed(7)
images = torch.rand(96, 1, 16, 16)
masks = (nn.functional.avg_pool2d(images, 5, stride=1, padding=2) > 0.5).float()
net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU())
net.append(nn.Conv2d(12, 1, 1))
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
grad_scaler = torch.amp.GradScaler("cpu")

for epoch in range(5):
    for batch, wanted in zip(images.split(8), masks.split(8), strict=True):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            predicted = net(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(predicted.float(), wanted)
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
