"""What convolutions, recurrent layers and bf16 products allocate internally on the CPU: oneDNN's copies.

oneDNN computes convolutions on tensors in blocks of as many channels as a vector register holds, so torch copies the
input and the weights into that layout and the result out of it; for backward it does so with the gradients. What
torch's kernel does, and when, is from its source (ATen/native/Convolution.cpp, mkldnn/Conv.cpp, mkldnn/RNN.cpp); which
layout oneDNN chooses and its scratch memory are fitted to measurements over some 60 shapes in fp32 and bf16, one
thread, AVX-512 without AMX (torch 2.13, oneDNN 3). With another instruction set oneDNN chooses other layouts: with AMX
a bf16 convolution was seen to take 1.97 MB where these rules say 1.44, and its backward pass 1.79 where they say 1.94.
`rules_were_read_for` says whether they hold here; where not, they are the best guess there is, and a forecast says so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flatout.environment import onednn_instruction_limit
from flatout.machine.detect import detect
from flatout.memory.workspace import Workspace

_PLAIN_CHANNELS = 3
"""Up to this many input channels, a convolution reads images as they are."""
_SMALL_BYTES = 8 * 1024
"""What oneDNN's kernels for channels_last take for their tables."""


InstructionSet = Literal["amx", "avx512", "other"]


@functools.cache
def instruction_set() -> InstructionSet:
    """What oneDNN computes with in this process: what the processor has, within ONEDNN_MAX_CPU_ISA."""
    limit = onednn_instruction_limit()
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or (
        limit and not limit.startswith(("AVX512", "AVX10", "DEF"))
    ):
        return "other"
    amx = {"amx_bf16", "amx_int8", "amx_fp16"} & set(detect().cpu.features)
    limited = limit.startswith(("AVX512", "AVX10")) and "AMX" not in limit
    return "amx" if amx and not limited else "avx512"


def rules_were_read_for(dtype: torch.dtype) -> bool:
    """Do the rules of this module hold for tensors of this dtype here? AMX computes in 16 bits only."""
    return instruction_set() == "avx512" or (instruction_set() == "amx" and dtype == torch.float32)


@functools.cache
def block_channels() -> int:
    """Channels in one block: fp32 values in a vector register."""
    return 8 if torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT", "NO AVX") else 16


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def is_channels_last(tensor: Tensor) -> bool:
    """As torch suggests for its kernels: contiguous in that layout and not in the usual one."""
    if tensor.dim() not in (4, 5) or tensor.is_contiguous():
        return False
    layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=layout)


@dataclass(frozen=True, kw_only=True)
class _Convolution:
    """One convolution's tensors: `source` is the side with `weight.shape[1]` channels a group, `result` the other.

    A transposed convolution is the backward pass of one that goes from its output to its input.
    """

    samples: int
    source_shape: tuple[int, ...]
    """Channels, then the image."""
    result_shape: tuple[int, ...]
    kernel: tuple[int, ...]
    groups: int
    strided: bool
    size: int
    """Bytes of an element."""

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.source_shape[0] == self.result_shape[0]

    @property
    def wide_depthwise(self) -> bool:
        """oneDNN's own kernels for depthwise weights end at 3 x 3."""
        return self.depthwise and max(self.kernel) > 3

    @property
    def low_precision(self) -> bool:
        return self.size < 4

    def side(self, shape: tuple[int, ...], block: int = 1) -> int:
        """Bytes of all samples, channels rounded up to blocks; groups of several channels are not rounded."""
        block = 1 if self.groups > 1 and not self.depthwise else block
        return self.samples * up(shape[0], block) * math.prod(shape[1:]) * self.size

    def weight(self, source_block: int = 1, result_block: int = 1) -> int:
        if self.groups > 1:
            per_group = self.source_shape[0] // self.groups
            results = up(self.result_shape[0], result_block if self.depthwise else 1)
            return results * per_group * math.prod(self.kernel) * self.size
        channels = up(self.source_shape[0], source_block) * up(self.result_shape[0], result_block)
        return channels * math.prod(self.kernel) * self.size

    def image_bytes(self, shape: tuple[int, ...], size: int, grown: tuple[int, ...] = ()) -> int:
        """One sample, in blocks, its image larger by `grown`."""
        image = (a + b for a, b in zip(shape[1:], grown or (0,) * len(self.kernel), strict=False))
        return up(shape[0], block_channels()) * math.prod(image) * size

    # peaks inside the three products, in bytes, with what they return

    def forward(self) -> int:
        """source -> result."""
        block = block_channels()
        result, blocked = self.side(self.result_shape), self.side(self.result_shape, block)
        plain = self.source_shape[0] < block and self.groups == 1
        source = 0 if plain else self.side(self.source_shape, block)
        weight = self.weight(1 if plain else block, block)
        return max(source + weight + blocked + self.pointwise_scratch(self.result_shape), blocked + result)

    def towards_source(self) -> int:
        """result's gradient -> source's gradient."""
        block = block_channels()
        source = self.side(self.source_shape)
        if self.strided and (not self.depthwise or self.low_precision):  # channels last inside, copied out twice
            gradient = 0 if self.result_shape[0] <= _PLAIN_CHANNELS else self.side(self.result_shape)
            scratch = self.image_bytes(self.result_shape, self.size, self.kernel) + _SMALL_BYTES
            return max(gradient + self.weight(block) + source + scratch, 3 * source)
        gradient = self.side(self.result_shape, block)
        blocked = self.side(self.source_shape, block)
        scratch = self.pointwise_scratch(self.source_shape) if self.low_precision else 0
        return max(gradient + self.weight(block, block) + blocked + scratch, blocked + source)

    def towards_weight(self) -> int:
        """source and result's gradient -> weight's gradient."""
        channels = self.source_shape[0]
        block = block_channels() if channels >= block_channels() else 8
        plain = self.groups == 1 and channels <= _PLAIN_CHANNELS
        reads_plain = self.low_precision and (channels < block_channels() or self.groups > 1) and not self.depthwise
        if reads_plain or self.wide_depthwise:
            copies = 0
            weight = self.weight()
        else:
            copies = (0 if plain else self.side(self.source_shape, block)) + self.side(self.result_shape, block)
            weight = self.weight(1 if plain else block, block)
        scratch = self.weight_scratch()
        return max(copies + weight + scratch, weight + self.weight())

    def weights_in_blocks(self) -> int:
        """The weights' gradient for channels_last; of wide depthwise kernels each channel is a block by a block."""
        if not self.wide_depthwise:
            return self.weight(16, 16)
        blocks = block_channels() ** 2 * self.weight()
        if not self.low_precision:
            return blocks
        pixels = math.prod(self.result_shape[1:]) + self.source_shape[1] * (self.source_shape[-1] + self.kernel[-1] - 1)
        images = self.source_shape[0] * block_channels() * self.size * pixels
        return blocks + blocks // self.size * 4 + images

    def pointwise_scratch(self, made: tuple[int, ...]) -> int:
        """1 x 1 kernels: fp32 sums of one image in bf16, and with a stride the pixels that are read, side by side."""
        if math.prod(self.kernel) != 1 or self.groups > 1:
            return 0
        sums = self.image_bytes(made, 4) if self.low_precision else 0
        read = self.image_bytes((self.source_shape[0], *self.result_shape[1:]), self.size) if self.strided else 0
        return (sums + read) * torch.get_num_threads()

    def weight_scratch(self) -> int:
        """bf16: sums in fp32, and one image each of source and gradient with pixels in pairs."""
        if not self.low_precision or self.depthwise:
            return 0
        sums = self.weight() // self.size * 4
        if math.prod(self.kernel) == 1 and not self.strided:
            return sums
        plain = self.source_shape[0] < block_channels()
        source = math.prod(self.source_shape) * self.size if plain else self.image_bytes(
            self.source_shape, self.size, self.kernel
        )  # fmt: skip
        return sums + (source + self.image_bytes(self.result_shape, self.size)) * torch.get_num_threads()


def convolution(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Workspace | None:
    """aten::convolution."""
    if input.dim() == 2 + len(stride) and input.numel():
        if not _by_onednn(input, weight, stride, dilation, transposed, groups):
            return Workspace(inside_bytes=_columns(input, weight, out) if not transposed else 0)
        one = _described(input, weight, out, stride, transposed, groups)
        if is_channels_last(input) or is_channels_last(weight):
            return Workspace(inside_bytes=_channels_last_copies(input, weight) + one.weight(1, 16) + _SMALL_BYTES)
        peak = one.towards_source() if transposed else one.forward()
        return Workspace(inside_bytes=made_contiguous(input, weight) + peak - out.nbytes)
    return None


def convolution_backward(
    out: Sequence[Tensor | None],
    gradient: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> Workspace | None:
    """aten::convolution_backward. mask: which gradients are wanted: of input, weight and bias."""
    if input.dim() != 2 + len(stride) or not input.numel():
        return None
    if not _by_onednn(input, weight, stride, dilation, transposed, groups):
        return Workspace(inside_bytes=_columns(input, weight, gradient) if not transposed else 0)
    one = _described(input, weight, gradient, stride, transposed, groups)
    returned = sum(tensor.nbytes for tensor in out if tensor is not None)
    of_input = input.nbytes if mask[0] else 0
    if is_channels_last(input) or is_channels_last(weight):
        copies = _channels_last_copies(gradient, input, weight)
        first = one.weight(16, 16) + _SMALL_BYTES if mask[0] else 0
        second = one.weights_in_blocks() + max(one.weight_scratch(), 2 * one.weight())
        return Workspace(inside_bytes=copies + max(0, of_input + max(first, second) - returned))
    peak = (one.forward() if transposed else one.towards_source()) if mask[0] else 0
    if mask[1]:
        peak = max(peak, of_input + one.towards_weight())
    return Workspace(inside_bytes=made_contiguous(gradient, input, weight) + max(0, peak - returned))


def _by_onednn(
    input: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int], transposed: bool, groups: int
) -> bool:
    """torch's ConvParams::use_mkldnn: small work in fp32 on one thread is left to its own kernel."""
    if not torch.backends.mkldnn.is_available() or input.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if input.dtype != torch.float32:
        return True
    height, width = (1, *weight.shape[2:])[-2:]  # torch looks at no more of a volume
    pointwise = height == width == 1
    uneven = any(one != 1 for one in (*stride, *dilation))
    large = uneven or input.shape[0] >= 16 or not pointwise or torch.get_num_threads() > 1
    if transposed:
        return large
    return large and (groups > 1 or min(height, width) > 3 or input.shape[0] > 1 or math.prod(input.shape[:4]) > 20480)


def _described(
    input: Tensor, weight: Tensor, result: Tensor, stride: Sequence[int], transposed: bool, groups: int
) -> _Convolution:
    source, made = tuple(input.shape[1:]), tuple(result.shape[1:])
    if transposed:
        source, made = made, source
    return _Convolution(
        samples=input.shape[0],
        source_shape=source,
        result_shape=made,
        kernel=tuple(weight.shape[2:]),
        groups=groups,
        strided=any(one != 1 for one in stride),
        size=input.element_size(),
    )


def _columns(input: Tensor, weight: Tensor, result: Tensor) -> int:
    """torch's own kernel lays every patch of the image out as a column (1 x 1: the image is that already)."""
    patch = math.prod(weight.shape[2:])
    if patch == 1:
        return 0
    return input.shape[0] * input.shape[1] * patch * math.prod(result.shape[2:]) * input.element_size()


def _channels_last_copies(*tensors: Tensor) -> int:
    return sum(one.nbytes for one in tensors if not is_channels_last(one) and max(one.shape[2:]) > 1)


def made_contiguous(*tensors: object) -> int:
    """What copies of those take that are not."""
    return sum(one.nbytes for one in tensors if isinstance(one, Tensor) and not one.is_contiguous())


# recurrent layers: oneDNN's LSTM, rnn_utils.cpp's workspace; exact for the 60 shapes measured

_PAGE = 4096


def _leading(count: int, size: int) -> int:
    """Elements of a row that oneDNN makes of `count`: whole cache lines, and not a multiple of 256."""
    row = up(count, 64 // size)
    return row + 64 // size if row % 256 == 0 else row


def _lstm_workspace_bytes(tokens: int, samples: int, inputs: int, hidden: int, size: int) -> int:
    """What the forward pass keeps for the backward pass, each piece in whole pages of 4096 bytes."""
    widest = max(inputs, hidden)
    states = 2 * (tokens + 1) * samples
    pieces = [
        tokens * samples * _leading(4 * hidden, size) * size,  # gates
        states * _leading(widest, size) * size,  # states
        states * _leading(widest, 4) * 4,  # their gradients: of layers and of iterations
        states * _leading(widest, 4) * 4,
        states * hidden * 4,  # cells
        states * hidden * size,  # and their gradients
        tokens * samples * _leading(hidden, size) * size,
    ]
    return sum(up(piece, _PAGE) for piece in pieces)


def _lstm_sizes(input: Tensor, hidden: Tensor) -> tuple[int, int, int, int, int]:
    tokens, samples, inputs = input.shape
    return tokens, samples, inputs, hidden.shape[-1], input.element_size()


def _lstm_scratch_bytes(tokens: int, samples: int, hidden: int, size: int) -> int:
    """The gates before their functions: of all tokens in fp32, of one in bf16; and two states."""
    gates = (tokens if size == 4 else 1) * samples * _leading(4 * hidden, 4) * 4
    return gates + 2 * samples * _leading(hidden, 4) * 4 + 3 * _PAGE


def lstm(
    out: object,
    input: Tensor,
    weight_input: Tensor,
    weight_hidden: Tensor,
    bias_input: Tensor,
    bias_hidden: Tensor,
    state: Tensor,
    *others: object,
) -> Workspace | None:
    """aten::mkldnn_rnn_layer; its fourth result is the workspace, whose size fake tensors do not know."""
    if input.dim() != 3:
        return None
    tokens, samples, inputs, hidden, size = _lstm_sizes(input, state)
    weights = (inputs + hidden) * _leading(4 * hidden, size) * size
    inside = weights + 4 * hidden * size + _lstm_scratch_bytes(tokens, samples, hidden, size)
    returned = {3: _lstm_workspace_bytes(tokens, samples, inputs, hidden, size)} if torch.is_grad_enabled() else {}
    return Workspace(inside_bytes=inside, returned_bytes=returned)


def lstm_backward(
    out: Sequence[object],
    input: Tensor,
    weight_input: Tensor,
    weight_hidden: Tensor,
    bias_input: Tensor,
    bias_hidden: Tensor,
    state: Tensor,
    cell: Tensor,
    output: Tensor,
    last_state: Tensor,
    last_cell: Tensor,
    gradient: Tensor | None,
    *others: object,
) -> Workspace | None:
    """aten::mkldnn_rnn_layer_backward; all that it returns is fp32."""
    if input.dim() != 3:
        return None
    tokens, samples, inputs, hidden, size = _lstm_sizes(input, state)
    rows = [row for row in (inputs, hidden) if size < 4 or _leading(row, size) != row]  # fp32 rows may be aligned
    weights = 4 * hidden * sum(_leading(row, size) for row in rows) * size
    gradients = (inputs + hidden) * _leading(4 * hidden, 4) * 4
    inside = weights + gradients + 2 * samples * hidden * 4 + _lstm_scratch_bytes(tokens, samples, hidden, size)
    inside += made_contiguous(gradient)
    if size < 4:  # the gradients that it is given, in fp32
        inside += tokens * samples * hidden * 4
    made = {index: one.numel() * 4 for index, one in enumerate(out) if isinstance(one, Tensor)}
    return Workspace(inside_bytes=inside, returned_bytes=made)


def product(out: object, *args: object) -> Workspace | None:
    """bf16 mm, addmm, bmm, baddbmm: blocks of both factors packed in pairs of rows, and fp32 sums of one block.

    Fitted to 27 shapes; a first factor that is transposed is packed whole, and batches that are neither
    contiguous nor transposed contiguous matrices are copied first.
    """
    first, second = [one for one in args if isinstance(one, Tensor)][-2:]
    if first.dtype != torch.bfloat16 or first.dim() < 2:
        return None
    rows, inner = first.shape[-2:]
    columns = second.shape[-1]
    if rows * inner * columns <= 16**3:  # torch's threshold for oneDNN
        return None
    packed = 2 * min(columns, 64) * min(up(inner, 32), 512)
    sums = 4 * min(columns, 64) * min(rows, 256)
    whole = 2 * min(rows, 256) * min(inner, 1024) if first.stride(-1) != 1 and inner > 1 else 0
    batches = [one for one in (first, second) if one.dim() == 3 and not one.mT.is_contiguous()]
    copied = made_contiguous(*batches)
    return Workspace(inside_bytes=copied + (packed + sums + whole) * torch.get_num_threads())
