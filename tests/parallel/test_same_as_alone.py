"""What two ranks train is what one process trains, in cases that a strategy may miss without an error."""

from __future__ import annotations

import pytest

from tests.train.conftest import RunRanks

COMPARE = """
import copy, warnings
import flatout
from flatout import Plan, TrainStep
from flatout.errors import UsageError
from flatout.parallel.whole_tensors import whole
from torch.nn import functional as F
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(21, 6, generator=generator), torch.randint(0, 4, (21,), generator=generator)
def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
def adamw(model, loss_fn):
    more = list(loss_fn.parameters()) if isinstance(loss_fn, nn.Module) else []
    return torch.optim.AdamW([*model.parameters(), *more], 1e-2)
class Temperature(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(value))
    def forward(self, model, batch):
        return F.cross_entropy(model(batch[0]) * self.scale, batch[1])
def plain(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])
def summed(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
summed.count_terms = lambda batch: None
def compare(*plans, make=mlp, loss=lambda seed: plain, clip_norm=None):
    \"\"\"Two epochs, the second under the last of these plans, of batches of 8, 8 and 5 samples.\"\"\"
    torch.manual_seed(rank)  # the ranks have to begin with rank 0's weights
    model, loss_fn = make(), loss(float(rank + 1))
    torch.manual_seed(0)
    alone, alone_loss = make(), loss(1.0)
    optimizer = adamw(model, loss_fn)
    step = TrainStep(model, optimizer, loss_fn, plans[0], clip_norm=clip_norm)
    losses = []
    for number, plan in enumerate((plans[0], plans[-1])):
        if plan is not step.plan:
            step = step.with_plan(plan)
        train = flatout.batches((x, y), 8, plan, seed=number)
        losses += [step(batch) for batch in train]
    by_hand, expected = adamw(alone, alone_loss), []
    for number in range(2):
        for batch in flatout.batches((x, y), 8, seed=number, rank=0, ranks=1):
            by_hand.zero_grad()
            value = alone_loss(alone, batch)
            value.backward()
            if clip_norm:
                nn.utils.clip_grad_norm_([one for group in by_hand.param_groups for one in group["params"]], clip_norm)
            by_hand.step()
            expected.append(value.detach())
    found = [whole(one.detach()) for group in optimizer.param_groups for one in group["params"]]
    wanted = [one.detach() for group in by_hand.param_groups for one in group["params"]]
    if plans[-1].parallel is not None:
        losses = torch.stack(losses)
        distributed.all_reduce(losses)
        torch.testing.assert_close(losses / ranks, torch.stack(expected), rtol=1e-5, atol=1e-6)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    return step
"""

CASES = {
    "shares in different numbers of parts": """
compare(Plan(parallel="fsdp", micro_batches=3))  # of the last batch one rank has 2 samples, the other 3
""",
    "parameters of the loss": """
for kind in ("ddp", "zero1", "fsdp"):
    compare(Plan(parallel=kind), loss=Temperature, clip_norm=0.3)
compare(Plan(parallel="ddp", micro_batches=2), loss=Temperature)
for kind in ("tensor", "pipeline"):
    model, loss_fn = mlp(), Temperature(1.0)
    try:
        TrainStep(model, adamw(model, loss_fn), loss_fn, Plan(parallel=kind, micro_batches=2))
    except UsageError as error:
        assert "trains a parameter of shape [] that is not the model's" in str(error), error
    else:
        raise AssertionError(kind)
""",
    "a loss that sums": """
for kind in ("ddp", "zero1", "fsdp"):
    compare(Plan(parallel=kind), loss=lambda seed: summed)
compare(Plan(parallel="ddp", micro_batches=2), loss=lambda seed: summed)
model, plan = mlp(), Plan(parallel="ddp")
step = TrainStep(model, torch.optim.SGD(model.parameters(), 1e-12), summed, plan)
found = flatout.fit(step, flatout.batches((x[:16], y[:16]), 8, plan, seed=0), epochs=1)
with torch.no_grad():
    alone = [float(summed(model, batch)) for batch in flatout.batches((x[:16], y[:16]), 8, rank=0, ranks=1)]
assert abs(found.loss - sum(alone) / 2) < 1e-4, (found.loss, alone)
""",
    "a model called twice that has an unused layer": """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x, first=True):
        self.calls += 1
        return self.a(x) if first else self.b(x)
def both(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]) + F.cross_entropy(model(batch[0], first=False), batch[1])
for kind in ("ddp", "zero1"):
    compare(Plan(parallel=kind), make=Heads, loss=lambda seed: both)
compare(Plan(parallel="ddp", micro_batches=2), make=Heads, loss=lambda seed: both)
# a rank whose share does not fit starts it again
def tight(loss_fn):
    def tried(model, batch):
        found = loss_fn(model, batch)
        if len(batch[0]) > 2:
            raise torch.OutOfMemoryError
        return found
    return tried
warnings.filterwarnings("ignore", "a batch of")
for loss_fn in (plain, both):
    compare(Plan(parallel="ddp"), make=Heads, loss=lambda seed: tight(loss_fn) if seed > 1 else loss_fn)
# once in the first step, twice in later ones
model, often = Heads(), [plain]
optimizer = torch.optim.SGD(model.parameters(), 0.1)
step = TrainStep(model, optimizer, lambda *given: often[-1](*given), Plan(parallel="ddp"))
for _ in range(2):
    step((x[:4], y[:4]))
often.append(both)
try:
    step((x[:4], y[:4]))
except UsageError as error:
    assert "calls the model more often than in the first step" in str(error), error
else:
    raise AssertionError
step = step.with_plan(step.plan)
for _ in range(3):
    step((x[:4], y[:4]))
""",
    "blocks that share parameters": """
class Block(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.inner, self.own = inner or nn.Linear(6, 6), nn.Linear(6, 6)
    def forward(self, x):
        return x + torch.tanh(self.own(torch.tanh(self.inner(x))))
def shared(what):
    first, last, one = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(6, 6) if what == "a module" else None
    blocks = nn.Sequential(*[Block(one) for _ in range(3)])
    if what == "a parameter":
        blocks[2].inner.weight = blocks[0].inner.weight
    if what == "one outside":
        blocks[1].inner.weight = first.weight
    return nn.Sequential(first, blocks, last)
for what in ("a module", "a parameter", "one outside"):
    for parts in (None, 2):
        compare(Plan(parallel="fsdp", micro_batches=parts), make=lambda: shared(what), clip_norm=0.5)
""",
    "buffers that are not sent as they are": """
class Buffered(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.last = nn.Linear(6, 4)
        self.register_buffer("kept", value())
    def forward(self, x):
        return self.last(x)
values = {
    "expanded": lambda: torch.ones(1).expand(4),
    "transposed": lambda: torch.full((2, 3), float(rank)).t(),
    "int16": lambda: torch.full((3,), rank, dtype=torch.int16),
    "float8": lambda: torch.full((3,), float(rank)).to(torch.float8_e4m3fn),
}
for name, value in values.items():
    for kind in ("ddp", "fsdp"):
        step = compare(Plan(parallel=kind), make=lambda: Buffered(value))
        assert torch.equal(step.model.kept.float(), torch.full(step.model.kept.shape, float(name == "expanded"))), name
sparse, shared = (lambda: torch.eye(3).to_sparse()), (lambda: torch.full((1,), 1.0 * rank).expand(4))
for value, said in ((sparse, "is sparse"), (shared, "share memory")):
    model = Buffered(value)
    try:
        TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), plain, Plan(parallel="ddp"))
    except UsageError as error:
        assert said in str(error), error
    else:
        assert rank == 0 and said == "share memory"
""",
    "parameters that fsdp cannot cut": """
class With(nn.Module):
    def __init__(self, one):
        super().__init__()
        self.last, self.one = nn.Linear(6, 4), nn.Parameter(one)
    def forward(self, x):
        return self.last(x) * self.one.sum()
for one, said in (
    (torch.tensor(1.0), "the parameter one has no dimension"),
    (torch.zeros(0, 3), "without an element"),
    (torch.ones(2, 3).t(), "is not contiguous in memory"),
    (torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last), "memory_format=torch.contiguous_format"),
):
    model = With(one)
    try:
        TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), plain, Plan(parallel="fsdp"))
    except UsageError as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
    assert type(model) is With and not hasattr(model.one, "placements")
""",
    "buffers of a pipeline that a forward changes": """
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.centred, self.own = Centred(), nn.Linear(6, 6)
    def forward(self, x):
        return x + torch.tanh(self.own(self.centred(x)))
class Net(nn.Module):
    def __init__(self, around=None):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(6, 6), nn.Sequential(Block(), Block(), Block()), nn.Linear(6, 4)
        self.around = around or nn.Identity()
    def forward(self, x):
        return self.last(self.around(self.blocks(self.first(x))))
def step_of(parallel, around=None):
    torch.manual_seed(0)
    model = Net(around)
    plan = Plan(parallel=parallel, micro_batches=2)
    return TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), plain, plan)
step, alone = step_of("pipeline"), step_of(None)
for i in range(3):
    batch = (x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4])
    torch.testing.assert_close(step(batch), alone(batch), rtol=1e-5, atol=1e-6)
found = step.model.state_dict()
for name, value in alone.model.state_dict().items():
    torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
try:
    step_of("pipeline", Centred())(batch)
except UsageError as error:
    assert "a forward pass changes around.mean, which is outside of the repeated blocks" in str(error), error
else:
    raise AssertionError
""",
    "another plan after zero1": """
zero1 = Plan(parallel="zero1")
for after in (Plan(parallel="ddp"), Plan(parallel="fsdp"), Plan(parallel="zero1", micro_batches=2)):
    compare(zero1, after)
step = compare(zero1, Plan())  # each rank trains alone from there on, with the state of all parameters
assert all("exp_avg" in step.optimizer.state[one] for one in step.model.parameters())
step = compare(zero1)
step.close()
try:
    TrainStep(step.model, step.optimizer, plain, Plan(parallel="ddp"))
except UsageError as error:
    assert "an earlier step with 'zero1' was closed" in str(error), error
else:
    raise AssertionError
step = TrainStep(step.model, step.optimizer, plain, zero1)
whole_state = step.optimizer.state_dict()
step.with_plan(Plan(parallel="ddp")).with_plan(zero1).close()
step.optimizer.load_state_dict(whole_state)
TrainStep(step.model, step.optimizer, plain, Plan(parallel="ddp"))
""",
}


NORMS = """
from flatout import Plan, TrainStep
from flatout.errors import UsageError
def made(norm, kind, **choices):
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(15, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return TrainStep(model, optimizer, lambda model, batch: model(batch).mean(), Plan(parallel=kind, **choices))
for kind in ("ddp", "zero1", "fsdp"):
    made(nn.InstanceNorm1d(3, affine=True), kind)
    running = nn.InstanceNorm1d(3, track_running_stats=True)
    made(running, kind, batch_norm="local")
    made(running.eval(), kind)
    for norm in (nn.InstanceNorm1d(3, track_running_stats=True), nn.BatchNorm1d(3, track_running_stats=False)):
        try:
            made(norm, kind)
        except UsageError as error:
            print(error.what)
leave()
"""


def test_norms_with_statistics_of_a_share_are_refused(run_ranks: RunRanks) -> None:
    expected = [
        f"0 is {norm}, and parallel is '{kind}'"
        for kind in ("ddp", "zero1", "fsdp")
        for norm in ("an instance norm with running statistics", "a batch norm")
    ]
    for code, said, errors in run_ranks(NORMS, 2):
        assert (code, said.splitlines(), errors) == (0, expected, "")


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_what_one_trains(run_ranks: RunRanks, case: str) -> None:
    for code, _, errors in run_ranks(COMPARE + CASES[case] + "leave()\n", 2):
        assert (code, errors) == (0, "")


LEFT_OUT = """
from flatout import Plan, TrainStep
from flatout.errors import UsageError
class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.begin, self.middle, self.end = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.left_out = False
    def forward(self, x):
        x = self.begin(x)
        return self.end(x if self.left_out and x.shape[0] != 2 else x + self.middle(x))
kind, samples = sys.argv[4], int(sys.argv[5])
model = Drops()
own = kind == "own"
given = DistributedDataParallel(model, find_unused_parameters=True) if own else model
optimizer = torch.optim.SGD(model.parameters(), 0.1)
plan = Plan() if own else Plan(parallel=kind, micro_batches=2 if samples == 5 else None)
step = TrainStep(given, optimizer, lambda model, batch: model(batch).square().mean(), plan)
batch = torch.randn(samples, 3) + rank
for _ in range(2):
    step(batch)
model.left_out = True
before = model.begin.weight.detach().clone()
try:
    for _ in range(2):
        step(batch)
except UsageError as error:
    assert torch.equal(model.begin.weight, before)
    print(error)
leave()
"""


@pytest.mark.parametrize(
    ("kind", "samples"),
    [
        ("ddp", 4),
        pytest.param("ddp", 5, id="left out in the last of two parts"),
        ("zero1", 4),
    ],
)
def test_a_layer_that_a_later_step_leaves_out_ends_the_training_before_an_update(
    run_ranks: RunRanks, kind: str, samples: int
) -> None:
    for code, said, errors in run_ranks(LEFT_OUT, 2, kind, samples):
        assert (code, errors) == (0, "")
        assert said.startswith("middle.weight got no gradient in this step, and all parameters did in the first one")


@pytest.mark.parametrize("kind", ["fsdp", "own"])
def test_the_remedies_for_that_train(run_ranks: RunRanks, kind: str) -> None:
    for code, said, _ in run_ranks(LEFT_OUT, 2, kind, 4):  # torch warns that all were used in the first step
        assert (code, said) == (0, "")
