"""Adam's two moments in one byte an element each, by torchao: a quarter of what they take in fp32.

The moments of every large parameter are kept as codes with a scale for each block of 256 elements; they are read and
written as fp32 within one compiled kernel a parameter, so the update itself is Adam's. Parameters of fewer than 4096
elements, or not of whole blocks, are stepped by the user's own optimizer as ever. The numbers are not Adam's to the
last bits: a code has 256 values. One of them is not used as torchao does: a second moment is never zero.

The state stays in the user's optimizer, so schedules, checkpoints and everything else that looks there go on working;
`close` gives it back in the parameters' dtype.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from flatout.errors import MachineError, UsageError
from flatout.torch_private.compiler import compile_errors, not_counted

LEAST_ELEMENTS = 4096
BLOCK = 256
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Name -> signed."""
_CHUNK = 1 << 16
_CHUNKS = 64
"""Elements that are turned into codes at once where a state is taken over, and into how many parts a large one is cut:
a part takes 13 times its size on the way."""
REMEDY = "install it with: pip install 'flatout[low-bit]'"


def low_bit_obstacle(optimizer: Any) -> str | None:
    """Why this optimizer's state cannot be held in 8 bits; None if it can."""
    import torch

    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return f"the optimizer is {type(optimizer).__name__}, not torch.optim.Adam or AdamW"
    for group in optimizer.param_groups:
        if any(group.get(name) for name in ("amsgrad", "maximize", "differentiable")):
            return "the optimizer has amsgrad, maximize or differentiable set"
        if any(isinstance(one, torch.Tensor) for one in group["betas"]):
            return "the optimizer's betas are tensors"
    if not any(_is_large(one) for group in optimizer.param_groups for one in group["params"]):
        return f"no parameter has at least {LEAST_ELEMENTS} elements in whole blocks of {BLOCK}"
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    return None


def _is_large(parameter: Any) -> bool:
    from flatout.torch_private.dispatch import is_traceable_wrapper_subclass

    plain = parameter.dtype.is_floating_point and not is_traceable_wrapper_subclass(parameter)
    many = parameter.numel() >= LEAST_ELEMENTS and parameter.numel() % BLOCK == 0
    return bool(plain and many and parameter.requires_grad)


class LowBitOptimizer:
    """The user's optimizer for whoever steps it: `step`, and `param_groups`, which are the user's own."""

    def __init__(self, optimizer: Any) -> None:
        obstacle = low_bit_obstacle(optimizer)
        if obstacle is not None:
            raise UsageError(
                f"optimizer_state is '8bit', and {obstacle}",
                limit="it is for the moments of torch.optim.Adam and AdamW, and needs torchao",
                remedy=REMEDY if "torchao" in obstacle else "drop optimizer_state, or take another optimizer",
            )
        self._optimizer = optimizer
        large = [one for group in optimizer.param_groups for one in group["params"] if _is_large(one)]
        self._large = {id(one) for one in large}
        self._codes = _optimizer_class(_decoupled(optimizer))(large)
        self._adopt()

    @property
    def param_groups(self) -> Any:
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self._optimizer.param_groups = groups

    def step(self) -> None:
        """One step of all parameters that have a gradient, with the groups' hyperparameters of this moment."""
        self.step_large()
        self._step_small(self._optimizer.param_groups)

    def step_large(self) -> None:
        """The same of those alone whose moments are in codes."""
        self._adopt()
        self._codes.state = self._optimizer.state
        self._codes.param_groups = [self._large_group(group) for group in self._optimizer.param_groups]
        self._codes.step()

    def small_groups(self) -> list[dict[str, Any]]:
        """The groups with the other parameters alone."""
        return [
            {**group, "params": [one for one in group["params"] if id(one) not in self._large]}
            for group in self._optimizer.param_groups
        ]

    def close(self) -> None:
        """Give the user's optimizer its state back as it keeps it by itself."""
        import torch

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

    def _step_small(self, groups: Any) -> None:
        """Also where there are none: schedulers and hooks look out for the optimizer's own step."""
        alone = self.small_groups()
        self._optimizer.param_groups = alone
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups
        for group, stepped in zip(groups, alone, strict=True):
            group.update({name: value for name, value in stepped.items() if name != "params"})

    def _large_group(self, group: dict[str, Any]) -> dict[str, Any]:
        import torch

        rate = group["lr"] if isinstance(group["lr"], torch.Tensor) else torch.tensor(float(group["lr"]))
        same = {name: group[name] for name in ("betas", "eps", "weight_decay", "amsgrad")}
        return {**same, "lr": rate, "params": [one for one in group["params"] if id(one) in self._large]}

    def _held(self) -> Iterator[Any]:
        """Large parameters that have a state."""
        for parameter, state in self._optimizer.state.items():
            if id(parameter) in self._large and "exp_avg" in state:
                yield parameter

    def _adopt(self) -> None:
        """Turn into codes what the optimizer by itself, or a checkpoint, made of large parameters' moments."""
        import torch

        with torch.no_grad():
            for parameter in self._held():
                state = self._optimizer.state[parameter]
                for name in _MOMENTS.keys() & state.keys():
                    if not is_in_codes(state[name]):
                        state[name] = write_codes(state[name], self._codes._new_buffer(parameter, _MOMENTS[name]))


def is_in_codes(value: Any) -> bool:
    return hasattr(value, "codes") and hasattr(value, "dequantize")


def copied_codes(optimizer: Any) -> dict[int, Any]:
    """What `copy.deepcopy` is to be given with the optimizer: copies of moments in codes, which have no way of their
    own to be copied."""
    held = (one for state in optimizer.state.values() for one in state.values() if is_in_codes(one))
    return {
        id(one): type(one)(one.codes.clone(), one.scale.clone(), one.qmap.clone(), one.signed, dtype=one.dtype)
        for one in held
    }


def without_codes(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state_dict in which moments that are held in codes stand as the values they mean.

    Turned into codes again, these give the same codes: whoever resumes may hold them in 8 bits, or not.
    """
    plain = {
        number: {key: one.dequantize() if is_in_codes(one) else one for key, one in entry.items()}
        if isinstance(entry, Mapping)
        else entry
        for number, entry in state["state"].items()
    }
    return {**state, "state": plain}


def write_codes(plain: Any, made: Any) -> Any:
    """`plain` written into a state of codes, a stretch at a time."""
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


def _find_scales_again(part: Any, values: Any) -> None:
    """Values that once were codes get the same codes again, so that a resumed run has the same bits.

    A block's scale is its largest magnitude, which has a code if it is positive; a negative one comes back 0.7 %
    smaller. Then the scale was that value over its code's, give or take the last bit.
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


def _decoupled(optimizer: Any) -> bool:
    import torch

    return isinstance(optimizer, torch.optim.AdamW) or bool(optimizer.defaults.get("decoupled_weight_decay"))


def import_torchao() -> Any:
    """torchao.optim."""
    with _torchao_keeps_quiet():
        import torchao.optim
    return torchao.optim


@functools.cache
def _optimizer_class(decoupled: bool) -> Any:
    """torchao's optimizer, whose step is a compiled kernel a parameter, with its memory told to who follows it."""
    import torch

    optimizers = import_torchao()
    from flatout.memory.fake_run import is_fake
    from flatout.memory.tracking import unseen

    base: Any = optimizers.AdamW8bit if decoupled else optimizers.Adam8bit
    with unseen():  # torchao keeps the values of its codes from their first use on: on fake tensors they would be wrong
        for signed in (True, False):
            base._subclass_zeros(torch.empty(BLOCK), signed, BLOCK)

    class Codes(base):
        def step(self, closure: Any = None) -> None:
            stepped = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
            for parameter in stepped:
                self._make_state(parameter)
                _as_long_as_a_kernel_holds_them(parameter)
            if stepped and not is_fake(stepped[0]):
                with unseen(), _kernels_compile():
                    super().step()
                for parameter in stepped:
                    _keep_above_zero(self.state[parameter]["exp_avg_sq"])

        def _make_state(self, parameter: Any) -> None:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = self._new_buffer(parameter, True)
                state["exp_avg_sq"] = self._new_buffer(parameter, False)

    return Codes


def _keep_above_zero(moment: Any) -> None:
    """A second moment under a millionth of its block's largest has the code of zero, but its first moment has not.

    Divided by the root of next to nothing, such an element moves hundreds of learning rates in one step. One code up,
    it moves less than its due instead.
    """
    if not moment.signed:
        moment.codes.clamp_(min=1)


def _as_long_as_a_kernel_holds_them(parameter: Any) -> None:
    """The compiled update holds both new moments in fp32, as torch's record of its CPU allocations shows.

    Compiled code cannot be followed operation by operation, and does not run on fake tensors: whoever follows sees
    these two instead, which are never written to and so take nothing.
    """
    import torch

    both = [torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device) for _ in range(2)]
    del both


@contextlib.contextmanager
def _kernels_compile() -> Iterator[None]:
    """torchao's step calls torch.compile; say so where this machine cannot."""
    with not_counted(), warnings.catch_warnings():  # counts tell whether a script compiles
        warnings.simplefilter("ignore")  # torch's own, of what compiling imports and caches
        try:
            yield
        except compile_errors() as error:
            words = " ".join(str(error).split("\n")[:2])
            raise MachineError(
                f"optimizer_state is '8bit', and its kernel does not compile: {words}",
                limit="torchao's step is compiled: it needs a C++ compiler on the CPU, Triton on CUDA",
                remedy="install one, or drop optimizer_state",
            ) from error


@contextlib.contextmanager
def _torchao_keeps_quiet() -> Iterator[None]:
    """As it is imported, torchao logs which of its kernels for other machines do not load; none is needed here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
