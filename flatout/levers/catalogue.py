"""Every lever, in the order in which they are tried."""

from __future__ import annotations

from flatout.levers.allocator import PreloadedAllocator, RetainMemory
from flatout.levers.attention import FusedAttention
from flatout.levers.autocast import Autocast
from flatout.levers.batched_fetch import BatchedFetch
from flatout.levers.channels_last import ChannelsLast
from flatout.levers.chunked_loss import ChunkedLoss
from flatout.levers.compile import Compile
from flatout.levers.cudnn_benchmark import CudnnBenchmark
from flatout.levers.denormals import FlushDenormals
from flatout.levers.fused_optimizer import FusedOptimizer
from flatout.levers.lever import Lever
from flatout.levers.matmul_precision import MatmulPrecision
from flatout.levers.moved_to_device import MovedToDevice
from flatout.levers.pinned_memory import PinnedMemory
from flatout.levers.threads import Threads

# First what changes no bit, then what changes rounding, then what reduces precision: a search that is cut short has
# kept the safe ones. Within that, cheap before dear, and what others build on before those: bf16 before compile
# (which then fuses its casts), layout before both. Levers that need a process of their own come last; but where the
# script runs at all is settled before anything else, because every other lever is another one on another device.
#
# There is none for loader workers, nor one that keeps samples or a copy of the data on the device: whatever a script
# changes while it trains (a numpy view of its data leaves no trace), or does in `__getitem__`, would go unnoticed.
LEVERS: tuple[Lever, ...] = (
    MovedToDevice(),
    BatchedFetch(),
    RetainMemory(),
    FlushDenormals(),
    Threads(),
    FusedOptimizer(),
    CudnnBenchmark(),
    ChannelsLast(),
    FusedAttention(),
    ChunkedLoss(),
    Autocast(),
    MatmulPrecision(),
    Compile(),
    PinnedMemory(),
    PreloadedAllocator(),
)

# Pairs that may help together although one of them did not help alone.
INTERACTING: tuple[tuple[str, str], ...] = (
    ("precision", "compile"),
    ("memory_format", "precision"),
    ("threads", "compile"),
)
