# subject: exploding-gradients
# follows: loss-not-falling
# thread: https://github.com/Marcovaldong/lstmp.pytorch/issues/2
# steps: 200
# gain: no
# device: cpu
# what: A recurrent layer with a ReLU is unrolled over 60 steps, with weights that enlarge their input and no clipping.

import torch
from torch import nn

torch.manual_seed(93)


class Rollout(nn.Module):
    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, hidden, nonlinearity="relu", batch_first=True)
        nn.init.eye_(self.rnn.weight_hh_l0)
        nn.init.zeros_(self.rnn.bias_hh_l0)
        self.read = nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.rnn(x)[0][:, -1])


model = Rollout()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(200):
    x = torch.rand(48, 60, 4) - 0.5
    y = x[:, :, 0].sum(1, keepdim=True)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step}: {loss.item():.4g}")
