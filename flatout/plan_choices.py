"""What each choice of a plan declares, and what follows from its declaration.

    precision: Literal["fp32", "bf16", "fp16"] | None = choice(
        "dtype of autocast regions", scopes=("script", "step"), exactness="reduced", levers=("autocast:Autocast",)
    )

A choice is declared once, as a field of `Choices`. Plan's checks, the searches, `fit_to_memory`, forecasts and
everything that takes a plan (TrainStep, batches, predict, generate, flatout run) read the rest from here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from flatout.plan_document import toml_value

Exactness = Literal["bit-identical", "rounding", "reduced"]
"""What a choice does to the numbers: nothing, another order of summation, or fewer bits."""

EXACTNESS_ORDER: tuple[Exactness, ...] = get_args(Exactness)

Aim = Literal["time", "memory"]

Scope = Literal["script", "step", "batches", "predict", "generate"]

SCOPES: dict[Scope, str] = {
    "script": "flatout run",
    "step": "TrainStep",
    "batches": "batches",
    "predict": "predict",
    "generate": "generate",
}
"""Where choices apply, and how a user calls that."""

SAME_PLAN: tuple[tuple[Scope, ...], ...] = (("step", "batches"),)
"""Scopes that share a plan: a choice that applies to one of them is no error in the other."""


ChoiceValue: TypeAlias = bool | int | str
"""The value of a choice that is set."""


@dataclass(frozen=True)
class Requirement:
    """What another choice has to be where this one is set."""

    other: str
    allows: Callable[[object], bool]
    """Of the other choice's value; None: it is unset."""
    why: str
    remedy: str = "drop one of the two"


@dataclass(frozen=True, kw_only=True)
class Declared:
    """One choice of a plan."""

    meaning: str
    scopes: tuple[Scope, ...]
    """Where it applies."""
    exactness: Exactness
    aim: Aim = "time"
    """'memory': a search keeps it also where it is not faster, if memory is short or it was asked for."""
    levers: tuple[str, ...] = ()
    """The classes that apply it, as 'module:Class' in flatout.levers; none where the scope's own code does."""
    low: int = 0
    """The limits of a whole number, both included."""
    high: int = 0
    requires: tuple[Requirement, ...] = ()
    replaces: tuple[str, ...] = ()
    """Choices that it makes redundant: a search drops them when it keeps this one."""
    pairs_with: tuple[str, ...] = ()
    """Choices with which it may help although neither does alone."""
    in_forecasts: bool = True
    """Does memory depend on it, and can it be carried out on fake tensors?"""
    repeatable: bool = True
    """False where kernels are chosen by how fast they were this time."""


def choice(meaning: str, **declared: Any) -> Any:  # the fields of Declared; a choice has its own type
    """A field of [plan]; keywords as in Declared."""
    return field(default=None, metadata={"declared": Declared(meaning=meaning, **declared)})


def _is_set(value: object) -> bool:
    return value is not None


def _in(*values: object) -> Callable[[object], bool]:
    return lambda value: value in values


_ONE_PASS = "torch's DDP then averages gradients in every backward pass, and a batch split into parts has several"
_ALL_GRADIENTS = "that needs all gradients before the first update"

_OF_WORKERS = Requirement(
    "loader_workers", bool, "it needs worker processes", "set loader_workers to 1 or more, or drop it"
)

SAME_BATCH = ("tensor", "pipeline")
"""Values of `parallel` with which every rank has the whole of each batch, and computes a part of the model."""

_WHOLE_PARAMETERS = Requirement(
    "parallel",
    lambda kind: kind not in ("fsdp", *SAME_BATCH),
    "it needs whole parameters, of which each rank then has a part",
    "drop one of the two, or set parallel = 'zero1'",
)
_ONE_MODEL = Requirement(
    "parallel",
    lambda kind: kind != "dp",
    "it acts on the model itself, and 'dp' computes with copies that it makes in every step",
    "drop one of the two, or set parallel = 'ddp'",
)
_WITH_DDP = Requirement("parallel", _in("ddp", "zero1"), "it is an option of torch's DDP", "set parallel = 'ddp'")
_WITH_FSDP = Requirement("parallel", _in("fsdp"), "it is an option of FSDP", "set parallel = 'fsdp'")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Every choice of a plan, in the order in which they are applied: a choice that others build on comes first.

    There is none for a script's loader workers, nor one that keeps a script's samples or a copy of its data: changes
    that the script makes while it trains (through a numpy view, say, or in `__getitem__`) would be missed.
    """

    device: Literal["cuda", "cpu"] | None = choice(
        "where a script trains: cuda = its model is moved to the GPU, if it names no device; cpu = it sees no GPU",
        scopes=("script",),
        exactness="rounding",
        levers=("moved_to_device:MovedToDevice", "hidden_gpu:HiddenGpu"),
    )
    fetch: Literal["batched", "cached"] | None = choice(
        "in-memory data in the main process: batched = whole batches, made from the live data (cached: the same)",
        scopes=("script", "batches"),
        exactness="bit-identical",
        levers=("batched_fetch:BatchedFetch",),
        requires=(Requirement("loader_workers", _in(None, 0), "fetch works in the main process"),),
    )
    data_device: Literal["cuda"] | None = choice(
        "where batches() keeps tensors: cuda = copied there once, so that later changes are not seen (needs fetch)",
        scopes=("batches",),
        exactness="bit-identical",
        requires=(
            Requirement("fetch", _is_set, "only batches() with fetch keeps tensors there", "set fetch = 'batched'"),
            Requirement("pin_memory", _in(None, False), "only batches in the CPU's memory can be page-locked"),
        ),
    )
    loader_workers: int | None = choice(
        "processes of batches(); 0 = load in the main process",
        scopes=("batches",),
        exactness="bit-identical",
        low=0,
        high=256,
    )
    persistent_workers: bool | None = choice(
        "keep the loader's workers alive between epochs, with the data set as it was when the first began",
        scopes=("batches",),
        exactness="bit-identical",
        requires=(_OF_WORKERS,),
    )
    prefetch_factor: int | None = choice(
        "batches that each loader worker holds ready; unset = 2, up to 8 where some take far longer to make",
        scopes=("batches",),
        exactness="bit-identical",
        low=1,
        high=64,
        requires=(_OF_WORKERS,),
    )
    pin_memory: bool | None = choice(
        "page-locked batches, so that copies to the device overlap with compute",
        scopes=("script", "batches"),
        exactness="bit-identical",
        levers=("pinned_memory:PinnedMemory",),
    )
    non_blocking: bool | None = choice(
        "a script's copies of batches to the GPU: the host does not wait for them",
        scopes=("script",),
        exactness="bit-identical",
        levers=("overlapped_copies:OverlappedCopies",),
        replaces=("pin_memory",),
        in_forecasts=False,
    )
    zero_grad: Literal["none"] | None = choice(
        "a script's zero_grad(set_to_none=False): none = gradients are freed, and read as zeros where anything asks",
        scopes=("script",),
        exactness="rounding",
        levers=("gradients_to_none:GradientsToNone",),
        pairs_with=("allocator",),
    )
    threads: int | None = choice(
        "intra-op threads of torch on the CPU",
        scopes=("script", "step", "predict", "generate"),
        exactness="rounding",
        levers=("threads:Threads",),
        low=1,
        high=1024,
        in_forecasts=False,
    )
    # After `threads`, and so undone before: it is a setting of each thread, those that `threads` adds included.
    flush_denormals: bool | None = choice(
        "treat fp32 values below 1.2e-38 as 0: CPUs compute with them slowly",
        scopes=("script", "step", "predict"),
        exactness="rounding",
        levers=("denormals:FlushDenormals",),
        in_forecasts=False,
    )
    optimizer: Literal["fused", "foreach"] | None = choice(
        "implementation of the optimizer's step: fused = one kernel for it all, foreach = one per operation",
        scopes=("script", "step"),
        exactness="rounding",
        levers=("fused_optimizer:FusedOptimizer",),
    )
    cudnn_benchmark: bool | None = choice(
        "let cuDNN time its algorithms once per input shape and keep the fastest",
        scopes=("script", "step", "predict"),
        exactness="rounding",
        levers=("cudnn_benchmark:CudnnBenchmark",),
        in_forecasts=False,
        repeatable=False,
    )
    memory_format: Literal["channels_last"] | None = choice(
        "layout of images and convolution weights in memory: NHWC instead of NCHW",
        scopes=("script", "step", "predict"),
        exactness="rounding",
        levers=("channels_last:ChannelsLast",),
    )
    attention: Literal["fused"] | None = choice(
        "attention that the model computes by hand: fused = by torch's kernel, which keeps no matrix of weights",
        scopes=("script", "step"),
        exactness="rounding",
        levers=("attention:FusedAttention",),
        in_forecasts=False,
        requires=(_ONE_MODEL,),
    )
    normalization: Literal["fused"] | None = choice(
        "batch norms in training on the CPU: fused = with the addition and the ReLU after them, in one kernel",
        scopes=("script", "step"),
        exactness="rounding",
        levers=("fused_norm:FusedNorm",),
        pairs_with=("precision", "memory_format"),
        in_forecasts=False,
        requires=(_ONE_MODEL,),
    )
    kernels: Literal["bf16"] | None = choice(
        "linear layers, attention and GELU on the CPU: bf16 = by Flatout's kernels, with products in bf16",
        scopes=("script", "step"),
        exactness="reduced",
        levers=("bf16_kernels:Bf16Kernels",),
        pairs_with=("precision",),
        in_forecasts=False,
        requires=(
            _ONE_MODEL,
            _WHOLE_PARAMETERS,
        ),
    )
    loss: Literal["chunked"] | None = choice(
        "cross-entropy of a last linear layer's scores: chunked = these are never held whole (saves memory)",
        scopes=("script", "step"),
        exactness="rounding",
        aim="memory",
        levers=("chunked_loss:ChunkedLoss",),
        requires=(
            _ONE_MODEL,
            _WHOLE_PARAMETERS,
        ),
    )
    precision: Literal["fp32", "bf16", "fp16"] | None = choice(
        "dtype of autocast regions; fp16 also scales the loss, so that small gradients do not vanish",
        scopes=("script", "step", "predict", "generate"),
        exactness="reduced",
        levers=("autocast:Autocast",),
        pairs_with=("memory_format",),
    )
    matmul_precision: Literal["highest", "high", "medium"] | None = choice(
        "precision of fp32 matmul: highest = fp32, high = TF32 on CUDA, medium = bf16 inside the product",
        scopes=("script", "step", "predict"),
        exactness="reduced",
        levers=("matmul_precision:MatmulPrecision",),
        in_forecasts=False,
    )
    compile: Literal["default", "regional", "reduce-overhead", "max-autotune"] | None = choice(
        "torch.compile: the whole model in this mode; regional = each repeated block once (starts sooner)",
        scopes=("script", "step", "predict"),
        exactness="rounding",
        levers=("compile:Compile",),
        replaces=("attention",),
        pairs_with=("precision", "threads"),
        in_forecasts=False,
        requires=(_ONE_MODEL,),
    )
    allocator: Literal["retain", "jemalloc", "tcmalloc", "mimalloc"] | None = choice(
        "CPU memory: retain = glibc keeps freed memory for reuse, in huge pages; else the allocator to preload",
        scopes=("script", "step"),
        exactness="bit-identical",
        levers=("allocator:RetainMemory", "allocator:PreloadedAllocator"),
        in_forecasts=False,
    )

    devices: int | None = choice(
        "processes of this machine that train a script, each on a device (or cores) of its own and a share of a batch",
        scopes=("script",),
        exactness="rounding",
        low=2,
        high=1024,
        in_forecasts=False,
    )
    parallel: Literal["dp", "ddp", "zero1", "fsdp", "tensor", "pipeline"] | None = choice(
        "ranks split: ddp = batch, zero1 = and optimizer state, fsdp = weights; tensor = layers, pipeline = blocks; "
        "dp: one process with several GPUs splits batches, and copies weights in every step (prefer ddp)",
        scopes=("step", "batches"),
        exactness="rounding",
        in_forecasts=False,
    )
    batch_norm: Literal["local", "synced"] | None = choice(
        "batch norms of several ranks: local = statistics of each rank's share, synced = of the whole batch (CUDA)",
        scopes=("step",),
        exactness="reduced",
        in_forecasts=False,
        requires=(
            Requirement(
                "parallel",
                lambda kind: kind is not None and kind not in SAME_BATCH,
                "it is for ranks that share a batch",
                "set parallel = 'ddp'",
            ),
        ),
    )
    gradient_compression: Literal["bf16", "fp16"] | None = choice(
        "dtype in which ranks send each other their gradients",
        scopes=("step",),
        exactness="reduced",
        in_forecasts=False,
        requires=(
            Requirement(
                "parallel", _in("ddp", "zero1"), "only ddp and zero1 send whole gradients", "set parallel = 'ddp'"
            ),
        ),
    )
    ddp_bucket_mib: int | None = choice(
        "MiB of gradients that DDP sends together; unset = torch's 25. Smaller starts earlier, larger sends less often",
        scopes=("step",),
        exactness="rounding",
        low=1,
        high=4096,
        in_forecasts=False,
        requires=(_WITH_DDP,),
    )
    ddp_static_graph: bool | None = choice(
        "every step uses the same parameters, so DDP looks for unused ones in its first step alone",
        scopes=("step",),
        exactness="rounding",
        in_forecasts=False,
        requires=(
            _WITH_DDP,
            Requirement("micro_batches", _in(None, 1), _ONE_PASS),
            Requirement("out_of_memory", _in("raise"), _ONE_PASS, "set out_of_memory = 'raise'"),
        ),
    )
    fsdp_dtype: Literal["bf16"] | None = choice(
        "dtype in which FSDP gathers parameters and computes with them; gradients are averaged and kept in fp32",
        scopes=("step",),
        exactness="reduced",
        in_forecasts=False,
        requires=(_WITH_FSDP,),
    )
    fsdp_keep_gathered: bool | None = choice(
        "FSDP keeps gathered parameters from the forward to the backward pass: gathered once a step, more memory",
        scopes=("step",),
        exactness="bit-identical",
        in_forecasts=False,
        requires=(_WITH_FSDP,),
    )
    fsdp_cpu_offload: bool | None = choice(
        "FSDP keeps parameters, gradients and optimizer state in the host's memory, and updates them there (CUDA only)",
        scopes=("step",),
        exactness="rounding",
        in_forecasts=False,
        requires=(
            _WITH_FSDP,
            Requirement(
                "precision",
                lambda kind: kind != "fp16",
                "a loss scaler needs gradients on the GPU",
                "set fsdp_dtype = 'bf16' instead",
            ),
        ),
    )
    tensor_ranks: int | None = choice(
        "neighbouring ranks that share each layer, as parallel = 'tensor' does, and a batch; fsdp is across the others",
        scopes=("step", "batches"),
        exactness="rounding",
        low=2,
        high=1024,
        in_forecasts=False,
        requires=(
            _WITH_FSDP,
            Requirement("fsdp_cpu_offload", _in(None, False), "parts of layers stay on the GPU", "drop one of the two"),
        ),
    )

    micro_batches: int | None = choice(
        "parts that each batch is split into, for one optimizer step; the batch does not grow",
        scopes=("step",),
        exactness="rounding",
        aim="memory",
        low=1,
        high=65536,
    )
    activation_offload: bool | None = choice(
        "activations wait in the host's memory for the backward pass, page-locked (CUDA only)",
        scopes=("script", "step"),
        exactness="bit-identical",
        aim="memory",
        levers=("activation_offload:ActivationOffload",),
        requires=(
            _ONE_MODEL,
            _WHOLE_PARAMETERS,
        ),
    )
    activation_checkpointing: Literal["block", "selective"] | None = choice(
        "recompute activations in backward: block = all of each repeated block, selective = not matmuls and attention",
        scopes=("script", "step"),
        exactness="bit-identical",
        aim="memory",
        levers=("activation_checkpointing:ActivationCheckpointing",),
        requires=(_ONE_MODEL,),
    )
    checkpointed_blocks: int | None = choice(
        "of how many repeated blocks, from the first, activations are recomputed; unset = of all",
        scopes=("step",),
        exactness="bit-identical",
        aim="memory",
        low=1,
        high=4096,
        requires=(
            Requirement(
                "activation_checkpointing",
                _is_set,
                "it limits the number of checkpointed blocks",
                "set activation_checkpointing = 'block'",
            ),
        ),
    )
    optimizer_in_backward: bool | None = choice(
        "update each parameter as soon as its gradient is there, and free it: gradients are never held together",
        scopes=("script", "step"),
        exactness="bit-identical",
        aim="memory",
        levers=("optimizer_in_backward:OptimizerInBackward",),
        requires=(
            _ONE_MODEL,
            _WHOLE_PARAMETERS,
            Requirement("micro_batches", _in(None, 1), _ALL_GRADIENTS),
            Requirement("nonfinite", _in(None), _ALL_GRADIENTS),
            Requirement("precision", lambda kind: kind != "fp16", _ALL_GRADIENTS),
            Requirement("zero_grad", _in(None), "that reads freed gradients as zeros"),
        ),
    )
    optimizer_state: Literal["8bit"] | None = choice(
        "Adam's two moments: 8bit = one byte an element, with a scale for each 256 (needs torchao)",
        scopes=("script", "step"),
        exactness="reduced",
        aim="memory",
        levers=("optimizer_state:LowBitState",),
        requires=(
            Requirement(
                "parallel",
                _in(None, "dp", "ddp"),
                "it needs whole parameters and their whole state, of which each rank then has a part",
                "drop one of the two, or set parallel = 'ddp'",
            ),
        ),
    )
    out_of_memory: Literal["split", "exact", "raise"] | None = choice(
        "a batch that does not fit: split it and go on; exact = only where no layer mixes samples; raise = end the run",
        scopes=("step",),
        exactness="rounding",
    )
    nonfinite: Literal["skip", "raise"] | None = choice(
        "a gradient with inf or NaN: skip that step and count it, or raise; unset = not looked for (fp16 always skips)",
        scopes=("step",),
        exactness="bit-identical",
        in_forecasts=False,
    )

    weights: Literal["int8", "int4"] | None = choice(
        "bits in which the linear layers' weights are held; int8 = one scale a row, int4 = one a group of 32",
        scopes=("predict", "generate"),
        exactness="reduced",
    )
    activations: Literal["int8"] | None = choice(
        "inputs of the linear layers rounded to 8 bits, one scale a token, so that products run in int8",
        scopes=("predict",),
        exactness="reduced",
        requires=(
            Requirement(
                "weights", _in("int8"), "products of whole numbers need both in 8 bits", "set weights = 'int8'"
            ),
        ),
    )
    batching: Literal["packed", "equal", "padded"] | None = choice(
        "ragged inputs: packed = one row, no padding; equal = of one length; padded = to the longest",
        scopes=("predict",),
        exactness="rounding",
    )
    batch_tokens: int | None = choice(
        "ragged inputs: tokens of one batch, padding included",
        scopes=("predict",),
        exactness="rounding",
        low=1,
        high=2**30,
    )
    fold_batch_norm: bool | None = choice(
        "multiply batch norms into the convolutions before them", scopes=("predict",), exactness="rounding"
    )
    speculation: Literal["lookup"] | None = choice(
        "guess tokens from the text so far and check several at once; same distribution",
        scopes=("generate",),
        exactness="rounding",
    )


@functools.cache
def declared() -> dict[str, Declared]:
    """Each choice by name, in the order of declaration."""
    return {one.name: one.metadata["declared"] for one in fields(Choices)}


def choice_names() -> tuple[str, ...]:
    """The keys of [plan], in the order of declaration."""
    return tuple(declared())


def contradiction(choices: Mapping[str, ChoiceValue]) -> tuple[str, str, str] | None:
    """(what, limit, remedy) of the first two choices that exclude each other; None if there are none."""
    for name, value in choices.items():
        for rule in declared()[name].requires if value else ():
            other = choices.get(rule.other)
            if not rule.allows(other):
                state = "unset" if other is None else _said(other)
                return f"{name} is {_said(value)} while {rule.other} is {state}", rule.why, rule.remedy
    return None


def worst(kinds: Iterable[Exactness]) -> Exactness:
    """The least exact of them."""
    return max(kinds, key=EXACTNESS_ORDER.index, default="bit-identical")


def allowed(exactness: Exactness, limit: Exactness) -> bool:
    """Is `exactness` within `limit`?"""
    return EXACTNESS_ORDER.index(exactness) <= EXACTNESS_ORDER.index(limit)


def _said(value: object) -> str:
    return repr(value) if isinstance(value, str) else toml_value(value)
