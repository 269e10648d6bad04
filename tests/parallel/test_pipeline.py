"""Blocks on two ranks train what one process trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.parallel.pipeline.balance import split_evenly
from flatout.parallel.pipeline.chain import Chain
from tests.parallel.split_training import MODELS, check_equals_one_process
from tests.train.conftest import RunRanks


@pytest.mark.slow
def test_two_ranks_train_what_one_trains(run_ranks: RunRanks, tmp_path: Path) -> None:
    alone, split = check_equals_one_process(run_ranks, tmp_path, "pipeline", "gpt2", 2)
    assert all(rank["gpt2"]["held"] < 0.7 * alone["gpt2"]["held"] for rank in split)


@pytest.mark.slow
def test_our_other_models_do_so_too(run_ranks: RunRanks, tmp_path: Path) -> None:
    check_equals_one_process(run_ranks, tmp_path, "pipeline", "bert,lm,seq", 2)


@pytest.mark.slow
def test_models_of_transformers_on_two_ranks_train_what_one_trains(run_ranks: RunRanks, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    check_equals_one_process(run_ranks, tmp_path, "pipeline", "hf-gpt2,hf-llama,hf-bert", 2)


SHAPES = (
    MODELS
    + """
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    def forward(self, *, x, scale):
        return (x + self.inner(x) * scale, None)
class Model(nn.Module):  # by keyword, tuples, something between the blocks, a parameter that several stages use
    def __init__(self):
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(5, 6), nn.Linear(6, 3), nn.Parameter(torch.tensor(0.5))
        self.never = nn.Parameter(torch.ones(2))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x=self.frozen(x), scale=self.scale * 2)[0]
        return self.last(x)
model = Model()
plan = Plan(parallel="pipeline", micro_batches=ranks) if ranks > 1 else Plan()
optimizer = torch.optim.AdamW(model.parameters(), 0.02)
def loss_fn(model, batch):
    return model(batch).square().mean()
step = TrainStep(model, optimizer, loss_fn, plan, clip_norm=0.1)
numbers = torch.Generator().manual_seed(1)
losses = []
for shape in ((4, 5), (4, 7, 5), (3, 5), (9, 2, 5), (4, 5)):  # a last batch that is shorter, longer sequences
    losses.append(float(step(torch.randn(shape, generator=numbers))))
    step.finish(); step.check_finite()
torch.save((losses, {name: one.clone() for name, one in model.state_dict().items()}), f"{sys.argv[4]}.{rank}")
leave()
"""
)


def test_any_chain_of_blocks_and_any_shape_of_batches(run_ranks: RunRanks, tmp_path: Path) -> None:
    import torch

    for ranks in (1, 2, 3):
        assert run_ranks(SHAPES, ranks, tmp_path / str(ranks)) == [(0, "", "")] * ranks
    losses, state = torch.load(tmp_path / "1.0")
    for ranks in (2, 3):
        for rank in range(ranks):
            here = torch.load(tmp_path / f"{ranks}.{rank}")
            assert here[0] == pytest.approx(losses, rel=1e-5)
            for one, other in zip(state.values(), here[1].values(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


REFUSED = (
    MODELS
    + """
def refusal(make):
    try:
        make()
    except FlatoutError as error:
        return str(error)
    raise AssertionError("not refused")
def step_of(model, plan=Plan(parallel="pipeline", micro_batches=2), loss_fn=Loss("gpt2")):
    return TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, plan)
found = [refusal(lambda: step_of(ours("gpt2"), Plan(parallel="pipeline")))]
found.append(refusal(lambda: step_of(nn.Linear(3, 3))))
found.append(refusal(lambda: step_of(ours("gpt2"), Plan(parallel="pipeline", micro_batches=2, compile="default"))))
found.append(refusal(lambda: step_of(ours("gpt2"))((x[:1], y[:1]))))
class Skips(nn.Module):  # what the first block computes is used again after the last one
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
    def forward(self, x):
        first = self.blocks[0](x)
        return self.blocks[1](first) + first
def mean(model, x):
    return model(x).mean()
found.append(refusal(lambda: step_of(Skips(), loss_fn=mean)(torch.ones(4, 4))))
class Twice(Skips):
    def forward(self, x):
        return self.blocks[1](self.blocks[0](self.blocks[0](x)))
found.append(refusal(lambda: step_of(Twice(), loss_fn=mean)(torch.ones(4, 4))))
class Asks(Skips):
    def forward(self, x):
        return self.blocks[1](self.blocks[0](x)) * self.blocks[0][0].weight.mean()
found.append(refusal(lambda: step_of(Asks(), loss_fn=mean)(torch.ones(4, 4))))
print("\\n".join(found))
leave()
"""
)


def test_what_is_no_chain_is_refused_on_every_rank(run_ranks: RunRanks) -> None:
    ended = run_ranks(REFUSED, 2)
    assert [code for code, _, _ in ended] == [0, 0], ended
    for _, found, _ in ended:
        parts, none, compiled, samples, skips, twice, asks = found.splitlines()
        assert "micro_batches is 1" in parts
        assert "there are 2 ranks" in parts
        assert "Linear has no repeated blocks" in none
        assert "compile is 'default'" in compiled
        assert "a batch has 1 samples, and there are 2 ranks" in samples
        assert "the loss is not finite in stages" in skips
        assert "does not call each block once" in twice
        assert "of a block" in asks


def test_blocks_are_shared_by_time_and_then_by_size() -> None:
    assert split_evenly([1.0] * 5, [1] * 5, before=0.0, after=0.0, stages=5) == [0, 1, 2, 3, 4, 5]
    assert split_evenly([3.0, 1.0, 1.0, 1.0], [1] * 4, before=0.0, after=0.0, stages=2) == [0, 1, 4]
    assert split_evenly([1.0] * 6, [1] * 6, before=0.0, after=2.0, stages=2) == [0, 4, 6]
    # one more block on either stage takes as long: it goes where less is held
    assert split_evenly([1.0] * 3, [6, 1, 1], before=0.0, after=0.0, stages=2) == [0, 1, 3]
    assert split_evenly([1.0] * 3, [1, 1, 6], before=0.0, after=0.0, stages=2) == [0, 2, 3]
    # a stage keeps the activations of as many parts as there are stages from it on
    assert split_evenly([1.0] * 5, [9, 9, 8, 10, 10], before=0.0, after=0.0, stages=2) == [0, 3, 5]
    kept = [4, 4, 4, 4, 4]
    assert split_evenly([1.0] * 5, [9, 9, 8, 10, 10], kept=kept, before=0.0, after=0.0, stages=2) == [0, 2, 5]
    with pytest.raises(UsageError, match="has 2 repeated blocks, and there are 3 ranks"):
        split_evenly([1.0] * 2, [1] * 2, before=0.0, after=0.0, stages=3)


BUFFERS = (
    MODELS
    + """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        with torch.inference_mode():
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("scale", torch.ones(1).expand(6))
    def forward(self, x):
        with torch.inference_mode():
            self.calls += 1
        return x + torch.tanh(self.layer(x)) * self.scale.clone()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        with torch.inference_mode():
            self.register_buffer("steps", torch.zeros(()))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
class Counts(Model):
    def forward(self, x):
        with torch.inference_mode():
            self.steps += 1
        return super().forward(x)
def step_of(model):
    plan = Plan(parallel="pipeline", micro_batches=2)
    return TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), lambda model, x: model(x).square().mean(), plan)
model = Model()
step = step_of(model)
for _ in range(3):
    step(torch.randn(4, 6, generator=numbers))
print(*(float(one.calls) for one in model.blocks))
try:
    step_of(Counts())(torch.randn(4, 6))
except UsageError as error:
    print(error)
leave()
"""
)


def test_measuring_leaves_no_trace_in_buffers_of_inference_mode(run_ranks: RunRanks) -> None:
    ended = run_ranks(BUFFERS, 2)
    assert [code for code, _, _ in ended] == [0, 0], ended
    for rank, (_, found, _) in enumerate(ended):
        calls, refused = found.splitlines()
        assert float(calls.split()[rank]) == 6.0  # two parts in each of three steps
        assert "a forward pass changes steps, which is outside of the repeated blocks" in refused


TOUCHING = (
    MODELS
    + """
class Touching(torch.optim.AdamW):  # makes an entry for each parameter, also for those without a gradient
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            self.state[one]
        return super().step(closure)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
optimizer = Touching(model.parameters(), 0.1)
plan = Plan(parallel="pipeline", micro_batches=2)
TrainStep(model, optimizer, lambda model, batch: model(batch).square().mean(), plan)(torch.ones(4, 4))
print({len(entry) for entry in optimizer.state_dict()["state"].values()})
leave()
"""
)


def test_empty_entries_of_an_optimizer_hide_no_state_of_another_rank(run_ranks: RunRanks) -> None:
    for code, said, errors in run_ranks(TOUCHING, 2):
        assert (code, said) == (0, "{3}\n"), errors


FORGOTTEN = (
    MODELS
    + """
import gc, weakref
def trained():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    plan = Plan(parallel="pipeline", micro_batches=2)
    step = TrainStep(model, optimizer, lambda model, batch: model(batch).square().mean(), plan)
    step(torch.ones(4, 4))
    step.close()
    return [weakref.ref(one) for one in (model, optimizer)]
left = trained()
gc.collect()
print([one() is None for one in left])
leave()
"""
)


def test_a_model_and_an_optimizer_that_nobody_uses_any_more_are_freed(run_ranks: RunRanks) -> None:
    for code, said, errors in run_ranks(FORGOTTEN, 2):
        assert (code, said) == (0, "[True, True]\n"), errors


HIDDEN = (
    MODELS
    + """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
    def forward(self, x):
        return torch.tanh(self.inner(x))
class Model(nn.Module):  # under autocast what its blocks pass on is in 16 bits
    def __init__(self):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(4)), nn.Linear(6, 1)
    def forward(self, x):
        return self.last(self.blocks[3](self.blocks[2](self.blocks[1](self.blocks[0](x)))))
def stepped(loss_fn, plan):
    torch.manual_seed(0)
    model = Model()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, plan)
    return lambda batch: float(step(batch))
batch = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1))
"""
)

PRECISIONS = (
    HIDDEN
    + """
for precision in (None, "bf16", "fp16"):
    plan = Plan(parallel="pipeline" if ranks > 1 else None, micro_batches=2, precision=precision)
    step = stepped(lambda model, batch: model(batch).square().mean(), plan)
    print(*[step(batch) for _ in range(3)])
leave()
"""
)


def test_stages_pass_on_what_they_compute_in_the_precision_of_the_plan(run_ranks: RunRanks) -> None:
    [alone] = run_ranks(PRECISIONS, 1)
    split = run_ranks(PRECISIONS, 2)
    assert [code for code, _, _ in (alone, *split)] == [0] * 3, (alone, split)
    expected = [float(word) for word in alone[1].split()]
    for _, printed, _ in split:
        assert [float(word) for word in printed.split()] == pytest.approx(expected, rel=1e-6)


FAILING = (
    HIDDEN
    + """
def trimmed(model, batch):
    return model(batch[:, : int(batch.any(-1).any(0).sum())]).square().mean()
def broken(model, batch):
    if torch.is_grad_enabled():  # not in the passes before the first step
        raise LookupError("of the loss itself")
    return model(batch).square().mean()
def too_large(model, batch):
    if torch.is_grad_enabled():
        raise torch.OutOfMemoryError("a part does not fit")
    return model(batch).square().mean()
batch[2:, 3:] = 0  # the second part of the batch is padded more than the first
try:
    stepped(globals()[sys.argv[4]], Plan(parallel="pipeline", micro_batches=2))(batch)
except (FlatoutError, LookupError) as error:
    print(type(error).__name__, error, flush=True)
os._exit(0)
"""
)


FROZEN = (
    HIDDEN
    + """
for at_first in (True, False):
    model = Model()
    step = TrainStep(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        lambda model, batch: model(batch).square().mean(),
        Plan(parallel="pipeline", micro_batches=2),
    )
    if not at_first:
        step(batch)
    model.blocks[:3].requires_grad_(False)
    try:
        step(batch)
    except FlatoutError as error:
        print(error)
leave()
"""
)


def test_a_first_stage_without_training_is_refused_on_every_rank(run_ranks: RunRanks) -> None:
    """From the first step on, or where blocks are frozen later."""
    for code, printed, errors in run_ranks(FROZEN, 2):
        assert code == 0, errors
        lines = printed.splitlines()
        assert len(lines) == 2
        for line in lines:
            assert line.startswith("nothing on rank 0 is trained, up to block ")
            assert line.endswith("; freeze fewer blocks, use fewer ranks, or parallel = 'fsdp'")


def test_parts_of_other_shapes_than_the_first_are_an_error(run_ranks: RunRanks) -> None:
    printed = run_ranks(FAILING, 2, "trimmed")[0][1]
    assert "UsageError a part of a batch is passed on between stages with shape [2, 3, 6]" in printed
    assert "with shape [2, 5, 6]" in printed
    assert "fsdp" in printed


def test_an_error_of_the_loss_is_raised_as_it_is(run_ranks: RunRanks) -> None:
    assert run_ranks(FAILING, 2, "broken")[0][1].startswith("LookupError of the loss itself")


def test_a_part_that_does_not_fit_is_said_to_be_one(run_ranks: RunRanks) -> None:
    printed = run_ranks(FAILING, 2, "too_large")[0][1]
    assert printed.startswith("MachineError out of memory on one rank; it cannot start its share of a step again alone")
    assert printed.endswith("use a smaller batch or a larger micro_batches\n")


def test_what_a_block_keeps_of_a_part_is_known_and_let_go() -> None:
    class Block(nn.Module):
        def __init__(self, wide: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, wide), nn.Linear(wide, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).tanh())

    model = nn.Sequential(Block(16), Block(64), Block(16))
    x = torch.randn(5, 8)
    with torch.no_grad():
        kept = Chain(model).kept_bytes(lambda: model(x))
    assert kept == [4 * 5 * (8 + wide) for wide in (16, 64, 16)]  # the inputs of both layers; tanh keeps its output
    assert all(one.grad is None for one in model.parameters())
