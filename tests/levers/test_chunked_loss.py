"""Scores that are never formed, against torch's own linear layer and cross-entropy, in the ways people write them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.errors import ScriptError
from flatout.levers import chunked_loss
from flatout.levers.chunked_loss import ChunkedLoss, widest_output
from flatout.levers.lazy_scores import LazyScores
from flatout.levers.subject import Subject

B, T, E, V = 3, 5, 6, 17
Loss = Callable[["Model", Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _small_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "LEAST_CLASSES", V)
    monkeypatch.setattr(chunked_loss, "LEAST_SCORES_BYTES", 0)


class Model(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, E)
        self.norm = nn.LayerNorm(E)
        self.head = nn.Linear(E, V, bias=bias)

    def hidden(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.embed(x)).tanh()
        return found

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.hidden(x))
        return found


def nanogpt(model: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1)


def hugging_face(model: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x).float()
    shifted, labels = logits[..., :-1, :].contiguous(), y[..., 1:].contiguous()
    return nn.CrossEntropyLoss()(shifted.view(-1, shifted.shape[-1]), labels.view(-1))


def classes_in_the_middle(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).transpose(1, 2), y, label_smoothing=0.1)


def tied(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(model.hidden(x), model.embed.weight).flatten(0, 1), y.flatten())


def by_product(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy((model.hidden(x) @ model.embed.weight.t()).reshape(B * T, V), y.reshape(-1))


def masked(model: Model, x: Tensor, y: Tensor) -> Tensor:
    where = torch.arange(B * T).view(B, T) % 2 == 0
    return functional.cross_entropy(model(x)[where], y[where], reduction="sum")


def last_position(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(input=model(x)[:, -1], target=y[:, -1])


def one_by_one(model: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    return torch.stack([functional.cross_entropy(logits[i], y[i]) for i in range(B)]).mean()


def permuted(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).permute(1, 2, 0), y.t())


def a_single_row(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x)[0, 0], y[0, 0])


def log_softmax(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return nn.NLLLoss()(functional.log_softmax(model(x).view(-1, V), dim=1), y.view(-1))


def log_softmax_first(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.nll_loss(model(x).log_softmax(-1).transpose(1, 2), y, ignore_index=3)


def the_first_classes(model: Model, x: Tensor, y: Tensor) -> Tensor:
    scores = model(x)[..., : V - 1].flatten(0, -2).float()  # a head that is padded
    return functional.cross_entropy(scores, y.view(-1).clamp(max=V - 2), label_smoothing=0.1)


def the_first_classes_twice(model: Model, x: Tensor, y: Tensor) -> Tensor:
    scores = model(x)[:, :, 0 : V - 1][:, 1:].transpose(1, 2).transpose(1, 2)[..., : V - 2]
    return functional.cross_entropy(scores.reshape(-1, V - 2), y[:, 1:].reshape(-1).clamp(max=V - 3))


FUSED = [
    log_softmax, log_softmax_first,
    nanogpt, hugging_face, classes_in_the_middle, tied, by_product, masked, last_position, one_by_one, permuted,
    a_single_row, the_first_classes, the_first_classes_twice,
]  # fmt: skip


def temperature(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy((model(x) / 0.7).view(-1, V), y.view(-1))


def class_weights(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).view(-1, V), y.view(-1), weight=torch.linspace(0.5, 1, V))


def unreduced(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).view(-1, V), y.view(-1), reduction="none").square().mean()


def probabilities(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).view(-1, V), functional.one_hot(y.view(-1), V).float())


def changed_in_place(model: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    flat = logits.view(-1, V)
    flat[:, 3] = -5.0
    flat.mul_(1.5)
    return functional.cross_entropy(logits.transpose(1, 2), y)


def regularised(model: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    loss = functional.cross_entropy(logits.view(-1, V), y.view(-1))
    return loss + 1e-2 * logits.logsumexp(-1).square().mean()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: Tensor) -> Tensor:
        return logits * 2

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class AsItIs(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def through_a_function_of_its_own(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(Doubled.apply(model(x).transpose(1, 2)), y)


def through_another(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(AsItIs.apply(model(x)).transpose(1, 2), y)


def checkpointed(model: Model, x: Tensor, y: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    return functional.cross_entropy(checkpoint(model.head, model.hidden(x), use_reentrant=True).transpose(1, 2), y)


def checkpointed_and_saved(model: Model, x: Tensor, y: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    wide = checkpoint(lambda h: functional.gelu(model.head(h)), model.hidden(x), use_reentrant=False)
    return functional.cross_entropy(wide.transpose(1, 2), y)


def the_last_classes(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x)[..., 1:].reshape(-1, V - 1), y.view(-1).clamp(max=V - 2))


def classes_in_another_order(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x)[..., torch.arange(V).flip(0)].view(-1, V), y.view(-1))


def likelihoods_of_its_own(model: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = functional.log_softmax(model(x), dim=-1)
    return -logits.gather(2, y[..., None]).mean()


def normalised_twice(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(torch.log_softmax(model(x), -1).transpose(1, 2), y)


def not_normalised(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.nll_loss(model(x).transpose(1, 2), y)


def over_positions(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.nll_loss(functional.log_softmax(model(x), dim=1).transpose(1, 2), y)


def normalised_through_a_function(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return functional.nll_loss(Doubled.apply(functional.log_softmax(model(x), -1)).transpose(1, 2), y)


def scaled_in_place_for_a_function(model: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    logits.div_(0.7)
    return functional.cross_entropy(Doubled.apply(logits).transpose(1, 2), y)


def an_item_set_for_a_function(model: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    logits[..., 3] = -5.0
    return functional.cross_entropy(Doubled.apply(logits).transpose(1, 2), y)


def an_accuracy_in_inference_mode(model: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    with torch.inference_mode():
        assert (logits.argmax(-1) == y).float().mean() >= 0
    return functional.cross_entropy(logits.transpose(1, 2), y)


def beside_a_reference(model: Model, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        reference = model(x)
    return functional.cross_entropy(model(x).transpose(1, 2), y) - 0.5 * functional.cross_entropy(
        reference.transpose(1, 2), y
    )


def normalised_without_gradients(model: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x).transpose(1, 2)
    with torch.no_grad():
        reference = functional.log_softmax(logits, 1)
    return functional.cross_entropy(logits, y) - 0.5 * functional.nll_loss(reference, y)


def a_layer_that_is_unfrozen_meanwhile(model: Model, x: Tensor, y: Tensor) -> Tensor:
    model.head.requires_grad_(False)
    logits = model(x)
    model.head.requires_grad_(True)
    return functional.cross_entropy(logits.transpose(1, 2), y)


def a_mask_that_changes(model: Model, x: Tensor, y: Tensor) -> Tensor:
    where = torch.arange(B * T).view(B, T) % 2 == 0
    logits = model(x)
    with torch.no_grad():
        taken = logits[where]
        where.fill_(True)
        mean = taken.exp().mean()
    return functional.cross_entropy(logits.transpose(1, 2), y) * mean


def a_bias_of_another_shape(model: Model, x: Tensor, y: Tensor) -> Tensor:
    bias = model.embed.weight.new_zeros(1, V)
    return functional.cross_entropy(functional.linear(model.hidden(x), model.head.weight, bias).transpose(1, 2), y)


FORMED = [
    scaled_in_place_for_a_function, an_item_set_for_a_function, an_accuracy_in_inference_mode, beside_a_reference,
    normalised_without_gradients, a_layer_that_is_unfrozen_meanwhile, a_mask_that_changes, a_bias_of_another_shape,
    likelihoods_of_its_own, normalised_twice, not_normalised, over_positions, normalised_through_a_function,
    temperature, class_weights, unreduced, probabilities, changed_in_place, regularised, through_a_function_of_its_own,
    through_another, checkpointed, checkpointed_and_saved, the_last_classes, classes_in_another_order,
]  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    y = torch.randint(0, V, (B, T))
    return torch.randint(0, V, (B, T)), y


@pytest.fixture
def subject() -> Iterator[Subject]:
    found = Subject()
    with ChunkedLoss().apply(found, "chunked"):
        yield found


def results(loss: Loss, model: Model, **how: Any) -> list[Tensor]:
    x, y = batch()
    for _ in range(2):  # gradients accumulate
        value = loss(model, x, y)
        value.backward(**how)
    return [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def plain(loss: Loss, model: Model) -> list[Tensor]:
    return results(loss, copy.deepcopy(model))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loss", [*FUSED, *FORMED])
def test_numbers_are_those_of_torch(loss: Loss, bias: bool) -> None:
    model = Model(bias)
    expected = plain(loss, model)
    found = Subject()
    with ChunkedLoss().apply(found, "chunked"):
        torch.testing.assert_close(results(loss, copy.deepcopy(model)), expected)
        torch.testing.assert_close(results(loss, model), expected)  # once more, where a layer may be given up
    assert functional.linear is torch._C._nn.linear


@pytest.mark.parametrize("loss", FUSED)
def test_the_scores_are_never_formed(loss: Loss, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise AssertionError("formed")

    monkeypatch.setattr("flatout.levers.lazy_scores.Source.form", fail)
    results(loss, Model())


@pytest.mark.parametrize("loss", FUSED)
def test_an_update_copies_no_weights_for_a_loss_that_is_still_there(
    loss: Loss, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[object] = []
    monkeypatch.setattr("flatout.levers.lazy_scores.Source.keep", copied.append)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    subject.optimizers.add(optimizer)
    value = loss(model, *batch())
    value.backward()
    gc.collect()
    optimizer.step()
    assert copied == []
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        value.backward()


def test_what_they_say_of_themselves(subject: Subject) -> None:
    scores = Model()(batch()[0])
    assert isinstance(scores, Tensor)
    assert isinstance(scores, LazyScores)
    assert (scores.shape, scores.size(-1), scores.dtype, len(scores)) == (torch.Size([B, T, V]), V, torch.float32, B)
    assert (scores.requires_grad, scores.is_leaf, scores.device.type) == (True, False, "cpu")
    assert not scores.place.source.is_formed
    assert "grad_fn" in repr(scores)
    assert type(scores + 0) is Tensor


@pytest.mark.parametrize("loss", [nanogpt, classes_in_the_middle])
def test_under_autocast(loss: Loss) -> None:
    model, (x, y) = Model(), batch()

    def run(model: Model) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, x, y)
        value.backward()
        return [value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = run(copy.deepcopy(model))
    with ChunkedLoss().apply(Subject(), "chunked"):
        found = run(model)
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)


def test_a_half_precision_model_keeps_its_types() -> None:
    model = Model().bfloat16()
    expected = plain(nanogpt, model)
    with ChunkedLoss().apply(Subject(), "chunked"):
        found = results(nanogpt, model)
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)


def test_evaluation_without_gradients(subject: Subject) -> None:
    model, (x, y) = Model(), batch()
    with torch.no_grad():
        scores = model(x)
        loss = functional.cross_entropy(scores.view(-1, V), y.view(-1))
        assert not loss.requires_grad
        assert not scores.place.source.is_formed
        right = scores.argmax(-1) == y
    torch.testing.assert_close(loss, functional.cross_entropy(torch.as_tensor(scores + 0).view(-1, V), y.view(-1)))
    assert right.shape == y.shape
    assert subject.incidents == []
    with torch.inference_mode():
        assert not isinstance(model(x), LazyScores)


def test_detached_scores_give_no_gradients(subject: Subject) -> None:
    model, (x, y) = Model(), batch()
    loss = functional.cross_entropy(model(x).detach().view(-1, V), y.view(-1))
    assert not loss.requires_grad
    assert not (model(x).detach() + 0).requires_grad


def test_a_second_backward_and_a_gradient_of_the_gradient() -> None:
    model, (x, y) = Model(), batch()

    def penalty(model: Model) -> list[Tensor]:
        loss = nanogpt(model, x, y)
        (gradient,) = torch.autograd.grad(loss, [model.head.weight], create_graph=True)
        (loss + gradient.square().sum()).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected, again = penalty(copy.deepcopy(model)), copy.deepcopy(model)
    with ChunkedLoss().apply(Subject(), "chunked"):
        torch.testing.assert_close(penalty(model), expected)
        loss = nanogpt(again, x, y)
        loss.backward(retain_graph=True)
        loss.backward()
    twice = plain(nanogpt, Model())[1:]
    torch.testing.assert_close([p.grad for p in again.parameters()], twice)


def test_saved_tensors_may_wait_elsewhere_without_forming_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As activation offload and torch's `save_on_cpu` have it."""

    def fail(*args: Any) -> Any:
        raise AssertionError("formed")

    model = Model()
    expected = plain(nanogpt, model)
    monkeypatch.setattr("flatout.levers.lazy_scores.Source.form", fail)
    with (
        ChunkedLoss().apply(Subject(), "chunked"),
        torch.autograd.graph.saved_tensors_hooks(lambda one: one.detach().clone(), lambda one: one),
    ):
        torch.testing.assert_close(results(nanogpt, model), expected)


def by_the_scores(ask: str, model: Model, *, chunked: bool) -> list[Tensor]:
    x, y = batch()
    scores = model(x)
    shown = scores.view(-1, V)
    normal = ask == "log-softmax"
    shown = functional.log_softmax(shown, -1) if normal else shown
    loss = (functional.nll_loss if normal else functional.cross_entropy)(shown, y.view(-1), ignore_index=3)
    assert chunked == (type(scores) is LazyScores and not scores.place.source.is_formed)
    seen: list[Tensor] = []
    if ask in ("grad", "log-softmax"):
        seen += torch.autograd.grad(loss, [scores, shown], retain_graph=True)
    elif ask == "grad and weight":
        seen += torch.autograd.grad(loss * 2, [shown, model.head.weight], retain_graph=True)
    elif ask == "hook":
        scores.register_hook(seen.append)
    elif ask == "retained":
        shown.retain_grad()
    elif ask == "create_graph":
        (first,) = torch.autograd.grad(loss, scores, create_graph=True)
        loss = loss + first.square().sum()
    loss.backward(retain_graph=True)
    if ask == "retained":
        assert shown.grad is not None
        seen.append(shown.grad)
    return [*seen, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("ask", ["grad", "grad and weight", "hook", "retained", "log-softmax", "create_graph"])
def test_gradients_by_the_scores_are_those_of_torch(ask: str) -> None:
    expected = by_the_scores(ask, Model(), chunked=False)
    with ChunkedLoss().apply(Subject(), "chunked"):
        found = by_the_scores(ask, Model(), chunked=True)
    torch.testing.assert_close(found, expected)


def test_that_holds_where_somebody_stands_in_for_torchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the watch of a run does."""
    expected = by_the_scores("grad", Model(), chunked=False)
    original = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kwargs: original(*args, **kwargs))
    with ChunkedLoss().apply(Subject(), "chunked"):
        found = by_the_scores("grad", Model(), chunked=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("targets", ["mean", "divided"])
def test_a_batch_without_targets_changes_no_weight(subject: Subject, targets: str) -> None:
    model = Model()
    x, y = batch()
    y[:] = -100
    reduction = "sum" if targets == "divided" else "mean"
    loss = functional.cross_entropy(model(x).view(-1, V), y.view(-1), reduction=reduction)
    loss = loss / (y != -100).sum() if targets == "divided" else loss
    loss.backward()
    assert loss.isnan()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_scores_that_are_looked_at_after_the_step_are_those_before_it() -> None:
    model, (x, y) = Model(), batch()
    found = Subject()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found.optimizers.add(optimizer)
    expected = model(x).detach()
    with ChunkedLoss().apply(found, "chunked"):
        scores = model(x)
        functional.cross_entropy(scores.view(-1, V), y.view(-1)).backward()
        optimizer.step()
        torch.testing.assert_close(scores.detach() + 0, expected)
        with torch.no_grad():
            late = model(x)
            model.head.weight.mul_(2)
            with pytest.raises(ScriptError, match="changed in place"):
                late.sum()


def test_an_accuracy_now_and_then_is_forgiven_and_one_every_step_is_not() -> None:
    model, (x, y) = Model(), batch()
    for every, given_up in ((5, False), (1, True)):
        found = Subject()
        with ChunkedLoss().apply(found, "chunked"):
            for step in range(20):
                scores = model(x)
                functional.cross_entropy(scores.view(-1, V), y.view(-1)).backward()
                if step % every == 0:
                    assert (scores.argmax(-1) == y).shape == y.shape
            assert isinstance(model(x), LazyScores) is not given_up
        assert [(name, "'argmax'" in why) for name, why in found.incidents] == (
            [("fused linear + cross-entropy", True)] if given_up else []
        )


def test_a_layer_that_never_meets_the_loss_is_left_alone_and_told_if_it_is_the_only_one() -> None:
    found = Subject()
    block = (nn.Linear(E, V), nn.GELU(), nn.Linear(V, E))
    model = nn.Sequential(*block, *(copy.deepcopy(layer) for layer in block))
    optimizer = torch.optim.SGD(model.parameters())
    found.optimizers.add(optimizer)
    with ChunkedLoss().apply(found, "chunked"):
        for _ in range(2):
            model(torch.randn(B, E)).sum().backward()
            optimizer.step()
        assert not isinstance(model[0](torch.randn(B, E)), LazyScores)
    ((_, why),) = found.incidents
    assert why.count("'gelu'") == 1  # blocks alike are told once


def test_a_mistake_is_explained_by_torch(subject: Subject) -> None:
    model, (x, y) = Model(), batch()
    with pytest.raises(ValueError, match="batch_size"):
        functional.cross_entropy(model(x).view(-1, V), y.view(-1)[:-1])
    with pytest.raises(IndexError, match="out of bounds"):
        functional.cross_entropy(model(x).view(-1, V), y.view(-1) + V)
    with pytest.raises(RuntimeError, match="shape"):
        model(x).view(-1, V + 1)


def test_nothing_is_held_after_the_step(subject: Subject) -> None:
    model, (x, y) = Model(), batch()
    scores = model(x)
    import weakref

    source, hidden = weakref.ref(scores.place.source), weakref.ref(scores.place.features)
    loss = functional.cross_entropy(scores[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1))
    loss.backward()
    gc.disable()
    del scores, loss
    gc.enable()
    assert (source(), hidden()) == (None, None)


def test_the_widest_layer() -> None:
    assert widest_output(Model()) == V
    assert widest_output(nn.Linear(50, 2)) == 2
    assert widest_output(nn.ReLU()) == 0


def test_the_type_of_a_log_softmax_under_autocast(subject: Subject) -> None:
    model, (x, _) = Model(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        lazy = functional.log_softmax(model(x), -1)
        assert isinstance(lazy, LazyScores)
        assert lazy.dtype == lazy.exp().dtype == torch.bfloat16


def test_a_penalty_on_a_weight_that_the_embedding_shares(subject: Subject) -> None:
    """Its gradient through the embedding was silently counted twice."""

    def gradient(*, lazy: bool) -> Tensor:
        model, (x, y) = Model(bias=False), batch()
        model.head.weight = model.embed.weight
        scores = model(x)
        assert isinstance(scores, LazyScores)
        loss = functional.cross_entropy((scores if lazy else scores + 0).view(-1, V), y.view(-1))
        (first,) = torch.autograd.grad(loss, [model.head.weight], create_graph=True)
        (loss + first.square().sum()).backward()
        assert model.head.weight.grad is not None
        return torch.cat([first.detach(), model.head.weight.grad])

    torch.testing.assert_close(gradient(lazy=True), gradient(lazy=False))


def test_weights_that_change_before_the_update_matter_only_to_scores_that_are_used_again(subject: Subject) -> None:
    """A decay by hand, with the last batch's scores still at hand, ended the script in the optimizer's step."""
    model, (x, y) = Model(), batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    subject.optimizers.add(optimizer)
    scores = model(x)
    functional.cross_entropy(scores.view(-1, V), y.view(-1)).backward()
    with torch.no_grad():
        model.head.weight.mul_(0.9)
    optimizer.step()
    with pytest.raises(ScriptError, match="after its weights had been changed"):
        scores.argmax(-1)
