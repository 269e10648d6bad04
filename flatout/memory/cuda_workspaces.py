"""What kernels on CUDA hold besides their results, operation by operation: buffers of reductions, cuBLAS's workspaces.

The counterpart of `kernel_workspaces`, which is about the CPU. cuDNN's workspaces are not known. Up to torch 2.14 each
thread's first product allocates cuBLAS's workspace for good, and backward passes have a thread of their own (seen with
torch 2.11 on an H100: 32 MiB each); since 2.15 each product allocates one and frees it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flatout.environment import cublas_workspace_config
from flatout.memory.allocator_settings import MIN_BLOCK_BYTES
from flatout.memory.cuda_reductions import reduction_buffer_bytes, threads_of_a_multiprocessor
from flatout.memory.workspace import Operation, Workspace, WorkspaceOf
from flatout.torch_private.attributes import name_in_schema

Sums = tuple[Tensor, set[int], int]
"""A tensor, the dimensions that are summed, bytes of one partial sum."""
_PARTIAL_SUM_BYTES = 4
"""fp32, for fp32 itself, bf16 and fp16."""


PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "addbmm"))
WORKSPACE_BYTES = 4096 * 2 * 1024 + 16 * 8 * 1024
WORKSPACE_HOPPER_BYTES = 4096 * 8 * 1024
"""Of cuBLAS: torch's defaults, CUBLAS_WORKSPACE_CONFIG unset."""
WORKSPACE_WITH_BIAS_BYTES = 1024 * 1024
"""Of cuBLASLt, which makes products with a bias (seen in torch 2.15, on every capability)."""
HOPPER = (9, 0)


def blas_workspace_bytes(capability: tuple[int, int] | None) -> int:
    """What torch gives to cuBLAS on a GPU of that compute capability."""
    config = cublas_workspace_config()
    pairs = re.findall(r":(\d+):(\d+)", config)
    if pairs:
        return sum(int(kibibytes) * int(count) * 1024 for kibibytes, count in pairs)
    return WORKSPACE_HOPPER_BYTES if capability is not None and capability[0] == HOPPER[0] else WORKSPACE_BYTES


def keeps_blas_workspace() -> bool:
    """Does this torch hold cuBLAS's workspaces from the first product on?"""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) < (2, 15)


def cuda_workspaces(multiprocessors: int | None, capability: tuple[int, int] | None) -> WorkspaceOf:
    """Rules for a GPU with these multiprocessors and capability; where they are unknown, only some apply."""
    product_bytes, kept = blas_workspace_bytes(capability), keeps_blas_workspace()
    threads_each = threads_of_a_multiprocessor(capability) if capability is not None else 0

    def workspace(
        operation: Operation, args: Sequence[object], kwargs: Mapping[str, object], out: object
    ) -> Workspace | None:
        name: str = name_in_schema(operation)
        if name in PRODUCTS:
            with_bias = {"cuBLASLt": WORKSPACE_WITH_BIAS_BYTES} if name == "aten::addmm" and _adds_bias(args) else {}
            if kept:
                return Workspace(kept_bytes={"cuBLAS": product_bytes, **with_bias})
            return Workspace(inside_bytes=min([product_bytes, *with_bias.values()]))
        rule = _RULES.get(name)
        found = rule(*args, **kwargs) if rule is not None and multiprocessors is not None and threads_each else None
        if found is None or multiprocessors is None:
            return None
        tensor, dimensions, element_bytes = found
        held = reduction_buffer_bytes(
            tuple(tensor.shape),
            tensor.stride(),
            dimensions,
            element_bytes=element_bytes,
            multiprocessors=multiprocessors,
            threads_each=threads_each,
        )
        return Workspace(inside_bytes=held + MIN_BLOCK_BYTES) if held else None  # with the blocks' counters

    return workspace


def _adds_bias(args: Sequence[object]) -> bool:
    """An addmm whose bias is added by the same kernel (isInputCompliesAddmmCudaLt in Blas.cpp)."""
    bias, first, second = (one for one in args if isinstance(one, Tensor))
    if bias.dim() != 1 or not bias.is_contiguous():
        return False
    return bool(min(*first.shape, *second.shape) > 1)


def _dimensions(tensor: Tensor, given: int | Sequence[int] | None) -> set[int]:
    """None and an empty list mean all."""
    listed = [given] if isinstance(given, int) else given
    return {dim % tensor.dim() for dim in listed} if listed else set(range(tensor.dim()))


def _element_bytes(tensor: Tensor) -> int:
    return max(_PARTIAL_SUM_BYTES, tensor.element_size())


def _sum(tensor: Tensor, dim: int | Sequence[int] | None = None, *others: object, **named: object) -> Sums:
    """sum, mean: the gradient of a bias, or of anything that was broadcast."""
    return tensor, _dimensions(tensor, dim), _element_bytes(tensor)


def _norm(
    tensor: Tensor, ord: object = 2, dim: int | Sequence[int] | None = None, *others: object, **named: object
) -> Sums:
    return tensor, _dimensions(tensor, dim), _element_bytes(tensor)


def _convolution_backward(gradient: Tensor, *others: Sequence[bool]) -> Sums | None:
    """The bias's gradient is a sum over all but the channels. The last argument says which gradients are wanted."""
    if not others[-1][2]:
        return None
    return gradient, {dim for dim in range(gradient.dim()) if dim != 1}, _element_bytes(gradient)


_RULES: dict[str, Callable[..., Sums | None]] = {
    "aten::sum": _sum,
    "aten::mean": _sum,
    "aten::linalg_vector_norm": _norm,
    "aten::convolution_backward": _convolution_backward,
}
