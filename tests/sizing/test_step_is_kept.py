"""Whatever is asked about a TrainStep, it trains on as if nobody had: same bits, levers once, same counters."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatout
from flatout import Plan, TrainStep
from flatout.levers.compile import compiler_is_there
from flatout.sizing import fit_to_memory as fitting
from flatout.sizing.training import Training

LOSS = flatout.supervised(nn.CrossEntropyLoss())


def quiet(line: str) -> None:
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop, self.outer = (
            nn.Linear(64, 64),
            nn.BatchNorm1d(64),
            nn.Dropout(0.1),
            nn.Linear(64, 64),
        )
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        out: Tensor = x + self.outer(self.drop(torch.relu(self.norm(self.inner(x)))))
        return out


def made(plan: Plan, *, clip_norm: float | None = None) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return TrainStep(model, optimizer, LOSS, plan, clip_norm=clip_norm, scheduler=scheduler)


def batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 64, generator=generator), torch.randint(0, 5, (8,), generator=generator)) for _ in range(count)
    ]


def result(step: TrainStep) -> list[Tensor]:
    kept = [*step.model.parameters(), *step.model.buffers()]
    state = [one for entry in step.optimizer.state.values() for one in entry.values()]
    plain = [one.dequantize() if hasattr(one, "dequantize") and hasattr(one, "codes") else one for one in state]
    return [one.detach().clone() for one in (*kept, *plain, torch.get_rng_state())]


def trained(step: TrainStep, ask: Callable[[TrainStep, Any], Any] | None) -> tuple[list[Tensor], list[Tensor], Any]:
    """Two steps, the question, three steps: losses, what is left, and what the step says of itself."""
    torch.manual_seed(2)
    losses = []
    for number, batch in enumerate(batches()):
        if number in (0, 2) and ask is not None:  # before the first step, and in the midst
            ask(step, batch)
        losses.append(step(batch))
    said = (
        step.state_dict(),
        step.rolled_back,
        step.scheduler.state_dict(),
        step.model[0].calls,
        step.nonfinite_losses,
    )
    left = result(step)
    step.close()
    return losses, left, said


QUESTIONS: dict[str, Callable[[TrainStep, Any], Any]] = {
    "forecast": lambda step, batch: flatout.forecast(step, batch, batch_size=16),
    "largest_batch": lambda step, batch: flatout.largest_batch(step, batch, limit="4 MiB", at_most=16, progress=quiet),
    "fit_to_memory": lambda step, batch: flatout.fit_to_memory(
        int(0.9 * flatout.forecast(step, batch).peak_bytes), step, batch, progress=quiet
    ),
}
PLANS = [
    Plan(),
    Plan(precision="bf16", optimizer="fused"),
    Plan(precision="fp16"),
    Plan(micro_batches=2, optimizer="foreach"),
    Plan(activation_checkpointing="block"),
    Plan(activation_checkpointing="selective", checkpointed_blocks=2, memory_format="channels_last"),
    Plan(optimizer_in_backward=True, threads=1),
    Plan(loss="chunked", matmul_precision="medium"),
    Plan(nonfinite="skip", flush_denormals=True),
]


def name(plan: Plan) -> str:
    return ",".join(plan.choices()) or "none"


@pytest.fixture(autouse=True)
def _short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "TIMED_SECONDS", 0.0)
    monkeypatch.setattr(fitting, "ROUNDS", 1)
    monkeypatch.setattr(fitting, "FINALISTS", 2)


def check(plan: Plan, question: str, *, clip_norm: float | None = None) -> None:
    asked: list[Any] = []

    def ask(step: TrainStep, batch: Any) -> None:
        try:
            asked.append(QUESTIONS[question](step, batch))
        except flatout.FlatoutError as error:  # where nothing helps; that must leave no trace either
            asked.append(error)

    losses, left, said = trained(made(plan, clip_norm=clip_norm), None)
    losses_asked, left_asked, said_asked = trained(made(plan, clip_norm=clip_norm), ask)
    assert len(asked) == 2
    assert all(torch.equal(a, b) for a, b in zip(losses, losses_asked, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(left, left_asked, strict=True))
    assert str(said_asked) == str(said)


@pytest.mark.parametrize(
    ("question", "plan"),
    [
        *(pytest.param("forecast", plan, id=f"forecast-{name(plan)}") for plan in PLANS),
        *(pytest.param("largest_batch", plan, id=f"largest_batch-{name(plan)}") for plan in PLANS[:3]),
        *(
            pytest.param("largest_batch", plan, id=f"largest_batch-{name(plan)}", marks=pytest.mark.slow)
            for plan in PLANS[3:]
        ),
    ],
)
@pytest.mark.first_case
def test_it_trains_on_to_the_same_bits(plan: Plan, question: str) -> None:
    check(plan, question)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(activation_checkpointing="block"),
        pytest.param(Plan(precision="bf16", optimizer="fused"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_so_it_does_where_measures_were_timed(plan: Plan) -> None:
    check(plan, "fit_to_memory")


def test_with_clipping() -> None:
    check(Plan(), "largest_batch", clip_norm=0.1)


@pytest.mark.filterwarnings("ignore")  # torch's own, of what compiling looks at
@pytest.mark.skipif(not compiler_is_there(), reason="needs a C++ compiler")
@pytest.mark.parametrize("question", ["forecast", pytest.param("largest_batch", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_compiled_code_stays_in_use(question: str) -> None:
    from torch._inductor import config

    check(Plan(compile="regional"), question)
    step = made(Plan(compile="regional"))
    calls = [block.__dict__["_compiled_call_impl"] for block in list(step.model)[:3]]
    step(batches()[0])
    QUESTIONS[question](step, batches()[0])
    assert [block.__dict__["_compiled_call_impl"] for block in list(step.model)[:3]] == calls
    assert config.fallback_random
    step.close()
    assert not config.fallback_random


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.usefixtures("uncompiled_torchao")
@pytest.mark.parametrize("question", ["forecast", "largest_batch"])
def test_moments_in_8_bits_keep_their_codes(question: str) -> None:
    check(Plan(optimizer_state="8bit"), question)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.usefixtures("uncompiled_torchao", "few_rounds")
def test_copies_of_moments_in_8_bits_can_be_trained() -> None:
    step = made(Plan(optimizer_state="8bit"))
    batch = torch.randn(24, 64), torch.randint(0, 5, (24,))
    step(batch)
    before = result(step)
    found = flatout.batch_curve(step, batch, at_least=24, at_most=24, seconds=600, progress=quiet)
    assert found.points[0].peak_bytes
    whole = step.loss_fn

    def by_value(model: Any, batch: Any) -> Any:
        loss = whole(model, batch)
        return loss * 2 if loss > 1e9 else loss

    step.loss_fn = by_value
    assert flatout.forecast(step, batch).method.startswith("real steps")
    assert all(torch.equal(a, b) for a, b in zip(result(step), before, strict=True))
    step.close()


@pytest.mark.parametrize(
    "plan",
    [
        {"optimizer_in_backward": True},
        {"precision": "bf16"},
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in ({"activation_checkpointing": "block"}, {"optimizer": "fused"}, {"loss": "chunked"})
        ),
    ],
    ids=str,
)
@pytest.mark.first_case
def test_levers_are_counted_once(plan: dict[str, Any]) -> None:
    """A step in use is forecast as a new one is."""
    new, used = made(Plan(**plan)), made(Plan(**plan))
    used(batches()[0])
    used.optimizer.state.clear()
    batch = batches()[0]
    assert flatout.forecast(used, batch).peak_bytes == flatout.forecast(new, batch).peak_bytes
    found = [flatout.largest_batch(one, batch, limit="2 MiB", at_most=64, progress=quiet) for one in (new, used)]
    assert found[0].tries == found[1].tries
    new.close()
    used.close()


def test_two_objects_over_one_memory() -> None:
    step = made(Plan(optimizer_in_backward=True))
    step(batches()[0])
    step.model[3].weight.grad = torch.ones(5, 64)
    before = result(step)
    training = Training.of(step, batches()[0])

    def train_and_fail() -> None:
        with training.on_same_memory() as own:
            mine = own.make_step()
            mine(own.batch)
            for ours, theirs in zip(own.model.parameters(), step.model.parameters(), strict=True):
                assert ours is not theirs
                assert ours.data_ptr() == theirs.data_ptr()
            assert not torch.equal(step.model[0].inner.weight, before[0])
            mine.close()
            raise KeyError

    with pytest.raises(KeyError):
        train_and_fail()
    assert all(torch.equal(a, b) for a, b in zip(result(step), before, strict=True))
    assert step.model[3].weight.grad is not None
    assert step.steps == 1
    step.close()


def test_a_model_and_loss_with_generators_and_ties_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 5))
    model[1].weight = model[0].weight
    model.noise = torch.Generator().manual_seed(3)  # type: ignore[assignment]
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS)
    state = model.noise.get_state()
    with Training.of(step, batches()[0]).on_same_memory() as own:
        assert own.model[0].weight is own.model[1].weight
        torch.rand(1, generator=own.model.noise)
    assert torch.equal(model.noise.get_state(), state)


@pytest.mark.slow
def test_the_plan_that_fits_is_gone_on_with() -> None:
    step = made(Plan(), clip_norm=1.0)
    batch = torch.randn(256, 64), torch.randint(0, 5, (256,))
    step(batch)
    given = flatout.forecast(step, batch)
    found = flatout.fit_to_memory(int(0.9 * given.peak_bytes), step, batch, exactness="rounding", progress=quiet)
    assert found.plan.choices()
    assert not found.plan.optimizer_in_backward  # not with clip_norm
    before = [one.clone() for one in step.model.parameters()]
    rate = step.scheduler.state_dict()
    went_on = step.with_plan(found.plan)
    assert went_on.plan == found.plan
    assert went_on.steps == 1
    assert went_on.model is step.model
    assert went_on.scheduler.state_dict() == rate
    assert all(torch.equal(a, b) for a, b in zip(step.model.parameters(), before, strict=True))
    assert flatout.forecast(went_on, batch).peak_bytes == found.forecast.peak_bytes <= found.limit_bytes
    went_on(batch)
    assert went_on.steps == 2
    assert went_on.gradient_norm is not None
    went_on.close()


def test_a_step_under_another_plan_has_none_of_the_former_levers() -> None:
    step = made(Plan(activation_checkpointing="block", micro_batches=2, optimizer_in_backward=None))
    step(batches()[0])
    other = step.with_plan(Plan(optimizer_in_backward=True))
    assert all(block.__dict__.get("_compiled_call_impl") is None for block in step.model)
    assert other.micro_batches == 1
    plain = made(Plan(activation_checkpointing="block", micro_batches=2))
    plain(batches()[0])
    torch.manual_seed(5)
    plain.with_plan(Plan())(batches()[1])
    torch.manual_seed(5)
    other(batches()[1])
    for ours, theirs in zip(other.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    other.close()


def test_a_plan_that_is_none_leaves_the_step_as_it_is() -> None:
    step = made(Plan(activation_checkpointing="block"))
    with pytest.raises(flatout.FlatoutError):
        step.with_plan("bf16")  # type: ignore[arg-type]
    assert step.model[0].__dict__["_compiled_call_impl"] is not None
    step.close()


class Angles(nn.Module):
    """A loss with weights and statistics of its own, which the optimizer trains too."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(500, 16))

    def forward(self, model: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]) @ self.centres.t(), batch[1])


def with_own_loss() -> tuple[TrainStep, Angles]:
    torch.manual_seed(0)
    model, loss = nn.Linear(8, 16), Angles()
    return TrainStep(model, torch.optim.Adam([*model.parameters(), *loss.parameters()]), loss), loss


PAIR = torch.randn(8, 8), torch.arange(8) % 4


def test_weights_of_the_loss_are_kept_and_counted() -> None:
    step, loss = with_own_loss()
    before = loss.centres.detach().clone()
    flatout.largest_batch(step, PAIR, limit="1 GiB", at_most=16, progress=quiet)
    assert torch.equal(loss.centres, before)
    found = flatout.forecast(step, PAIR)
    own = sum(one.nbytes for one in (*step.model.parameters(), *loss.parameters()))
    assert (found.categories["weights"], found.categories["gradients"]) == (own, own)


class Buffered(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(8, 16), nn.Linear(16, 4), kind
        with torch.inference_mode(kind == "inference"):
            made = torch.ones(1, 16).expand(8, 16) if kind == "expanded" else torch.eye(16)
            if kind in ("sparse_coo", "sparse_csr"):
                made = made.to_sparse(layout=getattr(torch, kind))
        self.register_buffer("table", made)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.kind.startswith("sparse"):
            hidden = (self.table @ hidden.t()).t()
        return self.last(hidden)


@pytest.mark.parametrize("kind", ["expanded", "inference", "sparse_coo", "sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_models_with_buffers_that_cannot_be_written_as_others(kind: str) -> None:
    model = Buffered(kind)
    step = TrainStep(model, torch.optim.Adam(model.parameters()), LOSS)
    step(PAIR)
    before = [one.detach().clone() for one in model.parameters()]
    found = flatout.largest_batch(step, PAIR, at_most=16, progress=quiet)
    assert found.batch_size == 16
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class Slow(torch.optim.Optimizer):
    """Its step needs an attribute that torch's copies leave out."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.share = 0.05

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.add_(one.grad, alpha=-group["lr"] * self.share)


def test_an_optimizer_of_the_users_own_is_copied_whole() -> None:
    model = nn.Linear(8, 4)
    step = TrainStep(model, Slow(model.parameters()), LOSS)
    assert flatout.forecast(step, PAIR).method == "fake run"
    flatout.largest_batch(step, PAIR, limit="1 GiB", at_most=8, progress=quiet)
    flatout.batch_curve(step, PAIR, at_most=8, seconds=0.05, progress=quiet)


def test_a_forecast_leaves_a_second_model_alone() -> None:
    torch.manual_seed(0)
    generator = nn.Linear(4, 6)
    critic = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    before = {name: one.clone() for name, one in critic.state_dict().items()}
    step = TrainStep(generator, torch.optim.Adam(generator.parameters()), lambda model, z: -critic(model(z)).mean())
    flatout.forecast(step, torch.randn(8, 4))
    flatout.fit_to_memory("1 GiB", step, torch.randn(8, 4), device="h100", progress=quiet)
    assert all(one.grad is None for one in critic.parameters())
    assert all(torch.equal(before[name], one) for name, one in critic.state_dict().items())
