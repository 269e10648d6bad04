"""Private operators, and what tensors and storages tell of themselves. Importing this imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.torch_private.lookup import attribute, private

# storages

storage_identity: Callable[[torch.UntypedStorage], int] = attribute("torch.UntypedStorage", "_cdata")
"""The address of torch's own object, shared by all tensors on it; `data_ptr` is 0 for every fake or empty one."""

storage_users: Callable[[int], int] = private("torch._C._storage_Use_Count")
"""How many hold the storage with this identity, in torch and Python; nothing public counts them."""

tensor_users: Callable[[Tensor], int] = private("torch.Tensor._use_count")
"""How many hold a tensor in torch itself, beside what `sys.getrefcount` counts."""

# tensors

is_view: Callable[[Tensor], bool] = private("torch.Tensor._is_view")
"""Is it a view to autograd? Nothing public tells."""

sparse_indices: Callable[[Tensor], Tensor] = private("torch.Tensor._indices")
sparse_values: Callable[[Tensor], Tensor] = private("torch.Tensor._values")
"""Of a sparse tensor as it is; the public `indices` and `values` refuse one that is not coalesced."""

grad_slot: Any = private("torch._C.TensorBase.grad")  # Any: a descriptor in C, for which there is no type
"""What a `__torch_function__` gets as its function when `.grad` is read: `grad_slot.__get__`."""

wrapper_without_memory: Callable[..., Tensor] = private("torch.Tensor._make_wrapper_subclass")
"""A tensor of a class of ours with a shape and no memory; torch's documentation of subclasses names only this."""

# operators

foreach_norm: Callable[[Sequence[Tensor]], Sequence[Tensor]] = private("torch._foreach_norm")
foreach_mul_: Callable[[Sequence[Tensor], float], None] = private("torch._foreach_mul_")
"""All of a list in one call; a public call for each takes a launch for each."""

int_mm: Callable[[Tensor, Tensor], Tensor] = private("torch._int_mm")
"""int8 x int8 -> int32, which no public product does."""

read_as_number: Callable[..., object] = private("torch.ops.aten._local_scalar_dense.default")
"""What `Tensor.item` is to the dispatcher."""

unsafe_view: Callable[..., Tensor] = private("torch.ops.aten._unsafe_view.default")
"""A view that is none to autograd, so what a Function returns may be changed in place."""

efficient_attention: Callable[..., Sequence[Tensor]] = private("torch.ops.aten._scaled_dot_product_efficient_attention")
"""The kernel that CUDA takes for attention; the public function picks the one of the device that a tensor names."""

onednn_takes_bf16: Callable[[], bool] = private("torch.ops.mkldnn._is_mkldnn_bf16_supported")
"""Nothing public tells."""

onednn_packed: Callable[..., Tensor] = private("torch.ops.mkldnn._reorder_linear_weight")
onednn_linear: Callable[..., Tensor] = private("torch.ops.mkldnn._linear_pointwise")
"""Weights in oneDNN's own layout, and the product with them; the public `torch.utils.mkldnn` makes inputs and outputs
tensors of a type of their own. Missing where torch was built without oneDNN."""

# CUDA

clear_cublas_workspaces: Callable[[], None] = private("torch._C._cuda_clearCublasWorkspaces")
"""Workspaces stay after the product that they were made for, and count as held memory; nothing public frees them.
Missing where torch was built without CUDA."""
