"""Linear layers with weights in the layout that the processor multiplies fastest.

torch reorders a weight for oneDNN at every call and, in fp32, may not use oneDNN at all (on some processors its other
library is half as fast). A layer that is only run can reorder once:

    PackedLinear       fp32, bf16 or fp16 weights, in oneDNN's own layout (CPU)
    RoundedLinear      8- or 4-bit weights, turned back into the inputs' dtype for each product: half the memory or less
                       (on the CPU only: elsewhere that would move more memory than it saves)
    Int8Linear         8-bit weights and 8-bit inputs, one scale a token: products of whole numbers

>>> import torch
>>> layer = torch.nn.Linear(64, 64).eval()
>>> with torch.inference_mode():
...     near = Int8Linear(layer)(torch.ones(2, 64)) - layer(torch.ones(2, 64))
>>> bool(near.abs().max() < 0.05)
True
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeGuard

import torch
from torch import Tensor, nn

from flatout.environment import onednn_is_limited
from flatout.kernels.token_scales import ZERO_POINT, scale_back, to_levels
from flatout.machine.detect import detect
from flatout.precision.quantize import INT4_GROUP, quantize_groups_int4, quantize_rows_int8
from flatout.torch_private.tensors import int_mm, onednn_linear, onednn_packed, onednn_takes_bf16

LEAST_WEIGHTS = 1 << 12
"""Smaller layers are left alone: they cost nothing."""
_FUSED_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
"""They read their linear layers' weights instead of calling them."""


class PackedLinear(nn.Linear):
    """fp32, bf16 or fp16 [..., in] -> the weight's dtype [..., out]; on the CPU only, without gradients."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = onednn_packed(layer.weight.detach(), None)  # opaque: no buffer
        self.dtype = layer.weight.dtype
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        out: Tensor = onednn_linear(x, self.weight, self.bias, "none", [], "")
        return out


class RoundedLinear(nn.Linear):
    """fp32, bf16 or fp16 [..., in] -> the same dtype [..., out], by weights of 8 or 4 bits."""

    values: Tensor
    scales: Tensor
    bias: Tensor | None  # type: ignore[assignment]

    def __init__(self, layer: nn.Linear, *, bits: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bits = layer.in_features, layer.out_features, bits
        self.dtype = layer.weight.dtype
        if bits == 8:
            values, scales = quantize_rows_int8(layer.weight)
        else:
            values, scales = quantize_groups_int4(layer.weight)
            values = values[:, 0::2] | (values[:, 1::2] << 4)  # two a byte
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        if self.bits == 8 and x.dtype == torch.float16:  # sums of whole numbers would pass its largest, 65,504
            weight = (self.values * self.scales[:, None]).to(x.dtype)
            return nn.functional.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))
        if self.bits == 8:  # whole numbers up to 127 are exact in the other dtypes: scaled after the product
            y, scales = nn.functional.linear(x, self.values.to(x.dtype)), self.scales.to(x.dtype)
            return y * scales if self.bias is None else torch.addcmul(self.bias.to(x.dtype), y, scales)
        levels = torch.stack((self.values & 15, self.values >> 4), dim=-1).flatten(1).to(torch.int8) - 8
        groups = levels.unflatten(1, (-1, INT4_GROUP)).to(x.dtype) * self.scales[..., None].to(x.dtype)
        return nn.functional.linear(x, groups.flatten(1), None if self.bias is None else self.bias.to(x.dtype))


class Int8Linear(nn.Linear):
    """fp32, bf16 or fp16 [..., in] -> the layer's dtype [..., out]; each token of the input has a scale of its own."""

    scales: Tensor
    values: Tensor
    zero_point: Tensor
    one: Tensor
    no_zeros: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.dtype = layer.weight.dtype
        values, scales = quantize_rows_int8(layer.weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().float())
        self.onednn = values.device.type == "cpu" and multiplies_int8()
        if self.onednn:
            self.register_buffer("one", torch.tensor(1.0, dtype=torch.float32, device="cpu"))
            self.register_buffer("zero_point", torch.tensor(ZERO_POINT, dtype=torch.int32, device="cpu"))
            self.register_buffer("no_zeros", torch.zeros(self.out_features, dtype=torch.int64, device="cpu"))
            self.weight = torch.ops.onednn.qlinear_prepack(values, None)
        else:
            self.register_buffer("values", values)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        # oneDNN's fast kernels take inputs without a sign; signed ones run a thousand times slower.
        levels, token_scales = to_levels(rows)
        if self.onednn:
            y = self._by_onednn(levels)
        elif rows.is_cuda:
            y = whole_number_products(levels, self.values) * self.scales
        else:  # whole numbers in floating point: slow, the same result
            y = nn.functional.linear(levels.float() - ZERO_POINT, self.values.float()) * self.scales
        y = scale_back(y, token_scales, self.bias)
        out: Tensor = y.to(self.dtype).unflatten(0, x.shape[:-1])
        return out

    def _by_onednn(self, levels: Tensor) -> Tensor:
        out = self.dtype if self.dtype is torch.bfloat16 else torch.float32
        quantised = (levels, self.one, self.zero_point, self.weight, self.scales, self.no_zeros)
        result: Tensor = torch.ops.onednn.qlinear_pointwise.tensor(*quantised, None, 1.0, 0, out, "none", [], "")
        return result


INT_MM_ROWS, INT_MM_MULTIPLE = 17, 8
"""What torch's kernel for CUDA asks for: rows of the inputs at least; what both sizes of a weight are multiples of."""


def fits_int_mm(layer: nn.Linear) -> bool:
    """Whether CUDA multiplies this layer's whole numbers as they are."""
    return layer.in_features % INT_MM_MULTIPLE == 0 and layer.out_features % INT_MM_MULTIPLE == 0


def whole_number_products(levels: Tensor, values: Tensor) -> Tensor:
    """uint8 inputs [rows, in], ZERO_POINT for 0, and int8 weights [out, in] -> int32 [rows, out], nothing widened."""
    rows = len(levels)
    signed = (levels.to(torch.int16) - ZERO_POINT).to(torch.int8)
    signed = nn.functional.pad(signed, (0, 0, 0, max(0, INT_MM_ROWS - rows)))
    return int_mm(signed, values.t())[:rows]


def multiplies_int8() -> bool:
    """Whether this processor has integer products that cannot overflow midway (VNNI or AMX)."""
    if onednn_is_limited():  # without them it saturates sums in 16 bits
        return False
    known = {"avx_vnni", "avx512_vnni", "amx_int8"} & set(detect().cpu.features)
    return bool(known) and hasattr(torch.ops.onednn, "qlinear_pointwise")


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN can hold weights of this dtype in its own layout here."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if dtype is torch.float32:
        return True
    # Without instructions for it oneDNN would convert at every step; a setting may limit its instruction set.
    return dtype is torch.bfloat16 and detect().cpu.multiplies_bf16 and onednn_takes_bf16()


def swap_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module | None], besides: Collection[str] = ()) -> int:
    """Replace every plain linear layer by `make(layer)` (None: keep it); returns how many.

    besides: names of layers that stay as they are.
    """
    stay = {id(model.get_submodule(name)) for name in besides}
    made: dict[int, nn.Module] = {}
    swapped = 0
    for parent in list(model.modules()):
        if isinstance(parent, _FUSED_LAYERS):
            continue
        for name, child in list(parent._modules.items()):  # named_children leaves out a layer's second name
            if not _plain(child) or id(child) in stay:
                continue
            if id(child) not in made:
                replacement = make(child)
                if replacement is None:
                    continue
                made[id(child)] = replacement.eval()
                swapped += 1
            setattr(parent, name, made[id(child)])
    return swapped


def unhooked(module: nn.Module) -> bool:
    """It has no hooks, and its forward is its class's."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _plain(module: object) -> TypeGuard[nn.Linear]:
    """An nn.Linear, not a subclass, without hooks or parametrisation."""
    if type(module) is not nn.Linear or module._parameters.get("weight") is None:
        return False
    return unhooked(module) and module.weight.numel() >= LEAST_WEIGHTS


class _Watched(nn.Linear):
    """A Linear that remembers whether its weight was read by anything but its own call."""

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        if name in ("weight", "bias") and not self.__dict__.get("_in_call"):
            self.__dict__["_read"] = True
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["_in_call"] = True
        try:
            return super().forward(x)
        finally:
            self.__dict__["_in_call"] = False


def read_by_others(model: nn.Module, run: Callable[[], object]) -> list[str]:
    """Names of the plain linear layers whose weights the model reads itself while it runs."""
    watched = {name: layer for name, layer in model.named_modules() if _plain(layer)}
    for layer in watched.values():
        layer.__class__ = _Watched
    try:
        run()
        return [name for name, layer in watched.items() if vars(layer).get("_read")]
    finally:
        for layer in watched.values():
            layer.__class__ = nn.Linear
            vars(layer).pop("_read", None)
            vars(layer).pop("_in_call", None)
