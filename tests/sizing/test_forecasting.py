from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from flatout import Plan, TrainStep, forecast, supervised
from flatout.errors import UsageError
from flatout.memory.allocator_settings import AllocatorSettings
from flatout.memory.cuda_workspaces import keeps_blas_workspace
from flatout.memory.forecast import MemoryForecast, Target, forecast_of
from flatout.memory.timeline import Allocation, Timeline
from flatout.sizing.target import find_target
from tests.allocator_record import allocator_recorded, window

LOSS = supervised(nn.CrossEntropyLoss())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


def batch(samples: int = 16, width: int = 64) -> Any:
    return torch.randn(samples, width), torch.randint(10, (samples,))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2400, 10),
    )


class Reader(nn.Module):
    """Tokens, an LSTM, a class."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = (
            nn.Embedding(50, 32),
            nn.LSTM(32, 48, batch_first=True),
            nn.Linear(48, 10),
        )

    def forward(self, tokens: Any) -> Any:
        return self.head(self.layers(self.embedding(tokens))[0][:, -1])


class Positive(nn.Module):
    """Its course hangs on its data: only rows with a positive sum go on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 10)

    def forward(self, x: Any) -> Any:
        hidden = self.first(x).relu()
        if hidden.sum() < 0:
            hidden = hidden * 2
        return self.second(hidden)


def measured(make: Any, optimizer_of: Any, plan: Plan, data: Any) -> int:
    """Peak of torch's allocator during two steps: weights, state and inputs included."""
    with allocator_recorded() as peak_in_window:
        model = make()
        optimizer = optimizer_of(model.parameters())
        data = copy.deepcopy(data)
        step = TrainStep(model, optimizer, LOSS, plan)
        with window():
            step(data)
            step(data)
    return peak_in_window()


@pytest.mark.parametrize(
    ("make", "data", "optimizer_of", "plan"),
    [
        (mlp, batch(512), torch.optim.Adam, Plan()),
        (mlp, batch(512), torch.optim.Adafactor, Plan(micro_batches=2)),
        (convnet, (torch.randn(32, 3, 20, 20), torch.randint(10, (32,))), torch.optim.SGD, Plan()),
        (convnet, (torch.randn(32, 3, 20, 20), torch.randint(10, (32,))), torch.optim.Adam, Plan(precision="bf16")),
        (Reader, (torch.randint(50, (32, 30)), torch.randint(10, (32,))), torch.optim.Adam, Plan()),
    ],
)
def test_the_allocator_agrees(make: Any, data: Any, optimizer_of: Any, plan: Plan) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = make()
        few = data[0][:16], data[1][:16]
        found = forecast(TrainStep(model, optimizer_of(model.parameters()), LOSS, plan), few, batch_size=len(data[0]))
        real = measured(make, optimizer_of, plan, data)
    finally:
        torch.set_num_threads(threads)
    assert found.method == "fake run"
    assert found.peak_bytes == pytest.approx(real, rel=0.03)


def test_nothing_of_the_users_is_changed() -> None:
    model = convnet()
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.randn(8, 3, 20, 20), torch.randint(10, (8,))
    TrainStep(model, optimizer, LOSS)(data)
    model.eval()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [one.grad for one in model.parameters()], data))
    random = torch.get_rng_state()
    forecast(TrainStep(model, optimizer, LOSS, Plan(precision="bf16", micro_batches=2)), data, batch_size=64)
    after = model.state_dict(), optimizer.state_dict(), [one.grad for one in model.parameters()], data
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert torch.equal(random, torch.get_rng_state())
    assert not model.training


def test_tied_weights_count_once() -> None:
    tied = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    tied[1].weight = tied[0].weight
    found = forecast(
        TrainStep(tied, torch.optim.SGD(tied.parameters(), 0.1), lambda m, b: m(b).sum()), torch.randn(2, 300)
    )
    assert found.categories["weights"] == (300 * 300 + 600) * 4


def test_a_forecast_as_value_json_and_text() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    found, again = (forecast(TrainStep(model, optimizer, LOSS), batch(), batch_size=1000) for _ in range(2))
    assert found == again
    assert found.batch_size == 1000
    assert sum(found.categories.values()) == found.tensor_bytes == found.peak_bytes
    assert 0 < found.between_steps_bytes < found.peak_bytes
    assert found.fits is None
    document = json.loads(json.dumps(found.to_json()))
    assert document["peak_bytes"] == found.peak_bytes
    assert document["fits"] is None
    text = str(found)
    assert text.startswith("batch 1000 on cpu: peak ")
    assert "activations" in text
    assert f"±{found.uncertainty:.0%}" in text
    assert f" at {found.line}" in text


@pytest.mark.parametrize(("capacity", "fits"), [(None, None), (1031, True), (1029, False)])
def test_fits_counts_the_uncertainty(capacity: int | None, fits: bool | None) -> None:
    one = Allocation(size_bytes=1000, born=0, phase="forward", step=0, operation="empty")
    target = Target(name="cpu", cuda=False, capacity_bytes=capacity)
    timeline = Timeline([one], [(0, True)])
    found = forecast_of(timeline, target, batch_size=None, uncertainty=0.03, not_covered=())
    assert found.fits is fits
    assert str(found).startswith("this batch on cpu")


def test_each_stream_of_a_gpu_has_segments_of_its_own() -> None:
    megabytes = Allocation(size_bytes=3_000_000, born=0, phase="forward", step=0, stream=0)
    timeline = Timeline([megabytes, replace(megabytes, born=1, stream=7)], [(0, True), (1, True)])
    found = forecast_of(timeline, Target(name="cuda", cuda=True), batch_size=None, uncertainty=0.1, not_covered=())
    assert found.peak_bytes == 2 * 20 * 2**20


def test_a_device_of_the_catalogue_need_not_be_here() -> None:
    model = mlp()
    found = forecast(TrainStep(model, torch.optim.Adam(model.parameters()), LOSS), batch(), device="RTX 4090")
    assert found.device == "rtx-4090"
    assert found.fits is True
    # since torch 2.15 a product gives its workspace back, and this peak falls outside of the products
    assert (found.categories["workspaces"] > 0) is keeps_blas_workspace()
    assert found.peak_bytes >= found.tensor_bytes
    assert any("CUDA context" in one for one in found.not_covered)


def test_an_unknown_device_names_the_nearest() -> None:
    model = mlp()
    with pytest.raises(UsageError, match="rtx-4090"):
        forecast(TrainStep(model, torch.optim.Adam(model.parameters()), LOSS), batch(), device="rtx-4091")


def test_a_batch_has_samples() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UsageError, match="batch_size is 0"):
        forecast(TrainStep(model, optimizer, LOSS), batch(), batch_size=0)
    with pytest.raises(UsageError):
        forecast(TrainStep(model, optimizer, LOSS), {"no": "tensors"})


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(x)
        return hidden.index_add(0, edge_index[1], hidden[edge_index[0]])


def test_a_graph_is_forecast_where_its_edges_are_no_part_of_the_batch() -> None:
    """As the refusal says: the remedy of a training, which need not count samples, is none of a forecast."""

    def loss_fn(model: nn.Module, batch: Any, edge_index: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["x"], edge_index), batch["y"])

    model = Graph()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    nodes = {"x": torch.randn(10, 4), "y": torch.randint(3, (10,))}
    edges = torch.randint(10, (2, 30))
    step = TrainStep(model, optimizer, lambda model, batch: loss_fn(model, batch, batch["edge_index"]))
    with pytest.raises(UsageError) as caught:
        forecast(step, {**nodes, "edge_index": edges})
    assert caught.value.what.endswith("differ in their first size: batch['x'] has 10, batch['edge_index'] has 2")
    assert caught.value.limit == "it is the number of samples, along which a batch is split"
    assert "functools.partial(loss_fn, edge_index=edge_index)" in caught.value.remedy
    assert "micro_batches" not in str(caught.value)
    partial = functools.partial(loss_fn, edge_index=edges)
    assert forecast(TrainStep(model, optimizer, partial), nodes).peak_bytes > 0


def test_a_loss_function_with_a_model_of_its_own_is_refused() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = nn.CrossEntropyLoss()
    with pytest.raises(UsageError, match="model of its own"):
        forecast(TrainStep(model, optimizer, lambda _, data: loss(model(data[0]), data[1])), batch())
    assert all(one.grad is None for one in model.parameters())


def test_where_the_data_decides_two_real_steps_are_extended() -> None:
    model = Positive()
    optimizer = torch.optim.Adam(model.parameters())
    found = forecast(TrainStep(model, optimizer, LOSS), batch(32), batch_size=256)
    assert found.method.startswith("real steps of ")
    assert found.uncertainty > 0.1
    assert any("fake run was impossible" in one for one in found.not_covered)
    assert found.peak_bytes == pytest.approx(measured(Positive, torch.optim.Adam, Plan(), batch(256)), rel=0.03)
    with pytest.raises(UsageError, match="1 sample"):
        forecast(TrainStep(model, optimizer, LOSS), batch(1))


@pytest.mark.parametrize(
    "plan", [Plan(precision="fp16"), Plan(nonfinite="skip"), Plan(precision="fp16", micro_batches=2)]
)
def test_plans_that_look_at_values_are_still_run_on_fake_tensors(plan: Plan) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    batch = (torch.randn(8, 16), torch.randint(0, 3, (8,)))
    loss = supervised(nn.CrossEntropyLoss())
    made = forecast(TrainStep(model, torch.optim.Adam(model.parameters()), loss, plan), batch)
    assert made.method == "fake run"


class Foreign(torch.autograd.Function):
    """Leaves torch, as code around numpy does: no fake tensor can follow."""

    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return gradient * 2


class Doubled(nn.Linear):
    def forward(self, x: Any) -> Any:
        return Foreign.apply(super().forward(x))


def test_what_cannot_run_on_fake_tensors_is_measured_in_small_real_steps() -> None:
    model = Doubled(64, 10)
    found = forecast(TrainStep(model, torch.optim.SGD(model.parameters()), LOSS), batch())
    assert "real steps" in found.method
    assert found.categories["weights"] == 4 * 650


def test_an_error_of_the_model_is_told_in_the_words_of_a_real_step(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        forecast(TrainStep(model, torch.optim.SGD(model.parameters()), LOSS), batch(width=63))
    assert not caplog.records


def test_a_generator_of_the_models_own_stays_where_it_is() -> None:
    model = mlp()
    model.noise = torch.Generator().manual_seed(3)  # type: ignore[assignment]
    before = model.noise.get_state()
    assert forecast(TrainStep(model, torch.optim.SGD(model.parameters()), LOSS), batch()).peak_bytes > 0
    assert torch.equal(model.noise.get_state(), before)


@pytest.mark.parametrize("device", [7, "cuda:x", "cpuu", torch.device("meta")])
def test_a_device_that_is_none_is_refused(device: Any) -> None:
    model = mlp()
    with pytest.raises(UsageError):
        forecast(TrainStep(model, torch.optim.SGD(model.parameters()), LOSS), batch(), device=device)


def test_a_torch_device_is_a_device() -> None:
    model = mlp()
    assert (
        forecast(TrainStep(model, torch.optim.SGD(model.parameters()), LOSS), batch(), device=torch.device("cpu")).fits
        is None
    )


@pytest.mark.parametrize("samples", ["8", 1.5, True, 0, -1])
def test_a_batch_size_that_is_no_number_of_samples_is_refused(samples: Any) -> None:
    model = mlp()
    with pytest.raises(UsageError, match="batch_size is"):
        forecast(TrainStep(model, torch.optim.SGD(model.parameters()), LOSS), batch(), batch_size=samples)


def test_what_is_no_step_is_refused_and_how_to_make_one_is_said() -> None:
    model = mlp()
    for wrong in (None, model, TrainStep, (model, torch.optim.SGD(model.parameters()), LOSS)):
        with pytest.raises(UsageError, match=r"step = flatout\.TrainStep\(model, optimizer, loss_fn, plan\)"):
            forecast(wrong, batch())
    with pytest.raises(UsageError, match="0 samples"):
        forecast(TrainStep(model, torch.optim.SGD(model.parameters()), LOSS), batch(0))


def test_the_text_says_whether_it_fits_and_what_is_not_counted() -> None:
    model = mlp()
    text = str(forecast(TrainStep(model, torch.optim.SGD(model.parameters()), LOSS), batch(), device="rtx-4090"))
    assert ", fits = weights " in text
    assert "not counted: the CUDA context" in text


class Gated(nn.Module):
    """One run of two takes the second layer, so their gradients differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x)) if x[:, 0].sum() > 0 else self.first(x)


def test_weights_and_gradients_are_not_extended_with_the_batch() -> None:
    model = Gated()
    inputs, labels = torch.ones(16, 64), torch.randint(10, (16,))
    inputs[:4] = -1  # the run of 4 leaves the layer out; that of 8 is undecided, at 0
    inputs[4:8, 0] = 2
    found = forecast(TrainStep(model, torch.optim.Adam(model.parameters()), LOSS), (inputs, labels))
    weights = found.categories["weights"]
    assert found.categories["gradients"] <= weights
    assert found.categories["optimizer"] <= 2 * weights + 100
    assert found.tensor_bytes == sum(found.categories.values())


def test_sparse_gradients_are_said_and_widen_the_range() -> None:
    def of(sparse: bool) -> MemoryForecast:
        model = nn.Sequential(nn.Embedding(500, 8, sparse=sparse), nn.Flatten(), nn.Linear(32, 10))
        step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), LOSS)
        return forecast(step, (torch.randint(500, (64, 4)), torch.randint(10, (64,))))

    found, dense = of(True), of(False)
    assert found.uncertainty > 1
    assert found.not_covered[:-1] == dense.not_covered
    assert found.not_covered[-1].startswith("sparse gradients: ")
    assert dense.uncertainty < 0.5


def test_the_allocator_s_settings_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(600, 700)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert find_target("rtx-4090", model).settings == AllocatorSettings()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert find_target("rtx-4090", model).settings.max_split_bytes == 64 << 20
    assert find_target("cpu", model).settings == AllocatorSettings()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:x")
    with pytest.raises(UsageError, match="expandable_segments"):
        find_target("rtx-4090", model)


def test_devices_that_have_no_known_memory_are_named_as_the_models() -> None:
    assert find_target("cpu:0", mlp()).name == "cpu"
    with torch.device("meta"):
        shapes = mlp()
    with pytest.raises(UsageError, match=r"the model is on 'meta'; memory is known on the CPU and on CUDA"):
        find_target(None, shapes)
    assert find_target("h100", shapes).cuda


def test_several_heads_on_one_trunk_are_forecast_as_the_allocator_has_them() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = nn.Linear(64, 1000), nn.ModuleList(nn.Linear(1000, 4) for _ in range(3))

        def forward(self, x: Any) -> Any:
            hidden = self.trunk(x)
            return sum(head(hidden) for head in self.heads)

    data = torch.randn(1000, 64), torch.randint(4, (1000,))
    model = Heads()
    found = forecast(TrainStep(model, torch.optim.SGD(model.parameters(), 1e-3), LOSS), data)
    real = measured(Heads, lambda parameters: torch.optim.SGD(parameters, 1e-3), Plan(), data)
    assert found.peak_bytes == pytest.approx(real, rel=0.03)
