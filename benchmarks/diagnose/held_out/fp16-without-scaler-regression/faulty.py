# subject: fp16-without-scaler
# follows: loss-not-falling
# thread: own
# steps: 250
# gain: no
# device: cpu
# what: float16 autocast, a loss of small values, and no GradScaler: most gradients are rounded to zero.

import argparse

import torch
from torch import nn


class Surrogate(nn.Module):
    """From parameters of a simulation to tiny deflections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(24, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1e-2 * self.layers(x)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=250)
parser.add_argument("--width", type=int, default=128)
args = parser.parse_args()

torch.manual_seed(300)
x = torch.randn(8192, 24)
y = 2e-3 * torch.tanh(x @ torch.randn(24, 8) / 5)
model = Surrogate(args.width)
optimizer = torch.optim.SGD(model.parameters(), lr=1000.0)
for step in range(args.steps):
    rows = torch.randint(0, len(x), (512,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):  # <- here
        out = model(x[rows])
        loss = nn.functional.mse_loss(out.float(), y[rows])
    loss.backward()  # <- here
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: {loss.item():.3e}")
