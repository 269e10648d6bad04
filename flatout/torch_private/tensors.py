"""Private operators, and private state of tensors and storages. Importing this imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flatout.torch_private.lookup import Private, attribute, private

# storages

storage_identity: Callable[[torch.UntypedStorage], int] = attribute("torch.UntypedStorage", "_cdata")
"""Identifies a storage, also where the public `data_ptr` is 0 or refused: empty and fake ones."""

storage_users: Callable[[int], int] = private("torch._C._storage_Use_Count")
"""The reference count of the storage with this identity; no public equivalent."""

tensor_users: Callable[[Tensor], int] = private("torch.Tensor._use_count")
"""The reference count of a tensor in C++; `sys.getrefcount` counts the references in Python only."""

# tensors

is_view: Callable[[Tensor], bool] = private("torch.Tensor._is_view")
"""True if autograd treats it as a view; no public equivalent."""

is_zero_tensor: Callable[[Tensor], bool] = private("torch.Tensor._is_zerotensor")
"""True for the zeros that forward-mode differentiation takes for missing tangents: there is no memory behind their
storage, whatever its size, and to read them under a dispatch mode ends the process. No public equivalent."""

sparse_indices: Callable[[Tensor], Tensor] = private("torch.Tensor._indices")
sparse_values: Callable[[Tensor], Tensor] = private("torch.Tensor._values")
"""The components of a sparse tensor; the public `indices` and `values` fail unless it is coalesced."""


def stored_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """What a tensor holds in memory: of a sparse one its indices, and at the end its values; of others itself."""
    if tensor.layout is torch.sparse_coo:
        return sparse_indices(tensor), sparse_values(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


grad_slot: Private = private("torch._C.TensorBase.grad")
"""A `__torch_function__` gets `grad_slot.__get__` where `.grad` is read; no public equivalent."""

wrapper_without_memory: Callable[..., Tensor] = private("torch.Tensor._make_wrapper_subclass")
"""An instance of a subclass with a shape but no memory; no public equivalent."""

# operators

foreach_norm: Callable[[Sequence[Tensor]], Sequence[Tensor]] = private("torch._foreach_norm")
foreach_mul_: Callable[[Sequence[Tensor], float], None] = private("torch._foreach_mul_")
"""One call for a whole list; the public functions launch a kernel for each tensor."""

int_mm: Callable[[Tensor, Tensor], Tensor] = private("torch._int_mm")
"""int8 x int8 -> int32; no public equivalent."""

read_as_number: Callable[..., object] = private("torch.ops.aten._local_scalar_dense.default")
"""The operation that `Tensor.item` dispatches to; no public equivalent."""

unsafe_view: Callable[..., Tensor] = private("torch.ops.aten._unsafe_view.default")
"""A reshape that autograd does not treat as a view, so the output of a Function can be modified in place."""

efficient_attention: Callable[..., Sequence[Tensor]] = private("torch.ops.aten._scaled_dot_product_efficient_attention")
"""The attention kernel for CUDA; the public function selects one by the device of its inputs."""

onednn_takes_bf16: Callable[[], bool] = private("torch.ops.mkldnn._is_mkldnn_bf16_supported")
"""True if the processor can run oneDNN in bf16; no public equivalent."""

onednn_packed: Callable[..., Tensor] = private("torch.ops.mkldnn._reorder_linear_weight")
onednn_linear: Callable[..., Tensor] = private("torch.ops.mkldnn._linear_pointwise")
"""Packs weights in oneDNN's layout, and multiplies by them; the public `torch.utils.mkldnn` also converts inputs and
outputs. Missing if torch was built without oneDNN."""

# CUDA

has_cuda_context: Callable[[int], bool] = private("torch._C._cuda_hasPrimaryContext")
"""Does this process use the GPU of this number? To ask anything else of it would start CUDA there. Missing in builds
without CUDA."""

clear_cublas_workspaces: Callable[[], None] = private("torch._C._cuda_clearCublasWorkspaces")
"""Frees cuBLAS workspaces, which otherwise stay allocated; no public equivalent. Missing in builds without CUDA."""
