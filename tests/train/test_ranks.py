"""Two ranks with ragged shares train the model that one rank trains, and reduce once a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

RANK = """
from flatout import Plan, TrainStep, batches, supervised
out = sys.argv[4]
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
"""
ONE_EPOCH = """
steps = 0
for batch in batches((x, y), 15, seed=1):
    step(batch)
    steps += 1
if ranks > 1:
    assert len(reductions) == steps, (len(reductions), steps)  # once a step, not once a part
if rank == 0:
    torch.save([parameter.detach() for parameter in model.parameters()], out)
leave()
"""
FIT = """
from flatout import fit
found = fit(step, batches((x, y), 15, seed=1), epochs=1)
if rank == 0:
    torch.save([torch.tensor(found.loss)], out)
leave()
"""


@pytest.mark.parametrize("trained", [ONE_EPOCH, FIT], ids=["weights", "the loss of an epoch"])
def test_shares_of_two_ranks_weigh_as_the_whole(run_ranks: Any, tmp_path: Path, trained: str) -> None:
    results = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.pt"
        assert run_ranks(RANK + trained, ranks, out) == [(0, "", "")] * ranks
        results.append(torch.load(out))
    for alone, shared in zip(*results, strict=True):
        torch.testing.assert_close(alone, shared, rtol=1e-5, atol=1e-6)


LONE = """
import warnings
import flatout
from flatout import TrainStep, batches, evaluate, fit, supervised
torch.manual_seed(0)
x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))


def made(model):
    return TrainStep(model, torch.optim.SGD(model.parameters(), 0.5), supervised(nn.CrossEntropyLoss()))


with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    fit(made(nn.Linear(6, 3)), batches((x, y), 4), epochs=1)
assert "each of the 2 ranks trains a model of its own" in str(found[0].message), found
with warnings.catch_warnings():
    warnings.simplefilter("error")
    fit(made(nn.Linear(6, 3)), batches((x, y), 4, rank=0, ranks=1), epochs=1)
    together = DistributedDataParallel(nn.Linear(6, 3))
    told = fit(made(together), batches((x, y), 4), epochs=1, evaluation=lambda: {"f1": 0.5} if rank == 0 else {})
assert told.evaluations == ({"f1": 0.5},), told.evaluations
try:
    fit(made(together), [(x, y)] * (3 + rank), epochs=1)
except Exception as error:
    assert "the ranks have different numbers of batches: 3, 4" in str(error), error
else:
    raise AssertionError("nothing was raised")
class Unsized:
    def __init__(self, count):
        self.count = count
    def __iter__(self):
        return iter([(x, y)] * self.count)
for counts in ((3, 4), (2, 0)):
    try:
        fit(made(together), Unsized(counts[rank]), epochs=1)
    except Exception as error:
        assert f"some ranks have no batch after {min(counts)}, and others have one" in str(error), error
    else:
        raise AssertionError("nothing was raised")
assert fit(made(together), Unsized(3), epochs=2).steps == 6
for kind in ("fsdp", "pipeline"):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6)) for _ in range(2)])
    average, plan = torch.optim.swa_utils.AveragedModel(model), flatout.Plan(parallel=kind, micro_batches=2)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()), plan)
    try:
        fit(step, batches((x, y), 4, plan), epochs=1, ema=average)
    except Exception as error:
        assert f"ema is given, and parallel is '{kind}'" in str(error), error
    else:
        raise AssertionError("nothing was raised")
leave()
"""


def test_what_ranks_do_apart_is_said(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(LONE, 2, tmp_path / "out") == [(0, "", "")] * 2


STREAMED = """
from flatout import Plan, TrainStep, batches, evaluate, supervised
class Rows(torch.utils.data.IterableDataset):
    def __init__(self, count):
        numbers = torch.Generator().manual_seed(1)
        self.rows = torch.randn(count, 3, generator=numbers), torch.randint(0, 2, (count,), generator=numbers)
    def __iter__(self):
        return zip(*self.rows)
torch.manual_seed(0)
model = nn.Linear(3, 2)
plan = Plan(parallel="ddp")
step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()), plan)
for count in (8, 11, 13):  # the last batch of 4: whole, of 3 samples, and of one, which is fewer than the ranks
    for data in (Rows(count), iter(Rows(count))):
        print(evaluate(step, batches(data, 4, plan))["loss"])
leave()
"""


def test_a_stream_is_evaluated_as_a_whole_on_every_rank(run_ranks: Any) -> None:
    [(code, alone, errors)] = run_ranks(STREAMED, 1)
    assert code == 0, errors
    expected = [float(line) for line in alone.splitlines()]
    for code, found, errors in run_ranks(STREAMED, 2):
        assert code == 0, errors
        assert [float(line) for line in found.splitlines()] == pytest.approx(expected, rel=1e-6)
