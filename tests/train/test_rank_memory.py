"""One of two ranks runs out of memory: it splits its share alone where that is sound, and says clearly where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

TRAIN = """
import warnings
from flatout import Plan, TrainStep, batches, supervised
from flatout.errors import MachineError
warnings.simplefilter("always")
out, place, micro_batches = sys.argv[4], sys.argv[5], int(sys.argv[6])
reductions = []

def end_of_memory(samples):
    if rank == 1 and samples > 3:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: 42")

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        if place == "backward":
            end_of_memory(len(gradient))
        return gradient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.middle = nn.BatchNorm1d(10) if place == "norm" else nn.Tanh()
        self.register_buffer("scale", torch.ones(8))  # broadcast by rank 0 before each step's first forward pass
    def forward(self, x):
        hidden = self.middle(Backward.apply(self.first(x))) * self.scale
        if place in ("forward", "norm"):
            end_of_memory(len(x))
        return self.last(hidden)

torch.manual_seed(0)
model = Net()
x, y = torch.randn(40, 10, 6), torch.randint(0, 3, (40, 10))
for i in range(40):
    y[i, 1 + i % 9 :] = -100  # ragged: ranks and parts weigh differently
wrapped = model
if ranks > 1:
    def hook(state, bucket):
        reductions.append(1)
        future = distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / ranks)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, hook)
    if rank == 1:
        model.scale.fill_(3.0)  # what rank 0 broadcasts counts, after a new beginning too
criterion = supervised(nn.CrossEntropyLoss())
def loss_fn(model, batch):
    loss = criterion(model, batch)
    if place == "loss":
        end_of_memory(len(batch[0]))
    return loss
loss_fn.count_terms = criterion.count_terms
step = TrainStep(wrapped, torch.optim.SGD(model.parameters(), 0.5), loss_fn, Plan(micro_batches=micro_batches))
steps = 0
try:
    for batch in batches((x, y), 16, seed=1):
        step(batch)
        steps += 1
except MachineError as error:
    print(error)
    leave(3)
except RuntimeError:  # the other rank has left
    leave(4)
print(steps, len(reductions), step.micro_batches)
torch.save([parameter.detach() for parameter in model.parameters()], f"{out}.{rank}")
leave()
"""


@pytest.mark.parametrize(("place", "micro_batches", "parts"), [("forward", 1, 4), ("loss", 2, 4), ("backward", 2, 4)])
def test_one_rank_splits_alone(run_ranks: Any, tmp_path: Path, place: str, micro_batches: int, parts: int) -> None:
    alone, shared = str(tmp_path / "alone"), str(tmp_path / "shared")
    ((code, _, _),) = run_ranks(TRAIN, 1, alone, place, 1)
    assert code == 0
    first, second = run_ranks(TRAIN, 2, shared, place, micro_batches)
    assert first == (0, f"3 3 {micro_batches}\n", "")  # reduced once a step
    assert second[:2] == (0, f"3 3 {parts}\n")
    assert "a batch of 8 did not fit; from now on it is split into" in second[2]
    expected, ranks = torch.load(f"{alone}.0"), [torch.load(f"{shared}.{rank}") for rank in range(2)]
    for whole, one, other in zip(expected, *ranks, strict=True):
        torch.testing.assert_close(one, whole, rtol=1e-5, atol=1e-6)
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("loss", "the last part, which reduces the gradients together with the other ranks, had begun"),
        ("backward", "the last part, which reduces the gradients together with the other ranks, had begun"),
        ("norm", "module.middle mixes the samples of a batch"),
    ],
)
def test_where_it_cannot_it_says_why(run_ranks: Any, tmp_path: Path, place: str, why: str) -> None:
    other, failed = run_ranks(TRAIN, 2, tmp_path / "out", place, 1)
    assert failed[0] == 3
    assert "out of memory on one rank; it cannot start its share of a step again alone: " + why in failed[1]
    assert "use a smaller batch or a larger micro_batches" in failed[1]
    assert other[0] == 4  # its reduction failed: it did not go on alone
