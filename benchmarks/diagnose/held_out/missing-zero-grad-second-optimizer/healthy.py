# subject: missing-zero-grad
# thread: https://github.com/Hsintien-Ng/idinvert_pytorch-reproduced/issues/1
# steps: 480
# gain: no
# device: cpu
# what: Encoder and head have an optimizer each; only the encoder's gradients are cleared.

import torch
import torch.nn as nn

torch.manual_seed(2024)

# how far along one of two spirals a point lies, in 32 dimensions
n = 5120
t = torch.rand(n) * 6 + 0.5
label = torch.randint(0, 2, (n,))
angle = t * 1.5 + label * 3.1416
points = torch.stack([t * torch.cos(angle), t * torch.sin(angle)], 1) / 6
data = points @ torch.randn(2, 32) + 0.02 * torch.randn(n, 32)

encoder = nn.Sequential(nn.Linear(32, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU())
head = nn.Sequential(nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 1))
opt_encoder = torch.optim.Adam(encoder.parameters(), lr=3e-4)
opt_head = torch.optim.Adam(head.parameters(), lr=1e-3)
loss_fn = nn.MSELoss()

batch_size = 256
for epoch in range(12):
    total = 0.0
    order = torch.randperm(n)
    for k in range(n // batch_size):
        idx = order[k * batch_size : (k + 1) * batch_size]
        opt_encoder.zero_grad()
        opt_head.zero_grad()
        place = head(encoder(data[idx]))
        loss = loss_fn(place, t[idx, None] / 6)
        loss.backward()
        opt_encoder.step()
        opt_head.step()
        total += loss.item()
    print(f"epoch {epoch} loss {total / (n // batch_size):.5f}")
