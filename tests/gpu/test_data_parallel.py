"""One process with several GPUs: parallel = 'dp', and scripts that use torch's DataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import flatout
from flatout import Plan, TrainStep
from flatout.errors import FlatoutError
from flatout.levers.autocast import Autocast
from flatout.levers.subject import Subject

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore:parallel is 'dp'"),
]
LOSS = flatout.supervised(nn.CrossEntropyLoss())


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.Linear(32, 5))


def batches(samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    for _ in range(4):
        yield (
            torch.randn(samples, 10, generator=drawn).cuda(),
            torch.randint(5, (samples,), generator=drawn).cuda(),
        )


def trained(plan: Plan, make: Callable[[], nn.Module] = plain, samples: int = 13) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = make().cuda()
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-2), LOSS, plan, clip_norm=1.0)
    losses = [step(batch).item() for batch in batches(samples)]
    step.close()
    assert not step.rolled_back
    return losses, model


@pytest.mark.parametrize(
    ("choices", "samples", "tolerance"),
    [
        ({}, 13, 1e-5),
        ({}, 1, 1e-5),
        ({"micro_batches": 3}, 13, 1e-5),
        ({"optimizer": "fused"}, 13, 1e-5),
        ({"precision": "bf16"}, 13, 1e-2),
        ({"precision": "fp16"}, 13, 2e-3),
    ],
    ids=["even and odd shares", "one sample", "micro-batches", "fused", "bf16", "fp16"],
)
def test_it_trains_as_one_gpu_does(choices: dict[str, object], samples: int, tolerance: float) -> None:
    expected, alone = trained(Plan(**choices), samples=samples)  # type: ignore[arg-type]
    found, model = trained(Plan(parallel="dp", **choices), samples=samples)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=10 * tolerance, atol=tolerance)


def test_other_gpus_compute_their_share() -> None:
    seen = set[tuple[int, int]]()

    class Looking(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if self.training:
                seen.add((input.get_device(), len(input)))
            return super().forward(input)

    trained(Plan(parallel="dp"), lambda: Looking(10, 5), samples=2 * torch.cuda.device_count())
    assert seen == {(gpu, 2) for gpu in range(torch.cuda.device_count())}


def test_its_cost_is_said_and_ddp_advised() -> None:
    model = plain().cuda()
    with pytest.warns(UserWarning, match=r"each step copies 2\.\d+ KiB to \d more GPU.*parallel = 'ddp'") as said:
        TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS, Plan(parallel="dp"))
    assert said[0].filename == __file__


def test_calls_without_gradients_stay_on_one_gpu() -> None:
    _, model = trained(Plan(parallel="dp"))
    assert len(list(flatout.predict(model, [torch.randn(10)] * 4))) == 4
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS, Plan(parallel="dp"))
    assert 0 < flatout.evaluate(step, list(batches(8)))["loss"] < 3


def test_batch_norm_of_shares_is_asked_for() -> None:
    with pytest.raises(FlatoutError, match=r"1 is a batch norm, and parallel is 'dp'; .* of each GPU's share"):
        trained(Plan(parallel="dp"), with_batch_norm)
    with pytest.raises(FlatoutError, match=r"'synced', and parallel is 'dp'; .* a process for each GPU"):
        trained(Plan(parallel="dp", batch_norm="synced"), with_batch_norm)
    losses, model = trained(Plan(parallel="dp", batch_norm="local"), with_batch_norm)
    assert losses[-1] < 3
    assert model.get_buffer("1.running_mean").abs().sum() > 0


class OfTheBatch(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input - input.mean(0))


class Keeping(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        self.kept = super().forward(input)
        return self.kept


class OfWeights(nn.Linear):
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(input), self.weight.square().sum()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (OfTheBatch, "computes another output for a batch in parts"),
        (Keeping, "the model's call sets kept"),
        (OfWeights, r"output\[1\] is a tensor of shape \[\] for \d samples"),
    ],
)
def test_what_cannot_be_split_by_samples_is_refused(make: type[nn.Linear], why: str) -> None:
    with pytest.raises(FlatoutError, match=why):
        trained(Plan(parallel="dp"), lambda: make(10, 5))


def test_inputs_of_several_lengths_are_refused() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0], batch[0].new_ones(3)).square().mean()

    class OfBoth(nn.Linear):
        def forward(self, input: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input) * weights.sum()

    model = OfBoth(10, 5).cuda()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss, Plan(parallel="dp"))
    with pytest.raises(FlatoutError, match=r"tensors differ in their first size: args\[0\] has 13, args\[1\] has 3"):
        step(next(batches(13)))


def test_a_model_on_two_gpus_is_refused() -> None:
    model = nn.Sequential(nn.Linear(10, 5).cuda(0), nn.Linear(5, 5).cuda(1))
    with pytest.raises(FlatoutError, match="parallel is 'dp', and the model is on cuda:0 and cuda:1"):
        TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS, Plan(parallel="dp"))


def test_it_is_not_forecast() -> None:
    model = plain().cuda()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS, Plan(parallel="dp"))
    with pytest.raises(FlatoutError, match="parallel is 'dp'; what each GPU of one process holds is not forecast"):
        flatout.forecast(step, next(batches(8)))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_plan_s_autocast_holds_in_the_threads_of_torch_s_own(precision: str) -> None:
    seen = set[tuple[int, torch.dtype]]()

    class Looking(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            output = super().forward(input)
            seen.add((input.get_device(), output.dtype))
            return output

    model = nn.DataParallel(Looking(10, 5).cuda())
    subject = Subject()
    subject.modules.add(model)
    inputs = torch.randn(8, 10, device="cuda")
    with Autocast().apply(subject, precision):
        assert subject.call(model, lambda: model(inputs)).dtype == torch.float32  # type: ignore[attr-defined]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    assert seen == {(gpu, dtype) for gpu in range(torch.cuda.device_count())}
    seen.clear()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        model(inputs)
    # What the check bf16-lost-in-data-parallel says of torch itself.
    assert {dtype for _, dtype in seen} == {torch.float16}
