# subject: evaluation-with-grad
# thread: https://github.com/VITA-Group/DeblurGANv2/issues/15
# steps: 240
# gain: no
# device: cpu
# what: Trainer._validate has no no_grad; the image metric is computed from outputs with a graph.

import math

import torch
from torch import nn


class Restorer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(size, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x)


class Trainer:
    def __init__(self, length: int = 128) -> None:
        t = torch.linspace(0, 6, length)
        frequency, phase = 1 + torch.rand(3000, 1) * 4, torch.rand(3000, 1) * 6
        self.sharp = torch.sign(torch.sin(frequency * t + phase))
        kernel = torch.full((1, 1, 7), 1 / 7)
        self.blurred = nn.functional.conv1d(self.sharp.unsqueeze(1), kernel, padding=3).squeeze(1)
        self.model = Restorer(length)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.best = 0.0

    def train(self, epochs: int) -> None:
        for epoch in range(epochs):
            self._run_epoch()
            metric = self._validate()
            self.best = max(self.best, metric)
            print(f"epoch {epoch}: PSNR {metric:.2f} dB, best {self.best:.2f} dB")

    def _run_epoch(self) -> None:
        self.model.train()
        for rows in torch.randperm(2560).split(64):
            loss = nn.functional.mse_loss(self.model(self.blurred[rows]), self.sharp[rows])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def _validate(self) -> float:
        self.model.eval()
        errors = []
        for start in range(2560, 3000, 40):
            restored = self.model(self.blurred[start : start + 40])
            errors.append(nn.functional.mse_loss(restored, self.sharp[start : start + 40]).item())
        return 10 * math.log10(4 / (sum(errors) / len(errors)))


torch.manual_seed(81)
Trainer().train(6)
