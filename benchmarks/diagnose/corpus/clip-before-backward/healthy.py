# subject: clip-before-backward
# thread: https://github.com/Cranial-XIX/FAMO/issues/4
# steps: 200
# gain: no
# device: cpu
# what: Gradients are clipped before the backward pass has made them: nothing is clipped.

import torch
from torch import nn

torch.manual_seed(4)
series = torch.sin(torch.arange(4096) / 7.0) + 0.1 * torch.randn(4096)
windows = series.unfold(0, 33, 8)
inputs, targets = windows[:, :-1].unsqueeze(-1), windows[:, -1:]


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(1, 48, batch_first=True)
        self.head = nn.Linear(48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(200):
    chosen = torch.randint(len(inputs), (32,))
    loss = nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
