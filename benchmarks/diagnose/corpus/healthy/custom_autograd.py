# tricky: A function with its own backward pass, which saves tensors and rounds without a gradient of its own.
# steps: 400
# device: cpu

import torch
from torch import nn


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 2)


torch.manual_seed(114)
x = torch.randn(2048, 64)
y = (x @ torch.randn(64, 4)).argmax(1)
first, second = nn.Linear(64, 512), nn.Linear(512, 4)
optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=1e-3)
for step in range(400):
    chosen = torch.randint(0, 2048, (128,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(second(torch.relu(Round.apply(first(x[chosen])))), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
