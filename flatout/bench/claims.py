"""The figures that the guides state, and the run that measures each of them here.

They are the guides' statements in our words. Two guides that contradict each other are two claims.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import fields

import torch

from flatout.bench import system_measures, training_measures
from flatout.bench.claim import Case, Claim, ClaimResult, ClaimsResult, Statement
from flatout.bench.process import in_child
from flatout.bench.table import installed_versions
from flatout.bench.workload import Setup
from flatout.errors import FlatoutError
from flatout.machine.with_ceilings import machine_with_ceilings
from flatout.timing import LoadWatch

LESSON = "PyTorch GPU Acceleration (lesson)"
TRAINING = "GPU Training with PyTorch on CUDA"
CHAPTER = "Using torch with CUDA (chapter 17)"
DEVELOPERS = "PyTorch for CUDA developers"
GUIDE = "Easily Mastering GPU PyTorch in 2024"

CLAIMS = (
    # precision
    Claim(
        key="amp-2x",
        says="mixed precision trains about 2x as fast",
        guides=(LESSON,),
        low=1.8,
        measure=training_measures.amp_speed,
    ),
    Claim(
        key="amp-20-30",
        says="mixed precision trains 20 to 30 % faster",
        guides=(TRAINING,),
        low=1.2,
        high=1.3,
        measure=training_measures.amp_speed,
    ),
    Claim(
        key="amp-memory",
        says="mixed precision halves the memory",
        guides=(LESSON, TRAINING),
        quantity="memory",
        low=1.9,
        measure=training_measures.amp_memory,
    ),
    Claim(
        key="amp-accuracy",
        says="mixed precision costs hardly any accuracy",
        guides=(TRAINING,),
        quantity="share",
        low=0.99,
        measure=training_measures.amp_accuracy,
    ),
    Claim(
        key="tf32-3x",
        says="TF32 makes matrix products 3x as fast",
        guides=(DEVELOPERS,),
        low=2.7,
        needs="cuda",
        measure=training_measures.tf32,
    ),
    # compilation
    Claim(
        key="compile-20-40",
        says="torch.compile gives 20 to 40 % more speed without code changes",
        guides=(DEVELOPERS,),
        low=1.2,
        high=1.4,
        measure=training_measures.compile_speed,
    ),
    Claim(
        key="compile-1.3-2x",
        says="torch.compile gives 1.3x to 2x",
        guides=(DEVELOPERS,),
        low=1.3,
        high=2.0,
        measure=training_measures.compile_speed,
    ),
    Claim(
        key="compile-first-call",
        says="the first call of a compiled model is slow, later ones are fast (10x or more apart)",
        guides=(LESSON,),
        low=10.0,
        measure=training_measures.first_call,
    ),
    Claim(
        key="compile-reduce-overhead",
        says="the mode reduce-overhead is faster than the default mode",
        guides=(LESSON, DEVELOPERS),
        low=1.03,
        needs="cuda",
        measure=training_measures.reduce_overhead,
    ),
    # layouts, gradients, memory
    Claim(
        key="channels-last",
        says="channels_last makes convolutions 10 to 30 % faster on modern GPUs",
        guides=(DEVELOPERS,),
        low=1.1,
        high=1.3,
        measure=training_measures.channels_last,
    ),
    Claim(
        key="cudnn-benchmark",
        says="cudnn.benchmark speeds up convolutions of fixed size",
        guides=(DEVELOPERS, CHAPTER),
        low=1.03,
        needs="cuda",
        measure=system_measures.cudnn_benchmark,
    ),
    Claim(
        key="set-to-none",
        says="zero_grad(set_to_none=True) is faster than filling gradients with zeros",
        guides=(DEVELOPERS,),
        low=1.03,
        measure=training_measures.set_to_none,
    ),
    Claim(
        key="checkpointing-memory",
        says="activation checkpointing saves memory",
        guides=(LESSON, TRAINING, GUIDE),
        quantity="memory",
        low=1.2,
        measure=training_measures.checkpointing_memory,
    ),
    Claim(
        key="checkpointing-time",
        says="activation checkpointing costs time",
        guides=(LESSON, TRAINING, GUIDE),
        quantity="slowdown",
        low=1.03,
        measure=training_measures.checkpointing_time,
    ),
    Claim(
        key="accumulation-memory",
        says="gradient accumulation trains a large batch in less memory",
        guides=(TRAINING,),
        quantity="memory",
        low=1.2,
        measure=training_measures.accumulation_memory,
    ),
    Claim(
        key="no-gradients",
        says="inference without gradients needs less memory",
        guides=(DEVELOPERS, CHAPTER),
        quantity="memory",
        low=1.2,
        measure=training_measures.without_gradients,
    ),
    # loading
    Claim(
        key="loader-workers",
        says="loader workers feed a device that waits for its data",
        guides=(TRAINING, CHAPTER),
        low=1.1,
        measure=system_measures.loader_workers,
    ),
    Claim(
        key="pinned-copies",
        says="pinned memory makes copies to the GPU faster",
        guides=(LESSON, DEVELOPERS),
        low=1.1,
        needs="cuda",
        measure=system_measures.pinned_copies,
    ),
    # devices
    Claim(
        key="gpu-10-50x",
        says="a GPU trains 10x to 50x as fast as the CPU",
        guides=(TRAINING,),
        low=10.0,
        high=50.0,
        needs="cuda",
        measure=system_measures.gpu_against_cpu,
    ),
    Claim(
        key="tiny-on-gpu",
        says="a tiny model can be slower on the GPU than on the CPU",
        guides=(CHAPTER,),
        low=1.0,
        needs="cuda",
        measure=system_measures.tiny_on_gpu,
    ),
    Claim(
        key="ddp-linear",
        says="DistributedDataParallel scales nearly linearly over GPUs, DataParallel does not",
        guides=(TRAINING, CHAPTER),
        low=1.8,
        needs="two GPUs",
        why_not="the bench does not start ranks yet; python -m benchmarks.parallel.overhead measures their scaling",
    ),
    # the table of rates
    Claim(
        key="resnet50-rate",
        says="ResNet-50 trains at 1,850 images/s (RTX 4090, batch 64, AMP)",
        guides=(DEVELOPERS,),
        quantity="rate",
        low=1850.0,
        unit="images",
        measure=system_measures.resnet_rate,
    ),
    Claim(
        key="bert-large-rate",
        says="BERT-Large encodes 320 sentences/s (RTX 4090, batch 32, torch.compile)",
        guides=(DEVELOPERS,),
        quantity="rate",
        low=320.0,
        unit="sentences",
        packages=("transformers",),
        measure=system_measures.bert_rate,
    ),
    Claim(
        key="gpt2-rate",
        says="GPT-2 generates 145 tokens/s (RTX 4090, KV cache)",
        guides=(DEVELOPERS,),
        quantity="rate",
        low=145.0,
        unit="tokens",
        packages=("transformers",),
        measure=system_measures.generation_rate,
    ),
    Claim(
        key="kv-cache",
        says="a KV cache makes generation faster",
        guides=(DEVELOPERS,),
        low=1.1,
        packages=("transformers",),
        measure=system_measures.cache_speed,
    ),
    # other frameworks
    Claim(
        key="jax",
        says="JAX is better optimized by XLA",
        guides=(DEVELOPERS,),
        low=1.03,
        packages=("jax",),
        measure=system_measures.jax_speed,
    ),
    Claim(
        key="tensorflow",
        says="TensorFlow is better in production and on mobile devices",
        guides=(DEVELOPERS,),
        low=1.0,
        why_not="the guide states no figure and names no task",
    ),
)

NOT_REACHED = "not measured: the bench was interrupted before it"
Progress = Callable[[str], None]


def measure_claims(claims: Sequence[Claim], setup: Setup, seconds: float, progress: Progress) -> ClaimsResult:
    """Measure each claim in a process of its own, `seconds` for each of its cases; claims that are measured alike share
    it. `progress` is called with what is being done. Ctrl-C ends it early, with what was measured until then."""
    load = LoadWatch()
    machine = machine_with_ceilings(progress)
    cases: dict[object, Sequence[Case] | str] = {}
    results = []
    interrupted = False
    for number, claim in enumerate(claims, start=1):
        reason = _why_not(claim)
        if not reason and claim.measure not in cases:
            if not interrupted:
                progress(f"claim {number} of {len(claims)}: {claim.says}")
            try:
                cases[claim.measure] = NOT_REACHED if interrupted else _measured(claim, setup, seconds)
            except KeyboardInterrupt:  # what was measured is kept
                interrupted = True
                cases[claim.measure] = NOT_REACHED
        found = reason or cases[claim.measure]
        results.append(_result(claim, found))
    seen = load.read()
    return ClaimsResult(
        machine=machine,
        device=setup.device,
        quick=setup.quick,
        versions=installed_versions("jax"),
        contended=None if seen is None else seen.contended,
        claims=tuple(results),
    )


def _why_not(claim: Claim) -> str:
    """Why it cannot be measured here; '' if it can."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if claim.needs == "two GPUs" and gpus < 2:
        return f"it needs two GPUs, and torch sees {gpus}"
    if claim.needs == "cuda" and not gpus:
        return "it needs a GPU, and torch sees none"
    missing = next((name for name in claim.packages if importlib.util.find_spec(name) is None), None)
    return f"{missing} is not installed" if missing else claim.why_not


def _measured(claim: Claim, setup: Setup, seconds: float) -> Sequence[Case] | str:
    """Its cases, or why there are none."""
    assert claim.measure is not None
    try:
        found: Sequence[Case] = in_child(claim.measure, setup, seconds)
    except FlatoutError as error:
        return f"it failed: {error}"
    return found


def _result(claim: Claim, found: Sequence[Case] | str) -> ClaimResult:
    stated = {one.name: getattr(claim, one.name) for one in fields(Statement)}
    if isinstance(found, str):
        return ClaimResult(**stated, cases=(), reason=found)
    return ClaimResult(**stated, cases=tuple(found))
