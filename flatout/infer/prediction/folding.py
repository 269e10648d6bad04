"""Batch norms multiplied into the convolutions before them: in evaluation both are one linear map.

Which norm follows which convolution is seen, not guessed from names: the model runs once, and a pair counts if the
norm's input is the very tensor that the convolution gave, nothing else read it, and each of the two ran once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from flatout.data.nested import leaves_in

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def fold_batch_norms(model: nn.Module, run: Callable[[], Any]) -> int:
    """Change `model` in place, as `run` (one call of it, in evaluation mode) shows it; returns how many were folded."""
    pairs = _pairs(model, run)
    for convolution, norm in pairs:
        _fold(convolution, norm)
    folded = {id(norm) for _, norm in pairs}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in folded:
                setattr(parent, name, nn.Identity())
    return len(pairs)


class _Readers(TorchFunctionMode):
    """Counts how often each convolution's output is given to an operation of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[int, tuple[Tensor, nn.Module]] = {}
        self.reads: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(True for _ in leaves_in(result, "", _is_tensor)):  # asking for a shape reads nothing
            for _, leaf in leaves_in((args, kwargs or {}), "", _is_tensor):
                if id(leaf) in self.outputs:
                    self.reads[id(leaf)] += 1
        return result


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _pairs(model: nn.Module, run: Callable[[], Any]) -> list[tuple[Any, Any]]:
    readers = _Readers()
    calls: Counter[int] = Counter()
    followed: list[tuple[nn.Module, nn.Module, int]] = []
    handles = []

    def gave(module: nn.Module, args: Any, output: Any) -> None:
        calls[id(module)] += 1
        readers.outputs[id(output)] = output, module

    def takes(module: nn.Module, args: Any) -> None:
        calls[id(module)] += 1
        known = readers.outputs.get(id(args[0])) if args else None
        if known is not None:
            followed.append((known[1], module, id(args[0])))

    for module in model.modules():
        if type(module) in _CONVOLUTIONS:
            handles.append(module.register_forward_hook(gave))
        elif isinstance(module, _BatchNorm) and module.running_mean is not None and not module.training:
            handles.append(module.register_forward_pre_hook(takes))
    norms_reads = 1  # batch_norm is one operation; whatever reads the tensor besides makes it more
    try:
        with torch.no_grad(), readers:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return [
        (convolution, norm)
        for convolution, norm, output in followed
        if calls[id(convolution)] == calls[id(norm)] == 1 and readers.reads[output] == norms_reads
    ]


@torch.no_grad()
def _fold(convolution: Any, norm: Any) -> None:
    """Computed in fp32, whatever the dtype of the weights."""
    scale = torch.rsqrt(norm.running_var.float() + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.float()
    bias = -norm.running_mean.float() if convolution.bias is None else convolution.bias.float() - norm.running_mean
    bias = bias * scale if norm.bias is None else bias * scale + norm.bias.float()
    weight = convolution.weight.float() * scale.view(-1, *(1,) * (convolution.weight.dim() - 1))
    layout = torch.channels_last if convolution.weight.dim() == 4 and _is_channels_last(convolution.weight) else None
    weight = weight.to(convolution.weight.dtype)
    convolution.weight.data = weight if layout is None else weight.contiguous(memory_format=layout)
    convolution.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=False)


def _is_channels_last(weight: Tensor) -> bool:
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
