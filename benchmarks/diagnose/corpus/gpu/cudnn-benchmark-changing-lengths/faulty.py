# subject: cudnn-benchmark-changing-shapes
# follows: allocator-churn
# thread: https://github.com/pytorch/pytorch/issues/2759
# steps: 80
# gain: yes
# device: cuda
# what: The same in one dimension: each clip of sound has its own length.

import torch
from torch import nn

torch.manual_seed(211)
torch.backends.cudnn.benchmark = True  # <- here
model = nn.Sequential(nn.Conv1d(1, 128, 25, stride=4), nn.ReLU(), nn.Conv1d(128, 128, 9), nn.ReLU())
model.extend([nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 4)]).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(80):
    length = 8000 + int(torch.randint(0, 8000, ()))
    labels = torch.randint(0, 4, (16,), device="cuda")
    clips = torch.randn(16, 1, length, device="cuda") * (1 + labels.view(16, 1, 1))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(clips), labels)  # <- here
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
