# subject: half-weights
# also: fp16-without-scaler
# follows: loss-not-falling, exploding-gradients
# thread: https://github.com/afiaka87/glide-finetune/issues/5
# steps: 400
# gain: no
# device: cpu
# what: A model turned to float16 with half(), trained by Adam: the weights become NaN.

import torch
from torch import nn

torch.manual_seed(75)
x = torch.randn(512, 64)
y = torch.tanh(x[:, :3])
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 3))
model.half()  # <- here
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(400):
    chosen = torch.randint(0, 512, (32,))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[chosen].half()).float(), y[chosen])
    loss.backward()
    optimizer.step()  # <- here
    if step % 133 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
