"""Every lever."""

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

# In the order in which a plan applies them: what others build on before those (the layout before 16-bit products, these
# before compile, which then fuses their casts). Within that, what changes no bit comes first, what reduces precision
# last. A search tries first what promises most.
#
# There is none for loader workers, nor one that keeps samples or a copy of the data on the device: whatever a script
# changes while it trains (a numpy view of its data leaves no trace), or does in `__getitem__`, would go unnoticed.
LEVERS: tuple[Lever, ...] = (
    MovedToDevice(),
    BatchedFetch(),
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
    RetainMemory(),
    PinnedMemory(),
    PreloadedAllocator(),
)

# Pairs that may help together although one of them did not help alone.
INTERACTING: tuple[tuple[str, str], ...] = (
    ("precision", "compile"),
    ("memory_format", "precision"),
    ("threads", "compile"),
)
