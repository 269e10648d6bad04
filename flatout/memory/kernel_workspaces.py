"""What kernels on the CPU hold besides their results: copies, buffers and workspaces, operation by operation.

A fake run sees what operations return. A kernel may allocate memory and free it before it returns, and that may be
the peak of a step: batch_norm's backward pass takes another tensor of its input's size. The rules below say how much
that is for each operation where it matters, given its arguments: from torch's source where a rule says so, else fitted
to measurements (torch's profiler, many shapes, fp32 and bf16, torch 2.13). Operations without a rule were
measured to hold nothing worth counting: pointwise ones of one dtype, layer_norm, embedding, cat, pooling, index_put,
cumsum, sort along one of several dimensions, dropout by bernoulli.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flatout.memory.onednn_workspaces import (
    convolution,
    convolution_backward,
    is_channels_last,
    lstm,
    lstm_backward,
    made_contiguous,
    product,
)
from flatout.memory.workspace import Operation, Workspace
from flatout.torch_private.attributes import name_in_schema
from flatout.torch_private.dispatch import tree_leaves

Rule = Callable[..., Workspace | None]
"""(results, *arguments as the operation gets them) -> what its kernel holds besides its results."""
_REDUCED = (torch.bfloat16, torch.float16)


def cpu_workspace(
    operation: Operation, args: Sequence[object], kwargs: Mapping[str, object], out: object
) -> Workspace | None:
    """What `operation` holds besides its results; None: nothing."""
    rule = _RULES.get(name_in_schema(operation))
    if rule is not None:
        return rule(out, *args)
    if torch.Tag.pointwise in operation.tags:
        return _mixed_dtypes(args, kwargs, out)
    return None


def _mixed_dtypes(args: Sequence[object], kwargs: Mapping[str, object], out: object) -> Workspace | None:
    """TensorIterator on the CPU computes in one dtype: what has another is first copied, a result of another after."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    if len({one.dtype for one in tensors}) < 2:
        return None
    floating = [one.dtype for one in tensors if one.dim() and one.dtype != torch.bool]
    if not floating:
        return None
    common = floating[0]
    for dtype in floating[1:]:
        common = torch.promote_types(common, dtype)
    copies = sum(
        one.numel() * common.itemsize for one in tensors if one.dim() and one.dtype not in (common, torch.bool)
    )
    made = out if isinstance(out, Tensor) else None
    if made is not None and any(made is one for one in tensors) and made.dtype != common:
        copies += made.numel() * common.itemsize  # in place: computed in a copy, then cast back
    return Workspace(inside_bytes=copies)


def _copies_first(out: object, first: Tensor, *others: object) -> Workspace:
    """_softmax, _log_softmax (SoftMax.cpp), layer_norm and the gradient of embedding: first.contiguous()."""
    return Workspace(inside_bytes=made_contiguous(first))


def _copies_two(out: object, first: Tensor, second: Tensor, *others: object) -> Workspace:
    """The backward passes of softmax (gradient and output) and layer_norm (gradient and input)."""
    return Workspace(inside_bytes=made_contiguous(first, second))


def _batch_norm_backward(out: object, gradient: Tensor, input: Tensor, *others: object) -> Workspace:
    """batch_norm_backward_cpu makes a second tensor of the input's size, whichever gradients are wanted."""
    return Workspace(inside_bytes=input.nbytes)


def _mean_bytes(tensor: Tensor) -> int:
    """bf16 is summed up as fp32, of which there is a copy."""
    return tensor.numel() * 4 if tensor.dtype in _REDUCED else 0


def _mean(out: object, tensor: Tensor, *others: object) -> Workspace:
    return Workspace(inside_bytes=_mean_bytes(tensor))


def _sum(out: Tensor, tensor: Tensor, dims: Sequence[int] | None = None, *others: object) -> Workspace | None:
    """A cast is a copy; so is bf16 where the summed dimensions are not adjacent in memory (SumKernel.cpp)."""
    if out.dtype != tensor.dtype:
        return Workspace(inside_bytes=tensor.numel() * out.element_size())
    if tensor.dtype not in _REDUCED or not dims:
        return None
    summed = {dim % tensor.dim() for dim in dims}
    strides = tensor.stride()
    order = sorted((dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1), key=lambda dim: -strides[dim])
    runs = sum(dim in summed and (i == 0 or order[i - 1] not in summed) for i, dim in enumerate(order))
    return Workspace(inside_bytes=tensor.numel() * 4) if runs > 1 else None


def _elementwise_loss(
    out: Tensor, input: Tensor, target: Tensor, reduction: int = 1, *others: object
) -> Workspace | None:
    """mse_loss, smooth_l1_loss: the losses of all elements are written where the mean will be, and stay there."""
    if not reduction:
        return None
    elements = torch.broadcast_shapes(input.shape, target.shape).numel()
    each = elements * out.element_size()
    reduced = elements * 4 if out.dtype in _REDUCED else 0
    return Workspace(inside_bytes=each + reduced, returned_bytes={0: each})


def _written_loss(
    out: object, input: Tensor, target: Tensor, weight: object = None, reduction: int = 1, *others: object
) -> Workspace | None:
    """binary_cross_entropy: likewise, without a second tensor."""
    if not reduction:
        return None
    return Workspace(inside_bytes=_mean_bytes(input), returned_bytes={0: input.nbytes})


def _soft_margin_loss(out: object, input: Tensor, target: Tensor, reduction: int = 1) -> Workspace | None:
    """Likewise; it takes no weight."""
    return _written_loss(out, input, target, None, reduction)


def _huber_loss(out: object, input: Tensor, target: Tensor, reduction: int = 1, *others: object) -> Workspace | None:
    if not reduction:
        return None
    return Workspace(inside_bytes=input.nbytes + _mean_bytes(input))


def _logits_loss(out: object, input: Tensor, *others: object) -> Workspace:
    """binary_cross_entropy_with_logits is made of pointwise operations."""
    return Workspace(inside_bytes=2 * input.nbytes + _mean_bytes(input))


def _accumulated(out: Tensor, *others: object) -> Workspace | None:
    """gather, scatter, scatter_add, scatter_reduce (ScatterGatherKernel.cpp): bf16 goes through a buffer in fp32."""
    return Workspace(inside_bytes=_mean_bytes(out)) if out.dtype in _REDUCED else None


def _upsample(out: Tensor, image: Tensor, *others: object) -> Workspace | None:
    """upsample_nearest2d, upsample_bilinear2d (UpSampleKernel.cpp): small results are computed in channels_last."""
    if is_channels_last(image) or out.shape[-2] + out.shape[-1] > 128:
        return None
    return Workspace(inside_bytes=image.nbytes + out.nbytes)


def _attention(out: object, query: Tensor, key: Tensor, *others: object) -> Workspace:
    """FlashAttentionKernel.cpp: scores of a block of queries and keys, and their sums, for each thread."""
    rows, columns = _attention_block(query, key)
    floats = rows * (columns + 2 + query.shape[-1])
    pairs = rows * columns * 2 if query.dtype in _REDUCED else 0
    return Workspace(inside_bytes=(floats * 4 + pairs) * torch.get_num_threads())


def _attention_backward(out: object, gradient: Tensor, query: Tensor, key: Tensor, *others: object) -> Workspace:
    """The gradient must be laid out as [batch, tokens, heads, width]; two blocks of scores for each thread."""
    rows, columns = _attention_block(query, key)
    blocks = rows * columns * (12 if query.dtype in _REDUCED else 8)
    return Workspace(inside_bytes=made_contiguous(gradient.transpose(1, 2)) + blocks * torch.get_num_threads())


def _attention_block(query: Tensor, key: Tensor) -> tuple[int, int]:
    tokens = query.shape[-2]
    rows = 256 if tokens >= 768 else 64 if tokens >= 192 else 32
    return min(rows, tokens), min(512, key.shape[-2])


def _rms_norm(out: object, tensor: Tensor, *others: object) -> Workspace:
    """Made of pointwise operations, in fp32."""
    twice = 2 * tensor.numel() * 4 if tensor.dtype in _REDUCED else 0
    return Workspace(inside_bytes=tensor.nbytes + twice)


def _of_complex(out: object, input: Tensor, *others: object) -> Workspace | None:
    """abs and angle (UnaryOps.cpp): of complex numbers a complex result comes first, and its real part is copied."""
    return Workspace(inside_bytes=input.nbytes) if input.is_complex() else None


def _another_input(out: object, input: Tensor, *others: object) -> Workspace:
    """One more tensor of the input's size: logsumexp, native_dropout."""
    return Workspace(inside_bytes=input.nbytes)


def _reduce_scatter(out: object, part: Tensor, whole: Tensor, *others: object) -> Workspace:
    """gloo sums up a copy of the whole and takes the part from it."""
    return Workspace(inside_bytes=whole.nbytes)


_RULES: dict[str, Rule] = {
    "aten::convolution": convolution,
    "aten::convolution_backward": convolution_backward,
    "aten::mkldnn_rnn_layer": lstm,
    "aten::mkldnn_rnn_layer_backward": lstm_backward,
    "aten::mm": product,
    "aten::addmm": product,
    "aten::bmm": product,
    "aten::baddbmm": product,
    "aten::_softmax": _copies_first,
    "aten::_log_softmax": _copies_first,
    "aten::_softmax_backward_data": _copies_two,
    "aten::_log_softmax_backward_data": _copies_two,
    "aten::native_layer_norm": _copies_first,
    "aten::native_layer_norm_backward": _copies_two,
    "aten::embedding_dense_backward": _copies_first,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::mean": _mean,
    "aten::sum": _sum,
    "aten::mse_loss": _elementwise_loss,
    "aten::smooth_l1_loss": _elementwise_loss,
    "aten::binary_cross_entropy": _written_loss,
    "aten::soft_margin_loss": _soft_margin_loss,
    "aten::huber_loss": _huber_loss,
    "aten::binary_cross_entropy_with_logits": _logits_loss,
    "aten::upsample_nearest2d": _upsample,
    "aten::upsample_bilinear2d": _upsample,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_fused_rms_norm": _rms_norm,
    "aten::gather": _accumulated,
    "aten::scatter": _accumulated,
    "aten::scatter_add": _accumulated,
    "aten::scatter_reduce": _accumulated,
    "aten::logsumexp": _another_input,
    "aten::abs": _of_complex,
    "aten::angle": _of_complex,
    "aten::native_dropout": _another_input,
    "c10d::_reduce_scatter_base_": _reduce_scatter,
}
