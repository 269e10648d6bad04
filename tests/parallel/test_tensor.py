"""Layers cut over two ranks train what one process trains."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from flatout.parallel.tensor.parts import Across, Cut
from flatout.parallel.tensor.rules import RULES
from tests.parallel.split_training import MODELS, check_equals_one_process
from tests.train.conftest import RunRanks


@pytest.mark.slow
def test_two_ranks_train_what_one_trains(run_ranks: RunRanks, tmp_path: Path) -> None:
    alone, split = check_equals_one_process(run_ranks, tmp_path, "tensor", "gpt2", 2)
    assert all(rank["gpt2"]["held"] < 0.6 * alone["gpt2"]["held"] for rank in split)


@pytest.mark.slow
def test_our_other_models_do_so_too(run_ranks: RunRanks, tmp_path: Path) -> None:
    alone, split = check_equals_one_process(run_ranks, tmp_path, "tensor", "bert,lm,seq", 2)
    for kind, one in alone.items():
        assert all(rank[kind]["held"] < 0.6 * one["held"] for rank in split)


@pytest.mark.slow
def test_models_of_transformers_on_two_ranks_train_what_one_trains(run_ranks: RunRanks, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    alone, split = check_equals_one_process(run_ranks, tmp_path, "tensor", "hf-gpt2,hf-llama,hf-bert", 2)
    for kind, one in alone.items():
        assert all(rank[kind]["held"] < 0.6 * one["held"] for rank in split)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["gpt2,one-block", "bert,lm,seq", "hf-gpt2,hf-llama,hf-bert"])
def test_layers_cut_over_two_ranks_and_sharded_over_two_train_what_one_trains(
    run_ranks: RunRanks, tmp_path: Path, kinds: str
) -> None:
    if kinds.startswith("hf"):
        pytest.importorskip("transformers")
    alone, split = check_equals_one_process(run_ranks, tmp_path, "fsdp+tensor", kinds, 4)
    for kind, one in alone.items():
        assert all(rank[kind]["held"] < 0.4 * one["held"] for rank in split)


SHARDED = (
    MODELS
    + """
from flatout.parallel.tensor import scores as split
def gathered(local, cut):
    raise AssertionError("the scores of all tokens were gathered, for a hook of FSDP2's")
split.gathered = gathered
plan = plan_of("fsdp+tensor") if ranks > 1 else Plan()
def trained(layers, plan=plan):
    torch.manual_seed(rank)
    model = ours("gpt2", layers=layers)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.3), flatout.supervised(nn.CrossEntropyLoss()), plan)
    data = batches((x, y), 6, plan, seed=3, shuffle=False)
    return [float(step(batch)) for batch in data], model, step
for layers in (1, 2):  # of a single block there are no repeated ones
    losses, model, step = trained(layers)
    print([round(loss, 4) for loss in mean_of_ranks(losses)])
if ranks > 1:
    trained(1, plan_of("fsdp+tensor", fsdp_dtype="bf16"))  # what the model returns is then converted to fp32
def refusal(function, *arguments, **keywords):
    try:
        function(*arguments, **keywords)
    except FlatoutError as error:
        return str(error)
    raise AssertionError("not refused")
if ranks > 1:
    wrong = batches((x, y), 8, rank=rank, ranks=ranks)
    together = "0, 1" if rank < 2 else "2, 3"
    assert f"ranks {together} compute one model together" in refusal(flatout.evaluate, step, wrong)
    assert "fsdp + 2 tensor_ranks" in refusal(step.with_plan, Plan(parallel="tensor"))
    other = ours("gpt2")
    plain = TrainStep(other, torch.optim.SGD(other.parameters(), 0.1), Loss("gpt2"), Plan(parallel="fsdp"))
    assert "put on several ranks by 'fsdp'" in refusal(plain.with_plan, plan)
    new = ours("gpt2")
    three = Plan(parallel="fsdp", tensor_ranks=3)
    found = refusal(TrainStep, new, torch.optim.SGD(new.parameters(), 0.1), Loss("gpt2"), three)
    assert "tensor_ranks is 3, and there are 4 ranks" in found
    assert "tensor_ranks is 3" in refusal(batches, (x, y), 6, three)
leave()
"""
)


def test_layers_cut_and_sharded_keep_the_scores_in_parts_and_refuse_what_cannot_be(run_ranks: RunRanks) -> None:
    [(_, losses, _)] = run_ranks(SHARDED, 1)
    assert run_ranks(SHARDED, 4) == [(0, losses, "")] * 4


CALLED = (
    MODELS
    + """
from flatout.errors import NumericsError
parallel, layers, kept = sys.argv[4], int(sys.argv[5]), sys.argv[6] == "kept"
def called(model):  # FSDP2 has whole parameters then: of ranks' parts, which are not of one size
    with torch.no_grad():
        return model(x)
torch.manual_seed(0)
model = ours("gpt2", layers=layers)
plan = plan_of(parallel, fsdp_keep_gathered=True if kept else None)
step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.3), Loss("gpt2"), plan)
before = float(step((x, y)))
called(model)
step = step.with_plan(plan.with_choice("micro_batches", 2, ""))
assert float(step((x, y))) < before
called(model)
step.close()
step = TrainStep(model, step.optimizer, Loss("gpt2"), plan)
step((x, y))
if rank == 0:
    local_part(model.tokens.weight).data[0, 0] = float("nan")
called(model)
try:
    step.check_finite()
except NumericsError:
    leave()
raise AssertionError("a weight that is not finite was not seen")
"""
)


@pytest.mark.parametrize(
    ("parallel", "ranks", "layers", "kept"),
    [
        ("fsdp+tensor", 4, 2, False),
        pytest.param("fsdp+tensor", 4, 1, True, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, 1, False, marks=pytest.mark.slow),
    ],
)
def test_a_call_without_gradients_does_not_change_what_is_trained(
    run_ranks: RunRanks, parallel: str, ranks: int, layers: int, kept: bool
) -> None:
    ended = run_ranks(CALLED, ranks, parallel, layers, "kept" if kept else "")
    assert ended == [(0, "", "")] * ranks


EVALUATED = (
    MODELS
    + """
plan = plan_of(sys.argv[4])
model = ours("one-block")
step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), Loss("gpt2"), plan)
def evaluated():  # on one rank alone, or another figure on each
    if sys.argv[5] == "first":
        return {"score": 1.0} if rank == 0 else {}
    return {"score": float(step.steps if rank % 2 else -step.steps)}
found = flatout.fit(step, batches((x, y), 12, plan), epochs=3, evaluation=evaluated, metric="score", patience=1,
    checkpoints=flatout.Checkpoints(sys.argv[6], best="max"))
print(found.steps, found.ended)
leave()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "ranks"), [("tensor", 2), ("fsdp+tensor", 4)])
@pytest.mark.parametrize("evaluation", ["first", "each"])
def test_ranks_that_share_layers_decide_alike(
    run_ranks: RunRanks, tmp_path: Path, parallel: str, ranks: int, evaluation: str
) -> None:
    assert run_ranks(EVALUATED, ranks, parallel, evaluation, tmp_path) == [(0, "4 patience\n", "")] * ranks


SAVED = (
    MODELS
    + """
folder, parallel, begin, steps, out, kind = sys.argv[4:10]
torch.manual_seed(rank)
model = theirs(kind).train() if kind.startswith("hf") else ours(kind)
plan = plan_of(parallel, micro_batches=2) if ranks > 1 else Plan()
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
step, data = TrainStep(model, optimizer, Loss(kind), plan, clip_norm=1.0), batches((x, y), 6, plan, seed=3)
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
from flatout.parallel.tensor.parts import Across
gathered = Across.gathered
def refused(across, part):
    raise AssertionError("a whole tensor is made, which a rank may have no memory for")
Across.gathered = refused
captured = flatout.capture(step, data)
checkpoints.save(captured, step=step.steps)
flatout.restore(captured, step, data)
Across.gathered = gathered
state = {name: whole(one).clone() for name, one in model.state_dict().items()}
figures = flatout.evaluate(step, batches((x[:19], y[:19]), 6, plan, shuffle=False))  # the last batch: one sample
torch.save((state, figures), f"{out}.{rank}")
step = step.with_plan(plan)  # goes on with the model as it is
step(next(iter(data)))
leave()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "ranks", "kind"),
    [("tensor", 2, "gpt2"), ("pipeline", 2, "gpt2"), ("fsdp+tensor", 4, "gpt2"), ("fsdp+tensor", 4, "hf-gpt2")],
)
def test_checkpoints_are_those_of_one_process(
    run_ranks: RunRanks, tmp_path: Path, parallel: str, ranks: int, kind: str
) -> None:
    if kind.startswith("hf"):  # queries, keys and values are one transposed matrix there
        pytest.importorskip("transformers")

    def run(ranks: int, folder: str, begin: int, steps: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        out = tmp_path / f"{folder}-{ranks}"
        ended = run_ranks(SAVED, ranks, tmp_path / folder, parallel, begin, steps, out, kind)
        assert [code for code, _, _ in ended] == [0] * ranks, ended
        found = [torch.load(f"{out}.{rank}") for rank in range(ranks)]
        assert all(figures == found[0][1] for _, figures in found)
        return found[0]

    whole, figures = run(ranks, "whole", 0, 6)
    run(ranks, "cut", 0, 3)
    resumed, _ = run(ranks, "cut", 3, 6)
    assert all(map(torch.equal, whole.values(), resumed.values()))
    run(ranks, "first", 0, 3)
    alone, alone_figures = run(1, "first", 3, 6)
    for here, there in zip(whole.values(), alone.values(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-4)
    assert figures == pytest.approx(alone_figures, rel=1e-4)


RANDOM = (
    MODELS
    + """
torch.manual_seed(rank)  # the streams are made one, whatever each rank begins with
model = ours("gpt2", drop=0.3)
seen = []
attention = model.blocks[0].attention
attention.dropout = 0.5
model.blocks[1].register_forward_hook(lambda module, inputs, output: seen.append(output.detach().clone()))
mixed = []
attention.out.register_forward_pre_hook(lambda module, inputs: mixed.append(inputs[0].detach().clone()))
for checkpointing in (None, "block"):
    plan = Plan(parallel="tensor", activation_checkpointing=checkpointing)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), Loss("gpt2"), plan)
    for _ in range(3):
        if rank == 0:
            torch.rand(5)  # a rank that draws for itself does not lead the others astray
        seen.clear(); mixed.clear()
        before = [one.detach().clone() for one in model.parameters()]
        step((x, y))
        recomputed = mixed[1:]
        assert all(torch.equal(mixed[0], one) for one in recomputed), "recomputed with other numbers"
        assert bool(recomputed) == (checkpointing is not None)
        every = [torch.empty_like(seen[0]) for _ in range(ranks)]
        distributed.all_gather(every, seen[0])
        assert torch.equal(every[0], every[1])  # the same dropout of what all ranks have
        for one in model.parameters():
            if not hasattr(one, "cut_over_ranks"):
                every = [torch.empty_like(one) for _ in range(ranks)]
                distributed.all_gather(every, one.detach())
                assert torch.equal(every[0], every[1])
    step.close()
# equal heads on all ranks get different dropout: each rank's own stream
with torch.no_grad():
    for one in (attention.qkv.weight, attention.qkv.bias):
        distributed.broadcast(one, 0)
step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.0), Loss("gpt2"), Plan(parallel="tensor"))
mixed.clear()
step((x, y))
every = [torch.empty_like(mixed[0]) for _ in range(ranks)]
distributed.all_gather(every, mixed[0])
assert not torch.equal(every[0], every[1])
leave()
"""
)


def test_dropout_is_the_same_where_all_ranks_have_a_value_and_differs_between_heads(run_ranks: RunRanks) -> None:
    assert run_ranks(RANDOM, 2) == [(0, "", "")] * 2


OVERFLOW = (
    MODELS
    + """
parallel = sys.argv[4]
torch.manual_seed(0)
model = ours("gpt2")
plan = plan_of(parallel, precision="fp16", micro_batches=2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
step = TrainStep(model, optimizer, Loss("gpt2"), plan)
step((x, y))
before = {name: whole(one).clone() for name, one in model.state_dict().items()}
bad = model.blocks[1].feed_forward.down.bias if parallel == "pipeline" else model.blocks[0].attention.qkv.bias
if rank == 1 and parallel == "fsdp+tensor":  # FSDP2's parts of parameters take no hooks
    from flatout.parallel.tensor import training
    agree = training.overflow_on_all
    def overflow_on_all(parameters, across):
        local_part(bad.grad).fill_(float("inf"))
        agree(parameters, across)
    training.overflow_on_all = overflow_on_all
elif rank == 1:  # only this rank's gradient is not finite
    bad.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
skipped = step.skipped
step((x, y))
assert step.skipped == skipped + 1
assert all(torch.equal(one, whole(other)) for one, other in zip(before.values(), model.state_dict().values()))
leave()
"""
)


@pytest.mark.parametrize(
    ("parallel", "ranks"), [("tensor", 2), ("pipeline", 2), pytest.param("fsdp+tensor", 4, marks=pytest.mark.slow)]
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(run_ranks: RunRanks, parallel: str, ranks: int) -> None:
    assert run_ranks(OVERFLOW, ranks, parallel) == [(0, "", "")] * ranks


REFUSED = (
    MODELS
    + """
def refusal(make):
    try:
        make()
    except FlatoutError as error:
        return str(error)
    raise AssertionError("not refused")
def step_of(model, optimizer=torch.optim.SGD, plan=Plan(parallel="tensor"), **options):
    return TrainStep(model, optimizer(model.parameters(), 0.1, **options), Loss("gpt2"), plan)
class MyModel(nn.Sequential):
    pass
found = [refusal(lambda: step_of(MyModel(nn.Linear(3, 3))))]
found.append(refusal(lambda: step_of(ours("gpt2", heads=1))))
changed = ours("gpt2")
changed.blocks[0].attention.out = nn.Sequential(nn.Linear(16, 16))
found.append(refusal(lambda: step_of(changed)))
shared = ours("gpt2")
shared.blocks[1].feed_forward.up.weight = shared.blocks[0].feed_forward.up.weight
found.append(refusal(lambda: step_of(shared)))
found.append(refusal(lambda: step_of(ours("gpt2"), torch.optim.Adafactor)))
good = ours("gpt2")
step = step_of(good)
found.append(refusal(lambda: step((x + rank, y))))
try:
    step((x.fill_(V), y))
except IndexError as error:
    found.append(str(error))
found.append(refusal(lambda: step_of(good, plan=Plan(parallel="ddp"))))
def grow(model, batch):
    raise torch.OutOfMemoryError("CUDA out of memory")
alone = TrainStep(good, torch.optim.SGD(good.parameters(), 0.1), grow, Plan(parallel="tensor"))
found.append(refusal(lambda: alone((x.fill_(0), y))))
print("\\n".join(found))
leave()
"""
)


def test_what_cannot_be_cut_is_refused_on_every_rank(run_ranks: RunRanks) -> None:
    ended = run_ranks(REFUSED, 2)
    assert [code for code, _, _ in ended] == [0, 0], ended
    for _, found, _ in ended:
        unknown, heads, kind, shared, optimizer, batch, token, kept, memory = found.splitlines()
        assert "no rule for MyModel" in unknown
        assert "GPT-2, Llama and BERT" in unknown
        assert "fsdp" in unknown
        assert "blocks.0.attention.qkv has 1 head, and 2 ranks share it" in heads
        assert "blocks.0.attention.out is a Sequential" in kind
        assert "blocks.0.feed_forward.up.weight and blocks.1.feed_forward.up.weight are the same parameter" in shared
        assert "the optimizer is Adafactor" in optimizer
        assert "rank 1 has another batch than rank 0" in batch
        assert "out of range" in token
        assert "parallel is 'ddp', and the model was put on several ranks by 'tensor'" in kept
        assert "out of memory on one rank" in memory


class _Alone(Across):
    """One of several ranks, without the others."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self.others: list[torch.Tensor] = []

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.others)


@pytest.mark.parametrize(
    ("shape", "dim", "fused", "ranks"),
    [((12, 5), 0, 3, 2), ((5, 12), 1, 3, 4), ((7, 3), 0, 1, 4), ((6,), 0, 1, 3), ((4, 9), 1, 1, 2)],
)
def test_the_parts_make_the_whole(shape: tuple[int, ...], dim: int, fused: int, ranks: int) -> None:
    whole = torch.randn(shape)
    cuts = [Cut(across=_Alone(rank, ranks), shape=shape, dim=dim, fused=fused) for rank in range(ranks)]
    parts = [cut.part(whole) for cut in cuts]
    for cut, part in zip(cuts, parts, strict=True):
        assert tuple(part.shape) == cut.part_shape
        pieces = [one.unflatten(dim, (fused, -1)) for one in parts]
        for one in pieces:
            missing = cut.chunk - one.shape[dim + 1]
            padding = [0, 0] * (one.ndim - dim - 2) + [0, missing]
            cut.across.others.append(torch.nn.functional.pad(one, padding))  # type: ignore[attr-defined]
        assert torch.equal(cut.whole(part), whole)
        assert cut.part(part) is part
        assert ranks == 1 or cut.whole(whole) is whole


@pytest.mark.parametrize("room", ["flatout", pytest.param("transformers", marks=pytest.mark.slow)])
def test_every_rule_is_for_a_class_that_there_is(room: str) -> None:
    pytest.importorskip(room)
    for name in RULES:
        module, _, kind = name.rpartition(".")
        if module.startswith(room):
            assert hasattr(importlib.import_module(module), kind), name


SCORES = (
    MODELS
    + """
from flatout.parallel.tensor import scores as split
gathers = []
plainly = split.gathered
def noted(local, cut):
    gathers.append(1)
    return plainly(local, cut)
split.gathered = noted
def last(values, targets):
    values = values.float().contiguous()
    return F.cross_entropy(values.view(-1, V), targets.reshape(-1).clamp(min=0), reduction="sum") / 100
def ours_with_targets(values, targets):
    return models.vocabulary.token_loss(values, targets)
def cut_off(values, targets):
    return F.cross_entropy(values[..., : V - 5].flatten(0, -2), targets.flatten() % (V - 5), ignore_index=3)
def every_row(values, targets):
    rows = F.cross_entropy(values.reshape(-1, V), targets.flatten(), reduction="none")
    return (rows * torch.arange(len(rows))).mean()
def smoothed(values, targets):
    return F.cross_entropy(values.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
def transposed(values, targets):
    return F.cross_entropy(values.transpose(1, 2), targets)
def by_hand(values, targets):
    return -values.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).mean()
def looked_at_first(values, targets):
    with torch.no_grad():
        assert values.argmax(-1).shape == targets.shape
    return F.cross_entropy(values.flatten(0, 1), targets.flatten())
def changed_in_place(values, targets):
    flat = values.flatten(0, 1)
    values /= 2
    values[..., 1] = -3.0
    return F.cross_entropy(flat, targets.flatten()) + values.square().mean()
def nothing_counts(values, targets):
    return F.cross_entropy(values.flatten(0, 1), torch.full_like(targets, -100).flatten(), reduction="sum")
class Outside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.sum(-1)
    @staticmethod
    def backward(ctx, gradient):
        return gradient[..., None].expand(*gradient.shape, V)
def from_outside(values, targets):
    return Outside.apply(values * 1.0).square().mean() + Outside.apply(values).square().mean()
def watched(values, targets):
    values.register_hook(lambda gradient: gradient * 2)
    return F.cross_entropy(values.flatten(0, 1), targets.flatten())
def in_doubles(values, targets):
    return F.cross_entropy(values.to(torch.float64).flatten(0, 1), targets.flatten()).float()
def as_another(values, targets):
    return F.cross_entropy(values.to(torch.zeros((), dtype=torch.float64)).flatten(0, 1), targets.flatten()).float()
cheap = [last, ours_with_targets, cut_off, every_row, nothing_counts, in_doubles]
others = [as_another, smoothed, transposed, by_hand, looked_at_first, changed_in_place, from_outside, watched]
found = {}
torch.manual_seed(0)
model = ours("bert").requires_grad_(True)
optimizer = torch.optim.SGD(model.parameters(), 0.0)
step = TrainStep(model, optimizer, Loss("bert"), Plan(parallel="tensor"))
for loss_of in cheap + others:
    optimizer.zero_grad()
    gathers.clear()
    scores = model(x)
    assert scores.shape == (24, 7, V) and scores.size(-1) == V and scores.dtype is torch.float32
    loss = loss_of(scores, y)
    assert len(gathers) == (ranks > 1 and loss_of not in cheap), (loss_of, gathers)
    loss.backward()
    cuts = {id(one): getattr(one, "cut_over_ranks", None) for one in model.parameters()}
    grads = [cuts[id(one)].whole(one.grad) if cuts[id(one)] else one.grad.clone() for one in model.parameters()]
    found[loss_of.__name__] = (loss.detach(), grads)
with torch.no_grad():
    found["without gradients"] = (F.cross_entropy(model(x).flatten(0, 1), y.flatten()), [])
    assert isinstance(model(x).tolist(), list)
torch.save(found, f"{sys.argv[4]}.{rank}")
leave()
"""
)


def test_the_loss_of_scores_that_no_rank_has_whole(run_ranks: RunRanks, tmp_path: Path) -> None:
    for ranks in (1, 3):
        assert (
            run_ranks(
                SCORES.replace("heads=4", "heads=3").replace("width=16", "width=12"), ranks, tmp_path / str(ranks)
            )
            == [(0, "", "")] * ranks
        )
    alone = torch.load(tmp_path / "1.0")
    for rank in range(3):
        here = torch.load(tmp_path / f"3.{rank}")
        for name, (loss, grads) in alone.items():
            torch.testing.assert_close(here[name][0], loss, msg=lambda text, name=name: f"{name}: {text}")
            for one, other in zip(here[name][1], grads, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


FEW_TOKENS = (
    MODELS
    + """
torch.manual_seed(0)
model = models.GPT2(models.GPT2Config(vocab_size=4, vocab_multiple=1, max_tokens=8, width=12, heads=3, layers=1,
    dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0))
if sys.argv[4] == "untied":
    model.head = nn.Linear(12, 4, bias=False)
both = dict(parallel="fsdp", tensor_ranks=3) if sys.argv[5] == "sharded" else dict(parallel="tensor")
plan = Plan(**both) if ranks > 1 else Plan()
step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), Loss("gpt2"), plan)
print([round(float(step((x % 4, (x + 1) % 4))), 4) for _ in range(3)])
leave()
"""
)


@pytest.mark.parametrize(("head", "parts"), [("tied", ""), ("untied", ""), ("untied", "sharded")])
def test_a_table_with_no_row_for_the_last_rank_stays_whole(run_ranks: RunRanks, head: str, parts: str) -> None:
    """Four rows for three ranks: two each, and none for the last one."""
    (alone,) = run_ranks(FEW_TOKENS, 1, head, parts)
    assert alone[0] == 0, alone
    assert run_ranks(FEW_TOKENS, 3, head, parts) == [alone] * 3
