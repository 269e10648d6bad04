"""Adam's two moments in one byte per element, by torchao: a quarter of what they take in fp32.

The moments of every large parameter are kept as codes with a scale for each block of 256 elements; they are read and
written as fp32 within one compiled kernel per parameter, so the update itself is Adam's. Parameters of fewer than 4096
elements, or not of whole blocks, are still stepped by the user's own optimizer. The numbers differ from Adam's, as a
code has 256 values. In one point torchao's codes are changed: a second moment is never zero.

The state stays in the user's optimizer, so schedules, checkpoints and other code that reads it continue to work. Its
`state_dict` holds plain moments: what is saved can be loaded with or without codes. `close` converts the state back to
the parameters' dtype.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

from flatout.errors import MachineError, UsageError
from flatout.parameters import Saved, parameters_of
from flatout.torch_private.compiler import compile_errors, not_counted

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer
    from torch.optim.optimizer import Args, Kwargs
    from torchao.optim.subclass_8bit import OptimState8bit

LEAST_ELEMENTS = 4096
BLOCK = 256
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Name -> signed."""
_CHUNK = 1 << 16
_CHUNKS = 64
"""An existing state is converted in chunks of at least so many elements, or in so many parts if it is large: converting
takes 13 times the size of a chunk."""
REMEDY = "install it with: pip install torchao"


def low_bit_obstacle(optimizer: Optimizer) -> str | None:
    """Why this optimizer's state cannot be held in 8 bits; None if it can."""
    import torch

    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        namesake = kind.__name__ in ("Adam", "AdamW")
        name = f"{kind.__module__}.{kind.__name__}" if namesake else kind.__name__
        return f"the optimizer is {name}, not torch.optim.Adam or AdamW"
    for group in optimizer.param_groups:
        if any(group.get(name) for name in ("amsgrad", "maximize", "differentiable")):
            return "the optimizer has amsgrad, maximize or differentiable set"
        if any(isinstance(one, torch.Tensor) for one in group["betas"]):
            return "the optimizer's betas are tensors"
    if not any(_is_large(one) for one in parameters_of(optimizer)):
        return f"no parameter has at least {LEAST_ELEMENTS} elements in whole blocks of {BLOCK}"
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    return None


def _is_large(parameter: Tensor) -> bool:
    from flatout.torch_private.dispatch import is_traceable_wrapper_subclass

    plain = parameter.dtype.is_floating_point and not is_traceable_wrapper_subclass(parameter)
    many = parameter.numel() >= LEAST_ELEMENTS and parameter.numel() % BLOCK == 0
    return bool(plain and many and parameter.requires_grad)


class LowBitOptimizer:
    """Steps the user's optimizer: has its `step`, and its own `param_groups`.

    Raises UsageError for an optimizer whose state cannot be held in 8 bits.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        import torch

        obstacle = low_bit_obstacle(optimizer)
        if obstacle is not None:
            raise UsageError(
                f"optimizer_state is '8bit', and {obstacle}",
                limit="it is for the moments of torch.optim.Adam and AdamW, and needs torchao",
                remedy=REMEDY if "torchao" in obstacle else "drop optimizer_state, or use another optimizer",
            )
        self._optimizer = optimizer
        large = [one for one in parameters_of(optimizer) if _is_large(one)]
        self._large = {id(one) for one in large}
        decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(optimizer.defaults.get("decoupled_weight_decay"))
        self._codes = _optimizer_class(decoupled)(large)
        self._hook = optimizer.register_state_dict_post_hook(lambda optimizer, state: without_codes(state))
        self._adopt()

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, object]]) -> None:
        self._optimizer.param_groups = groups

    def step(self) -> None:
        """Step all parameters that have a gradient, with the groups' current hyperparameters."""
        hook = self._optimizer.register_step_pre_hook(self.step_large)  # the last: others see the step before it
        try:
            self._optimizer.step()  # even if there are no small ones: schedulers and hooks depend on it
        finally:
            hook.remove()

    def step_large(self, optimizer: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """A hook before the optimizer's step: steps those whose moments are in codes, and leaves it the others."""
        self._adopt()
        self._codes.state = self._optimizer.state
        self._codes.param_groups = [self._large_group(group) for group in self._optimizer.param_groups]
        self._codes.step()
        return (self._with_small_alone(), *args[1:]), kwargs  # the first is the optimizer itself

    def close(self) -> None:
        """Give the user's optimizer its state back in its own format."""
        import torch

        self._hook.remove()
        flags = {id(one): group for group in self._optimizer.param_groups for one in group["params"]}
        with torch.no_grad():
            for parameter in self._held():
                state = self._optimizer.state[parameter]
                for name, value in state.items():
                    if is_in_codes(value):
                        state[name] = value.dequantize().to(parameter.dtype)
                group = flags.get(id(parameter), {})
                if group.get("fused") or group.get("capturable"):  # torch keeps those counters on the device
                    state["step"] = state["step"].to(parameter.device)

    def _with_small_alone(self) -> Optimizer:
        """A shallow copy of the optimizer over the others: a step that raises leaves the optimizer itself unchanged."""
        other: Optimizer = object.__new__(type(self._optimizer))
        vars(other).update(
            vars(self._optimizer),
            param_groups=[
                {**group, "params": [one for one in group["params"] if id(one) not in self._large]}
                for group in self._optimizer.param_groups
            ],
        )
        return other

    def _large_group(self, group: Saved) -> dict[str, object]:  # one of param_groups
        import torch

        rate = group["lr"] if isinstance(group["lr"], torch.Tensor) else torch.tensor(float(group["lr"]))
        same = {name: group[name] for name in ("betas", "eps", "weight_decay", "amsgrad")}
        return {**same, "lr": rate, "params": [one for one in group["params"] if id(one) in self._large]}

    def _held(self) -> Iterator[Tensor]:
        """Large parameters that have a state."""
        for parameter, state in self._optimizer.state.items():
            if id(parameter) in self._large and "exp_avg" in state:
                yield parameter

    def _adopt(self) -> None:
        """Convert moments of large parameters that the optimizer itself, or a checkpoint, has set."""
        import torch

        with torch.no_grad():
            for parameter in self._held():
                state = self._optimizer.state[parameter]
                for name in _MOMENTS.keys() & state.keys():
                    if not is_in_codes(state[name]):
                        state[name] = write_codes(state[name], self._codes._new_buffer(parameter, _MOMENTS[name]))


def is_in_codes(value: object) -> TypeGuard[OptimState8bit]:
    return hasattr(value, "codes") and hasattr(value, "dequantize")


def copied_codes(optimizer: Optimizer) -> dict[int, OptimState8bit]:
    """A memo for `copy.deepcopy` of the optimizer: copies of moments in codes, which deepcopy cannot copy."""
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]  # others keep a tensor
    held = (one for state in states for one in state.values() if is_in_codes(one))
    return {
        id(one): type(one)(one.codes.clone(), one.scale.clone(), one.qmap.clone(), one.signed, dtype=one.dtype)
        for one in held
    }


def without_codes(state: Saved) -> dict[str, object]:  # a state_dict, as torch types it
    """An optimizer's state_dict with moments in codes replaced by their values.

    Converted again, they give the same codes, so a run may resume with or without 8-bit moments.
    """
    plain = {
        number: {key: one.dequantize() if is_in_codes(one) else one for key, one in entry.items()}
        if isinstance(entry, Mapping)
        else entry
        for number, entry in state["state"].items()
    }
    return {**state, "state": plain}


def write_codes(plain: Tensor, made: OptimState8bit) -> OptimState8bit:
    """Write `plain` into a state of codes of the same shape, chunk by chunk; returns that state."""
    codes, values = made.codes.view(-1), plain.reshape(-1)
    chunk = max(_CHUNK, values.numel() // _CHUNKS // BLOCK * BLOCK)
    for start in range(0, values.numel(), chunk):
        end = min(start + chunk, values.numel())
        part = type(made)(
            codes[start:end], made.scale[start // BLOCK : end // BLOCK], made.qmap, made.signed, dtype=made.dtype
        )
        part.copy_(values[start:end].float())
        if made.signed:
            _find_scales_again(part, values[start:end].float().view(-1, BLOCK))
    _keep_above_zero(made)
    return made


def _find_scales_again(part: OptimState8bit, values: Tensor) -> None:
    """Values that came from codes get the same codes again, so that a resumed run is bit-identical.

    values: [blocks, BLOCK]. A block's scale is its largest magnitude, which has a code if it is positive; a negative
    one comes back 0.7 % smaller. Then the scale was that value divided by its code's, within one ulp.
    """
    import torch
    from torchao.optim.quant_utils import quantize_8bit_with_qmap

    guess = values.amin(1) / part.qmap[0]
    up, down = (torch.nextafter(guess, torch.full_like(guess, end)) for end in (torch.inf, -torch.inf))
    for scale in (guess, up, down):
        codes = quantize_8bit_with_qmap(values / scale.clamp(min=1e-12)[:, None], part.qmap)
        same = (part.qmap[codes.int()] * scale[:, None] == values).all(1) & (scale > 0)
        part.codes.view(-1, BLOCK)[same] = codes[same].to(torch.uint8)
        part.scale[same] = scale[same]


def import_torchao() -> ModuleType:
    """torchao.optim. On import it logs which of its kernels for other machines do not load; none is needed here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import torchao.optim
    finally:
        logging.disable(before)
    found: ModuleType = torchao.optim
    return found


@functools.cache
def _optimizer_class(decoupled: bool) -> Callable[[Sequence[Tensor]], Any]:  # torchao is untyped
    """torchao's optimizer, whose step is one compiled kernel per parameter, with memory that trackers can see."""
    import torch

    optimizers = import_torchao()
    from flatout.memory.fake_run import is_fake
    from flatout.memory.tracking import unseen

    base = optimizers.AdamW8bit if decoupled else optimizers.Adam8bit
    with unseen():  # torchao caches the values of its codes on first use: made from fake tensors they would be wrong
        for signed in (True, False):
            base._subclass_zeros(torch.empty(BLOCK), signed, BLOCK)

    def step(self: Any) -> None:  # a method of the class that is returned
        stepped = [one for one in parameters_of(self) if one.grad is not None]
        for parameter in stepped:
            if not (state := self.state[parameter]):
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = self._new_buffer(parameter, True)
                state["exp_avg_sq"] = self._new_buffer(parameter, False)
            _allocate_like_the_kernel(parameter)
        if stepped and not is_fake(stepped[0]):
            with unseen(), _kernels_compile():
                base.step(self)
            for parameter in stepped:
                _keep_above_zero(self.state[parameter]["exp_avg_sq"])

    return type("Codes", (base,), {"step": step})


def _keep_above_zero(moment: OptimState8bit) -> None:
    """A second moment below a millionth of its block's largest gets the code of zero, but its first moment does not.

    Divided by the root of almost 0, such an element would move by hundreds of learning rates in one step. One code
    higher, it moves less than it should instead.
    """
    if not moment.signed:
        moment.codes.clamp_(min=1)


def _allocate_like_the_kernel(parameter: Tensor) -> None:
    """The compiled update holds both new moments in fp32, as torch's record of its CPU allocations shows.

    Compiled code cannot be tracked operation by operation, and does not run on fake tensors: memory trackers see
    these two tensors instead, which are never written to and so take no memory.
    """
    import torch

    both = [torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device) for _ in range(2)]
    del both


@contextlib.contextmanager
def _kernels_compile() -> Iterator[None]:
    """torchao's step calls torch.compile: raises MachineError where that fails on this machine."""
    with not_counted(), warnings.catch_warnings():  # from counts Flatout sees whether a script compiles
        warnings.simplefilter("ignore")  # from torch, about what compiling imports and caches
        try:
            yield
        except compile_errors() as error:
            words = " ".join(str(error).split("\n")[:2])
            raise MachineError(
                f"optimizer_state is '8bit', but its kernel does not compile: {words}",
                limit="torchao's step is compiled: it needs a C++ compiler on the CPU, Triton on CUDA",
                remedy="install one, or drop optimizer_state",
            ) from error
