"""Which class an operator belongs to, by its name; classes share a ceiling.

>>> operator_class("aten::addmm"), operator_class("aten::_foreach_add_"), operator_class("aten::gelu_backward")
('matmul', 'pointwise', 'pointwise')
"""

from __future__ import annotations

import functools
from typing import Final

from flatout.operator_bytes import moves_no_data
from flatout.profiling.profile import OperatorClass

PRODUCTS: Final[frozenset[OperatorClass]] = frozenset({"matmul", "convolution", "attention", "recurrent"})
"""Classes whose work is matrix products."""

_EXACT: dict[str, OperatorClass] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "matmul"), "matmul"),
    **dict.fromkeys(("_int_mm", "_scaled_mm", "_addmm_activation", "linear_backward", "_grouped_mm"), "matmul"),
    **dict.fromkeys(("_sparse_addmm", "_sparse_mm", "sparse_sampled_addmm"), "matmul"),
    **dict.fromkeys(("embedding", "index_select", "gather", "scatter_add_", "index_put_", "index"), "embedding"),
    **dict.fromkeys(("gather_backward", "_embedding_bag", "scatter_", "_index_put_impl_", "index_add_"), "embedding"),
    **dict.fromkeys(("copy_", "_to_copy", "clone", "cat", "stack", "contiguous", "_pin_memory"), "copy"),
    **dict.fromkeys(("_local_scalar_dense", "constant_pad_nd", "roll", "flip", "repeat"), "copy"),
    **dict.fromkeys(("sum", "mean", "var", "std", "var_mean", "max", "min", "amax", "amin", "argmax"), "reduction"),
    **dict.fromkeys(("argmin", "topk", "sort", "cumsum", "norm", "linalg_vector_norm", "all", "any"), "reduction"),
    **dict.fromkeys(("dot", "vdot", "mv", "addmv", "addr"), "reduction"),  # each number is used once, as in a sum
    **dict.fromkeys(("_foreach_norm", "nll_loss_forward", "nll_loss2d_forward", "logsumexp", "prod"), "reduction"),
}  # fmt: skip
_FLATOUTS: dict[str, OperatorClass] = {
    **dict.fromkeys(("linear", "linear_gradients", "linear_loss"), "matmul"),
    **dict.fromkeys(("gelu_tanh", "gelu_tanh_gradient"), "pointwise"),
}
"""Of Flatout's own operators; the names of the others say what they are."""
_WITHIN: tuple[tuple[str, OperatorClass], ...] = (
    ("attention", "attention"),
    ("flash_attn", "attention"),
    ("convolution", "convolution"),
    ("conv1d", "convolution"),
    ("conv2d", "convolution"),
    ("conv3d", "convolution"),
    ("rnn", "recurrent"),
    ("lstm", "recurrent"),
    ("gru", "recurrent"),
    ("embedding", "embedding"),
    ("_norm", "normalisation"),
    ("softmax", "softmax"),
    ("_fused_adam", "optimizer"),
    ("_fused_sgd", "optimizer"),
    ("_fused_adagrad", "optimizer"),
    ("qlinear", "matmul"),
    ("pool", "reduction"),
)
"""The first that the name contains; the order decides where several do."""
_OF_TORCH = ("aten", "mkldnn", "mkldnn_prepacked", "onednn", "quantized", "torchvision")
_COMMUNICATION = ("c10d::", "nccl:", "gloo:", "mpi:", "ucc:", "_c10d_functional::", "c10d_functional::")


@functools.lru_cache(maxsize=4096)
def operator_class(name: str) -> OperatorClass:
    """'other' for what is no operator, does no work of its own, such as a view, or is an extension's whose name does
    not say what it does."""
    if name.startswith(_COMMUNICATION):
        return "communication"
    space, _, plain = name.partition("::")
    if "::" in plain:  # of autograd's engine
        return "other"
    if space in _OF_TORCH and plain in _EXACT:
        return _EXACT[plain]
    if space == "flatout" and plain in _FLATOUTS:
        return _FLATOUTS[plain]
    for part, found in _WITHIN:
        if part in plain:
            return found
    return "pointwise" if space == "aten" and not moves_no_data(name) else "other"
