"""Which levers are offered where, and that the list is sound."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest

from flatout.levers import allocator, fused_norm
from flatout.levers.catalogue import INTERACTING, LEVERS, levers_of
from flatout.levers.lever import Choice, Lever, choices_from_json, choices_of_plan
from flatout.levers.observed import LoaderSeen, ModuleSeen, Observed, OptimizerSeen
from flatout.machine.description import Cpu, Gpu, Machine, Versions
from flatout.plan import Plan
from flatout.plan_choices import EXACTNESS_ORDER, SCOPES, declared


def machine(*, cpu: tuple[str, ...] = ("fp32",), gpu: tuple[str, ...] | None = None, cores: int = 8) -> Machine:
    return Machine(
        fingerprint="f",
        cpu=Cpu(
            name="c",
            model_id="m",
            physical_cores=cores // 2 or 1,
            logical_cores=cores,
            available_cores=cores,
            fast_dtypes=cpu,
        ),
        memory_total_bytes=1 << 34,
        memory_available_bytes=1 << 33,
        devices=() if gpu is None else (Gpu(name="g", index=0, fast_dtypes=gpu),),
        versions=Versions(python="3", operating_system="o", flatout="0", torch="2.13.0"),
    )


LOADER = LoaderSeen(
    dataset="TensorDataset",
    samples=100,
    batch_size=4,
    workers=0,
    pin_memory=False,
    persistent_workers=False,
    fetch="batched",
)
OPTIMIZER = OptimizerSeen(kind="Adam", parameters=4, can_fuse=True, can_foreach=True)
MODULE = ModuleSeen(kind="Net", parameters=9, convolutions=2, dtypes=("float32",))
WIDE = replace(MODULE, widest_output=50_257)
NORMED = replace(MODULE, batch_norms=1)
SEEN = Observed(optimizers=(OPTIMIZER,), loaders=(LOADER,), modules=(MODULE,), threads=8)
ON_GPU = replace(SEEN, device="cuda:0")
CPU, AMX = machine(), machine(cpu=("fp32", "bf16"))
AMPERE, TURING, OLD = machine(gpu=("fp32", "tf32", "bf16", "fp16")), machine(gpu=("fp32", "fp16")), machine(gpu=())

WITH_GPU = replace(AMPERE, versions=replace(AMPERE.versions, cuda="12.8"))


def lever(name: str) -> Lever:
    return next(one for one in LEVERS if one.name == name)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(allocator, "preloaded_libraries", lambda: "")
    monkeypatch.setattr(fused_norm, "_obstacle", lambda: None)
    monkeypatch.setattr(allocator, "_library", lambda name: "libjemalloc.so.2" if name == "jemalloc" else None)


def test_the_list_is_sound() -> None:
    assert len({one.name for one in LEVERS}) == len(LEVERS)
    assert {name for pair in INTERACTING for name in pair} <= {one.plan_field for one in LEVERS}
    for scope in SCOPES:
        for one in levers_of(scope):
            assert scope in declared()[one.plan_field].scopes
            assert f"{type(one).__module__.rpartition('.')[2]}:{type(one).__name__}" in one.declared.levers
    assert LEVERS[0].plan_field == "device"  # every other lever is another one on another device
    live = [one for one in LEVERS if one.switch == "live" and not one.compiles]
    late = ("activation_offload", "activation_checkpointing", "optimizer_in_backward")  # around what was compiled
    assert [one.plan_field for one in live[-3:]] == list(late)
    # The kernels' layers come before the chunked loss, which is asked first: it takes the last layer from them.
    apart = (*late, "kernels")
    order = [EXACTNESS_ORDER.index(one.exactness) for one in live if one.plan_field not in apart]
    assert order == sorted(order)  # compile alone comes after what it builds on
    assert [one.switch for one in LEVERS[2:]] == sorted(
        (one.switch for one in LEVERS[2:]), key=("live", "once", "loader", "process").index
    )


OFFERED: list[tuple[str, Machine, Observed, tuple[Any, ...]]] = [
    ("moved to the GPU", WITH_GPU, SEEN, ("cuda",)),
    ("trained on the CPU", WITH_GPU, ON_GPU, ("cpu",)),
    ("batched fetch", CPU, SEEN, ("batched",)),
    ("batched fetch", AMPERE, ON_GPU, ("batched",)),
    ("malloc retains memory", CPU, SEEN, ("retain",)),
    ("flush denormals", CPU, SEEN, (True,)),
    ("threads", CPU, SEEN, (4, 2, 1)),
    ("threads", CPU, replace(SEEN, threads=4), (8, 2, 1)),
    ("optimizer", CPU, SEEN, ("fused", "foreach")),
    ("optimizer", AMPERE, ON_GPU, ("fused",)),
    ("cudnn.benchmark", AMPERE, ON_GPU, (True,)),
    ("channels_last", CPU, SEEN, ("channels_last",)),
    ("autocast", AMX, SEEN, ("bf16",)),
    ("autocast", AMPERE, ON_GPU, ("bf16",)),
    ("autocast", TURING, ON_GPU, ("fp16",)),
    ("matmul precision", AMX, SEEN, ("medium",)),
    ("matmul precision", AMPERE, ON_GPU, ("high",)),
    ("torch.compile", CPU, SEEN, ("default",)),
    ("torch.compile", CPU, replace(SEEN, modules=(replace(MODULE, repeated_block="B"),)), ("default", "regional")),
    ("torch.compile", AMPERE, ON_GPU, ("default", "reduce-overhead", "max-autotune")),
    (
        "torch.compile",
        AMPERE,
        replace(ON_GPU, step_seconds=2e-3, operations_per_step=200),
        ("reduce-overhead", "default", "max-autotune"),
    ),
    ("pinned memory", AMPERE, ON_GPU, (True,)),
    ("overlapped copies", AMPERE, ON_GPU, (True,)),
    ("allocator", CPU, SEEN, ("jemalloc",)),
    ("fused attention", CPU, replace(SEEN, modules=(replace(MODULE, attention_by_hand="Head"),)), ("fused",)),
    ("fused linear + cross-entropy", CPU, replace(SEEN, modules=(WIDE,)), ("chunked",)),
    ("fused batch norm", CPU, replace(SEEN, modules=(NORMED,)), ("fused",)),
]


@pytest.mark.parametrize(("name", "here", "seen", "values"), OFFERED)
def test_offered(name: str, here: Machine, seen: Observed, values: tuple[Any, ...]) -> None:
    found = lever(name).applies(here, seen)
    assert found.values == values
    assert found.reason
    for value in values:
        choices = {lever(name).plan_field: value}
        assert Plan(**choices).choices() == choices
        assert Choice(lever(name), value) in choices_of_plan(choices, LEVERS)
        assert lever(name).label(value)


WORKED = replace(LOADER, workers=2)
REFUSED: list[tuple[str, Machine, Observed, str]] = [
    ("moved to the GPU", CPU, SEEN, "no GPU"),
    ("moved to the GPU", AMPERE, SEEN, "torch can use"),  # without a CUDA build
    ("moved to the GPU", WITH_GPU, ON_GPU, "on the GPU"),
    ("moved to the GPU", WITH_GPU, replace(SEEN, names_device=True), "itself"),
    ("moved to the GPU", WITH_GPU, replace(SEEN, modules=()), "no module"),
    ("trained on the CPU", WITH_GPU, SEEN, "on the CPU"),
    ("trained on the CPU", WITH_GPU, replace(ON_GPU, autocast_in_script=True), "mixed precision"),
    ("trained on the CPU", WITH_GPU, replace(ON_GPU, captures_graphs="it mentions graphs"), "graphs"),
    ("batched fetch", CPU, replace(SEEN, loaders=()), "no DataLoader"),
    ("batched fetch", CPU, replace(SEEN, loaders=(WORKED,)), "set by the script"),
    ("batched fetch", CPU, replace(SEEN, loaders=(replace(LOADER, fetch="", fetch_obstacle="why"),)), "why"),
    ("malloc retains memory", AMPERE, ON_GPU, "GPU"),
    ("flush denormals", CPU, replace(SEEN, flush_denormals=True), "already"),
    ("flush denormals", AMPERE, ON_GPU, "GPU"),
    ("threads", CPU, replace(SEEN, threads_set_by_script=True), "already"),
    ("threads", AMPERE, ON_GPU, "GPU"),
    ("threads", machine(cores=1), replace(SEEN, threads=1), "one core"),
    ("optimizer", CPU, replace(SEEN, optimizers=()), "no optimizer"),
    ("optimizer", CPU, replace(SEEN, optimizers=(replace(OPTIMIZER, fused=True, obstacle="chose"),)), "chose"),
    ("optimizer", CPU, replace(SEEN, optimizers=(replace(OPTIMIZER, can_fuse=False, can_foreach=False),)), "faster"),
    ("cudnn.benchmark", CPU, SEEN, "CPU"),
    ("cudnn.benchmark", AMPERE, replace(ON_GPU, cudnn_benchmark=True), "already"),
    ("cudnn.benchmark", AMPERE, replace(ON_GPU, deterministic_algorithms=True), "deterministic"),
    ("cudnn.benchmark", AMPERE, replace(ON_GPU, modules=(replace(MODULE, convolutions=0),)), "no convolutions"),
    ("channels_last", CPU, replace(SEEN, modules=(replace(MODULE, convolutions=0),)), "no 2-d"),
    ("channels_last", CPU, replace(SEEN, modules=(replace(MODULE, channels_last=True),)), "already"),
    ("autocast", CPU, SEEN, "no fast 16-bit"),
    ("autocast", OLD, ON_GPU, "no fast 16-bit"),
    ("autocast", AMX, replace(SEEN, autocast_in_script=True), "already"),
    ("autocast", AMX, replace(SEEN, modules=()), "no module"),
    ("autocast", AMX, replace(SEEN, modules=(replace(MODULE, dtypes=("float64",)),)), "not fp32"),
    ("autocast", TURING, replace(ON_GPU, scaler_in_script=True), "no fast 16-bit"),
    ("matmul precision", CPU, SEEN, "no bf16"),
    ("matmul precision", TURING, ON_GPU, "no TF32"),
    ("matmul precision", AMX, replace(SEEN, matmul_precision="high"), "already"),
    ("matmul precision", AMX, replace(SEEN, modules=(replace(MODULE, dtypes=("float64",)),)), "not fp32"),
    ("torch.compile", CPU, replace(SEEN, compiled_in_script=True), "already"),
    ("fused attention", CPU, SEEN, "no module computes attention"),
    ("fused linear + cross-entropy", CPU, replace(SEEN, modules=(replace(WIDE, widest_output=65),)), "65 outputs"),
    ("fused batch norm", CPU, SEEN, "no batch norms"),
    ("fused batch norm", AMPERE, replace(ON_GPU, modules=(NORMED,)), "not on the CPU"),
    ("fused batch norm", CPU, replace(SEEN, modules=(replace(NORMED, compiled=True),)), "torch.compile"),
    ("fused batch norm", CPU, replace(SEEN, modules=(NORMED,), differentiates_twice="create_graph"), "create_graph"),
    ("fused linear + cross-entropy", CPU, replace(SEEN, modules=(WIDE,), compiled_in_script=True), "already"),
    ("fused linear + cross-entropy", CPU, replace(SEEN, modules=(WIDE,), optimizers=()), "no optimizer"),
    ("torch.compile", CPU, replace(SEEN, modules=(replace(MODULE, compiled=True),)), "already"),
    ("torch.compile", CPU, replace(SEEN, modules=()), "no module"),
    ("pinned memory", CPU, SEEN, "CPU"),
    ("overlapped copies", CPU, SEEN, "CPU"),
    ("overlapped copies", AMPERE, replace(ON_GPU, orders_device_work="train.py mentions Stream("), "waits for what"),
    ("pinned memory", AMPERE, replace(ON_GPU, loaders=(replace(LOADER, pin_memory=True),)), "no loader"),
    ("allocator", AMPERE, ON_GPU, "GPU"),
]


@pytest.mark.parametrize(("name", "here", "seen", "why"), REFUSED)
def test_refused(name: str, here: Machine, seen: Observed, why: str) -> None:
    found = lever(name).applies(here, seen)
    assert not found
    assert why in found.reason


def test_no_compiler_no_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "g++" in lever("torch.compile").applies(CPU, SEEN).reason


def test_a_preloaded_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "preloaded_libraries", lambda: "/usr/lib/libjemalloc.so.2")
    assert not lever("malloc retains memory").applies(CPU, SEEN)
    assert not lever("allocator").applies(CPU, SEEN)
    assert lever("allocator").environment("jemalloc") == {"LD_PRELOAD": "libjemalloc.so.2"}


def test_labels() -> None:
    assert lever("autocast").label("bf16") == "bf16 autocast"
    assert lever("threads").label(2) == "threads 2"
    assert lever("flush denormals").label(True) == "flush denormals"
    assert lever("batched fetch").label("cached") == "batched fetch"  # as older plans say
    assert lever("torch.compile").label("default") == "torch.compile"
    assert lever("matmul precision").label("high") == "TF32 matmul"


def test_nothing_that_a_script_may_change_is_kept_or_copied_to_other_processes() -> None:
    chosen = {"fetch": "cached", "loader_workers": 2, "persistent_workers": True, "data_device": "cuda"}
    assert [choice.field for choice in choices_of_plan(chosen, LEVERS)] == ["fetch"]


def test_choices_travel_as_json() -> None:
    choices = [Choice(lever("threads"), 2), Choice(lever("allocator"), "jemalloc")]
    assert choices_from_json([choice.to_json() for choice in choices], LEVERS) == choices
    assert choices_of_plan({"allocator": "jemalloc", "threads": 2}, LEVERS) == choices


def test_what_was_seen_travels_as_json() -> None:
    assert Observed.from_json(SEEN.to_json()) == SEEN
    assert SEEN.share("data") is None
