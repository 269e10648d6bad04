# subject: channels-last-missing
# thread: own
# steps: 120
# gain: yes
# device: cpu
# what: A small U-Net for denoising in the default layout.

import argparse

import torch
from torch import nn


def double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1, self.down2 = double(1, width), double(width, 2 * width)
        self.middle = double(2 * width, 2 * width)
        self.up2, self.up1 = double(4 * width, width), double(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.down1(x)
        two = self.down2(nn.functional.max_pool2d(one, 2))
        deep = self.middle(nn.functional.max_pool2d(two, 2))
        up = self.up2(torch.cat([nn.functional.interpolate(deep, scale_factor=2.0), two], dim=1))
        up = self.up1(torch.cat([nn.functional.interpolate(up, scale_factor=2.0), one], dim=1))
        return self.out(up)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    torch.manual_seed(7)
    grid = torch.linspace(0, 6.28, 32)
    waves = torch.rand(256, 2, 1, 1) * 3
    clean = torch.sin(waves[:, :1] * grid[:, None] + waves[:, 1:] * grid[None, :])
    model = UNet(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        target = clean[torch.randint(0, 256, (16,))]
        noisy = target + 0.4 * torch.randn_like(target)
        restored = model(noisy)  # <- here
        loss = nn.functional.mse_loss(restored, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"step {step + 1}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
