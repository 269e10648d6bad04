"""A step against the loop that one would write by hand: the same numbers, whatever it does inside."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.errors import NumericsError, PlanError, UsageError
from flatout.plan import Plan
from flatout.train.loss import supervised
from flatout.train.step import TrainStep

Batch = tuple[torch.Tensor, torch.Tensor]


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(dropout)) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 5))


def data(batches: int = 6, samples: int = 12) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batches, samples, 8, generator=generator)
    return [(part, part[:, :5].argmax(1)) for part in x]


def by_hand(model: nn.Module, batches: list[Batch], *, clip_norm: float | None = None) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    return losses


def with_step(
    model: nn.Module, batches: list[Batch], plan: Plan, **options: Any
) -> tuple[list[torch.Tensor], TrainStep]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    step = TrainStep(model, optimizer, supervised(nn.CrossEntropyLoss()), plan, scheduler=scheduler, **options)
    return [step(batch) for batch in batches], step


def assert_same(a: nn.Module, b: nn.Module, tolerance: float) -> None:
    for (name, one), (_, other) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_the_same_bits_as_a_loop_by_hand(clip_norm: float | None) -> None:
    ours, theirs = net(0.3), net(0.3)
    torch.manual_seed(2)
    expected = by_hand(theirs, data(), clip_norm=clip_norm)
    torch.manual_seed(2)
    losses, _ = with_step(ours, data(), Plan(), clip_norm=clip_norm)
    assert [float(a) for a in losses] == [float(b) for b in expected]
    assert_same(ours, theirs, 0.0)


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [
        (Plan(micro_batches=3), 1e-5),
        (Plan(micro_batches=100), 1e-5),  # more parts than samples
        (Plan(optimizer="fused"), 1e-5),
        (Plan(nonfinite="skip"), 0.0),
        (Plan(nonfinite="raise"), 0.0),
        (Plan(activation_checkpointing="block"), 0.0),
        (Plan(activation_checkpointing="selective"), 0.0),
        (Plan(precision="fp32"), 0.0),
        (Plan(precision="bf16"), 0.1),
        (Plan(precision="fp16", micro_batches=2), 0.05),
    ],
    ids=lambda value: str(value.choices()) if isinstance(value, Plan) else "",
)
def test_every_plan_trains_the_same_model(plan: Plan, tolerance: float) -> None:
    ours, theirs = net(), net()
    expected = by_hand(theirs, data(), clip_norm=1.0)
    losses, step = with_step(ours, data(), plan, clip_norm=1.0)
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    assert_same(ours, theirs, tolerance)
    assert (step.steps, step.skipped, step.rolled_back) == (6, 0, [])
    assert all(loss.dtype == torch.float32 and not loss.requires_grad for loss in losses)
    keys = list(ours.state_dict())
    step.close()
    assert list(ours.state_dict()) == keys == list(theirs.state_dict())
    assert copy.deepcopy(ours)(data()[0][0]).shape == (12, 5)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.slow
def test_compiled_with_levers_around_it() -> None:
    ours, theirs = net(), net()
    expected = by_hand(theirs, data(3))
    plan = Plan(compile="regional", activation_checkpointing="block", precision="bf16", micro_batches=2)
    losses, step = with_step(ours, data(3), plan)
    assert step.rolled_back == []
    torch.testing.assert_close(losses, expected, rtol=0.05, atol=0.05)
    step.close()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("kept", ["block", "selective"])
@pytest.mark.slow
def test_compiled_and_checkpointed_batches_of_several_sizes(kept: str) -> None:
    """Two graphs fit the larger batches then: one for their size and one for any. Products that are compiled write to
    memory that is used again, so 'selective' cannot keep their results."""
    torch.compiler.reset()
    sizes = [12, 7, 12, 5]
    batches = [(x[:size], y[:size]) for (x, y), size in zip(data(len(sizes)), sizes, strict=True)]
    ours, theirs = net(), net()
    expected = by_hand(theirs, batches)
    losses, step = with_step(ours, batches, Plan(compile="regional", activation_checkpointing=kept))
    assert step.rolled_back == []
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    step.close()


def test_ragged_targets_weigh_as_much_as_they_hold() -> None:
    """Parts with 1 and with 40 valid targets: the mean is over targets, as it is in one piece."""

    def ragged() -> Batch:
        x = torch.randn(6, 10, 8, generator=torch.Generator().manual_seed(3))
        y = x[..., :5].argmax(-1)
        for i in range(6):
            y[i, 1 + 2 * i if i < 3 else 1 :] = -100
        return x, y

    weights = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])
    for criterion in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=weights), nn.CrossEntropyLoss(reduction="sum")):
        models = []
        for parts in (1, 3, 6):
            model = net()
            step = TrainStep(
                model, torch.optim.SGD(model.parameters(), 0.1), supervised(criterion), Plan(micro_batches=parts)
            )
            models.append((model, step(ragged())))
        for model, loss in models[1:]:
            torch.testing.assert_close(loss, models[0][1])
            assert_same(model, models[0][0], 1e-6)


class Syncs(TorchDispatchMode):
    """Counts the values that are brought to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(precision="bf16"), Plan(micro_batches=4)], ids=lambda p: str(p.choices())
)
def test_a_step_never_reads_a_value_back(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.train.loss_parts.on_host", lambda value: False)  # as if on a GPU
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)  # Adam's counters on the CPU are host values
    step = TrainStep(model, optimizer, supervised(nn.CrossEntropyLoss()), plan, clip_norm=1.0)
    step(data()[0])
    with Syncs() as syncs:
        step(data()[0])
    assert syncs.count == 0


def poisoned() -> list[Batch]:
    batches = data()
    batches[2] = (batches[2][0] * float("nan"), batches[2][1])
    return batches


@pytest.mark.parametrize(
    "plan", [Plan(nonfinite="skip"), Plan(nonfinite="skip", precision="bf16"), Plan(precision="fp16")]
)
def test_a_step_with_nan_is_skipped_and_counted(plan: Plan) -> None:
    ours = net()
    _, step = with_step(ours, poisoned(), plan, clip_norm=1.0)
    assert (step.steps, step.skipped) == (6, 1)
    assert all(parameter.isfinite().all() for parameter in ours.parameters())


def test_a_step_with_nan_is_raised_by_number_with_the_weights_as_they_were() -> None:
    ours, theirs = net(), net()
    by_hand(theirs, data()[:2])
    with pytest.raises(NumericsError, match="gradient of step 3 is not finite"):
        with_step(ours, poisoned(), Plan(nonfinite="raise"))
    assert_same(ours, theirs, 0.0)


@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"plan": Plan(nonfinite="skip")}])
def test_sparse_gradients_have_no_common_norm(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.EmbeddingBag(8, 4, sparse=True), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randint(8, (6, 2)), torch.randint(3, (6,))
    before = copy.deepcopy(model.state_dict())
    step = TrainStep(model, optimizer, supervised(nn.CrossEntropyLoss()), **options)
    with pytest.raises(UsageError, match=r"the gradient of 0.weight is sparse; .*without sparse=True"):
        step(batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    TrainStep(model, optimizer, supervised(nn.CrossEntropyLoss()))(batch)
    model[0].requires_grad_(False)
    step = TrainStep(model, optimizer, supervised(nn.CrossEntropyLoss()), **options)
    step(batch)
    model[0].requires_grad_(True)
    with pytest.raises(UsageError, match=r"the gradient of 0.weight is sparse"):
        step(batch)


def test_a_step_takes_up_where_another_left() -> None:
    ours = net()
    _, step = with_step(ours, poisoned(), Plan(precision="fp16"))
    other = net()
    _, fresh = with_step(other, [], Plan(precision="fp16"))
    fresh.load_state_dict(step.state_dict())
    assert fresh.state_dict() == step.state_dict()
    assert fresh.state_dict()["scaler"]["scale"] < 65536


def other_model() -> Any:
    return net(), torch.optim.SGD(net().parameters(), 0.1), supervised(nn.CrossEntropyLoss())


def swapped() -> Any:
    model = net()
    return torch.optim.SGD(model.parameters(), 0.1), model, supervised(nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (other_model, "none of the optimizer's 10 parameters"),
        (swapped, "model is a SGD; it is a torch.nn.Module; the model comes first"),
    ],
)
def test_what_does_not_belong_together_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TrainStep(*make())


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (lambda model, batch: 3.0, "returned float"),
        (lambda model, batch: model(batch[0]), r"shape \[12, 5\]"),
        (lambda model, batch: model(batch[0]).detach().mean(), "does not depend"),
        (lambda model, batch: model(batch[0]).mean() * 1j, "a tensor of torch.complex64; .* a real number"),
        (supervised(nn.CrossEntropyLoss()), "a list of 3|a tuple of 3"),
    ],
)
def test_a_loss_that_is_none_is_named(loss_fn: Any, said: str) -> None:
    model = net()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
    batch = data()[0] if "3" not in said[-1] else (*data()[0], None)
    with pytest.raises(UsageError, match=said):
        step(batch)


def test_small_slips_are_named() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_fn = supervised(nn.CrossEntropyLoss())
    with pytest.raises(UsageError, match="clip_norm is -1"):
        TrainStep(model, optimizer, loss_fn, clip_norm=-1)
    with pytest.raises(UsageError, match="ReduceLROnPlateau"):
        TrainStep(model, optimizer, loss_fn, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(UsageError, match="reduction is 'none'"):
        supervised(nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(UsageError, match="never called the model"):
        TrainStep(model, optimizer, lambda m, b: m[0](b[0]).mean(), Plan(precision="bf16"))(data()[0])
    model.eval()
    with pytest.raises(UsageError, match="evaluation mode"):
        TrainStep(model, optimizer, loss_fn)(data()[0])


def test_mixed_devices_are_named() -> None:
    model = net()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()))
    x, y = data()[0]
    with pytest.raises(UsageError, match=r"batch\[0\] is on meta, while the model is on cpu") as caught:
        step((x.to("meta"), y))
    assert "flatout.to_device(batch, 'cpu')" in str(caught.value)
    model[0].to("meta")
    with pytest.raises(UsageError, match=r"model.0.weight is on meta"):
        step((x, y))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_data_that_was_not_converted_with_the_model_is_named(dtype: torch.dtype) -> None:
    model = net().to(dtype)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()))
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        UsageError, match=rf"batch\[0\] is float32; the model's weights are {name}, .*model.to\(torch.fl"
    ):
        step(data()[0])


def test_a_users_own_error_stays_the_users() -> None:
    model = net()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step((torch.randn(4, 9), torch.zeros(4, dtype=torch.long)))


@pytest.mark.parametrize(
    ("criterion", "targets", "said"),
    [
        (nn.CrossEntropyLoss(), torch.zeros(12), "class indices are int64"),
        (
            nn.CrossEntropyLoss(),
            torch.zeros(12, dtype=torch.int32),
            "torch.int32; class indices are int64; use targets",
        ),
        (nn.CrossEntropyLoss(), torch.zeros(11, dtype=torch.long), r"one class index for each of \[12\]"),
        (nn.CrossEntropyLoss(), torch.full((12,), 5), "a target is class 5; the model has 5 classes, 0 to 4"),
        (
            nn.CrossEntropyLoss(),
            torch.arange(12) % 5 - 1,
            "a target is class -1; .*; number the classes from 0; for items",
        ),
        (
            nn.CrossEntropyLoss(ignore_index=9),
            torch.full((12,), -100),
            "a target is class -100; .*; number the classes",
        ),
        (nn.CrossEntropyLoss(), [0] * 12, "the targets are a list; the criterion compares two tensors; convert them"),
        (nn.MSELoss(), None, "the targets are None; the criterion compares two tensors"),
        (
            nn.BCEWithLogitsLoss(),
            torch.ones(12, 5, dtype=torch.int64),
            "targets are torch.int64; .*; use targets.float()",
        ),
        (
            nn.BCEWithLogitsLoss(),
            torch.ones(12, 5, dtype=torch.bool),
            "targets are torch.bool; .*; use targets.float()",
        ),
        (nn.MSELoss(), torch.zeros(12), r"returns \[12, 5\] and the targets are \[12\]"),
    ],
)
def test_wrong_targets_are_named(criterion: nn.Module, targets: Any, said: str) -> None:
    model = net()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(criterion))
    with pytest.raises(UsageError, match=said):
        step((data()[0][0], targets))


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.MSELoss(), nn.functional.cross_entropy])
def test_a_criterion_is_given_a_tensor(criterion: Any) -> None:
    """torch's own say which of their internal calls fails; a criterion of one's own may take a tuple."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.net(x), x

    def own(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs[0], targets)

    def step(criterion: Any) -> TrainStep:
        model = Pair()
        return TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(criterion))

    with pytest.raises(UsageError, match=r"^the model returns a tuple; supervised\(\) passes .*; write a loss_fn"):
        step(criterion)(data()[0])
    assert step(own)(data()[0]).isfinite()


def test_images_in_another_layout_train_the_same_model() -> None:
    def trained(plan: Plan) -> tuple[nn.Module, TrainStep]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        step = TrainStep(model, optimizer, supervised(nn.CrossEntropyLoss()), plan)
        x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            step((x, torch.arange(16) % 4))
        return model, step

    plain, _ = trained(Plan())
    ours, step = trained(Plan(memory_format="channels_last", optimizer="fused"))
    assert all(weight.is_contiguous() for weight in ours.parameters())
    assert step.rolled_back == []
    assert_same(ours, plain, 1e-4)
    step.close()
    assert ours[0].weight.is_contiguous()


@pytest.mark.parametrize(
    "plan", [Plan(weights="int8"), Plan(batching="equal"), Plan(batch_tokens=64), Plan(fold_batch_norm=True)]
)
def test_a_plan_of_inference_is_refused(plan: Plan) -> None:
    model = net()
    (name,) = plan.choices()
    with pytest.raises(
        PlanError, match=rf"{name} is .*; TrainStep does not apply it \(predict.*use plan.part_for\('step'\)"
    ):
        TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.MSELoss()), plan)


def test_a_plan_that_moves_a_script_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(PlanError, match=r"device is 'cuda'; TrainStep does not apply it \(flatout run would\)"):
        TrainStep(model, optimizer, lambda *_: torch.zeros(()), Plan(device="cuda"))


def test_settings_of_the_process_hold_during_calls_alone() -> None:
    """Found on a GPU: one step's TF32 made the products of every other model TF32."""
    seen = []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark))
        if len(seen) == 3:
            raise RuntimeError("a batch that is broken")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    model, before = net(), (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark)
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), 0.1), loss, Plan(matmul_precision="high", cudnn_benchmark=True)
    )
    for batch in data(2):
        step(batch)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark) == before
    with pytest.raises(RuntimeError, match="a batch that is broken"):
        step(data(1)[0])
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark) == before
    assert seen == [("high", True)] * 3
    assert step.rolled_back == []


def test_a_closed_step_takes_no_more() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = TrainStep(model, optimizer, supervised(nn.MSELoss()), clip_norm=1.0)
    with pytest.raises(UsageError, match="optimizer_in_backward"):
        step.with_plan(Plan(optimizer_in_backward=True))
    with pytest.raises(UsageError, match="this step is closed"):  # it would train without its plan, and not say so
        step((torch.zeros(2, 2), torch.zeros(2, 1)))


def test_a_layer_that_joins_later_is_clipped_too() -> None:
    model = nn.Sequential(net()[0], nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model[0].parameters(), 1.0)
    step = TrainStep(model, optimizer, supervised(nn.CrossEntropyLoss()), clip_norm=0.01)
    optimizer.add_param_group({"params": model[1].parameters()})
    before = torch.cat([one.detach().flatten() for one in model.parameters()])
    step(data()[0])
    after = torch.cat([one.detach().flatten() for one in model.parameters()])
    assert float((after - before).norm()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("kind", ["block", "selective"])
def test_a_batch_counts_once_in_the_statistics_of_a_checkpointed_norm(kind: str) -> None:
    def normed() -> nn.Module:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU()) for _ in range(3)]
        return nn.Sequential(*blocks, nn.Linear(8, 5))

    ours, theirs = normed(), normed()
    for model, plan in ((ours, Plan(activation_checkpointing=kind)), (theirs, Plan())):  # type: ignore[arg-type]
        _, step = with_step(model, data(3), plan)
        assert step.rolled_back == []
    assert_same(ours, theirs, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))


def test_a_model_with_other_blocks_than_at_first_can_be_closed() -> None:
    model = net()
    _, step = with_step(model, data(1), Plan(activation_checkpointing="block"))
    removed = model[1]
    assert removed.__dict__["_compiled_call_impl"] is not None
    del model[1]
    step.close()
    assert all(one.__dict__.get("_compiled_call_impl") is None for one in (removed, *model))


@pytest.mark.parametrize("micro_batches", [None, 2])
def test_losses_of_many_steps_hold_no_memory_of_outputs(micro_batches: int | None) -> None:
    """`mse_loss` returns its mean in the memory of all squares, and steps keep losses until they are read together."""
    model = nn.Linear(4, 256)
    plan = Plan(micro_batches=micro_batches)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.MSELoss()), plan)
    loss = step((torch.randn(64, 4), torch.randn(64, 256)))
    assert loss.untyped_storage().nbytes() == loss.element_size()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_step_is_not_copied(copied: Callable[[TrainStep], object]) -> None:
    model = net()
    _, step = with_step(model, data(1), Plan(optimizer="fused"))
    with pytest.raises(UsageError, match="cannot be copied or pickled"):
        copied(step)
    copied_model, copied_optimizer = copy.deepcopy((step.model, step.optimizer))
    TrainStep(copied_model, copied_optimizer, step.loss_fn)(data(1)[0])


class Averaging(TrainStep):
    """As users write it: with a constructor, state and a loss of its own."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        self.factor, self.calls = factor, 0
        super().__init__(model, torch.optim.SGD(model.parameters(), 0.1), self.scaled, clip_norm=1.0)

    def scaled(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return self.factor * (model(batch) ** 2).mean()

    def __call__(self, batch: object) -> torch.Tensor:
        self.calls += 1
        return super().__call__(batch)


def test_another_plan_leaves_a_subclass_as_it_is() -> None:
    first = Averaging(nn.Linear(3, 2), 2.0)
    first(torch.ones(4, 3))
    step = first.with_plan(Plan(micro_batches=2))
    assert type(step) is Averaging
    assert (step.steps, step.calls, step.plan.micro_batches) == (1, 1, 2)
    step.factor = 0.0
    assert float(step(torch.ones(4, 3))) == 0.0, "its loss is a method of this step, not of the closed one"
    assert (step.steps, step.calls, first.calls) == (2, 2, 1)


def test_parts_of_a_single_sample_are_too_small_for_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.MSELoss()), Plan(micro_batches=2))
    step((torch.randn(4, 3), torch.randn(4, 4)))
    said = "a batch of 3 in 2 parts has parts of a single sample; layer 1 takes its statistics from at least 2"
    with pytest.raises(UsageError, match=said):
        step((torch.randn(3, 3), torch.randn(3, 4)))


class Counting(torch.optim.SGD):
    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        type(self).calls += 1
        super().zero_grad(set_to_none)


def test_gradients_are_freed_by_whatever_the_optimizers_zero_grad_is(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.ones(4, 2)

    def step_of(kind: type[torch.optim.SGD]) -> TrainStep:
        model = nn.Linear(2, 1)
        return TrainStep(model, kind(model.parameters(), 0.0), lambda model, x: model(x).sum())

    plain, own = step_of(torch.optim.SGD), step_of(Counting)
    for step in (plain, own):
        for _ in range(2):
            step(batch)
        assert torch.equal(step.model.weight.grad, torch.full((1, 2), 4.0))
    assert Counting.calls == 2
    freed: list[object] = []
    original = torch.optim.Optimizer.zero_grad

    def noted(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        freed.append(optimizer)
        original(optimizer, set_to_none)

    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.Optimizer, "zero_grad", noted)
        plain(batch)
    assert freed == [plain.optimizer]
    with monkeypatch.context() as patched:
        patched.setattr(plain.optimizer, "zero_grad", lambda set_to_none: noted(plain.optimizer, set_to_none))
        plain(batch)
    assert freed == [plain.optimizer] * 2
    plain(batch)
    assert len(freed) == 2
    assert torch.equal(plain.model.weight.grad, torch.full((1, 2), 4.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64])
def test_gradients_that_loss_scaling_does_not_take_are_refused(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5, dtype=dtype))
    with pytest.raises(UsageError, match=f"precision is 'fp16', and 1.weight is {str(dtype)[6:]}.*keep the weights"):
        with_step(model, [], Plan(precision="fp16"))
    model[1].requires_grad_(False)
    trained = torch.optim.SGD(model[0].parameters(), 0.1)
    TrainStep(model, trained, supervised(nn.CrossEntropyLoss()), Plan(precision="fp16")).close()
