"""Two ranks under each strategy train what one process trains: ragged shares, parts, clipping, a schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flatout import Plan
from flatout.errors import PlanError
from tests.train.conftest import RunRanks

TRAIN = """
import warnings
import flatout
from flatout import Plan, TrainStep, batches, supervised
from flatout.parallel.whole_tensors import whole
out, folder, kind, begin, steps = sys.argv[4:9]
torch.manual_seed(rank)  # the ranks have to begin with rank 0's weights
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    def forward(self, x):
        return x + self.inner(x)
model = nn.Sequential(nn.Linear(5, 6), Block(), Block(), nn.Linear(6, 3))
generator = torch.Generator().manual_seed(1)
x = torch.randn(42, 7, 5, generator=generator)
y = torch.randint(0, 3, (42, 7), generator=generator)
for i in range(42):
    y[i, 1 + i % 6 :] = -100  # ragged: one to six targets
plan = Plan(parallel=kind, micro_batches=2)
optimizer = torch.optim.AdamW(model.parameters(), 0.02)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
step = TrainStep(model, optimizer, supervised(nn.CrossEntropyLoss()), plan, clip_norm=0.3, scheduler=schedule)
data = batches((x, y), 7, plan, seed=3)
checkpoints = flatout.Checkpoints(folder)
if int(begin):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ranks whose random states")
        flatout.restore(checkpoints.load(), step, data)
assert step.steps == int(begin)
while step.steps < int(steps):
    for batch in data:
        step(batch)
        if step.steps == int(steps):
            break
checkpoints.save(flatout.capture(step, data), step=step.steps)
figures = flatout.evaluate(step, batches((x[:31], y[:31]), 10, plan, shuffle=False))  # the last batch: one sample
weights = [whole(one.detach()).clone() for one in model.parameters()]
held = sum(one.to_local().numel() if hasattr(one, "to_local") else one.numel() for one in model.parameters())
moments = sum(
    (one.to_local() if hasattr(one, "to_local") else one).numel()
    for state in optimizer.state.values() for name, one in state.items() if name != "step"
)
torch.save({"weights": weights, "figures": figures, "held": held, "moments": moments}, f"{out}.{rank}")
step.close()
leave()
"""
PARAMETERS = 5 * 6 + 6 + 2 * (6 * 6 + 6) + 6 * 3 + 3


def train(run_ranks: RunRanks, out: Path, folder: Path, kind: str, ranks: int, begin: int, steps: int) -> list[dict]:
    assert run_ranks(TRAIN, ranks, out, folder, kind, begin, steps) == [(0, "", "")] * ranks
    return [torch.load(f"{out}.{rank}") for rank in range(ranks)]


def close(one: dict, other: dict) -> None:
    for here, there in zip(one["weights"], other["weights"], strict=True):
        torch.testing.assert_close(here, there, rtol=2e-5, atol=2e-6)
    assert one["figures"] == pytest.approx(other["figures"], rel=1e-5)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict]:
    """What one process came to; filled by the first test that needs it."""
    return {}


@pytest.mark.parametrize("kind", ["ddp", "zero1", "fsdp"])
@pytest.mark.first_case
def test_two_ranks_train_what_one_trains_and_continue_with_another_number(
    run_ranks: RunRanks, tmp_path: Path, alone: dict[str, dict], kind: str
) -> None:
    if not alone:
        alone["8"] = train(run_ranks, tmp_path / "alone", tmp_path / "one", "ddp", 1, 0, 8)[0]
    folder = tmp_path / "two"
    whole = train(run_ranks, tmp_path / "whole", tmp_path / "whole-run", kind, 2, 0, 8)
    for rank in whole:
        close(rank, alone["8"])
    assert [rank["held"] for rank in whole] == ([PARAMETERS] * 2 if kind != "fsdp" else _shares())
    moments = [rank["moments"] for rank in whole]
    assert sum(moments) == 2 * PARAMETERS * (2 if kind == "ddp" else 1)
    train(run_ranks, tmp_path / "cut", folder, kind, 2, 0, 5)
    resumed = train(run_ranks, tmp_path / "resumed", folder, kind, 2, 5, 8)
    for rank, uninterrupted in zip(resumed, whole, strict=True):
        assert all(map(torch.equal, rank["weights"], uninterrupted["weights"]))
    other = tmp_path / "other"
    train(run_ranks, tmp_path / "first", other, kind, 2, 0, 5)
    close(train(run_ranks, tmp_path / "later", other, "ddp", 1, 5, 8)[0], alone["8"])


def _shares() -> list[int]:
    """FSDP cuts each parameter along its first size, the first rank having the larger part."""
    sizes = [(6, 5), (6, 1), *[(6, 6), (6, 1)] * 2, (3, 6), (3, 1)]
    first = sum((rows + 1) // 2 * columns for rows, columns in sizes)
    return [first, PARAMETERS - first]


OPTIONS = """
import flatout
from flatout.parallel.whole_tensors import whole
def trained(unused=False, **choices):
    torch.manual_seed(0)
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        def forward(self, x):
            return x + torch.tanh(self.inner(self.norm(x)))
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.last = nn.Sequential(Block(), Block()), nn.Linear(16, 5)
            self.unused = nn.Linear(3, 3) if unused else None
        def forward(self, x):
            return self.last(self.blocks(x))
    model = Net()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, 8, 16, generator=generator), torch.randint(0, 5, (4, 8), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = flatout.TrainStep(model, optimizer, flatout.supervised(nn.CrossEntropyLoss()), flatout.Plan(**choices))
    mine = slice(4 * rank, 4 * rank + 4)
    dtypes = {step((x[i, mine], y[i, mine])).dtype for i in range(4)}
    dtypes |= {one.dtype for one in model.parameters()} | {one.grad.dtype for one in model.last.parameters()}
    assert dtypes == {torch.float32}
    weights = [whole(one.detach()).clone() for one in model.last.parameters()]
    step.close()
    return weights
def difference(ones, others):
    return max(float((one - other).abs().max()) for one, other in zip(ones, others))
plain, fsdp = trained(parallel="ddp"), trained(parallel="fsdp")
assert difference(plain, trained(parallel="ddp", ddp_bucket_mib=1)) == 0
assert difference(plain, trained(parallel="ddp", ddp_static_graph=True, out_of_memory="raise")) == 0
assert difference(plain, trained(True, parallel="ddp", ddp_static_graph=True, out_of_memory="raise")) == 0
assert difference(fsdp, trained(parallel="fsdp", fsdp_keep_gathered=True)) == 0
assert difference(plain, trained(parallel="fsdp", fsdp_keep_gathered=True, micro_batches=2)) < 1e-6
assert 0 < difference(fsdp, trained(parallel="fsdp", fsdp_dtype="bf16")) < 0.02
leave()
"""


def test_options_of_ddp_and_fsdp(run_ranks: RunRanks) -> None:
    assert run_ranks(OPTIONS, 2) == [(0, "", "")] * 2


def test_a_static_graph_takes_a_batch_in_one_pass() -> None:
    with pytest.raises(
        PlanError, match=r"ddp_static_graph is true while out_of_memory is unset.*out_of_memory = 'raise'"
    ):
        Plan(parallel="ddp", ddp_static_graph=True)
    with pytest.raises(PlanError, match="ddp_static_graph is true while micro_batches is 2"):
        Plan(parallel="ddp", ddp_static_graph=True, out_of_memory="raise", micro_batches=2)
    with pytest.raises(PlanError, match="fsdp_dtype is 'bf16' while parallel is 'ddp'"):
        Plan(parallel="ddp", fsdp_dtype="bf16")


UNUSED = """
from flatout import Plan, TrainStep
from flatout.errors import UsageError
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    def forward(self, x):
        x = self.always(x)
        return self.sometimes(x) if x.shape[0] > 2 else x  # only where there are three samples
torch.manual_seed(0)
model = Model()
kept = model.never.weight.detach().clone()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
count = (lambda batch: None) if sys.argv[5] == "sum" else None
def loss_fn(model, batch):
    squares = model(batch).square()
    return squares.sum() if count else squares.mean()
step = TrainStep(model, optimizer, loss_fn, Plan(parallel="ddp"), count_terms=count)
x = torch.randn(6, 5, 3)
for i in range(6):
    if ranks > 1:
        step(x[i, :3] if rank == 0 else x[i, 3:])  # the second rank never uses `sometimes`
    else:  # the same gradient
        optimizer.zero_grad()
        parts = [x[i, :3], x[i, 3:]]
        scale = [1, 1] if count else [3 / 5, 2 / 5]
        sum(loss_fn(model, part) * one for part, one in zip(parts, scale)).backward()
        optimizer.step()
assert torch.equal(model.never.weight, kept)
bad = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
if ranks > 1:
    try:
        TrainStep(bad, torch.optim.SGD(bad.parameters(), 0.1), loss_fn, Plan(parallel="ddp"))
    except UsageError as error:
        print(error)
    TrainStep(bad, torch.optim.SGD(bad.parameters(), 0.1), loss_fn, Plan(parallel="ddp", batch_norm="local"))
torch.save([one.detach() for one in model.parameters()], f"{sys.argv[4]}.{rank}")
leave()
"""


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_parameters_that_a_rank_does_not_use_and_losses_that_sum(
    run_ranks: RunRanks, tmp_path: Path, kind: str
) -> None:
    (code, _, errors), *_ = run_ranks(UNUSED, 1, tmp_path / "one", kind)
    assert (code, errors) == (0, "")
    found = run_ranks(UNUSED, 2, tmp_path / "two", kind)
    for code, said, errors in found:
        assert (code, errors) == (0, "")
        assert said.startswith("1 is a batch norm, and parallel is 'ddp'; its mean and variance would be those of each")
    for rank in range(2):
        for here, there in zip(torch.load(f"{tmp_path}/two.{rank}"), torch.load(f"{tmp_path}/one.0"), strict=True):
            torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)


DIFFERENT = """
from flatout import Plan, TrainStep
from flatout.errors import UsageError
kind = sys.argv[4]
model = nn.Linear(3, 4 + rank if kind == "width" else 4)
if kind == "frozen" and rank:
    model.bias.requires_grad_(False)
plan = Plan(parallel="ddp", micro_batches=2 + rank) if kind == "plan" else Plan(parallel="ddp")
try:
    TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), lambda model, batch: model(batch).mean(), plan)
except UsageError as error:
    print(error)
leave()
"""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("width", "the ranks differ: on rank 0 weight has shape [4, 3] and dtype float32, on rank 1 weight has shape"),
        ("frozen", "the ranks differ: on rank 0 bias is trained, on rank 1 bias is not trained"),
        ("plan", "the ranks differ: on rank 0 micro_batches is 2, on rank 1 micro_batches is 3"),
    ],
)
def test_ranks_with_different_models_or_plans_are_refused(run_ranks: RunRanks, kind: str, said: str) -> None:
    for code, out, errors in run_ranks(DIFFERENT, 2, kind):
        assert (code, errors) == (0, "")
        assert out.startswith(said)


IN_PLACE = """
from flatout import Plan, TrainStep
from flatout.errors import UsageError
model = nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (2, 2)))  # its output is a view
before = [one.detach().clone() for one in model.parameters()]
def loss_fn(model, batch):
    output = model(batch)
    output += 1
    return output.square().mean()
step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, Plan(parallel="fsdp"))
try:
    step(torch.randn(4, 3))
except UsageError as error:
    print(error)
leave()
"""


def test_an_output_changed_in_place_is_refused_where_its_gradients_would_be_wrong(run_ranks: RunRanks) -> None:
    for code, said, errors in run_ranks(IN_PLACE, 2):
        assert (code, errors) == (0, "")
        assert said.startswith("loss_fn changed an output of the model in place; under fully_shard the gradients")


COMPRESSED = """
from flatout import Plan, TrainStep
torch.manual_seed(0)
model = nn.Linear(3, 2)
plan = Plan(parallel="ddp", gradient_compression="fp16")
optimizer = torch.optim.SGD(model.parameters(), 1.0)
step = TrainStep(model, optimizer, lambda model, batch: model(batch).square().mean(), plan)
batch = torch.randn(4, 3) + rank
step(batch)  # averaged in fp32: DDP begins with the second
step(batch)
print(all(torch.equal(one.grad, one.grad.half().float()) for one in model.parameters()))
leave()
"""


@pytest.mark.slow
def test_gradients_are_sent_in_16_bits_where_that_is_asked_for(run_ranks: RunRanks) -> None:
    assert run_ranks(COMPRESSED, 2) == [(0, "True\n", "")] * 2
    for code, _, errors in run_ranks(COMPRESSED.replace("fp16", "bf16"), 2):
        assert code != 0
        assert "gradient_compression is 'bf16', and the model is on the CPU; torch sends bf16 gradients" in errors


UNFROZEN = """
import flatout
from flatout import Plan, TrainStep
from flatout.errors import UsageError
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
model[0].requires_grad_(False)
plan = Plan(parallel="ddp")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
step = TrainStep(model, optimizer, lambda model, batch: model(batch).square().mean(), plan)
batch = torch.randn(4, 3) + rank
for _ in range(3):
    step(batch)
model[0].requires_grad_(True)
try:
    step(batch)
except UsageError as error:
    print(error.what)
step = step.with_plan(plan)
for _ in range(3):
    step(batch)
sums = [torch.zeros(1) for _ in range(2)]
torch.distributed.all_gather(sums, model[0].weight.detach().sum().reshape(1))
print(torch.equal(*sums))
leave()
"""


def test_layers_that_are_unfrozen_later_are_trained_by_a_new_step(run_ranks: RunRanks) -> None:
    """DDP would leave their gradients as each rank has them."""
    said = "parameters were frozen or unfrozen in the middle of training\nTrue\n"
    assert run_ranks(UNFROZEN, 2) == [(0, said, "")] * 2


SPARSE = """
from flatout import Plan, TrainStep
from flatout.errors import UsageError
model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
step = TrainStep(model, optimizer, lambda model, batch: model(batch).square().mean(), Plan(parallel="ddp"))
try:
    step(torch.randint(0, 5, (4,)))
except UsageError as error:
    print(error.what)
leave()
"""


def test_sparse_gradients_are_refused(run_ranks: RunRanks) -> None:
    for code, said, errors in run_ranks(SPARSE, 2):
        assert (code, errors) == (0, "")
        assert said == "the gradient of a parameter of shape [5, 4] is sparse\n"


GROUP_ADDED = """
from flatout import Plan, TrainStep
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(2, 40))
optimizer = torch.optim.Adam(model[:2].parameters(), 0.1)
step = TrainStep(model, optimizer, lambda model, batch: model(batch).square().mean(), Plan(parallel="zero1"))
batch = torch.randn(4, 3) + rank
for _ in range(3):
    step(batch)
optimizer.add_param_group({"params": list(model[2].parameters())})
step(batch)
steps = {name: int(optimizer.state[one]["step"]) for name, one in model.named_parameters() if one in optimizer.state}
print(sorted({count for name, count in steps.items() if not name.startswith("2.")}), len(steps))
leave()
"""


def test_a_group_that_is_added_changes_no_owner(run_ranks: RunRanks) -> None:
    """The moments of what was trained before stay."""
    ended = run_ranks(GROUP_ADDED, 2)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert [said.split("] ")[0] for _, said, _ in ended] == ["[4", "[4"]
    assert sum(int(said.split("] ")[1]) for _, said, _ in ended) == 6


UNEVEN = """
from flatout import Plan, TrainStep, evaluate
from flatout.errors import UsageError
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
step = TrainStep(model, optimizer, lambda model, batch: model(batch).square().mean(), Plan(parallel="fsdp"))
print(sorted(evaluate(step, [torch.ones(2, 4)] * 2)))
for batches in (2 + rank, 1 - rank):
    try:
        evaluate(step, [torch.ones(2, 4)] * batches)
    except UsageError as error:
        print(error)
leave()
"""


def test_an_evaluation_of_different_lengths_is_refused_where_every_rank_takes_part(run_ranks: RunRanks) -> None:
    """It would wait for ever: each call of the model gathers its parameters."""
    for code, said, errors in run_ranks(UNEVEN, 2):
        assert (code, errors) == (0, "")
        figures, after, at_once = said.splitlines()
        assert figures == "['loss']"
        assert after.startswith("some ranks have no batch after 2, and others have one")
        assert at_once.startswith("some ranks have no batch after 0, and others have one")


NOT_SHARDED = """
from flatout import Plan, TrainStep
from flatout.errors import UsageError
def refused(model, kind):
    try:
        TrainStep(model, kind(model.parameters(), 0.1), lambda model, batch: model(batch).sum(), Plan(parallel="fsdp"))
    except UsageError as error:
        print(error)
blocks = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3)]
refused(nn.Sequential(*blocks), torch.optim.Adafactor)
refused(nn.Sequential(*blocks), torch.optim.Rprop)
blocks[1][0].double()
refused(nn.Sequential(*blocks), torch.optim.SGD)
blocks[1][0].float().requires_grad_(False)
refused(nn.Sequential(nn.Linear(4, 4), *blocks, nn.Linear(4, 2).double()), torch.optim.SGD)
blocks[0][1].bias.register_hook(lambda gradient: gradient / 2)
refused(nn.Sequential(*blocks), torch.optim.SGD)
blocks[0][1].bias = nn.Parameter(torch.zeros(4))
blocks[2][0].weight.register_post_accumulate_grad_hook(lambda weight: None)
refused(nn.Sequential(*blocks), torch.optim.SGD)
leave()
"""


def test_what_fsdp_cannot_train_is_refused_before_it_is_sharded(run_ranks: RunRanks) -> None:
    for code, said, errors in run_ranks(NOT_SHARDED, 2):
        assert code == 0, errors
        adafactor, rprop, inside, around, *hooks = said.splitlines()
        assert adafactor.startswith("the optimizer is Adafactor, and parallel is 'fsdp'; torch's Adafactor does not")
        assert rprop.startswith("the optimizer is Rprop")
        assert inside.startswith("1.0.weight is float64 and 1.1.weight is float32, and parallel is 'fsdp'")
        assert around.startswith("0.weight is float32 and 4.weight is float64, and parallel is 'fsdp'")
        assert [one.partition(",")[0] for one in hooks] == [
            "the parameter 0.1.bias has hooks on its gradient",
            "the parameter 2.0.weight has hooks on its gradient",
        ]
