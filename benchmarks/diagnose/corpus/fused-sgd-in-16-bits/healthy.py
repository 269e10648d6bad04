# subject: fused-sgd-in-16-bits
# follows: loss-not-falling
# thread: https://github.com/pytorch/pytorch/issues/191763
# steps: 300
# gain: no
# device: cpu
# what: Weights in bfloat16 and an SGD with fused=True, whose kernel does not store its updates of them on a CPU.

import torch
from torch import nn

torch.manual_seed(76)
x = torch.randn(2048, 48)
y = (x[:, :6] @ torch.randn(6, 4)).argmax(1)
model = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
for step in range(300):
    chosen = torch.randint(0, 2048, (64,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x[chosen])
    loss = nn.functional.cross_entropy(logits.float(), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
