# tricky: A queue of embeddings of a fixed size, and a second encoder that is updated without gradients.
# steps: 300
# device: cpu

import copy

import torch
from torch import nn

torch.manual_seed(120)
images = torch.randn(1024, 96)
encoder = nn.Sequential(nn.Linear(96, 512), nn.ReLU(), nn.Linear(512, 64))
slow = copy.deepcopy(encoder).requires_grad_(False)
queue = nn.functional.normalize(torch.randn(512, 64), dim=1)
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9)
for step in range(300):
    batch = images[torch.randint(0, 1024, (64,))]
    query = nn.functional.normalize(encoder(batch + 0.1 * torch.randn_like(batch)), dim=1)
    with torch.no_grad():
        key = nn.functional.normalize(slow(batch + 0.1 * torch.randn_like(batch)), dim=1)
    logits = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.T], dim=1) / 0.2
    loss = nn.functional.cross_entropy(logits, torch.zeros(64, dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    queue = torch.cat([queue[64:], key])
    with torch.no_grad():
        for kept, new in zip(slow.parameters(), encoder.parameters(), strict=True):
            kept.mul_(0.99).add_(new, alpha=0.01)
    if step % 75 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
