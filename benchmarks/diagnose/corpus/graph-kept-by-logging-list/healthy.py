# subject: graph-kept-by-logging
# also: memory-leak
# thread: https://github.com/boschresearch/Continuous-Recurrent-Units/pull/4
# steps: 120
# gain: no
# device: cpu
# what: A history of losses for a plot at the end, never detached.

import torch
from torch import nn

torch.manual_seed(56)
series = torch.sin(torch.arange(2000) / 9.0).unsqueeze(1) + 0.05 * torch.randn(2000, 1)
rnn, head = nn.GRU(1, 32, batch_first=True), nn.Linear(32, 1)
optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=5e-3)
history = []
for step in range(120):
    starts = torch.randint(0, 1960, (24, 1))
    window = series[starts + torch.arange(31)]
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(head(rnn(window[:, :-1])[0]), window[:, 1:])
    loss.backward()
    optimizer.step()
    history.append(loss.detach())
print(f"first {history[0].item():.4f}, last {history[-1].item():.4f}, lowest {min(float(x) for x in history):.4f}")
