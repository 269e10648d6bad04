"""Fused linear + cross-entropy: the scores of a last layer, [tokens, vocabulary], are never fully in memory.

Calls of a wide linear layer return `LazyScores`. If these go into cross-entropy, loss and gradients are computed chunk
by chunk from the layer's input (`kernels/linear_cross_entropy`); if the script does anything else with them, they are
computed then. A layer whose scores are usually computed (a wide hidden layer, scores divided by a temperature, an
accuracy in every step) is left alone from then on.

This is how a plan, `fit_to_memory`, our models, a user's model and an unmodified script all get this loss. In code
compiled by torch.compile it does nothing; call `flatout.linear_cross_entropy` there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject, is_checkpointing
from flatout.machine.description import Machine
from flatout.replaced import replaced_in_torch
from flatout.torch_private.late import dispatch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from flatout.levers.lazy_scores import Source

LEAST_CLASSES = 1024
LEAST_SCORES_BYTES = 4 << 20
"""Of one call: smaller scores are no material part of a step's memory."""
EXPECTED_BY_KERNEL, MOST_SAVED = 0.05, 0.4
"""Shares of a step. The first on a CPU where one kernel makes the loss without its scores; the second where most
targets are ignored, as those of a masked language model: their scores are not computed on a CPU."""
LOOKS_FORGIVEN = 4
"""A layer's scores may be used for something else once in so many losses, plus a first time."""


class ChunkedLoss(Lever):
    """Never hold the scores of a wide last layer, `[tokens, vocabulary]`, as a whole.

    Where the scores go into cross-entropy and nowhere else, loss and gradients are computed chunk by chunk from the
    layer's input. If the script does something else with them, they are computed then. It saves memory, and on a CPU
    with products of bf16, or where many targets are ignored, time; so a search keeps it where it is faster, where
    memory is short, or where the plan asks for it.
    """

    name = "fused linear + cross-entropy"
    plan_field = "loss"
    names_value = False
    acts_on_forward = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        by_kernel = observed.device == "cpu" and machine.cpu.multiplies_bf16
        ignored = observed.ignored_share or 0.0
        saved = (EXPECTED_BY_KERNEL if by_kernel else 0.0) + ignored * observed.product_share(machine)
        why = f"{ignored:.0%} of a step's products are for scores of ignored targets" if ignored else ""
        return Saving(expected=saved, least=-0.3, most=max(MOST_SAVED, 1.2 * saved), why=why)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.is_compiled:
            return refuse("torch.compile is already used, and compiled code materialises the scores")
        if not observed.optimizers:
            return refuse("there is no optimizer object, so Flatout cannot see when the weights change")
        widest = max((module.widest_output for module in observed.modules), default=0)
        if widest < LEAST_CLASSES:
            return refuse(f"the widest layer has {widest} outputs: scores are a small part of a step's memory")
        return offer("chunked", reason=f"a layer has {widest:,} outputs, and its scores are in memory several times")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        layers = Layers(subject, subject.reporter(self.name))
        with layers.in_place(), subject.before_steps(layers.weights_change):
            yield


def widest_output(model: Module) -> int:
    """The most outputs that one of a model's weight matrices may produce; 0 without any."""
    import torch

    widest = 0
    for module in model.modules():
        table = isinstance(module, torch.nn.Linear | torch.nn.Embedding)  # an embedding may share the last layer's
        for weight in module.parameters(recurse=False):
            if weight.ndim == 2:
                widest = max(widest, weight.shape[0] if table else max(weight.shape))
    return widest


class WideLayer:
    """How one weight's scores were used so far."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weakref.ref(weight)
        self.losses = self.looks = 0
        self.given_up = False


class Layers:
    """The wide linear layers that are called while the lever is on."""

    def __init__(self, subject: Subject, report: Callable[[str], None]) -> None:
        self._subject, self._report = subject, report
        self._known: dict[int, WideLayer] = {}
        self._uses: list[str] = []
        self._judged = False
        self.busy = False
        """True while scores are computed: linear layers called then are not deferred."""
        self._open: weakref.WeakSet[Source] = weakref.WeakSet()
        """Calls whose scores may still be used."""

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace torch's linear layer and its product with a weight matrix."""
        import torch
        from torch.nn import functional

        from flatout.levers import lazy_scores  # before torch's functions are replaced: it keeps the originals

        self._is_plain = lazy_scores.is_plain

        with replaced_in_torch(
            (functional, "linear", self._linear),
            (torch, "matmul", self._product),
            *((torch.Tensor, name, self._product) for name in ("__matmul__", "matmul")),
        ):
            yield

    def weights_change(self) -> None:
        """An optimizer is about to step."""
        for source in list(self._open):
            source.keep()
        if not self._judged:
            self._judged = True
            if not any(layer.losses for layer in self._known.values()):
                uses = "; ".join(dict.fromkeys(self._uses)) or "none is wide enough, or its input is too short"
                self._report(f"no cross-entropy takes the scores of a linear layer as they are: {uses}")

    # what a script calls

    def _linear(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        import torch

        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if torch.compiler.is_compiling() or (bias is not None and bias.ndim != 1):
                return original(input, weight, bias)
            if not self._worth(input, weight, weight):
                return original(input, weight, bias)
            return self._lazy(input, weight, bias, weight)

        return linear

    def _product(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        import torch

        def matmul(input: Tensor, other: Tensor, **kwargs: object) -> Tensor:
            if torch.compiler.is_compiling() or kwargs or getattr(other, "ndim", 0) != 2:
                return original(input, other, **kwargs)
            base = other if other.is_leaf else other._base
            if base is None or not self._worth(input, base, None) or not self._worth(input, other.t(), base):
                return original(input, other)
            return self._lazy(input, other.t(), None, base)

        return matmul

    def _lazy(self, input: Tensor, weight: Tensor, bias: Tensor | None, key: Tensor) -> Tensor:
        from flatout.levers.lazy_scores import lazy_linear

        scores = lazy_linear(input, weight, bias, self._layer(key), self)
        self._open.add(scores.place.source)
        return scores

    def _layer(self, key: Tensor) -> WideLayer:
        """Layers of another TrainStep's model are given up from the start: each step handles its own."""
        layer = self._known.get(id(key))
        if layer is None or layer.weight() is not key:
            layer = self._known[id(key)] = WideLayer(key)
            layer.given_up = not (self._subject.any_model or self._is_ours(key))
        return layer

    def _is_ours(self, key: Tensor) -> bool:
        return any(key is one for module in self._subject.modules for one in module.parameters())

    def _worth(self, input: Tensor, weight: Tensor | None, key: Tensor | None) -> bool:
        """May this call be deferred? Runs for every linear layer: the cheapest checks come first."""
        import torch

        if (
            self.busy
            or weight is None
            or weight.ndim != 2
            or not self._is_plain(input)
            or not weight.is_floating_point()
        ):
            return False
        if not self._is_plain(weight):
            return False
        if key is None:
            return weight.is_leaf and weight.requires_grad and max(weight.shape) >= LEAST_CLASSES
        classes, features = weight.shape
        if classes < LEAST_CLASSES or not key.is_leaf or input.ndim < 1 or input.shape[-1] != features:
            return False
        if input.numel() // max(1, features) * classes * input.element_size() < LEAST_SCORES_BYTES:
            return False
        if self._layer(key).given_up:
            return False
        kind = input.device.type
        fitting = input.dtype == weight.dtype or torch.is_autocast_enabled(kind)
        return (
            fitting
            and input.dtype != torch.float64
            and input.device == weight.device
            and not (_transformed() or _recomputed())
        )

    # how the scores were used

    def fused(self, source: Source) -> None:
        """Cross-entropy used them without forming them."""
        source.key.losses += source.in_training

    def formed(self, source: Source, by: str) -> None:
        """They had to be computed, for the operation `by`."""
        self._open.discard(source)
        layer = source.key
        layer.looks += source.in_training
        if not source.in_training or (layer.losses and layer.looks <= 1 + layer.losses // LOOKS_FORGIVEN):
            return
        layer.given_up = True
        use = f"the scores of a layer of {source.classes:,} outputs are used by {by!r} and so computed"
        if layer.losses:
            self._report(use)
        else:  # a wide layer inside the model is worth reporting only if there is no other
            self._uses.append(use)


def _recomputed() -> bool:
    """In a checkpointed part, or in its recomputation: both must save the same tensors."""
    return is_checkpointing() or dispatch().current_graph_task() != -1


def _transformed() -> bool:
    """Under torch.func, forward gradients, torch.jit.trace or in inference mode: tensors are wrapped or recorded there,
    and gradients are not autograd's."""
    import torch

    return torch.is_inference_mode_enabled() or dispatch().beside_autograd()
