"""What torch's reductions on CUDA hold besides their results: the buffer in which thread blocks add up their parts.

A sum over many rows is split over the blocks of all multiprocessors. Each block leaves its partial sums in a buffer in
global memory, and the last one adds them up; it is freed once the kernel is queued. For a column sum (the gradient of a
bias) that buffer has a value for each thread, so 512 sums over 65,536 rows take 96 MiB on 128 multiprocessors:
more than the tensor that is summed. The rules are those of ATen/native/cuda/Reduce.cuh (setReduceConfig,
global_memory_size), read in torch 2.15 and compared with what its allocator handed out.

>>> reduction_buffer_bytes((65536, 512), (512, 1), {0}, element_bytes=4, multiprocessors=128, threads_each=1536)
100663296
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

MOST_THREADS = 512
WARP = 32
INPUTS_AT_ONCE = 4
"""Elements that one thread loads at a time (input_vec_size)."""
LEAST_VALUES, MOST_VALUES = 16, 256
"""That a thread adds up by itself, as torch aims for."""
THREADS_OF_A_MULTIPROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""By compute capability; 2048 otherwise (CUDA C++ Programming Guide, technical specifications)."""


Dimensions: TypeAlias = list[tuple[int, int]]
"""(size, stride in elements) as TensorIterator lays them out: adjoining dimensions joined, the fastest first."""


def threads_of_a_multiprocessor(capability: tuple[int, int]) -> int:
    """The most that are resident at once."""
    return THREADS_OF_A_MULTIPROCESSOR.get(capability, 2048)


def reduction_buffer_bytes(
    shape: Sequence[int],
    strides: Sequence[int],
    summed: set[int],
    *,
    element_bytes: int,
    multiprocessors: int,
    threads_each: int,
) -> int:
    """Bytes of the buffer of a reduction of a tensor [shape], strides in elements, over the dimensions `summed`.

    element_bytes: of what is added up (4 for fp32, bf16 and fp16). 0 where one block does each sum alone.
    """
    if 0 in shape:
        return 0
    sizes = list(zip(shape, strides, strict=True))
    reduced = _joined(one for dim, one in enumerate(sizes) if dim in summed)
    kept = _joined(one for dim, one in enumerate(sizes) if dim not in summed)
    outputs = math.prod(size for size, _ in kept)
    inputs = math.prod(size for size, _ in reduced)
    along_inputs = not kept or bool(reduced and reduced[0][1] < kept[0][1])
    first, second = (inputs, outputs) if along_inputs else (outputs, inputs)
    fastest = (reduced or [(1, 1)])[0][1] if along_inputs else kept[0][1]
    at_once = 1
    if fastest == 1 and along_inputs and first >= 128 and len(reduced) == 1:
        first //= INPUTS_AT_ONCE
    elif fastest == 1 and not along_inputs:
        at_once = _outputs_at_once(reduced, kept)
        first //= at_once
    width, height = _block(first, second, MOST_THREADS // at_once)

    inputs_a_step = width if along_inputs else 1
    outputs_a_step = 1 if along_inputs else width
    split = -(-inputs // inputs_a_step) >= min(height * 16, MOST_VALUES)
    if split:
        inputs_a_step *= height
    else:
        outputs_a_step *= height
    blocks = -(-(outputs // at_once) // outputs_a_step)
    wanted_blocks = multiprocessors * (threads_each // (width * height))
    values = -(-inputs // inputs_a_step)
    if not split or values < MOST_VALUES or blocks > wanted_blocks:
        return 0
    parts = min(max(-(-wanted_blocks // blocks), -(-values // MOST_VALUES)), -(-values // LEAST_VALUES))
    if parts <= 1:
        return 0
    return element_bytes * outputs * parts * (1 if along_inputs else width * at_once)


def _joined(dimensions: Iterable[tuple[int, int]]) -> Dimensions:
    """Sorted by stride; dimensions that follow one another without a gap count as one."""
    found: Dimensions = []
    for size, stride in sorted((one for one in dimensions if one[0] > 1), key=lambda one: one[1]):
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = found[-1][0] * size, found[-1][1]
        else:
            found.append((size, stride))
    return found


def _outputs_at_once(reduced: Dimensions, kept: Dimensions) -> int:
    """Sums that one thread makes at once: as many as divide the sizes and strides, at most 4."""
    at_once = 4
    for number in (kept[0][0], *(stride for _, stride in (*reduced, *kept[1:]))):
        while number % at_once:
            at_once //= 2
    return at_once


def _block(first: int, second: int, most: int) -> tuple[int, int]:
    """Width and height of a block of threads."""
    wide = _power_of_two(first) if first < most else most
    high = _power_of_two(second) if second < most else most
    width = min(wide, WARP)
    height = min(high, most // width)
    return min(wide, most // height), height


def _power_of_two(number: int) -> int:
    """The largest that is no greater; 1 for 0."""
    return 1 << max(0, number.bit_length() - 1)
