"""Two ranks with ragged shares train the model that one rank trains, and reduce once a step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RANK = """
import os, sys, torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from flatout import Plan, TrainStep, batches, supervised
torch.set_num_threads(1)
rank, ranks, port, out = (*map(int, sys.argv[1:4]), sys.argv[4])
if ranks > 1:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("gloo", rank=rank, world_size=ranks)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
x = torch.randn(40, 10, 6)
y = torch.randint(0, 3, (40, 10))
for i in range(40):
    y[i, 1 + i % 9 :] = -100  # ragged: some samples have one valid target, some nine
reductions = []
wrapped = DistributedDataParallel(model) if ranks > 1 else model
if ranks > 1:
    def hook(state, bucket):
        reductions.append(1)
        future = distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / ranks)
    wrapped.register_comm_hook(None, hook)
optimizer = torch.optim.SGD(model.parameters(), 0.5)
step = TrainStep(wrapped, optimizer, supervised(nn.CrossEntropyLoss()), Plan(micro_batches=3))
steps = 0
for batch in batches((x, y), 15, seed=1):
    step(batch)
    steps += 1
if ranks > 1:
    assert len(reductions) == steps, (len(reductions), steps)  # once a step, not once a part
if rank == 0:
    torch.save([parameter.detach() for parameter in model.parameters()], out)
if ranks > 1:
    distributed.barrier()
    os._exit(0)  # gloo's threads at times abort the interpreter's own end
"""


def test_shares_of_two_ranks_weigh_as_the_whole(tmp_path: Path) -> None:
    import socket

    import torch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    results = []
    for ranks in (1, 2):
        out = str(tmp_path / f"{ranks}.pt")
        command = [sys.executable, "-c", RANK]
        children = [subprocess.Popen([*command, str(rank), str(ranks), port, out]) for rank in range(ranks)]
        assert [child.wait(timeout=120) for child in children] == [0] * ranks
        results.append(torch.load(out))
    for alone, shared in zip(*results, strict=True):
        torch.testing.assert_close(alone, shared, rtol=1e-5, atol=1e-6)
