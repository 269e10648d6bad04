# subject: evaluation-with-grad
# thread: own
# steps: 240
# gain: yes
# device: cpu
# what: The validation after every few steps records a graph that nobody uses.

import torch
from torch import nn


def make_series(length):
    t = torch.arange(length, dtype=torch.float32)
    return torch.sin(t / 9) + 0.5 * torch.sin(t / 31) + 0.1 * torch.randn(length)


class Forecaster(nn.Module):
    def __init__(self, window, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(window, width),
            nn.Tanh(),
            nn.Dropout(0.1),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Dropout(0.1),
            nn.Linear(width, 1),
        )

    def forward(self, x):
        return self.layers(x).squeeze(-1)


@torch.no_grad()
def validate(model, inputs, targets):
    model.eval()
    predicted = [model(part) for part in inputs.split(512)]
    model.train()
    return (torch.cat(predicted) - targets).abs().mean().item()


def main():
    torch.manual_seed(21)
    windows = make_series(12800).unfold(0, 65, 1)
    inputs, targets = windows[:, :64].contiguous(), windows[:, 64].contiguous()
    split = len(inputs) - 4096
    model = Forecaster(64, 640)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    step = 0
    for _ in range(5):
        for idx in torch.randperm(split).split(182)[:48]:
            loss = nn.functional.l1_loss(model(inputs[idx]), targets[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 3 == 0:
                mae = validate(model, inputs[split:], targets[split:])
        print(f"step {step}: train {loss.item():.4f} validation {mae:.4f}")


main()
