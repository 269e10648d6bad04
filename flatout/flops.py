"""Count the floating point operations of one training step, forward and backward, as torch dispatches them.

torch's own counter covers products, convolutions and attention on GPUs; attention on the CPU, recurrent layers, which
oneDNN and cuDNN run as one operation, and products with sparse matrices are added here. A multiply-add counts as 2.
Counting slows its step down: trials count, and a run counts a single step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from flatout.torch_private.attributes import packet_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload, OpOverloadPacket

    Packet = OpOverloadPacket[..., object]


def count_step(formulas: Mapping[Packet, Callable[..., int]] | None = None) -> Callable[[], float]:
    """Start counting; call the result where the step ends: it returns the number of operations.

    `formulas`: for further operations, by packet: a function of their arguments, with shapes in place of tensors.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    own = {packet: _shaped(formula) for packet, formula in (formulas or {}).items()}
    counter = FlopCounterMode(display=False, custom_mapping={**_more_formulas(torch.ops.aten), **own})
    counter.flop_registry |= _sparse_formulas(torch.ops.aten)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    counter.__enter__()

    def finish() -> float:
        counter.__exit__(None, None, None)
        return float(counter.get_total_flops())

    return finish


class _NoModules:
    """Torch's counter follows the modules of a step by hooks of autograd, which fail where the step takes the gradient
    of a module's input with `torch.autograd.grad`, as a gradient penalty does. Only the sum is wanted here."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        """Nothing is followed."""

    def __exit__(self, *_: object) -> None:
        """Nothing was."""


class OperationCount:
    """Adds up operations that another dispatch mode sees."""

    def __init__(self) -> None:
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        self.flops = 0.0
        self._formulas = FlopCounterMode(display=False, custom_mapping=_more_formulas(torch.ops.aten)).flop_registry
        self._formulas |= _sparse_formulas(torch.ops.aten)

    def add(
        self,
        operation: OpOverload[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        out: object,
    ) -> None:
        """Arguments as a dispatch mode gets them, and the result."""
        self.flops += self.of(operation, args, kwargs, out) or 0.0

    def of(
        self,
        operation: OpOverload[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        out: object,
    ) -> float | None:
        """Of this operation alone; None where there is no formula: it has no products."""
        formula = self._formulas.get(packet_of(operation))
        return None if formula is None else float(formula(*args, **kwargs, out_val=out))


def _more_formulas(aten: object) -> dict[Packet, Callable[..., int]]:
    formulas: dict[str, Callable[..., int]] = {
        "mkldnn_rnn_layer": lambda x, *weights, **_: _layer(x, weights[:2]),
        "mkldnn_rnn_layer_backward": lambda x, *weights, **_: 2 * _layer(x, weights[:2]),
        "_cudnn_rnn": lambda x, weights, *_, **__: _layer(x, [w for w in weights if len(w) == 2]),
        "_cudnn_rnn_backward": lambda x, weights, *_, **__: 2 * _layer(x, [w for w in weights if len(w) == 2]),
        "_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_: _attention(q, k, v),
        # Five products instead of two: the scores are computed again, as torch counts it for GPUs.
        "_scaled_dot_product_flash_attention_for_cpu_backward": lambda _, q, k, v, *__: _attention(q, k, v) * 5 // 2,
        "addbmm": lambda _, a, b, **__: 2 * prod(a) * b[-1],
        "_addmm_activation": lambda _, a, b, **__: 2 * prod(a) * b[-1],
        "_int_mm": lambda a, b: 2 * prod(a) * b[-1],
        "_thnn_fused_lstm_cell": lambda *_, **__: 0,  # elementwise: its products are dispatched by themselves
        "convolution_backward": _convolution_backward,  # torch's own ignores groups
        "_trilinear": _trilinear,
    }
    return {
        getattr(aten, name): _shaped(formula)
        for name, formula in formulas.items()
        if getattr(aten, name, None) is not None
    }


def _shaped(formula: Callable[..., int]) -> Callable[..., int]:
    def count(*args: object, out_shape: object = None, **kwargs: object) -> int:
        return formula(*args)

    return count


def _sparse_formulas(aten: object) -> dict[Packet, Callable[..., int]]:
    """Of products that take sparse matrices too, of which only the numbers that are stored are multiplied, and of
    attention that takes nested tensors. These get tensors: a shape does not say how many."""
    formulas: dict[str, Callable[..., int]] = {
        "mm": lambda a, b: _product(a, b),
        "addmm": lambda _, a, b: _product(a, b),
        "_sparse_addmm": lambda _, a, b: _product(a, b),
        "sparse_sampled_addmm": lambda found, a, b: 2 * _stored(found) * int(a.shape[-1]),
        "_native_multi_head_attention": lambda x, _, __, qkv, b, out, *others: _attention_layer(x, (qkv, out)),
        "_transformer_encoder_layer_fwd": lambda x, qkv, b, out, *others: _attention_layer(
            x, (qkv, out, others[5], others[7])
        ),
    }
    return {getattr(aten, name): _of_tensors(formula) for name, formula in formulas.items() if hasattr(aten, name)}


def _of_tensors(formula: Callable[..., int]) -> Callable[..., int]:
    def count(*args: object, out_val: object = None, **kwargs: object) -> int:
        return formula(*[one for one in args if hasattr(one, "layout")])

    return count


def _product(a: Tensor, b: Tensor) -> int:
    """Of two sparse matrices 0: how many numbers meet is in their indices alone."""
    import torch

    sparse = [one.layout is not torch.strided for one in (a, b)]
    if all(sparse):
        return 0
    if sparse[0]:
        return 2 * _stored(a) * int(b.shape[1])
    return 2 * int(a.shape[0]) * (_stored(b) if sparse[1] else int(b.shape[0] * b.shape[1]))


def _attention_layer(x: Tensor, weights: Iterable[Tensor]) -> int:
    """Self-attention of x [batch, positions, width], or of a nested tensor of such, and its linear layers."""
    lengths, width = [len(one) for one in x.unbind()], int(x.unbind()[0].shape[-1])
    products = sum(lengths) * sum(one.numel() for one in weights)
    return 2 * products + 4 * width * sum(length * length for length in lengths)


def _stored(matrix: Tensor) -> int:
    """How many numbers a sparse matrix holds."""
    from flatout.torch_private.tensors import stored_parts

    return int(stored_parts(matrix)[-1].numel())


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """[batch, heads, positions, features]: the scores, and the values weighted by them."""
    batch, heads, positions, features = query
    return int(2 * batch * heads * positions * key[-2] * (features + value[-1]))


Other: TypeAlias = Any  # what an operator takes beside shapes


def _convolution_backward(grad: Sequence[int], x: Sequence[int], weight: Sequence[int], *rest: Other) -> int:
    """The gradients of the input and of the weights take as many operations as the forward pass, each."""
    *_, transposed, _, _, wanted = rest
    places = x[2:] if transposed else grad[2:]
    return int((wanted[0] + wanted[1]) * 2 * x[0] * prod(places) * prod(weight))  # its channels are those of one group


def _trilinear(*args: Other) -> int:
    """The products of a and b, then those of their sums with c: torch.bilinear and its gradients.

    Three shapes, the dimensions that each has not, and those that are summed over.
    """
    shapes, expanded, summed = args[:3], args[3:6], args[6]
    sides = []
    for shape, places in zip(shapes, expanded, strict=True):
        sizes = iter(shape)
        sides.append([1 if place in places else next(sizes) for place in range(len(shape) + len(places))])
    first = [max(sizes) for sizes in zip(*sides[:2], strict=True)]
    rest = [1 if place in summed and place in expanded[2] else size for place, size in enumerate(first)]
    return int(2 * prod(first) + 2 * prod(max(sizes) for sizes in zip(rest, sides[2], strict=True)))


def _layer(x: Sequence[int], weights: Iterable[Sequence[int]]) -> int:
    """[time, batch, features] (or [batch, time, features]) through weights of [gates * hidden, inputs] each."""
    return int(2 * prod(x[:-1]) * sum(w[0] * w[1] for w in weights))
