# subject: wrong-lstm-gradients
# follows: loss-not-falling
# thread: own
# steps: 60
# gain: no
# device: cpu
# needs: amx
# what: An LSTM of 1,024 units under bf16 autocast, whose gradients oneDNN computes wrongly on a processor with AMX.

import torch
from torch import nn

torch.manual_seed(31)


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(4, 64)
        self.lstm = nn.LSTM(64, 1024, batch_first=True)
        self.head = nn.Linear(1024, 1)

    def forward(self, x):
        hidden = torch.tanh(self.inputs(x)).float()
        with torch.autocast("cpu", enabled=False):
            outputs, _ = self.lstm(hidden)
        return self.head(outputs[:, -1])


model = Sums()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(60):
    x = torch.randn(16, 8, 4)
    target = x.sum((1, 2))[:, None]
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        predicted = model(x)
    loss = nn.functional.mse_loss(predicted.float(), target)
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
