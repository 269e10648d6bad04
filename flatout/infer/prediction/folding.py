"""Folds batch norms into the convolutions before them: in evaluation mode the two are one linear map.

Which norm follows which convolution is observed, not guessed from names: the model runs once, and a pair counts if the
norm's input is exactly the tensor that the convolution returned, nothing else read or returned it, and each of the two
ran once. Convolutions with computed weights (spectral or weight norm, parametrisations) and layers with hooks are left
as they are. The folded model is then compared with the original: a difference undoes the folding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flatout.infer.output_tensors import output_tensors
from flatout.memory.onednn_workspaces import is_channels_last
from flatout.torch_private.modules import BatchNorm, Convolution

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LEAVE_TORCH = {Tensor.numpy, Tensor.tolist, Tensor.item, Tensor.__array__, Tensor.__bool__, Tensor.__float__}


def fold_batch_norms(model: nn.Module, run: Callable[[], object], why_not: WhyNot | None = None) -> tuple[int, str]:
    """Change `model` in place, as `run` (one call of it, in evaluation mode) shows it.

    why_not: of the outputs after and before, in what they differ ('' = they agree); without it nothing is compared.
    Returns how many were folded, and why none or fewer than all were ('' if all).
    """
    pairs, output = _pairs(model, run)
    before = [_Before(convolution) for convolution, _ in pairs]
    for convolution, norm in pairs:
        _fold(convolution, norm)
    places = _replaced(model, {id(norm) for _, norm in pairs})
    with torch.no_grad():
        reason = why_not(run(), output) if why_not is not None and pairs else ""
    if reason:
        for parent, name, child in places:
            setattr(parent, name, child)
        for known in before:
            known.put_back()
        return 0, f"folded, {reason}"
    left = sum(isinstance(one, BatchNorm) for one in model.modules())
    return len(pairs), f"{left} left, which do not follow a plain convolution alone" if left else ""


WhyNot = Callable[[object, object], str]


class _Before:
    """A convolution's parameters, to be put back."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        self._convolution, self._weight, self._bias = convolution, convolution.weight, convolution.bias

    def put_back(self) -> None:
        self._convolution.weight, self._convolution.bias = self._weight, self._bias


def _replaced(model: nn.Module, folded: set[int]) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, norm) of each norm that now is an Identity."""
    places = []
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and id(child) in folded:
                places.append((parent, name, child))
                setattr(parent, name, nn.Identity())
    return places


class _Readers(TorchFunctionMode):
    """Counts how often each convolution's output is given to an operation of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[int, tuple[Tensor, nn.Conv2d]] = {}
        self.reads: Counter[int] = Counter()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        # Asking for a shape reads nothing; leaving torch does.
        if func in _LEAVE_TORCH or any(True for _ in output_tensors(result)):
            for _, leaf in output_tensors((args, kwargs or {})):
                if id(leaf) in self.outputs:
                    self.reads[id(leaf)] += 1
        return result


def _pairs(model: nn.Module, run: Callable[[], object]) -> tuple[list[tuple[nn.Conv2d, nn.BatchNorm2d]], object]:
    """(convolution, norm) and the output of the run."""
    readers = _Readers()
    calls: Counter[int] = Counter()
    followed: list[tuple[nn.Conv2d, nn.BatchNorm2d, int]] = []
    handles = []

    def gave(module: nn.Conv2d, args: object, output: Tensor) -> None:
        calls[id(module)] += 1
        readers.outputs[id(output)] = output, module

    def takes(module: nn.BatchNorm2d, args: tuple[object, ...]) -> None:
        calls[id(module)] += 1
        known = readers.outputs.get(id(args[0])) if args else None
        if known is not None:
            followed.append((known[1], module, id(args[0])))

    for module in model.modules():
        if type(module) not in (*_CONVOLUTIONS, *_NORMS) or not _plain(module):
            continue
        if isinstance(module, Convolution) and module._parameters.get("weight") is not None:
            handles.append(module.register_forward_hook(gave))
        elif isinstance(module, BatchNorm) and _keeps_statistics(module):
            handles.append(module.register_forward_pre_hook(takes))
    norms_reads = 1  # batch_norm is one operation; any other reader adds to it
    try:
        with torch.no_grad(), readers:
            result = run()
    finally:
        for handle in handles:
            handle.remove()
    returned = {leaf.untyped_storage().data_ptr() for _, leaf in output_tensors(result)}
    pairs = [
        (convolution, norm)
        for convolution, norm, output in followed
        if calls[id(convolution)] == calls[id(norm)] == 1
        and readers.reads[output] == norms_reads
        and readers.outputs[output][0].untyped_storage().data_ptr() not in returned
    ]
    return pairs, result


def _plain(module: nn.Module) -> bool:
    """It has no hooks, and its forward is its class's."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _keeps_statistics(norm: nn.BatchNorm2d) -> bool:
    return norm.running_mean is not None and norm.running_var is not None and not norm.training


@torch.no_grad()
def _fold(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
    """Computed in fp32, whatever the dtype of the weights."""
    assert norm.running_mean is not None, "a norm without statistics is not folded"
    assert norm.running_var is not None, "it has both or neither"
    scale = torch.rsqrt(norm.running_var.float() + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.float()
    bias = -norm.running_mean.float() if convolution.bias is None else convolution.bias.float() - norm.running_mean
    bias = bias * scale if norm.bias is None else bias * scale + norm.bias.float()
    weight = convolution.weight.float() * scale.view(-1, *(1,) * (convolution.weight.dim() - 1))
    layout = torch.channels_last if convolution.weight.dim() == 4 and is_channels_last(convolution.weight) else None
    weight = weight.to(convolution.weight.dtype)
    # A new parameter: another layer may share the old one.
    made = weight if layout is None else weight.contiguous(memory_format=layout)
    convolution.weight = nn.Parameter(made, requires_grad=False)
    convolution.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=False)
