# tricky: Parameters without gradients in half of the steps: only one of two heads is trained at a time.
# steps: 300
# device: cpu

import torch
from torch import nn

torch.manual_seed(121)
x = torch.randn(2048, 64)
answers = [(x @ torch.randn(64, 3)).argmax(1), (x @ torch.randn(64, 7)).argmax(1)]
trunk = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
heads = nn.ModuleList([nn.Linear(512, 3), nn.Linear(512, 7)])
optimizer = torch.optim.Adam([*trunk.parameters(), *heads.parameters()], lr=1e-3)
for step in range(300):
    chosen, which = torch.randint(0, 2048, (64,)), step % 2
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(heads[which](trunk(x[chosen])), answers[which][chosen])
    loss.backward()
    optimizer.step()
    if step % 75 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
