# subject: unaligned-shapes
# thread: own
# steps: 60
# gain: yes
# device: cuda
# what: A vocabulary of 50257 in half precision, which no tile of the Tensor Cores divides.

import torch
from torch import nn

torch.manual_seed(208)
VOCABULARY = 50304
tokens = torch.randint(0, 50257, (512, 257), device="cuda")
model = nn.Sequential(nn.Embedding(VOCABULARY, 768), nn.LayerNorm(768), nn.Linear(768, VOCABULARY)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for step in range(60):
    batch = tokens[torch.randint(0, 512, (32,), device="cuda")]
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, :-1].flatten())
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
