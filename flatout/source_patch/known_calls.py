"""What is known of torch's functions: which losses autocast computes in fp32, and which methods only rearrange."""

from __future__ import annotations

import re

LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss")
"""Of torch.nn.functional: autocast casts their inputs to fp32, on CPUs and on CUDA."""

LOSS_FUNCTIONS = frozenset(f"torch.nn.functional.{name}" for name in LOSSES)
LOSS_CLASSES = frozenset(
    f"torch.nn.{name}" for name in ("CrossEntropyLoss", "NLLLoss", "MSELoss", "L1Loss", "SmoothL1Loss")
)
"""Their modules."""

REARRANGING = frozenset(
    ("view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "contiguous", "detach", "t")
)
"""Methods of tensors that change no value."""

FACTORIES = frozenset(
    f"torch.{name}"
    for name in (
        *("arange", "as_tensor", "empty", "empty_like", "from_numpy", "full", "ones", "ones_like", "rand", "rand_like"),
        *("randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like"),
    )
)
"""Functions that make tensors, of which autocast changes nothing."""

TENSOR_METHODS = REARRANGING | frozenset(
    (
        *("argmax", "argmin", "backward", "item", "max", "min", "mean", "sum", "size", "pow", "exp", "log", "abs"),
        *("softmax", "log_softmax", "sigmoid", "tanh", "numel", "cpu", "float", "norm", "square", "topk", "sqrt"),
    )
)
"""What only a tensor has, among the things that a model returns."""
TENSOR_ATTRIBUTES = frozenset(("shape", "data", "grad", "dtype", "ndim"))

PLACES = frozenset(("to", "cuda", "cpu", "float", "train", "eval", "requires_grad_"))
"""Methods of modules that return the module itself."""

FUSABLE = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers with torch's fused implementation."""
FOREACH = (*FUSABLE, "Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")

_OPTIMIZER = re.compile(r"torch\.optim(?:\.\w+)?\.([A-Z]\w*)")


def optimizer_kind(names: set[str]) -> str:
    """'Adam' of 'torch.optim.Adam' or 'torch.optim.adam.Adam'; '' for what is no optimizer."""
    kinds = {match[1] for name in names if (match := _OPTIMIZER.fullmatch(name)) is not None}
    return kinds.pop() if len(kinds) == 1 else ""


def is_loss(names: set[str]) -> bool:
    """Is it a loss function or class that autocast computes in fp32?"""
    return bool(names & (LOSS_FUNCTIONS | LOSS_CLASSES))
