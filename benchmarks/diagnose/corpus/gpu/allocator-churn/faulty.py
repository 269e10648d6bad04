# subject: allocator-churn
# thread: https://github.com/huggingface/transformers/issues/31372
# steps: 100
# gain: yes
# device: cuda
# what: empty_cache in every step: all memory goes back to the driver and is asked for again.

import torch
from torch import nn

torch.manual_seed(213)
torch.set_float32_matmul_precision("high")
x = torch.randn(4096, 1024, device="cuda")
y = x[:, :10].argmax(1)
blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)]
model = nn.Sequential(*blocks, nn.Linear(1024, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
for step in range(100):
    chosen = torch.randint(0, 4096, (4096,), device="cuda")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    torch.cuda.empty_cache()  # <- here
    if step % 25 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
