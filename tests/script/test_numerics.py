"""What a run records of its numbers, and how it is compared with a reference of the plain run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatout.generators import generator_states
from flatout.levers.subject import Subject
from flatout.script import reference
from flatout.script.numerics import GradientNoise, NumericsRecorder, NumericsRequest, WeightNoise, nudge_weights
from flatout.tuning.numerics import Numerics
from tests.odd_defaults import odd_defaults


class Watched:
    """A model and an optimizer as a watched script would have them."""

    def __init__(self, *, optimizer: bool = True, dtype: torch.dtype = torch.float32, norm: bool = False) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(3, 2), *([torch.nn.BatchNorm1d(2)] if norm else [])]
        self.model = torch.nn.Sequential(*layers).to(dtype)
        self.subject = Subject()
        self.subject.modules.add(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.1) if optimizer else None
        if self.optimizer is not None:
            self.subject.optimizers.add(self.optimizer)
        self.watch: Any = SimpleNamespace(
            subject=self.subject, at_backward=[], before_optimizer=[], inside_optimizer=False
        )
        self.wrong: Any = lambda: None
        """Called between the recorder's look at the gradients and the optimizer's step."""
        self.scale = 1.0
        self.batches = 0

    def record(self, steps: int, **request: Any) -> Numerics:
        recorder = NumericsRecorder(self.watch, NumericsRequest(steps=steps, **request))
        for _ in range(steps):
            self.step(recorder)
        return Numerics.from_answer({**recorder.finish(), "ended": False, "unseeded": [], "peak_resident_bytes": None})

    def step(self, recorder: NumericsRecorder, backwards: int = 1) -> None:
        self.model.zero_grad()
        self.batches += 1
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(self.batches))
        for _ in range(backwards):
            loss = self.scale * (self.model(batch.to(self.model[0].weight.dtype)) ** 2).mean()
            for callback in self.watch.at_backward:
                callback((loss,))
            loss.backward()
        if self.optimizer is not None:
            for callback in self.watch.before_optimizer:
                callback(self.optimizer)
            self.wrong()
            self.optimizer.step()
        recorder.step_ended()


class ByHand(Watched):
    """Without an optimizer: a step begins when a backward pass has ended, with the update that follows from it."""

    def __init__(self) -> None:
        super().__init__(optimizer=False)
        self.share = 1.0
        """Of the gradients, in each update."""
        self._pass()

    def step(self, recorder: NumericsRecorder, backwards: int = 1) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.1 * self.share)
        self.model.zero_grad()
        self._pass()
        recorder.step_ended()

    def _pass(self) -> None:
        self.batches += 1
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(self.batches))
        loss = self.scale * (self.model(batch) ** 2).mean()
        for callback in self.watch.at_backward:
            callback((loss,))
        loss.backward()


def test_losses_norms_and_digests() -> None:
    one, other = Watched().record(2), Watched().record(2)
    assert one == other
    assert [len(step) for step in one.losses] == [1, 1]
    assert one.parameters == ("0.weight", "0.bias")
    assert one.stays_finite()


def test_the_recorder_takes_its_callbacks_away() -> None:
    watched = Watched()
    watched.record(1)
    assert (watched.watch.at_backward, watched.watch.before_optimizer) == ([], [])


def test_each_backward_pass_of_a_step_is_a_loss_of_its_own() -> None:
    watched = Watched()
    recorder = NumericsRecorder(watched.watch, NumericsRequest(steps=1))
    watched.step(recorder, backwards=3)
    answer = recorder.finish()
    assert [len(step) for step in answer["losses"]] == [3]


def test_without_an_optimizer() -> None:
    numerics = Watched(optimizer=False).record(1)
    assert numerics.norms[0] is not None
    assert numerics.norms[0] > 0


def test_the_digest_sees_one_bit_and_no_layout() -> None:
    digests = []
    for change in (0.0, 0.0, 2.0**-22):
        watched = Watched()
        with torch.no_grad():
            watched.model[0].weight[0, 0] = 1.0 + change
            if len(digests) == 1:
                watched.model[0].weight.data = watched.model[0].weight.data.t().contiguous().t()
        digests.append(watched.record(0).weight_digest)
    assert digests[0] == digests[1] != digests[2]


def test_noise_is_a_share_of_each_gradients_size_and_leaves_zeros(tmp_path: Path) -> None:
    weight, unused = torch.nn.Parameter(torch.ones(200, 50)), torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.randn(200, 50, generator=torch.Generator().manual_seed(1))
    weight.grad[100:] = 0
    before, noise = weight.grad.clone(), GradientNoise(0.01)
    noise.add_to([weight, unused])
    first = weight.grad - before
    assert float(first.norm() / before.norm()) == pytest.approx(0.01, rel=0.1)
    assert not first[100:].any()
    assert unused.grad is None
    noise.add_to([weight])
    assert not torch.equal(weight.grad - before, 2 * first)  # each step has its own


def test_a_run_with_noisy_gradients_differs_by_as_much_at_each_check_step(tmp_path: Path) -> None:
    Watched().record(6, role="reference", folder=str(tmp_path), checks=(0, 3))
    noisy = Watched().record(6, role="checked", folder=str(tmp_path), gradient_noise=0.01)
    assert [check.replaced for check in noisy.checks] == [False, False]
    for check in noisy.checks:
        size = sum(gradient.size**2 for gradient in check.gradients) ** 0.5
        error = sum(gradient.error**2 for gradient in check.gradients) ** 0.5
        assert error / size == pytest.approx(0.01, rel=0.8)  # of eight elements


def test_weights_are_rounded_only_while_gradients_are_taken(tmp_path: Path) -> None:
    plain = Watched().record(6, role="reference", folder=str(tmp_path), checks=(0, 3, 5))
    watched, generator = Watched(), torch.get_rng_state()
    seen: list[torch.Tensor] = []
    watched.watch.at_backward.append(lambda roots: seen.append(watched.model[0].weight.detach().clone()))
    noisy = watched.record(6, role="checked", folder=str(tmp_path), weight_noise=True)
    assert torch.equal(torch.get_rng_state(), generator)
    initial = Watched().model[0].weight.detach()
    assert 0 < ((seen[0] - initial).abs() / initial.abs()).max() <= 2.0**-9 * 1.01
    assert noisy.losses != plain.losses
    assert [check.replaced for check in noisy.checks] == [False] * 3
    for check in noisy.checks:
        assert all(0 < gradient.relative < 0.02 for gradient in check.gradients if gradient.size)
    # on arrival at the last check the weights are near those of the plain run, not 16-bit noise away from them
    assert all(drift.error < 0.02 * drift.moved for drift in noisy.checks[-1].drift)


def test_the_roundings_of_weights_are_the_same_until_the_next_check_step() -> None:
    watched, noise = Watched(), WeightNoise()
    before = watched.model[0].weight.detach().clone()

    def moved() -> torch.Tensor:
        noise.add()
        found = watched.model[0].weight.detach() - before
        noise.remove()
        noise.remove()  # as where an optimizer has made its step before the step ends
        assert torch.allclose(watched.model[0].weight, before, rtol=1e-6)
        return found

    noise.draw(watched.subject, 0)
    first, second = moved(), moved()
    assert torch.allclose(first, second, atol=1e-7)
    noise.draw(watched.subject, 5)
    assert not torch.allclose(first, moved(), atol=1e-5)


def test_weights_of_16_bits_are_rounded_already() -> None:
    watched, noise = Watched(dtype=torch.bfloat16), WeightNoise()
    before = watched.model[0].weight.detach().clone()
    noise.draw(watched.subject, 0)
    noise.add()
    assert torch.equal(watched.model[0].weight, before)


def test_weights_are_rounded_for_updates_by_hand(tmp_path: Path) -> None:
    ByHand().record(9, role="reference", folder=str(tmp_path), checks=(0, 3, 6))
    noisy = ByHand().record(9, role="checked", folder=str(tmp_path), weight_noise=True)
    assert [0 < one.gradients[0].relative < 0.02 for one in noisy.checks] == [True, True, True]
    assert all(drift.error < 0.02 * drift.moved for check in noisy.checks[1:] for drift in check.drift)


def test_a_nudge_is_one_rounding_error_in_any_format_and_repeats() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        moved = []
        for _ in range(2):
            watched = Watched(dtype=dtype)
            weight = watched.model[0].weight
            before = weight.detach().clone()
            nudge_weights(watched.subject)
            moved.append(weight.detach())
        assert torch.equal(moved[0], moved[1])
        relative = ((moved[0] - before) / before).abs().double() / torch.finfo(dtype).eps
        assert relative.min() > 0.4
        assert relative.max() < 2.1


def test_a_nudge_may_go_farther_and_elsewhere() -> None:
    moved = []
    for words in ({}, {"ulps": 8}, {"seed": 1}):
        watched = Watched()
        weight = watched.model[0].weight
        before = weight.detach().clone()
        nudge_weights(watched.subject, **words)
        moved.append(((weight.detach() - before) / before).double() / torch.finfo(torch.float32).eps)
    assert torch.equal(moved[0].sign(), moved[1].sign())
    assert moved[1].abs().min() > 7
    assert not torch.equal(moved[0].sign(), moved[2].sign())


@pytest.fixture
def folder(tmp_path: Path) -> str:
    Watched(norm=True).record(8, role="reference", folder=str(tmp_path), checks=(0, 4))
    return str(tmp_path)


def test_the_same_run_differs_from_its_reference_in_nothing(folder: str) -> None:
    plain = Watched(norm=True).record(8)
    numerics = Watched(norm=True).record(8, role="checked", folder=folder)
    assert (numerics.losses, numerics.weight_digest) == (plain.losses, plain.weight_digest)
    assert [check.step for check in numerics.checks] == [0, 4]
    for check in numerics.checks:
        assert check.same_generators
        assert check.replaced
        assert not check.unlike
        assert {gradient.error for gradient in check.gradients} == {0.0}
        assert all(gradient.scale == pytest.approx(1) for gradient in check.gradients)
        assert {part.error for part in (*check.drift, *check.updates)} == {0.0}
        assert {part.name for part in check.drift} >= {"0.weight", "Sequential#0.1.running_mean"}


def test_what_happens_to_the_gradients_is_not_blamed_on_the_optimizer(folder: str) -> None:
    watched = Watched(norm=True)
    watched.scale = 2.0
    check = watched.record(8, role="checked", folder=folder).checks[1]
    assert {round(gradient.scale, 4) for gradient in check.gradients if gradient.size > 1e-6} == {2.0}
    assert {update.error for update in check.updates} == {0.0}


def test_what_happens_to_the_optimizer_is_seen_behind_equal_gradients(folder: str) -> None:
    watched = Watched(norm=True)
    assert watched.optimizer is not None
    watched.optimizer.param_groups[0]["weight_decay"] = 0.0
    checks = watched.record(8, role="checked", folder=folder).checks
    assert all(check.replaced for check in checks)
    assert checks[0].updates[0].error > 1e-3 * checks[0].updates[0].moved
    assert checks[1].drift[0].error > 1e-3 * checks[1].drift[0].moved
    # every check step begins from the plain run's state again
    assert checks[1].gradients[0].error == 0.0


def test_a_parameter_without_its_gradient_is_named(folder: str) -> None:
    watched = Watched(norm=True)
    watched.model[0].bias.requires_grad_(False)
    numerics = watched.record(1, role="checked", folder=folder)
    assert "0.bias" in numerics.checks[0].unlike


def test_other_random_numbers_are_noticed(folder: str) -> None:
    watched = Watched(norm=True)
    watched.wrong = lambda: torch.rand(1)
    numerics = watched.record(8, role="checked", folder=folder)
    assert [check.same_generators for check in numerics.checks] == [True, False]


def test_an_update_by_hand_is_made_from_the_plain_gradients_too(tmp_path: Path) -> None:
    """They were those of a state that had drifted since the check step before: at a high learning rate nothing of what
    followed could be compared."""
    ByHand().record(9, role="reference", folder=str(tmp_path), checks=(0, 4, 8))

    def checked(**changed: float) -> Numerics:
        run = ByHand()
        for name, value in changed.items():
            setattr(run, name, value)
        return run.record(9, role="checked", folder=str(tmp_path))

    for one in checked(scale=1.2).checks:
        assert one.replaced
        assert [update.error for update in one.updates] == [0.0, 0.0]
        assert {round(gradient.relative, 3) for gradient in one.gradients} == {0.2}
    for one in checked(share=0.9).checks:
        assert [round(update.error / update.moved, 3) for update in one.updates] == [0.1, 0.1]
    nudged = ByHand().record(9, role="checked", folder=str(tmp_path), nudge="rounding").checks
    assert [(one.replaced, one.gradients[0].relative < 1e-4) for one in nudged] == [(False, True)] * 3


def test_noise_goes_into_updates_by_hand(tmp_path: Path) -> None:
    ByHand().record(6, role="reference", folder=str(tmp_path), checks=(0, 3))
    noisy = ByHand().record(6, role="checked", folder=str(tmp_path), gradient_noise=0.01)
    assert [0.001 < one.updates[0].error / one.updates[0].moved < 0.03 for one in noisy.checks] == [True, True]
    assert ByHand().record(3, gradient_noise=0.01).losses != ByHand().record(3).losses


def test_a_sparse_gradient_is_replaced_in_its_own_rows() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([3, 1, 3])).sum().backward()
    plain = torch.arange(10.0).view(5, 2)
    reference._replace(table.weight, plain)
    assert table.weight.grad is not None
    found = table.weight.grad.coalesce()
    assert found.indices().tolist() == [[1, 3]]
    assert torch.equal(found.values(), plain[[1, 3]])


def test_a_nudged_run_keeps_its_own_gradients(folder: str) -> None:
    numerics = Watched(norm=True).record(8, role="checked", folder=folder, nudge="rounding")
    assert not any(check.replaced for check in numerics.checks)
    assert 0 < numerics.checks[1].gradients[0].relative < 1e-2


def test_of_a_model_too_large_samples_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "LARGEST_STATE_BYTES", 10)
    Watched().record(8, role="reference", folder=str(tmp_path), checks=(0, 4))
    numerics = Watched().record(8, role="checked", folder=str(tmp_path))
    assert numerics.sampled
    assert [check.step for check in numerics.checks] == [0]
    assert not numerics.checks[0].replaced
    assert {gradient.error for gradient in numerics.checks[0].gradients} == {0.0}


def test_a_large_state_is_written_at_fewer_check_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    size = reference.check_bytes(watched.subject)
    monkeypatch.setattr(reference, "LARGEST_STATE_BYTES", size)
    monkeypatch.setattr(reference, "LARGEST_REFERENCE_BYTES", 3 * size)
    written = reference.ReferenceWriter(tmp_path, watched.subject, (0, 4, 8, 12, 16))
    assert written.checks == (0, 4, 12)
    free = SimpleNamespace(free=round(size / reference.SHARE_OF_DISK))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: free)
    assert reference.ReferenceWriter(tmp_path, watched.subject, (0, 4)).checks == (0,)


def test_where_a_gradient_is_noise_an_update_of_it_says_nothing() -> None:
    """Adam makes whole steps of noise: those of a bias of keys, whose gradient is zero but for rounding."""
    gradient, noisy = torch.tensor([1.0, -1.0, 1e-9, 0.0]), torch.tensor([1.01, -0.99, 0.01, -0.01])
    clear = reference._clear_of_noise(gradient, noisy)
    assert clear.tolist() == [True, True, False, False]
    after = {"bias": torch.tensor([-0.1, 0.1, 0.0, 0.0])}
    mine = {"bias": torch.tensor([-0.1, 0.1, -0.1, 0.1])}
    before = {"bias": torch.zeros(4)}
    (plain,) = reference._differences(after, mine, before, False)
    (found,) = reference._differences(after, mine, before, False, {"bias": reference._Clear(0, clear)})
    assert plain[1] / plain[2] == pytest.approx(1.0)
    assert found[1] == 0
    assert found[2] == plain[2]


def test_samples_are_the_same_elements_in_any_layout() -> None:
    tensor = torch.arange(60_000.0).reshape(300, 200)
    assert torch.equal(reference.sample(tensor, 3), reference.sample(tensor.t().contiguous().t(), 3))
    assert len(reference.sample(tensor, 3)) == reference.SAMPLED_ELEMENTS


@pytest.mark.parametrize(("most", "expected"), [(5, (0, 1, 2, 3)), (4, (0, 1, 2, 3)), (2, (0, 2)), (1, (0,))])
def test_thinned(most: int, expected: tuple[int, ...]) -> None:
    assert reference.thinned((0, 1, 2, 3), most) == expected


def test_where_the_state_is_large_the_early_check_steps_stay() -> None:
    checks = (0, 2, 4, *range(10, 200, 10))
    assert reference.thinned(checks, 6) == (0, 2, 4, 10, 70, 130)
    assert reference.thinned(checks, 5) == (0, 20, 60, 110, 150)


def test_a_checked_run_is_moved_by_16_bits_at_every_check_step(folder: str) -> None:
    moved = Watched(norm=True).record(8, role="checked", folder=folder, nudge="16-bit")
    nudged = Watched(norm=True).record(8, role="checked", folder=folder, nudge="rounding")
    for coarse, fine in zip(moved.checks, nudged.checks, strict=True):
        assert not coarse.replaced
        assert fine.gradients[0].relative < coarse.gradients[0].relative / 5 < 0.1


def test_a_generator_of_a_gpu_counts_once_a_number_was_drawn_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = reference.generator_digest()
    seed, unused, drawn = torch.full((8,), 7, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8), torch.ones(8)
    for state, same in ((torch.cat([seed, unused]), True), (torch.cat([seed, drawn.to(torch.uint8)]), False)):
        monkeypatch.setattr(reference, "generator_states", lambda state=state: {**generator_states(), "cuda": [state]})
        assert (reference.generator_digest() == plain) is same


def test_equal_infinities_differ_by_nothing() -> None:
    """As in the mask of an attention: it made every later comparison NaN, which passes any limit."""
    mask = torch.triu(torch.full((3, 3), -torch.inf), 1) + torch.eye(3)
    (same,) = reference._differences({"mask": mask}, {"mask": mask.clone()}, {}, True)
    assert same[1:3] == (0.0, pytest.approx(3**0.5))
    for other in (torch.nan, 0.0, torch.inf):
        (found,) = reference._differences({"mask": mask}, {"mask": mask.nan_to_num(neginf=other)}, {}, True)
        assert found[1] == torch.inf


def test_a_gradient_that_is_not_finite_says_nothing_and_one_beside_a_finite_one_is_wrong() -> None:
    finite, overflowed = torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.inf])
    assert reference._error(overflowed, torch.tensor([torch.nan, 2.0])) == (0.0, 0.0, 0.0)
    assert reference._error(finite, overflowed) == (torch.inf, pytest.approx(5**0.5), 0.0)


def test_numbers_in_64_bits_are_compared_in_64_bits() -> None:
    """In 32 bits an update of a billionth was nothing, and so was a lost one."""
    before = torch.ones(4, dtype=torch.float64)
    after = before + 1e-9
    (lost,) = reference._differences({"w": after}, {"w": before}, {"w": before}, True)
    assert lost[1] == lost[2] == pytest.approx(2e-9)


def test_the_imaginary_part_counts() -> None:
    plain, mine = torch.tensor([1.0 + 2.0j]), torch.tensor([1.0 - 2.0j])
    assert reference._error(plain, mine) == (4.0, pytest.approx(5**0.5), pytest.approx(-3.0))
    (found,) = reference._differences({"w": plain}, {"w": mine}, {}, True)
    assert found[1] == 4.0


def test_the_digest_of_buffers_sees_counters() -> None:
    one, other = Watched(norm=True), Watched(norm=True)
    other.model[1].num_batches_tracked += 1
    assert one.record(0).buffer_digest != other.record(0).buffer_digest


class Momenta(torch.optim.Optimizer):
    """A script's own: it keeps a tensor and no dict for each parameter, and a counter of all steps under a name."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.state["taken"] = torch.zeros(1)  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["taken"] += 1  # type: ignore[index]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = 0.9 * self.state.get(parameter, torch.zeros(1)) + parameter.grad
            parameter.sub_(0.1 * self.state[parameter])


def test_an_optimizer_may_keep_its_state_as_it_likes(tmp_path: Path) -> None:
    def watched() -> Watched:
        found = Watched(optimizer=False)
        found.optimizer = Momenta(found.model.parameters())
        found.subject.optimizers.add(found.optimizer)
        return found

    plain = watched().record(4, role="reference", folder=str(tmp_path), checks=(1, 3))
    other = watched()
    checked = other.record(4, role="checked", folder=str(tmp_path))
    assert checked.weight_digest == plain.weight_digest
    assert sorted(reference.optimizer_state(other.subject)) == ["0.0.", "0.1.", "0.taken"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_buffer_is_a_constant_with_a_digest(tmp_path: Path, layout: torch.layout) -> None:
    """As the adjacency matrix of a graph network."""

    def watched(scale: float = 1.0) -> Watched:
        found = Watched()
        with torch.sparse.check_sparse_tensor_invariants(True):
            found.model.register_buffer("graph", (scale * torch.eye(3)).to_sparse(layout=layout))
        return found

    plain = watched().record(4, role="reference", folder=str(tmp_path), checks=(1, 3))
    checked = watched().record(4, role="checked", folder=str(tmp_path))
    assert checked.buffer_digest == plain.buffer_digest != watched(2.0).record(0).buffer_digest
    assert [check.unlike for check in checked.checks] == ["", ""]


def test_a_gradient_that_is_conjugated_on_reading_has_a_norm() -> None:
    watched = Watched(optimizer=False)
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    weight.grad = torch.tensor([3.0 + 4.0j, 0.0]).conj()
    watched.subject.optimizers.add(optimizer := torch.optim.SGD([weight], 0.1))
    recorder = NumericsRecorder(watched.watch, NumericsRequest(steps=1, gradient_noise=1e-6))
    for callback in watched.watch.before_optimizer:
        callback(optimizer)
    recorder.step_ended()
    assert recorder.finish()["gradient_norms"] == [pytest.approx(5.0, rel=1e-4)]


def test_both_parts_of_a_complex_loss_count() -> None:
    watched = Watched()
    recorder = NumericsRecorder(watched.watch, NumericsRequest(steps=1))
    for callback in watched.watch.at_backward:
        callback((torch.tensor(1 + 2j),))
    recorder.step_ended()
    assert recorder.finish()["losses"] == [[1.5]]


def test_what_lbfgs_keeps_in_lists_is_loaded_too(tmp_path: Path) -> None:
    def watched() -> Watched:
        found = Watched(optimizer=False)
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
        found.optimizer = torch.optim.LBFGS(found.model.parameters(), lr=0.1, max_iter=3)
        found.subject.optimizers.add(found.optimizer)

        def step(recorder: NumericsRecorder, backwards: int = 1) -> None:
            def closure() -> torch.Tensor:
                found.model.zero_grad()
                loss = (found.model(x) ** 2).mean()
                found.watch.inside_optimizer = True
                for callback in found.watch.at_backward:
                    callback((loss,))
                loss.backward()
                return loss

            found.optimizer.step(closure)  # type: ignore[union-attr, arg-type]
            recorder.step_ended()

        found.step = step  # type: ignore[method-assign]
        return found

    watched().record(4, role="reference", folder=str(tmp_path), checks=(3,))
    other = watched()
    with torch.no_grad():
        other.model[0].weight.add_(1e-3)
    (check,) = other.record(4, role="checked", folder=str(tmp_path)).checks
    assert "0.0.old_dirs[0]" in reference.optimizer_state(other.subject)
    assert check.drift[0].error > 0
    assert {update.error for update in check.updates} == {0.0}


def test_what_a_script_sets_for_new_tensors_is_not_for_ours() -> None:
    moved = []
    for defaults in (contextlib.nullcontext, odd_defaults):
        watched = Watched()
        with defaults():
            nudge_weights(watched.subject)
            moved.append((watched.model[0].weight.detach(), reference.sample(torch.arange(60_000.0, device="cpu"), 3)))
    assert torch.equal(moved[0][0], moved[1][0])
    assert torch.equal(moved[0][1], moved[1][1].float())
