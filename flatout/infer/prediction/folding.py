"""Folds batch norms into the convolutions before them: in evaluation mode the two are one linear map.

Which norm follows which convolution is observed, not guessed from names: the model runs once, and a pair counts if the
norm's input is exactly the tensor that the convolution returned, nothing else read or returned it, and each of the two
ran once. Convolutions with computed weights (spectral or weight norm, parametrisations) and layers with hooks are left
as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flatout.infer.output_tensors import output_tensors
from flatout.infer.prediction.linear import unhooked
from flatout.memory.onednn_workspaces import is_channels_last
from flatout.torch_private.modules import BatchNorm, Convolution

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LEAVE_TORCH = {Tensor.numpy, Tensor.tolist, Tensor.item, Tensor.__array__, Tensor.__bool__, Tensor.__float__}


def fold_batch_norms(model: nn.Module, run: Callable[[], object]) -> tuple[int, str, object]:
    """Change `model` in place, as `run` (one call of it, in evaluation mode) shows it.

    Returns how many were folded, why none or fewer than all were ('' if all), and the output before.
    """
    pairs, output = _pairs(model, run)
    for convolution, norm in pairs:
        _fold(convolution, norm)
    folded = {id(norm) for _, norm in pairs}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and id(child) in folded:
                setattr(parent, name, nn.Identity())
    left = sum(isinstance(one, BatchNorm) for one in model.modules())
    return len(pairs), f"{left} left, which do not follow a plain convolution alone" if left else "", output


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
        if type(module) not in (*_CONVOLUTIONS, *_NORMS) or not unhooked(module):
            continue
        if isinstance(module, Convolution) and module._parameters.get("weight") is not None:
            handles.append(module.register_forward_hook(gave))
        elif isinstance(module, BatchNorm) and _keeps_statistics(module):
            handles.append(module.register_forward_pre_hook(takes))
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
        and readers.reads[output] == 1  # by batch_norm, which is one operation; any other reader adds to it
        and readers.outputs[output][0].untyped_storage().data_ptr() not in returned
    ]
    return pairs, result


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
