"""Runs of Llama 3.1 that torchtitan published, and what of the model and the machines a plan needs to know of them.

Sources, read in the repository pytorch/torchtitan at commit b5bcd76c66d0acb1a08b176d9639425bc55e0b2a:

    llama3-2024-12   benchmarks/llama3_h100_202412_torchtitan.md (before: docs/performance.md), run with torchtitan
                     9dec370 of 2024-12-26, torch 1963fc8 of 2024-12-23
    asynctp-2025-06  benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, torchtitan 820504e, torch 38410cf9

Llama 3.1 8B was published on 8, 64 and 128 GPUs there; on 256 GPUs only the 70B. Memory is what the allocator reserved
(metrics.py of torchtitan 9dec370), of which a plan's sum of tensors is a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.parallel.estimates import Cluster, Workload
from flatout.parallel.communication_costs import Link, Sharing

Checkpointing = Literal["none", "selective", "full"]
Source = Literal["llama3-2024-12", "asynctp-2025-06"]


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The shapes of a Llama, from torchtitan/models/llama3 (layers, width and so on)."""

    name: str
    layers: int
    width: int
    hidden: int
    """Of the feed-forward layers."""
    heads: int
    key_heads: int
    vocabulary: int = 128_256

    @property
    def key_width(self) -> int:
        return self.width // self.heads * self.key_heads

    @property
    def products(self) -> dict[str, int]:
        """The weights of a block's matrix products, in the order in which they run."""
        return {
            "wq": self.width * self.width,
            "wk": self.width * self.key_width,
            "wv": self.width * self.key_width,
            "wo": self.width * self.width,
            "w1": self.width * self.hidden,
            "w3": self.width * self.hidden,
            "w2": self.hidden * self.width,
        }

    @property
    def block_parameters(self) -> int:
        return sum(self.products.values()) + 2 * self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + 2 * self.vocabulary * self.width + self.width


LLAMA_8B = Llama(name="Llama 3.1 8B", layers=32, width=4096, hidden=14_336, heads=32, key_heads=8)
LLAMA_70B = Llama(name="Llama 3.1 70B", layers=80, width=8192, hidden=28_672, heads=64, key_heads=8)
RECOMPUTED_BY_SELECTIVE = ("wk", "wo", "w3")
"""torchtitan's selective checkpointing per operation keeps every second product's output, and attention's."""


def workload(model: Llama, *, length: int = 8192, checkpointing: Checkpointing = "selective") -> Workload:
    """One sample is a sequence of so many tokens. bf16 products, parameters and Adam's moments in fp32; parameters are
    gathered in bf16, gradients reduced in fp32, as in torchtitan's defaults."""
    products = sum(model.products.values())
    attention = 2 * length * model.width  # of a token, forward: two products with the half of the keys that are before
    block_forward = 2 * products + attention
    head = 2 * model.vocabulary * model.width
    kept_width = {  # elements of a token that a block keeps: its input, and what is not computed again
        "none": 7 * model.width + 2 * model.key_width + 4 * model.hidden,
        "selective": model.width + 3 * model.width + model.key_width + model.hidden,  # attention, wq, w2; wv; w1
        "full": model.width,
    }[checkpointing]
    again = {
        "none": 0,
        "selective": sum(2 * model.products[name] for name in RECOMPUTED_BY_SELECTIVE),
        "full": block_forward,
    }[checkpointing]
    return Workload(
        name=f"{model.name}, {length} tokens, {checkpointing} checkpointing",
        parameters=model.parameters,
        blocks=model.layers,
        block_parameters=model.layers * model.block_parameters,
        flops_per_sample=3.0 * length * (model.layers * block_forward + head),
        recomputed_flops_per_sample=float(length * model.layers * again),
        activation_bytes_per_sample=2.0 * length * model.layers * kept_width,
        # The loss is computed in fp32: log-probabilities, their gradient, and that of the logits.
        transient_bytes_per_sample=3.0 * 4 * length * model.vocabulary,
        compute_bytes=2,
        gathered_bytes=2,
        hidden_bytes_per_sample=2.0 * length * model.width,
        # All_gather and reduce_scatter around attention and around the feed-forward layers, in each pass; computing
        # a block again repeats them, but selective checkpointing has kept the results of the reduce_scatters.
        tensor_all_reduces_per_block=4 + {"none": 0, "selective": 1, "full": 2}[checkpointing],
        heads=model.key_heads,
    )


PEAK_FLOPS_PER_SECOND = 989.5e12
"""bf16, dense, of an H100 SXM by NVIDIA's data sheet. The GPUs of these runs have HBM2e and a limit of 500 W."""
SOURCES = {
    "flops_per_second": f"a fitted share of {PEAK_FLOPS_PER_SECOND / 1e12} TFLOP/s (NVIDIA's H100 data sheet)",
    "memory_bytes": "95 GiB: 96 GB of HBM2e, less what the driver keeps (torchtitan's benchmarks/, hardware)",
    "memory_bytes_per_second": "2.4 TB/s, published (torchtitan's benchmarks/, hardware)",
    "within": "NVLink 4: 900 GB/s, both ways together (NVIDIA's H100 data sheet); 3.4 us a hop (NCCL's tuning.cc)",
    "between": "400 Gb/s for each GPU (torchtitan's benchmarks/, hardware); 14 us a hop (NCCL's tuning.cc)",
    "start_seconds": "8.4 us (NVIDIA/nccl at 5067397, src/graph/tuning.cc: ring, protocol Simple; the hops likewise)",
}


def grand_teton(gpus: int, *, efficiency: float) -> Cluster:
    """So many of the H100s on which torchtitan's runs were made. efficiency: the share of the peak that products
    reach."""
    return Cluster(
        ranks=gpus,
        ranks_per_machine=8,
        flops_per_second=efficiency * PEAK_FLOPS_PER_SECOND,
        memory_bytes=95 * 2**30,
        within=Link(latency_seconds=3.4e-6, bytes_per_second=450e9),
        between=Link(latency_seconds=14e-6, bytes_per_second=50e9),
        memory_bytes_per_second=2.4e12,
        start_seconds=8.4e-6,
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row of a published table."""

    source: Source
    model: Llama
    gpus: int
    compiled: bool
    precision: Literal["bf16", "float8"] = "bf16"
    tensor_ranks: int = 1
    samples_per_replica: int = 2
    checkpointing: Checkpointing = "selective"
    async_tensor_parallel: bool = False
    tokens_per_second: float
    """Of one GPU."""
    memory_gib: float | None = None
    fitted: bool = False
    """Was a constant of the plan taken from this row?"""

    @property
    def sharing(self) -> Sharing:
        return "fsdp"

    @property
    def not_predicted(self) -> str:
        """Why not; '' if it is."""
        if self.precision == "float8":
            return "float8: what its products reach beside its conversions is not in the model"
        return "async tensor parallel: its exchange overlaps with products" if self.async_tensor_parallel else ""


def _table() -> tuple[Run, ...]:
    old: Source = "llama3-2024-12"
    new: Source = "asynctp-2025-06"
    small, large = LLAMA_8B, LLAMA_70B
    return (
        Run(source=old, model=small, gpus=8, compiled=False, tokens_per_second=5762, memory_gib=82.4, fitted=True),
        Run(source=old, model=small, gpus=8, compiled=True, tokens_per_second=6667, memory_gib=77.0, fitted=True),
        Run(source=old, model=small, gpus=128, compiled=False, tokens_per_second=5605, memory_gib=67.0),
        Run(source=old, model=small, gpus=128, compiled=True, tokens_per_second=6514, memory_gib=62.0),
        Run(
            source=new,
            model=small,
            gpus=64,
            compiled=True,
            tensor_ranks=8,
            samples_per_replica=12,
            tokens_per_second=4378,
        ),
        Run(
            source=new,
            model=large,
            gpus=256,
            compiled=True,
            tensor_ranks=8,
            samples_per_replica=16,
            checkpointing="full",
            tokens_per_second=597.3,
        ),
        Run(
            source=old,
            model=small,
            gpus=8,
            compiled=True,
            precision="float8",
            tokens_per_second=8532,
            memory_gib=76.8,
        ),
        Run(
            source=old,
            model=small,
            gpus=128,
            compiled=True,
            precision="float8",
            tokens_per_second=8380,
            memory_gib=61.8,
        ),
        Run(
            source=old,
            model=large,
            gpus=256,
            compiled=True,
            precision="float8",
            tensor_ranks=8,
            samples_per_replica=16,
            checkpointing="full",
            tokens_per_second=829,
            memory_gib=71.9,
        ),
        Run(
            source=new,
            model=small,
            gpus=64,
            compiled=True,
            tensor_ranks=8,
            samples_per_replica=12,
            async_tensor_parallel=True,
            tokens_per_second=4809.4,
        ),
        Run(
            source=new,
            model=large,
            gpus=256,
            compiled=True,
            tensor_ranks=8,
            samples_per_replica=16,
            checkpointing="full",
            async_tensor_parallel=True,
            tokens_per_second=652.4,
        ),
    )


RUNS = _table()
