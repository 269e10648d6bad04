# subject: data-parallel
# thread: https://github.com/dbolya/yolact/issues/438
# steps: 100
# gain: no
# device: cuda
# what: DataParallel, where DistributedDataParallel serves.

import tempfile

import torch
import torch.distributed as dist
from torch import nn

torch.manual_seed(212)
folder = tempfile.TemporaryDirectory()
dist.init_process_group("nccl", init_method=f"file://{folder.name}/store", rank=0, world_size=1)
x = torch.randn(4096, 256, device="cuda")
y = x[:, :10].argmax(1)
network = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
model = nn.parallel.DistributedDataParallel(network, device_ids=[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(100):
    chosen = torch.randint(0, 4096, (256,), device="cuda")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
