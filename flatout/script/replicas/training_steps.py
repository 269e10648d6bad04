"""The training of a script on several ranks: calls of its models, its backward passes, its gradients and updates.

a model is called to train      with the first rank's weights; its dropout draws from the rank's own stream
a backward pass                 counts as much as the share has of the batch
a gradient is read              all gradients become the mean over the ranks first
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flatout.parameters import parameters_of
from flatout.script.own_modules import own_imports
from flatout.script.patches import Patches
from flatout.script.replicas import agreement
from flatout.script.replicas.agreement import RanksDiffer, bits
from flatout.script.replicas.settings import UNTOUCHED, Refused
from flatout.script.replicas.training_data import Call, Share
from flatout.torch_private.compiler import never_compiled
from flatout.tracebacks import leave_no_frame

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from flatout.script.replicas.replica import Replica

WEIGHTS_EVERY = 50
"""Updates between comparisons of the ranks' weights; they are compared at the first one too."""


class TrainingSteps:
    """Of one rank."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._share: Share | None = None
        """Of the batch that the script trains on now."""
        self.modes: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models whose mode the script has set, or that it has trained."""
        self._same: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models that have the first rank's weights."""
        self._sent: dict[int, weakref.ref[Tensor]] = {}
        """Id -> a weight that is the first rank's: what was computed with it must not see it written to again."""
        self._inside = self._setting_mode = self._in_backward = self._averaging = self._dirty = False
        self._losses_seen = 0
        self.batch_norms = 0

    def install(self, patches: Patches) -> None:
        """Once torch has been imported."""
        import torch

        from flatout.torch_private.modules import OPTIMIZER_PRE_HOOKS

        patches.replace(torch.optim.Optimizer, "__init__", self._wrap_optimizer)
        OPTIMIZER_PRE_HOOKS[self] = self._step
        patches.replace(torch.autograd, "backward", self._wrap_backward)
        patches.replace(torch.nn.Module, "__call__", self._wrap_call)
        patches.replace(torch.nn.Module, "train", self._wrap_train)

    def _wrap_train(self, original: Call) -> Call:
        def train(module: nn.Module, mode: bool = True) -> object:
            if self._setting_mode or not self._replica.here():
                return original(module, mode)
            self._setting_mode = True
            try:
                return original(module, mode)
            finally:
                self._setting_mode = False
                self.modes.add(module)

        return train

    def _wrap_call(self, original: Call) -> Call:
        import torch

        compiling, grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

        def __call__(self_: nn.Module, *args: object, **kwargs: object) -> object:
            if compiling() or self._inside or self._in_backward or not self._replica.here():
                return original(self_, *args, **kwargs)
            return outermost(self_, args, kwargs, grad_enabled())

        def outermost(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], trains: bool) -> object:
            data = self._replica.data
            try:
                if not trains or self._replica.count == 1 or not (data.on_share or data.handed):
                    data.plain_calls += not trains
                    return original(module, *args, **kwargs)
                self._make_same(module)
                self._inside = True
                try:
                    with self._replica.streams.own():
                        return original(module, *args, **kwargs)
                finally:
                    self._inside = False
            except BaseException as error:
                leave_no_frame(error)
                raise

        never_compiled(__call__, outermost)
        return __call__

    def _make_same(self, module: nn.Module) -> None:
        """The first rank's weights, before the first call of a model that trains."""
        if module in self._same:
            return
        self._same.add(module)
        from flatout.script.replicas.gradients import from_first

        weights = [one for one in (*module.parameters(), *module.buffers()) if not self._is_sent(one)]
        if not weights:
            return
        self._sent.update((id(one), weakref.ref(one)) for one in weights)
        self._check_layers(module)
        self.modes.add(module)
        self._replica.trained.add_module(module)
        with self._replica.answering():
            shapes = hash(tuple((*one.shape, one.numel()) for one in weights))
            rows = self._replica.agreement.compare(self._replica.row(agreement.WEIGHTS, given=shapes))
            if len({row.given for row in rows}) > 1:
                raise RanksDiffer(
                    f"{type(module).__name__} has weights of other shapes on other ranks",
                    limit="all ranks train the same model",
                    remedy="seed what decides the shapes",
                )
            with self._replica.exchanging():
                from_first(weights, self._replica.agreement.group)

    def _is_sent(self, weight: Tensor) -> bool:
        known = self._sent.get(id(weight))
        return known is not None and known() is weight

    def _check_layers(self, module: nn.Module) -> None:
        from flatout.train.split import batch_coupled_layers

        norms = batch_coupled_layers(module)
        self.batch_norms += len(norms)
        if norms and not self._replica.settings.allow_local_batchnorm:
            raise self._replica.refusals.refuse(
                f"{norms[0]} of {type(module).__name__} is a batch norm",
                limit="its mean and variance would be those of each rank's share: not the training of one device",
                remedy="accept that with --allow-local-batchnorm, or use GroupNorm or LayerNorm",
            )

    def _wrap_backward(self, original: Call) -> Call:
        def backward(*args: object, **kwargs: object) -> object:
            if self._in_backward or not self._replica.here():
                return original(*args, **kwargs)
            try:
                args, kwargs = self._weighted(args, kwargs)
                self._in_backward = True
                try:
                    return original(*args, **kwargs)
                finally:
                    self._in_backward = False
                    self._replica.backwards += 1
                    self._dirty = self._replica.count > 1
            except BaseException as error:
                leave_no_frame(error)
                raise

        return backward

    def _weighted(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments of a backward pass such that it counts by this rank's share."""
        import torch

        given: Any = args[0] if args else kwargs.get("tensors")  # torch checks it
        roots: list[Tensor] = list(given) if isinstance(given, list | tuple) else [given]
        if not roots or not all(isinstance(one, torch.Tensor) for one in roots):
            return args, kwargs  # torch reports it
        if self._replica.count > 1:
            self._look_at(roots)
        weight = self._weight(roots) if self._replica.count > 1 else 1.0
        for callback in self._replica.at_loss:
            callback(roots, weight)
        self._replica.data.handed.clear()
        self._replica.data.plain_calls = 0
        if weight == 1.0:
            return args, kwargs
        seeds = args[1] if len(args) > 1 else kwargs.pop("grad_tensors", None)
        seeds = list(seeds) if isinstance(seeds, list | tuple) else [seeds] * len(roots)
        if any(seed is None and root.numel() != 1 for root, seed in zip(roots, seeds, strict=True)):
            return args, kwargs  # torch reports it
        scaled = [
            (torch.ones_like(root) if seed is None else seed) * weight for root, seed in zip(roots, seeds, strict=True)
        ]
        return (roots, scaled, *args[2:]), {name: one for name, one in kwargs.items() if name != "tensors"}

    def _weight(self, roots: list[Tensor]) -> float:
        """By how much this pass counts in the mean over the ranks."""
        data = self._replica.data
        if data.handed:
            shares = [share for _, share in data.handed]
            if len({(share.weight, share.even) for share in shares}) > 1 and not all(one.even for one in shares):
                raise self._replica.refusals.refuse(
                    f"batches of {' and '.join(str(one.whole) for one in shares)} samples are trained on together",
                    limit=f"parts of {self._replica.count} ranks differ in size, and one loss cannot count by both",
                    remedy="use batch sizes that the number of devices divides, and drop_last=True",
                )
            self._share = shares[-1]
        if self._share is None or not (data.handed or data.on_share):
            raise self._no_share()
        if self._replica.settings.loss == "sum":
            return float(self._replica.count) if self._share.samples else 0.0
        if self._replica.settings.loss == "terms":
            return self._weight_by_terms(roots)
        return self._share.weight

    def _weight_by_terms(self, roots: list[Tensor]) -> float:
        from flatout.script.replicas.losses import terms_of

        with own_imports():
            terms = terms_of(roots[0]) if len(roots) == 1 else None
        if terms is None:
            raise self._replica.refusals.refuse(
                "--loss terms, and the loss is not a single cross-entropy",
                limit="only that one says how many targets it averages over",
                remedy="use --loss mean, which counts by samples",
            )
        assert self._share is not None
        own = terms if self._share.samples else 0.0
        with self._replica.answering():
            rows = self._replica.agreement.compare(self._replica.row(agreement.LOSS, given=bits(own)))
        whole = sum(row.number for row in rows)
        return own * self._replica.count / whole if whole else 1.0

    def _no_share(self) -> Refused:
        if not self._replica.trained.optimizers:
            return self._replica.refusals.refuse(
                f"{self._replica.line()}: a backward pass, and the script has made no optimizer",
                limit="gradients are exchanged for what optimizers train",
                remedy="use one of torch.optim, or train on one device",
            )
        if why := self._replica.data.unshared:
            return self._replica.refusals.refuse(
                f"{self._replica.line()}: the script trains on a batch that was not shared: {why}",
                limit="each rank would train on all of it",
                remedy="make the iterator of the training loader after the optimizer, in training mode and with "
                "gradients enabled",
            )
        return self._replica.refusals.refuse(
            f"{self._replica.line()}: the script trains on a batch that no DataLoader handed out",
            limit="what each rank's share of it is cannot be known",
            remedy=f"draw batches from a DataLoader, or share them by rank and start it with {UNTOUCHED}",
        )

    def _look_at(self, roots: list[Tensor]) -> None:
        """Is each loss of the first passes a mean over samples, unless --loss says what it is?"""
        from flatout.script.replicas.losses import LOOKED_AT, complaint

        if self._replica.settings.loss is not None or self._losses_seen >= LOOKED_AT:
            return
        self._losses_seen += 1
        handed = self._replica.data.handed
        samples = handed[-1][1].samples if len(handed) == 1 else None
        for root in roots:
            with own_imports():
                found = complaint(root, samples)
            if found is not None:
                remedy = "--loss mean if it is one all the same (the proof shows whether it is: --prove)"
                remedy = f"say what it is: --loss {found.instead}, or {remedy}" if found.instead else f"say {remedy}"
                raise self._replica.refusals.refuse(
                    f"{self._replica.line()}: {found.what}",
                    limit="it is taken for a mean over the samples of a batch",
                    remedy=remedy,
                )

    # gradients and updates

    def _wrap_optimizer(self, original: Call) -> Call:
        def __init__(optimizer: Optimizer, *args: object, **kwargs: object) -> None:
            original(optimizer, *args, **kwargs)
            if self._replica.here():
                self._check_parameters(optimizer)
                self._replica.trained.add_optimizer(optimizer)

        return __init__

    @property
    def reads_gradients(self) -> Callable[[Tensor], Tensor | None]:
        """In place of a parameter's own `grad`."""
        from flatout.levers.grad_attribute import get_grad

        def read(parameter: Tensor) -> Tensor | None:
            if self._dirty and not self._in_backward and not self._averaging and self._replica.here():
                self._average()
            return get_grad(parameter)

        return read

    @property
    def writes_gradients(self) -> Callable[[Tensor, Tensor | None], None]:
        """In place of setting a parameter's own `grad`."""
        from flatout.levers.grad_attribute import set_grad

        def write(parameter: Tensor, value: Tensor | None) -> None:
            by_hand = value is not None and not self._in_backward and not self._averaging
            if by_hand and self._replica.data.handed and self._replica.here():
                raise self._replica.refusals.refuse(
                    f"{self._replica.line()}: the script sets gradients itself, and no backward pass has computed them",
                    limit="gradients are exchanged that loss.backward() computes",
                    remedy="use loss.backward() in place of torch.autograd.grad, or one device",
                )
            set_grad(parameter, value)

        return write

    def _check_parameters(self, optimizer: Optimizer) -> None:
        import torch

        named = all(isinstance(one, torch.nn.Parameter) for one in parameters_of(optimizer))
        if self._replica.count > 1 and not named:
            raise self._replica.refusals.refuse(
                f"{self._replica.line()}: the optimizer trains a tensor that is not a torch.nn.Parameter",
                limit="when a gradient is read is followed for parameters alone",
                remedy="make it a torch.nn.Parameter, or use one device",
            )

    def _step(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Before every optimizer's step."""
        if not self._replica.here():
            return
        if self._replica.count > 1:
            self._check_step(optimizer)
            if self._dirty:
                self._average()
        for callback in self._replica.at_update:
            callback(optimizer)

    def _check_step(self, optimizer: Optimizer) -> None:
        import torch

        if isinstance(optimizer, torch.optim.LBFGS):
            raise self._replica.refusals.refuse(
                "the optimizer is LBFGS",
                limit="it searches by the loss of its closure, which is that of a rank's share",
                remedy="use another optimizer, or one device",
            )
        if self._in_backward:
            raise self._replica.refusals.refuse(
                "an optimizer steps inside the backward pass",
                limit="gradients are exchanged when the pass is over",
                remedy="step after loss.backward(), or use one device",
            )

    def _average(self) -> None:
        from flatout.script.replicas.gradients import average, flags_digest, sparse_name, weights_digest

        self._averaging, self._dirty = True, False
        try:
            with self._replica.answering():
                parameters = self._replica.trained.parameters()
                if name := sparse_name(parameters):
                    raise RanksDiffer(
                        f"{name} has a sparse gradient",
                        limit="gradients are averaged whole",
                        remedy="use sparse=False in its embedding",
                    )
                compared = weights_digest(parameters) if self._replica.updates % WEIGHTS_EVERY == 0 else 0
                row = self._replica.row(
                    agreement.UPDATE,
                    rates=self._replica.trained.rates(),
                    weights=compared,
                    gradients=flags_digest(parameters),
                )
                rows = self._replica.agreement.compare(row)
                self._replica.updates += 1
                with self._replica.exchanging():
                    same = len({one.gradients for one in rows}) == 1
                    average(parameters, self._replica.agreement.group, same_flags=same)
                    self._share_statistics()
        finally:
            self._averaging = False

    def _share_statistics(self) -> None:
        """Running statistics of batch norms: the first rank's, of its shares."""
        from flatout.script.replicas.gradients import from_first

        if self.batch_norms:
            buffers = [one for module in self._replica.trained.modules for one in module.buffers()]
            from_first(buffers, self._replica.agreement.group)
