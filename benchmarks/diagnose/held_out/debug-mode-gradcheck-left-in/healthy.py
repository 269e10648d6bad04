# subject: debug-mode
# also: python-time
# thread: own
# steps: 160
# gain: yes
# device: cpu
# what: The check of a handwritten backward pass against finite differences runs in every step.

import torch
from torch import nn


class SoftThreshold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, level):
        kept = x.abs() > level
        ctx.save_for_backward(kept)
        return torch.where(kept, x - level * x.sign(), torch.zeros_like(x))

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        return grad * kept, None


class Shrinkage(nn.Module):
    """A few steps of sparse coding with learned matrices."""

    def __init__(self, signal, codes):
        super().__init__()
        self.encode = nn.Linear(signal, codes, bias=False)
        self.mix = nn.Linear(codes, codes, bias=False)
        self.decode = nn.Linear(codes, signal, bias=False)

    def forward(self, x):
        driven = self.encode(x)
        z = SoftThreshold.apply(driven, 0.05)
        for _ in range(3):
            z = SoftThreshold.apply(driven + z - self.mix(z), 0.05)
        return self.decode(z)


torch.manual_seed(33)
atoms = torch.randn(300, 120) / 10
model = Shrinkage(120, 300)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
for step in range(160):
    codes = torch.randn(192, 300) * (torch.rand(192, 300) < 0.05)
    x = codes @ atoms
    loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 39:
        print(f"step {step + 1}: {loss.item():.5f}")
