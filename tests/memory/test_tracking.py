from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from flatout.memory.fake_run import FakeRun, ValuesForOptimizers
from flatout.memory.timeline import Timeline
from flatout.memory.tracking import Tracker
from flatout.memory.workspace import Workspace
from flatout.torch_private.tensors import stored_parts
from tests.allocator_record import allocator_recorded, window


def test_storages_are_counted_once_until_nothing_refers_to_them() -> None:
    with Tracker() as tracker:
        values = torch.ones(1000)
        view = values[10:]
        assert tracker.held_bytes == 4000
        del values
        assert tracker.held_bytes == 4000
        del view
        assert tracker.held_bytes == 0
    assert tracker.timeline().peak().size_bytes == 4000


def test_a_resized_storage_is_another_allocation() -> None:
    with Tracker() as tracker:
        values = torch.empty(0)
        values.resize_(50)
        assert tracker.held_bytes == 200
    assert [one.size_bytes for one in tracker.alive_by_storage().values()] == [200]


def test_phases_modules_and_categories() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    with Tracker() as tracker:
        tracker.model = model
        tracker.hold(model.parameters(), "weights")
        inputs = torch.randn(32, 8)
        tracker.hold([inputs], "inputs")
        model(inputs).sum().backward()
        optimizer.step()
    found = tracker.timeline().allocations
    weights = sum(one.numel() * 4 for one in model.parameters())
    alive = {
        name: sum(one.size_bytes for one in tracker.alive_by_storage().values() if one.category == name)
        for name in ("weights",)
    }
    assert alive == {"weights": weights}
    held = {one.category: one.size_bytes for one in found}
    assert {"weights", "inputs", "activations", "gradients", "optimizer", "temporaries"} == set(held)
    assert sum(one.size_bytes for one in found if one.category == "gradients") == weights
    tanh = next(one for one in found if one.operation == "tanh.default")
    assert (tanh.phase, tanh.module, tanh.category, tanh.shape) == ("forward", "1", "activations", (32, 16))
    assert tanh.line.rpartition(":")[0] == __file__
    backward = next(one for one in found if one.operation == "tanh_backward.default")
    assert (backward.phase, backward.module, backward.line) == ("backward", "1", tanh.line)


def test_a_closure_that_the_optimizer_calls_is_no_part_of_its_update() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(32, 8)

    def closure() -> float:
        loss = model(inputs).square().mean()
        loss.backward()
        return float(loss.detach())

    with Tracker() as tracker:
        tracker.model = model
        optimizer.step(closure)
    found = tracker.timeline().allocations
    tanh = next(one for one in found if one.operation == "tanh.default")
    assert (tanh.phase, tanh.module, tanh.category) == ("forward", "1", "activations")
    backward = next(one for one in found if one.operation == "tanh_backward.default")
    assert (backward.phase, backward.module, backward.line) == ("backward", "1", tanh.line)
    assert any(one.phase == "optimizer" and one.category == "optimizer" for one in found)


def test_weights_of_a_lazy_layer_are_held_from_its_first_forward_on() -> None:
    with Tracker() as tracker:
        layer = nn.LazyLinear(4, bias=False)
        tracker.hold(layer.parameters(), "weights")
        assert tracker.held_bytes == 0
        layer(torch.empty(1, 1000))
        assert tracker.held_bytes == 4 * 4000


def test_a_limit_raises_out_of_memory() -> None:
    with Tracker(limit_bytes=5000), pytest.raises(torch.OutOfMemoryError, match="8000 bytes"):
        torch.ones(2000)


def test_what_a_kernel_holds_inside_is_born_and_dies_around_it() -> None:
    def workspace_of(operation: Any, args: Any, kwargs: Any, out: Any) -> Workspace | None:
        return Workspace(inside_bytes=700, returned_bytes={0: 500}) if "ones" in str(operation) else None

    with Tracker(workspace_of=workspace_of) as tracker:
        values = torch.ones(100)
        assert tracker.held_bytes == 500  # more than its shape shows
        again = values.view(10, 10)
        assert tracker.held_bytes == 500
        del values, again
    timeline = tracker.timeline()
    assert list(timeline.totals()) == [500, 1200, 500, 0]
    assert timeline.peak().allocation is timeline.allocations[1]


def test_copies_are_fake_and_share_what_was_shared() -> None:
    layer = nn.Linear(4, 4)
    layer.tied = layer.weight
    world = FakeRun()
    (layer_copy,) = world.fake_copies((layer,))
    assert layer_copy.tied is layer_copy.weight
    assert type(layer_copy.weight.data).__name__ == "FakeTensor"
    with world, Tracker() as tracker:
        large = world.tensor_like(torch.empty(1), (1024, 1024, 1024, 1024))
        doubled = large * 2
        assert tracker.held_bytes == 2 * 4 * 1024**4
        del large, doubled


def test_only_optimizers_may_read_a_fake_value() -> None:
    world = FakeRun()
    (layer,) = world.fake_copies((nn.Linear(3, 3),))
    optimizer = torch.optim.Adafactor(layer.parameters())
    with world, ValuesForOptimizers():
        layer.weight.grad = torch.ones(3, 3)
        optimizer.step()
        with pytest.raises(Exception, match="_local_scalar_dense"):
            layer.weight.sum().item()


@pytest.mark.parametrize("real", [True, False])
def test_gradients_of_one_tensor_are_summed_up_in_place(real: bool) -> None:
    """The engine does so where no dispatch mode is active: three gradients of a tensor take two tensors, not three."""
    world = FakeRun()
    with contextlib.nullcontext() if real else world, Tracker() as tracker:
        values = torch.ones(1000, requires_grad=True)
        hidden = values * 2
        total = hidden.sum() + hidden.mean() + hidden[:500].sum()
        tracker.reset_peak()
        held = tracker.held_bytes
        total.backward()
    assert tracker.peak_bytes - held <= 2 * 4000 + 2000 + 100


@pytest.mark.parametrize("heads", [2, 3, 5])
def test_the_allocator_agrees_where_several_losses_share_a_tensor(heads: int) -> None:
    """Against torch's own record of a run that nothing follows."""

    def run() -> None:
        hidden = inputs @ weight
        torch.stack([(hidden @ head).square().mean() for head in parts]).sum().backward()

    inputs, weight = torch.randn(256, 16), torch.randn(16, 2000, requires_grad=True)
    parts = [torch.randn(2000, 4) for _ in range(heads)]
    run()  # its gradient is there from now on
    with allocator_recorded() as peak_in_window, window():
        run()
    with Tracker() as tracker:
        tracker.hold([weight.grad, weight, inputs, *parts], "weights")
        held = tracker.held_bytes
        run()
    assert tracker.peak_bytes - held == pytest.approx(peak_in_window(), rel=0.02)


def test_a_term_that_something_else_holds_is_not_summed_up_in_place() -> None:
    kept: list[Any] = []

    def run() -> None:
        hidden = values * 2
        parts = [hidden * 3, hidden * 4]
        for part in parts:
            assert part.grad_fn is not None
            part.grad_fn.register_hook(lambda inwards, _: kept.append(inwards[0]))
        (parts[0].sum() + parts[1].sum()).backward()

    values = torch.ones(1000, requires_grad=True)
    run()
    kept.clear()
    with allocator_recorded() as peak_in_window, window():
        run()
    kept.clear()
    with Tracker() as tracker:
        tracker.hold([values, values.grad], "weights")
        held = tracker.held_bytes
        run()
    assert len(kept) == 2
    assert tracker.peak_bytes - held == pytest.approx(peak_in_window(), abs=100)


@pytest.mark.parametrize("picked", [lambda x: x.sort(-1).values, lambda x: x.topk(60, -1).values], ids=["sort", "topk"])
def test_what_is_scattered_into_zeros_in_the_backward_pass_is_counted_once(picked: Any) -> None:
    """Without a dispatch mode torch scatters in place."""

    def run() -> None:
        picked(values * 2).sum().backward()

    values = torch.randn(64, 500, requires_grad=True)
    run()
    with allocator_recorded() as peak_in_window, window():
        run()
    with Tracker() as tracker:
        tracker.hold([values, values.grad], "weights")
        held = tracker.held_bytes
        run()
    assert tracker.peak_bytes - held == pytest.approx(peak_in_window(), rel=0.02)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr])
def test_all_parts_of_a_sparse_tensor_are_held(layout: torch.layout) -> None:
    size = {"blocksize": (2, 2)} if layout is torch.sparse_bsr else {}
    matrix = torch.eye(8).to_sparse(layout=layout, **size)
    with Tracker() as tracker:
        tracker.hold([matrix], "weights")
        parts = stored_parts(matrix)
        assert tracker.held_bytes == sum(one.untyped_storage().nbytes() for one in parts) > 0


def summed(kept: list[Any]) -> Timeline:
    """Of a backward pass in which two gradients of a tensor are summed up; `kept` gets the first of them."""
    world = FakeRun()
    with world, Tracker() as tracker:
        hidden = torch.ones(1000, requires_grad=True) * 2
        parts = [hidden * 3, hidden * 4]
        if kept:
            for part in parts:
                assert part.grad_fn is not None
                part.grad_fn.register_hook(lambda inwards, _: kept.append(inwards[0]))
        (parts[0].sum() + parts[1].sum()).backward()
        return tracker.timeline()


def test_a_sum_in_place_has_the_memory_of_its_first_term() -> None:
    """Another allocation after the end of the first could be given another place."""
    timeline = summed([])
    assert "add.Tensor" not in [one.operation for one in timeline.allocations if one.phase == "backward"]
    assert [timeline.allocations[index].born for index, is_birth in timeline.events if is_birth] == [
        event for event, (_, is_birth) in enumerate(timeline.events) if is_birth
    ]


def test_another_sum_is_counted_when_it_is_made() -> None:
    """Before its second term ends, whose memory an allocator could otherwise give it."""
    timeline = summed([None])
    (total,) = [one for one in timeline.allocations if one.phase == "backward" and one.operation == "add.Tensor"]
    terms = [one for one in timeline.allocations if one.phase == "backward" and one.operation == "mul.Tensor"]
    assert len(terms) >= 2
    assert all(one.died is None or one.died > total.born for one in terms[:2])
    for event, (index, is_birth) in enumerate(timeline.events):
        assert (timeline.allocations[index].born if is_birth else timeline.allocations[index].died) == event


def test_a_first_term_that_is_a_view_is_not_summed_up_in_place() -> None:
    """Of a weight that an embedding and the last layer share: the engine's sum takes memory of its own."""
    table, tokens = nn.Embedding(2000, 16), torch.arange(4)

    def run() -> None:
        nn.functional.linear(table(tokens).tanh(), table.weight).logsumexp(1).sum().backward()

    run()
    table.weight.grad = None
    with allocator_recorded() as peak_in_window, window():
        run()
    table.weight.grad = None
    with Tracker() as tracker:
        tracker.hold([table.weight, tokens], "weights")
        held = tracker.held_bytes
        run()
    assert tracker.peak_bytes - held == pytest.approx(peak_in_window(), rel=0.02)
