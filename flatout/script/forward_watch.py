"""Calls of outermost modules: in which mode, with gradients or not, and whether a backward pass used their graph."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flatout.data.nested import tensors_in
from flatout.parameters import own_part
from flatout.script.behaviour_seen import ForwardSeen, MadeSeen, PaddingSeen
from flatout.script.layers_alone import ConvolutionTimer, RecurrentLayers
from flatout.script.patches import Patches, noting
from flatout.script.places import Places
from flatout.torch_private.compiler import never_compiled
from flatout.torch_private.late import dispatch
from flatout.tracebacks import leave_no_frame

if TYPE_CHECKING:
    from torch import Tensor, nn

MOST_SHAPES = 64
MOST_OUTPUTS = 8
MOST_EMBEDDINGS, MOST_BATCHES = 16, 64
LEAST_TOKENS = 4
"""Shorter rows are no sequences."""
AVERAGED_STATISTICS = "/torch/optim/swa_utils.py"
CHECKPOINTING = "/torch/utils/checkpoint.py"
Call = Callable[..., object]


@dataclass
class _Calls:
    module: str
    identity: int
    place: tuple[str, int]
    training: bool
    grad: bool
    calls: int = 0
    used: int = 0
    unused: int = 0
    longest: int = 0
    seconds: float = 0.0
    weights: bool = True
    recalibrates: bool = False
    dropout: tuple[str, int] | None = None
    repeated: int = 0
    input: tuple[weakref.ref[Tensor], int | None] | None = None
    """The first one of the latest call, and its version."""
    shapes: Counter[str] = field(default_factory=Counter)
    """Of its inputs, where it builds a graph."""


class _Use:
    """Is held by the graph of one call alone: when the graph goes, it is known whether a backward pass came by."""

    __slots__ = ("__weakref__", "calls", "fired")

    def __init__(self, calls: _Calls) -> None:
        self.calls, self.fired = calls, False

    def fire(self, gradient: object) -> None:
        if not self.fired:
            self.fired = True
            self.calls.used += 1

    def __del__(self) -> None:
        if not self.fired:
            self.calls.unused += 1


@dataclass
class _Made:
    module: weakref.ref[nn.Module]
    kind: str
    place: tuple[str, int]
    weights: bool = False
    """Had it parameters when it was called?"""


@dataclass
class _MadeAt:
    kind: str
    made: int = 0
    steps: set[int] = field(default_factory=set)


class ForwardWatch:
    """Between `start` and `stop`, in the thread in which it was made. `guard` runs a function of ours such that none of
    its errors reach the script."""

    def __init__(self, places: Places, guard: Callable[[Callable[[], None]], None]) -> None:
        self._places, self._guard = places, guard
        self._patches = Patches()
        self._calls: dict[tuple[int, tuple[str, int], bool, bool], _Calls] = {}
        self._run: Counter[tuple[int, tuple[str, int], bool, bool]] = Counter()
        self._layers: dict[int, tuple[str, ...]] = {}
        self._made: list[_Made] = []
        self._new: dict[int, _Made] = {}
        """The same by the id of the module."""
        self._made_at: dict[tuple[str, int], _MadeAt] = {}
        self._padding: dict[int, list[tuple[int, int, int, bool]]] = {}
        self._depth = 0
        self._evaluated = False
        """Is the outermost module that runs in evaluation mode?"""
        self._dropout: tuple[str, int] | None = None
        """Where the function dropout was called in this run of it."""
        self._on, self._thread = False, threading.get_ident()
        self.in_backward = False
        self.convolutions, self.recurrent = ConvolutionTimer(), RecurrentLayers()
        self.recomputed_seconds = 0.0
        self.steps = 0
        self.autocast = ""
        """The dtype of autocast in forwards with gradients; '' where it is off."""
        self.evaluating = False
        """The last outermost call was made without gradients, and no pass or step has followed it."""
        self.training_began: float | None = None
        """The time at which an outermost call with gradients began, the first one after this was set to None."""

    def start(self) -> None:
        from torch import nn

        self._on = True
        self._patches.replace(nn.Module, "__call__", self._wrap_call)
        self._patches.replace(nn.Module, "__init__", self._wrap_init)
        self._patches.replace(nn.functional, "dropout", noting(self._note_dropout))

    def stop(self) -> None:
        self._on = False
        self._patches.undo()

    def _listens(self) -> bool:
        return self._on and (threading.get_ident() == self._thread or self.in_autograds_thread())

    def in_autograds_thread(self) -> bool:
        """Does this thread run the pass of the script's own? On a GPU it recomputes there what was checkpointed."""
        return self.in_backward and dispatch().current_graph_task() != -1

    def interrupted(self) -> None:
        """A backward pass or an optimizer step: calls before it and after it are not in a row."""
        self._run.clear()
        self.evaluating = False

    # what the script calls

    def _wrap_call(self, original: Call) -> Call:
        import torch
        from torch import nn

        from flatout.torch_private.dispatch import transform_level

        watch, compiling = self, torch.compiler.is_compiling
        followed = (nn.Embedding, nn.Conv2d, nn.LSTM)

        # Layers are seen here and not by hooks of theirs, which a copy of the model, or a file that it is saved to,
        # would hold with all that they lead to.
        def __call__(self: nn.Module, *args: object, **kwargs: object) -> object:
            if compiling() or not watch._listens():
                return original(self, *args, **kwargs)
            if watch._depth:
                if isinstance(self, followed) or id(self) in watch._new:
                    watch._inner(self, args)
                return original(self, *args, **kwargs)
            if transform_level() is not None:
                return original(self, *args, **kwargs)
            try:
                return watch._outermost(original, self, args, kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise

        never_compiled(__call__, self._outermost, self._inner)
        return __call__

    def _inner(self, module: nn.Module, args: tuple[object, ...]) -> None:
        from flatout.torch_private.dispatch import transform_level

        if not self.in_backward and transform_level() is None:
            self._guard(lambda: self._look_at(module, args))

    def _outermost(
        self, original: Call, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        from torch import is_grad_enabled

        place = self._places.here()
        if not self.in_backward:
            self._guard(lambda: self._before(module, args, kwargs))
            self.evaluating = not is_grad_enabled()
            self._evaluated, self._dropout = not module.training, None
        began = time.perf_counter()
        self._depth += 1
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._depth -= 1
            self._evaluated = False
            seconds = time.perf_counter() - began
            # Recomputation stops by an exception as soon as it has what it needs.
            if self.in_backward and self._places.passes_through(CHECKPOINTING):
                self.recomputed_seconds += seconds
        if not self.in_backward:
            self._guard(lambda: self._after(module, args, kwargs, result, place, seconds))
        return result

    def _wrap_init(self, original: Call) -> Call:
        watch = self

        def __init__(self: nn.Module, *args: object, **kwargs: object) -> None:
            original(self, *args, **kwargs)
            if watch._depth and not watch.in_backward and watch._listens() and len(watch._made) < 256:
                made = _Made(weakref.ref(self), type(self).__name__, watch._places.here())
                watch._made.append(made)
                watch._new[id(self)] = made

        return __init__

    # what is noted

    def _note_dropout(self, input: object = None, p: float = 0.5, *args: object, **kwargs: object) -> None:
        """Layers say whether they train, and so does a script that wants dropout in evaluation."""
        if self._evaluated and p > 0 and not args and "training" not in kwargs and self._listens():
            self._dropout = self._places.here()

    def _before(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        import torch

        if torch.is_grad_enabled() and self.training_began is None:
            self.training_began = time.perf_counter()
        if torch.is_grad_enabled() and not self.autocast:
            first = next(module.parameters(), None)
            kind = first.device.type if first is not None else "cpu"
            if torch.is_autocast_enabled(kind):
                self.autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        self._look_at(module, args)

    def _look_at(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """A module is called, by the script or by another module."""
        from torch import nn

        made = self._new.get(id(module))
        if made is not None and made.module() is module:
            made.weights = any(True for _ in module.parameters())
        if isinstance(module, nn.Embedding) and args:
            self._add_padding(module, args[0])
        elif isinstance(module, nn.Conv2d) and self.steps <= 1:
            self.convolutions.note(module, args)
        elif isinstance(module, nn.LSTM) and self.steps <= 1:
            self.recurrent.note(module)

    def _add_padding(self, module: nn.Module, tokens: object) -> None:
        from torch import Tensor, is_grad_enabled

        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[1] < LEAST_TOKENS:
            return
        if not is_grad_enabled() or (id(module) not in self._padding and len(self._padding) >= MOST_EMBEDDINGS):
            return
        batches = self._padding.setdefault(id(module), [])
        if len(batches) < MOST_BATCHES:
            batches.append(padding_of(own_part(tokens.detach()), getattr(module, "padding_idx", None)))

    def _after(
        self,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        result: object,
        place: tuple[str, int],
        seconds: float,
    ) -> None:
        import torch

        outputs = [one for _, one in tensors_in(result) if isinstance(one, torch.Tensor)][:MOST_OUTPUTS]
        with_graph = [one for one in outputs if one.requires_grad and one.grad_fn is not None]
        grad = torch.is_grad_enabled() and bool(with_graph)
        key = (id(module), place, module.training, grad)
        calls = self._calls.get(key)
        if calls is None:
            calls = self._calls[key] = _Calls(type(module).__name__, id(module), place, module.training, grad)
            self._layers.setdefault(id(module), mode_layers(module))
            calls.weights = any(True for _ in module.parameters())
            calls.recalibrates = self._places.passes_through(AVERAGED_STATISTICS)
        calls.calls += 1
        calls.seconds += seconds
        calls.dropout = calls.dropout or self._dropout
        self._run[key] += 1
        calls.longest = max(calls.longest, self._run[key])
        if grad:
            use = _Use(calls)
            for tensor in with_graph:
                tensor.register_hook(use.fire)
        self._note_input(calls, args, kwargs, in_a_row=self._run[key] > 1)
        self._note_made()

    def _note_input(
        self, calls: _Calls, args: tuple[object, ...], kwargs: dict[str, object], *, in_a_row: bool
    ) -> None:
        from torch import Tensor

        first = next((one for _, one in tensors_in((args, kwargs)) if isinstance(one, Tensor)), None)
        before, calls.input = calls.input, None
        if first is None:
            return
        calls.input = weakref.ref(first), None if first.is_inference() else first._version
        calls.repeated += in_a_row and before is not None and before[0]() is first and before[1] == calls.input[1]
        if calls.grad and first.ndim and len(calls.shapes) < MOST_SHAPES:
            calls.shapes[str(list(first.shape))] += 1

    def _note_made(self) -> None:
        made, self._made = self._made, []
        self._new.clear()
        for one in made:
            module = one.module()  # None: it was used and dropped
            if one.weights or (module is not None and any(True for _ in module.parameters())):
                at = self._made_at.setdefault(one.place, _MadeAt(one.kind))
                at.made += 1
                at.steps.add(self.steps)

    # what was found

    def forwards(
        self, updated: Callable[[int], bool], learns_through_another: Callable[[int], bool]
    ) -> tuple[ForwardSeen, ...]:
        """Both are asked with the id of a module. updated: has an optimizer that holds its parameters stepped?
        learns_through_another: does it learn only through another model?"""
        models = list(dict.fromkeys(one.identity for one in self._calls.values()))
        return tuple(
            ForwardSeen(
                module=one.module,
                line=self._places.line(one.place),
                calls=one.calls,
                training=one.training,
                grad=one.grad,
                used=one.used,
                unused=one.unused,
                longest_run=one.longest,
                repeated=one.repeated,
                mode_layers=self._layers.get(one.identity, ()),
                updated=updated(one.identity),
                seconds=one.seconds,
                weights=one.weights,
                recalibrates=one.recalibrates,
                model=models.index(one.identity),
                learns_through_another=learns_through_another(one.identity),
                dropout_line=self._places.line(one.dropout) if one.dropout is not None else None,
            )
            for one in self._calls.values()
        )

    def made(self) -> tuple[MadeSeen, ...]:
        return tuple(
            MadeSeen(kind=one.kind, line=self._places.line(place), made=one.made, steps=len(one.steps))
            for place, one in self._made_at.items()
        )

    @property
    def shapes(self) -> tuple[str, ...]:
        """Of the inputs of that model, at that line, whose inputs had the most: those of others say nothing of it."""
        each = [one.shapes for one in self._calls.values() if one.weights]
        most = max(each, key=len, default=Counter[str]())
        return tuple(shape for shape, _ in most.most_common())

    @property
    def padding(self) -> PaddingSeen | None:
        """Of the embedding with the most positions: the rest of the model computes with as many."""
        each = [_padding_seen(batches) for batches in self._padding.values()]
        most = max(each, key=lambda one: (one.positions, one.share), default=None)
        return most if most is not None and most.share else None


def mode_layers(module: nn.Module) -> tuple[str, ...]:
    """Kinds of layers that compute something else in training than in evaluation."""
    from torch import nn

    from flatout.torch_private.modules import BatchNorm

    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    found: dict[str, None] = {}
    for one in module.modules():
        if (isinstance(one, dropouts) and one.p > 0) or isinstance(one, BatchNorm | nn.RReLU):
            found[type(one).__name__] = None
        elif isinstance(one, nn.RNNBase | nn.MultiheadAttention) and one.dropout > 0:
            found[f"{type(one).__name__} with dropout"] = None
    return tuple(found)


def padding_of(tokens: Tensor, padding_idx: int | None) -> tuple[int, int, int, bool]:
    """(padded positions, positions, padding value, does the layer name it?) of a batch of token ids.

    Without a named value, it is the value that ends (or begins) rows in runs of different lengths.
    """
    positions = tokens.numel()
    if padding_idx is not None:
        return int((tokens == padding_idx).sum()), positions, padding_idx, True
    for flipped in (tokens, tokens.flip(1)):
        value = int(flipped[:, -1].mode().values)
        runs = (flipped.flip(1) == value).cumprod(1).sum(1)
        padded = runs >= 2
        if int(padded.sum()) >= max(2, tokens.shape[0] // 4) and len(set(runs.tolist())) >= 3:
            return int(runs[padded].sum()), positions, value, False
    return 0, positions, 0, False


def _padding_seen(batches: Sequence[tuple[int, int, int, bool]]) -> PaddingSeen:
    """Of the batches of one embedding, as `padding_of` describes them."""
    positions = sum(one[1] for one in batches)
    values = {one[2] for one in batches if one[0]}
    padded = sum(one[0] for one in batches) if len(values) == 1 else 0  # another value in each batch is no padding
    return PaddingSeen(
        share=padded / max(1, positions),
        value=next(iter(values), 0),
        positions=positions,
        from_padding_idx=all(one[3] for one in batches),
    )
