"""`zero_grad(set_to_none=False)` frees gradients instead of filling them with zeros: backward need not add to zeros.

To the script nothing changes. A gradient that was freed is a tensor of zeros again as soon as anything reads `.grad`:
an optimizer (with momentum or decay it moves weights that got no gradient, where it skips those without one), a clip,
a hook, the script itself. And a gradient is freed only while nothing else holds it or its memory; one that backward
left in memory that it shares gets a copy of its own, as adding to zeros would have made. What remains is the sign of
zeros: 0 + -0 is 0, and a gradient that is written anew may hold -0.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from flatout.errors import MachineError
from flatout.levers.lever import Lever, Saving, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.replaced import replaced

PASSES_OVER_GRADIENTS = 4
"""To fill them with zeros is one, to add to them three: two are read, one is written."""
OPERATIONS_A_GRADIENT = 2

HOLDING: tuple[Callable[[Any], Any], ...] = (
    lambda gradient: gradient,
    lambda gradient: gradient[:1],
    lambda gradient: gradient.detach(),
    lambda gradient: gradient.data,
    lambda gradient: gradient.untyped_storage(),
)
"""Ways to hold a gradient or its memory, which torch has to tell from nobody holding it."""


class GradientsToNone(Lever):
    """For a script that asks for zeros. Whether a lever or the script reads a gradient makes no difference."""

    name = "gradients set to None"
    plan_field = "zero_grad"

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        if observed.gradients_zeroed is None:
            return Saving(expected=0.0, least=0.0, most=0.0, why="no call of zero_grad was seen")
        seconds = _zeroing_seconds(machine, observed)
        if seconds is None or not observed.step_seconds:
            return Saving(expected=0.01, least=-0.05, most=0.3)
        share = min(0.4, seconds / observed.step_seconds)
        why = f"zeros and additions to them take {share:.1%} of a step"
        return Saving(expected=0.5 * share, least=-share, most=2 * share, why=why)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.gradients_zeroed is False:
            return refuse("zero_grad frees the gradients already")
        if not observed.optimizers:
            return refuse("the script has no optimizer object")
        if observed.compiled_in_script:
            return refuse("the script compiles, and compiled code reads gradients past Python")
        if observed.differentiates_twice:
            return refuse(observed.differentiates_twice)
        if observed.captures_graphs:
            return refuse(f"{observed.captures_graphs}: a captured graph writes to the gradients' memory")
        return offer("none", reason="the script's zero_grad fills gradients with zeros, and backward adds to them")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        import torch

        freed = _Freed(lambda why: _tell(subject, self.name, why))
        with (
            freed.read_as_zeros(),
            replaced(torch.optim.Optimizer, "zero_grad", freed.of_optimizer),
            replaced(torch.nn.Module, "zero_grad", freed.of_module),
            replaced(torch.autograd, "backward", freed.after_backward),
        ):
            yield

    def label(self, value: Any) -> str:
        return self.name


def _tell(subject: Subject, name: str, why: str) -> None:
    if (name, why) not in subject.incidents:
        subject.incidents.append((name, why))


def _zeroing_seconds(machine: Machine, observed: Observed) -> float | None:
    """What it takes to fill the gradients and to add to them, at the rates of this machine; None: not measured."""
    rates = observed.ceilings(machine)
    if rates is None or rates.memory_copy_bytes_per_second is None or rates.launches_per_second is None:
        return None
    gradient_bytes = 4 * sum(one.parameters for one in observed.modules)
    tensors = sum(one.parameters for one in observed.optimizers)
    memory = PASSES_OVER_GRADIENTS * gradient_bytes / rates.memory_copy_bytes_per_second.value
    return memory + OPERATIONS_A_GRADIENT * tensors / rates.launches_per_second.value


class _Freed:
    """Gradients that the script takes to be zeros and that are not there now."""

    def __init__(self, tell: Any) -> None:
        import torch

        self._tell = tell
        self._waiting: dict[int, weakref.ref[Any]] = {}
        """By identity, the parameters whose gradient was freed and not asked for since."""
        self._slot: Any = torch.Tensor.grad
        """torch's own attribute."""
        self._alone = self._owners_of_sole()

    # what the script calls

    def of_optimizer(self, original: Any) -> Any:
        def zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
            if set_to_none or not _is_plain():
                original(optimizer, set_to_none)
            else:
                self._free(parameter for group in optimizer.param_groups for parameter in group["params"])

        return zero_grad

    def of_module(self, original: Any) -> Any:
        def zero_grad(module: Any, set_to_none: bool = True) -> None:
            if set_to_none or not _is_plain() or getattr(module, "_is_replica", False):
                original(module, set_to_none)
            else:
                self._free(module.parameters())

        return zero_grad

    def after_backward(self, original: Any) -> Any:
        """Of every pass, in whichever thread: what one leaves in shared memory, the next may overwrite."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self._after_backward()

        return backward

    @contextlib.contextmanager
    def read_as_zeros(self) -> Iterator[None]:
        """`.grad` of a parameter whose gradient was freed gives zeros, which are its gradient from then on."""
        import torch

        kind, slot, waiting = torch.nn.Parameter, self._slot, self._waiting
        get, put, drop = slot.__get__, slot.__set__, slot.__delete__

        def read(parameter: Any) -> Any:
            if id(parameter) in waiting:
                self._settle(parameter)
            return get(parameter)

        def write(parameter: Any, gradient: Any) -> None:
            put(parameter, gradient)
            waiting.pop(id(parameter), None)

        def delete(parameter: Any) -> None:
            drop(parameter)
            waiting.pop(id(parameter), None)

        ours = property(read, write, delete)
        kind.grad = ours  # type: ignore[assignment]
        try:
            yield
        finally:
            for parameter in self._those_waiting():
                self._settle(parameter)
            if vars(kind).get("grad") is ours:
                del kind.grad

    # what becomes of gradients

    def _free(self, parameters: Any) -> None:
        freed = kept = 0
        for parameter in parameters:
            gradient = self._slot.__get__(parameter)
            if gradient is None:
                continue
            fits = _fits(parameter, gradient)
            gradient = None  # or it would count as held
            if fits and self._owners(parameter) in self._alone:
                self._slot.__set__(parameter, None)
                self._waiting[id(parameter)] = weakref.ref(parameter)
                freed += 1
            else:
                _fill_with_zeros(self._slot.__get__(parameter))
                kept += 1
        if kept and not freed:
            self._tell("gradients are held elsewhere too, or are no plain tensors: they are set to zero")

    def _after_backward(self) -> None:
        """What got a gradient has one of its own; what got none reads as zeros still."""
        for parameter in self._those_waiting():
            if self._slot.__get__(parameter) is None:
                continue
            if self._has_its_own(parameter):
                del self._waiting[id(parameter)]
            else:
                self._settle(parameter)

    def _has_its_own(self, parameter: Any) -> bool:
        import torch

        gradient = self._slot.__get__(parameter)
        dense = gradient.layout is torch.strided
        gradient = None  # or it would count as held
        return dense and self._owners(parameter) in self._alone

    def _settle(self, parameter: Any) -> None:
        """The gradient is what it would be, had it been filled with zeros."""
        import torch

        reference = self._waiting.pop(id(parameter), None)
        if reference is None or reference() is not parameter:
            return
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
            gradient = self._slot.__get__(parameter)
            if gradient is None:
                self._slot.__set__(parameter, _zeros(parameter))
            elif gradient.layout is not torch.strided:
                self._slot.__set__(parameter, _zeros(parameter).add_(gradient))
            elif not gradient.requires_grad:
                gradient = None  # or it would count as held
                if not self._has_its_own(parameter):
                    self._slot.__set__(parameter, self._slot.__get__(parameter).clone())

    def _those_waiting(self) -> list[Any]:
        alive = []
        for key, reference in list(self._waiting.items()):
            parameter = reference()
            if parameter is None:
                del self._waiting[key]
            else:
                alive.append(parameter)
        return alive

    # who holds a gradient

    def _owners(self, parameter: Any) -> tuple[int, int, int, int]:
        """How many hold the gradient and its memory, each in Python and in torch, the asking included."""
        import torch

        gradient = self._slot.__get__(parameter)
        memory = gradient.untyped_storage()
        in_torch = gradient._use_count(), torch._C._storage_Use_Count(memory._cdata)
        return sys.getrefcount(gradient), sys.getrefcount(memory), *in_torch

    def _owners_of_sole(self) -> set[tuple[int, int, int, int]]:
        """Those of gradients that nobody else holds: fresh from a backward pass, and once Python has seen them.

        Raises MachineError where one that is held too cannot be told from them.
        """
        import torch

        with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
            alone = set()
            for _ in range(2):
                parameter = torch.nn.Parameter(torch.zeros(2))
                accumulation: Any = torch.autograd.graph.get_gradient_edge(parameter).node
                accumulation(torch.ones(2))
                alone |= {self._owners(parameter), self._owners(parameter)}
            for hold in HOLDING:
                held = hold(self._slot.__get__(parameter))
                if self._owners(parameter) in alone:
                    remedy = "leave zero_grad out of the plan"
                    raise MachineError("torch does not tell who holds a gradient", limit=repr(alone), remedy=remedy)
                del held
        return alone


def _is_plain() -> bool:
    """Not traced by torch.compile, not recorded for a CUDA graph, not in a stream of its own: each has its memory."""
    import torch

    if torch.compiler.is_compiling():
        return False
    cuda = torch.cuda
    return not cuda.is_initialized() or (
        not cuda.is_current_stream_capturing() and cuda.current_stream() == cuda.default_stream()
    )


def _fits(parameter: Any, gradient: Any) -> bool:
    """Would backward give the same gradient anew: a plain tensor that lies as its weight does?"""
    import torch

    return (
        type(parameter) is torch.nn.Parameter
        and type(gradient) is torch.Tensor
        and parameter.is_leaf
        and (parameter.is_cpu or (parameter.is_cuda and parameter.get_device() == torch.cuda.current_device()))
        and gradient.layout is torch.strided
        and gradient.is_floating_point()
        and gradient.dtype is parameter.dtype
        and not gradient.requires_grad
        and gradient.stride() == parameter.stride()
    )


def _fill_with_zeros(gradient: Any) -> None:
    """As torch does."""
    if gradient.grad_fn is not None:
        gradient.detach_()
    else:
        gradient.requires_grad_(False)
    gradient.zero_()


def _zeros(parameter: Any) -> Any:
    """As if made when the script asked for them: on a GPU its main stream makes them, and the current one waits."""
    import torch

    if not parameter.is_cuda:
        return torch.zeros_like(parameter, requires_grad=False)
    main, current = torch.cuda.default_stream(parameter.device), torch.cuda.current_stream(parameter.device)
    with torch.cuda.stream(main):
        made = torch.zeros_like(parameter, requires_grad=False)
    current.wait_stream(main)
    return made
