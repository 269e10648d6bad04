# subject: needless-find-unused-parameters
# thread: https://github.com/facebookresearch/swav/issues/63
# steps: 120
# gain: no
# device: cpu
# what: DistributedDataParallel searches for unused parameters in a model that uses all.

import tempfile

import torch
import torch.distributed as dist
from torch import nn

torch.manual_seed(47)
folder = tempfile.TemporaryDirectory()
dist.init_process_group("gloo", init_method=f"file://{folder.name}/store", rank=0, world_size=1)
x = torch.randn(1024, 64)
y = (x @ torch.randn(64, 5)).argmax(1)
blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(20)]
network = nn.Sequential(*blocks, nn.Linear(64, 5))
model = nn.parallel.DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(120):
    chosen = torch.randint(0, 1024, (64,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
