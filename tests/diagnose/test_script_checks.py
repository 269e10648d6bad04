"""Each check of a script fires on the facts of a fault, and says nothing on those of a healthy script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.diagnose.check import Check
from flatout.diagnose.checks import CHECKS, check_facts
from flatout.diagnose.facts import Facts, RunFacts
from flatout.diagnose.finding import Finding
from flatout.diagnose.learning_checks import trend
from flatout.levers.observed import LoaderSeen, ModuleSeen, Observed, OptimizerSeen
from flatout.machine.ceilings import Ceilings, Peak
from flatout.machine.description import Gpu, Machine
from flatout.profiling.profile import IdleCause, KernelRow, ModuleRow, OperatorRow, Profile, StepParts, WaitRow
from flatout.script.behaviour_seen import (
    BackwardSeen,
    Behaviour,
    BroadcastSeen,
    CallSeen,
    ChannelsLastSeen,
    ClipSeen,
    CompileSeen,
    ForwardSeen,
    GradientsSeen,
    GraphBreakSeen,
    IdleSchedulerSeen,
    LayerGradients,
    LineTime,
    MadeSeen,
    PaddingSeen,
    ParallelSeen,
    ParametersSeen,
    RecurrentSeen,
    RemadeOptimizerSeen,
    SchedulerSeen,
    WorkersSeen,
)
from flatout.script.growth import Growth
from flatout.script.process_record import ProcessRecord, own_seconds
from flatout.script.source_facts import SourceFacts

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "machine_two_cores.json").read_text())
MACHINE = Machine.from_json({**RECORDED, "ceilings": None})
CORES = MACHINE.cpu.available_cores
LINE = ("train.py", 12, "loss.backward()")
EVALUATION_LINE = ("train.py", 20, "model(x)")
STEP = 0.1
SOURCE = SourceFacts.of(
    {
        "train.py": "import torch\ntorch.manual_seed(0)\nloader = DataLoader(data)\n"
        "for x in loader:\n    opt.zero_grad()\n    loss = model(x)\n    loss.backward()\n    opt.step()\n"
        "    history.append(loss.item())\n"
    }
)


def source(text: str) -> SourceFacts:
    return SourceFacts.of({"train.py": text})


def operator(**given: Any) -> OperatorRow:
    known = {"name": "aten::mm", "operator_class": "matmul", "dtype": "float32", "calls": 1, "device": "cpu"} | given
    return OperatorRow(host_seconds=known["seconds"], **known)


def profile(**given: Any) -> Profile:
    parts = StepParts(
        **{"data": 0.002, "copies": 0.0, "forward": 0.03, "backward": 0.05, "optimizer": 0.01}
        | {"communication": 0.0, "idle": 0.0, "other": 0.008}
        | given.pop("parts", {})
    )
    known: dict[str, Any] = {
        "name": "train.py",
        "device": "cpu",
        "step_kind": "optimizer",
        "steps": 5,
        "timed_steps": 9,
        "warm_up_steps": 3,
        "step_seconds": STEP,
        "profiled_step_seconds": STEP,
        "operators": (operator(seconds=0.06),),
        "operator_calls": 100.0,
    }
    return Profile(parts=parts, **{**known, **given})


def behaviour(**given: Any) -> Behaviour:
    known: dict[str, Any] = {
        "steps": 50,
        "seconds": 5.0,
        "zeroed_steps": 50,
        "backwards": (BackwardSeen(line=LINE, calls=50, per_step=1.0, reduction="mean"),),
        "forwards": (TRAINING,),
        "seeded": True,
        "losses": tuple(2.0 - 0.01 * step for step in range(50)),
        "weights_move": True,
        "unchanged_share": 0.01,
        "optimizer_dtypes": ("float32",),
        "optimizer_lines": (LINE,),
        "devices": {"cpu": 100},
        "page_fault_seconds": 1e-6,
        "system_seconds": 0.05,
    }
    return Behaviour(**{**known, **given})


BACKWARD = BackwardSeen(line=LINE, calls=50, per_step=1.0, reduction="mean")
TRAINING = ForwardSeen(
    module="Net", line=LINE, calls=50, training=True, grad=True, used=50, longest_run=1, updated=True,
    mode_layers=("Dropout",),
)  # fmt: skip
FINITE = tuple(
    operator(name=name, operator_class="other", calls=40, seconds=0.001, line="train.py:12")
    for name in ("aten::isfinite", "aten::all")
)
SOLVER = operator(name="aten::mul", operator_class="pointwise", calls=3000, seconds=0.08, line="train.py:12")
"""Of a line that calls a library, which checks for NaN now and then."""
BY_ELEMENT = operator(name="aten::item", operator_class="other", calls=640, seconds=0.019, line="train.py:12")
UNBIND = operator(
    name="aten::unbind", operator_class="other", calls=1, seconds=0.019, shapes="[100]", line="train.py:12"
)
WRONG_LSTM = RecurrentSeen(inputs=512, units=1024, dtype="bfloat16", gradient_error=0.98)
LOSS = ForwardSeen(module="CrossEntropyLoss", line=LINE, calls=50, training=True, grad=True, used=50)
EVALUATION = ForwardSeen(
    module="Net", line=EVALUATION_LINE, calls=40, training=False, grad=False, longest_run=10, updated=True,
    mode_layers=("Dropout",),
)  # fmt: skip


def observed(**given: Any) -> Observed:
    known: dict[str, Any] = {
        "step_seconds": STEP,
        "breakdown_seconds": {"data": 0.002, "forward": 0.03, "backward": 0.05, "optimizer": 0.01, "other": 0.008},
        "optimizers": (OptimizerSeen(kind="Adam", parameters=4),),
        "loaders": (LoaderSeen(dataset="D", samples=None, batch_size=64, workers=0, pin_memory=False,
                               persistent_workers=False, fetch="batched"),),
        "modules": (ModuleSeen(kind="Net", parameters=100),),
        "threads": CORES,
        "page_faults_per_step": 100.0,
    }  # fmt: skip
    return Observed(**{**known, **given})


def facts(**given: Any) -> Facts:
    known: dict[str, Any] = {
        "command": "train.py",
        "observed": observed(),
        "profile": profile(),
        "behaviour": behaviour(),
        "source": SOURCE,
        "machine": MACHINE,
        "run": RunFacts(steps=50),
    }
    return Facts(**{**known, **given})


def time_of(activity: str, share: float, line: tuple[str, int, str] = LINE, samples: int = 100) -> LineTime:
    return LineTime(line=line, activity=activity, seconds=share * STEP, samples=samples, low_share=0.8 * share)  # type: ignore[arg-type]


def ceilings(device: str = "cpu", **peaks: float) -> Ceilings:
    made = {
        name: Peak(value=value, low=value, high=value, unit="FLOP/s", samples=9, how="")
        for name, value in peaks.items()
    }
    return Ceilings(
        device=device, gemm_flops_per_second=made, quick=True, threads=2, measured_at="", torch_version="2.13"
    )


def layers(*middles: float, steps: int = 8) -> tuple[LayerGradients, ...]:
    return tuple(LayerGradients(name=f"layer{n}", depth=n, rms=(size,) * steps) for n, size in enumerate(middles))


def gradients(**given: Any) -> GradientsSeen:
    known: dict[str, Any] = {
        "module": "Net",
        "layers": layers(1e-3, 2e-3, 2e-3, 1e-3),
        "norms": (1.0,) * 10,
        "weight_norm": 10.0,
    }
    return GradientsSeen(**{**known, **given})


def on_gpu(**given: Any) -> Facts:
    profiled = {"device": "cuda:0", "parts": {"idle": 0.0}} | given.pop("profiled", {})
    return facts(
        profile=profile(**profiled),
        observed=observed(device="cuda:0", **given.pop("seen", {})),
        behaviour=behaviour(device="cuda:0", page_fault_seconds=None, **given.pop("behaved", {})),
        **given,
    )


def with_growth(size_bytes: int) -> Facts:
    growth = Growth(first_bytes=1 << 30, last_bytes=(1 << 30) + size_bytes, seconds=100.0, steps=50)
    return facts(run=RunFacts(steps=50, growth=growth))


def loading(**given: Any) -> Facts:
    """A quarter of a step waits for data."""
    times = given.pop("times", (time_of("loader", 0.25),))
    return facts(profile=profile(parts={"data": 0.04}), behaviour=behaviour(times=times), **given)


REPEATING = """
for x in loader:
    for {} in range(4):
        loss = f(model(x{}))
        loss.backward()
    opt.step()
"""
"""The same four times, or each of four tasks."""
ACCUMULATING = source("for i, x in enumerate(loader):\n    loss.backward()\n    if i % 4 == 3:\n        opt.step()\n")
GUARDED = """
seen = 0
for i, x in enumerate(loader):
    loss.backward()
    seen += 1
    done = (i + 1) % 4 == 0
    if {}:
        opt.step()
"""
IN_THE_RATE = source(f"opt = torch.optim.SGD(model.parameters(), 0.1 / 4)\n{GUARDED.format('done')}")
DIVIDING = source("for i, x in enumerate(loader):\n    (loss / 4).backward()\n    if i % 4 == 3:\n        opt.step()\n")
FOUR = (BackwardSeen(line=LINE, calls=200, per_step=4.0, reduction="mean"),)
POLICY = source("for x in episodes:\n    loss = -(log_prob(x) * rewards).mean()\n    loss.backward()\n    opt.step()\n")
LATE = source("for x in loader:\n    loss.backward()\n    scheduler.step()\n    opt.step()\n")
EARLY = source(
    "s = StepLR(opt, 2)\nfor e in r:\n    s.step()\n    for x in loader:\n        loss.backward()\n        opt.step()\n"
)
NEVER_TEXT = "s = torch.optim.lr_scheduler.StepLR(opt, 2)\nfor x in loader:\n    opt.step()\nprint(s.get_last_lr())\n"
NEVER = source(NEVER_TEXT)
FUNCTIONAL = {"other": 0.05, "forward": 0.0, "backward": 0.04}
WITH_EVALUATION = {"forward": 0.01, "backward": 0.04, "evaluation": 0.05}
TARGETS = replace(EVALUATION, calls=50, longest_run=1)
REMADE = RemadeOptimizerSeen(line=LINE, kind="Adam", remade=39, steps=40)
IDLE = IdleSchedulerSeen(kind="StepLR", steps=40)
KEEPING = source("kept = []\nfor x in loader:\n    loss.backward()\n    opt.step()\n    kept.append(out)\n")
BOUNDED = source(
    "kept = []\nfor x in loader:\n    loss.backward()\n    opt.step()\n    kept.append(out)\n    kept = kept[-9:]\n"
)
WRITING = source(
    "for x in loader:\n    loss.backward()\n    opt.step()\n    print(loss)\n    f.write(text)\n    plt.plot(a)\n"
)
NORM = source(
    "class Norm(nn.Module):\n    def __init__(self, n):\n        self.g = nn.Parameter(torch.ones(n))\n"
    "    def forward(self, x):\n        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * self.g\n"
)
SLOW_STEPS = facts(profile=profile(step_seconds=None, profiled_step_seconds=None))
RNN = source("torch.manual_seed(0)\nx = pack_padded_sequence(x, lengths)\n")
PADDED = PaddingSeen(share=0.6, value=0, positions=10_000, from_padding_idx=True)
TINY = (LoaderSeen(dataset="D", samples=None, batch_size=1, workers=0, pin_memory=False, persistent_workers=False),)
SMALL_OPERATORS = profile(operators=(operator(seconds=0.001),), operator_calls=100.0)
DP = ParallelSeen(kind="DataParallel", devices=4)
DDP = ParallelSeen(kind="DistributedDataParallel", devices=1, synchronised_per_step=4.0)
WIDE_SCORES = operator(name="aten::_log_softmax", operator_class="softmax", shapes="[512, 50257]", seconds=0.02)
LONG_ATTENTION = replace(WIDE_SCORES, name="aten::_softmax", shapes="[2, 8, 9000, 9000]")
BY_HAND = observed(modules=(ModuleSeen(kind="Net", parameters=9, attention_by_hand="Attention"),))
ATTENTION = (
    ModuleRow(path="Net.attn", kind="Attention", depth=1, calls=1, forward_seconds=0.02, backward_seconds=0.03),
)
SCORES = (operator(name="aten::_softmax", operator_class="softmax", module="Net.attn", seconds=0.02),)
TORCHS_ATTENTION = operator(
    name="aten::scaled_dot_product_attention", operator_class="attention", module="Net.attn", seconds=0.0001
)
AROUND = (
    *ATTENTION,
    replace(ATTENTION[0], path="Net.attn.block", kind="Block", depth=2),
    replace(ATTENTION[0], path="Net.attn.block.attend", kind="Attend", depth=3),
)
"""A module whose code names a softmax and products, around another that computes attention."""
AROUND_SCORES = (replace(SCORES[0], module="Net.attn.block.attend"),)
POINTWISE = operator(name="aten::mul", operator_class="pointwise", module="Net.attn", seconds=0.02)
NORMS = (ModuleRow(path="Net.norm", kind="Norm", depth=1, calls=1, forward_seconds=0.01, backward_seconds=0.01),)
SIMPLE_NORM = replace(NORMS[0], forward_seconds=0.001, backward_seconds=0.001)
CHANNELS = ChannelsLastSeen(layers=4, contiguous_seconds=0.02, channels_last_seconds=0.01, low_ratio=1.8)
CONVOLUTION = profile(operators=(operator(name="aten::convolution", operator_class="convolution", seconds=0.06),))
PAGEABLE = KernelRow(name="Memcpy HtoD (Pageable -> Device)", kind="copy", calls=2, seconds=0.01)
DEAD = gradients(layers=layers(0.0, 0.0, 0.0, 0.0), norms=(0.0,) * 10, largest_vectors=(0.0,) * 10)
FAINT = layers(2e-9, 1e-9, 3e-9, 2e-9)
BROADCAST = BroadcastSeen(line=LINE, predictions="[80, 1]", targets="[80]", calls=50)
WAIT = WaitRow(operator="aten::_local_scalar_dense", line="train.py:12", calls=1, seconds=0.05)
SYNC_IDLE = IdleCause(cause="sync", seconds=0.02, evidence="")
H100 = Gpu(index=0, name="H100", memory_total_bytes=80 << 30)
GPU_MACHINE = replace(
    MACHINE,
    devices=(replace(H100, fast_dtypes=("fp32", "tf32", "bf16")),),
    versions=replace(MACHINE.versions, cuda="12.8", driver_cuda=None),
).with_ceilings(ceilings("cuda:0", fp32=5e13, tf32=4e14))
RISING = tuple(1.0 + 0.1 * step for step in range(150))
BREAK = GraphBreakSeen(reason="call to print", line=LINE, count=1)


def ranks(*parts: dict[str, float], **changes: Any) -> Facts:
    """That train together: the parts of a step of each, with what it waits for the others as 'communication'."""
    common: dict[str, Any] = {"steps": 99, "ranks": len(parts), "own_error_seconds": 0.001, "device": "cpu"}
    common |= {"busy_share": 0.5, **changes}
    found = tuple(
        ProcessRecord(
            pid=number,
            rank=number,
            started_at=float(number),
            step_seconds=sum(one.values()),
            parts=one,
            exposed_seconds=one["communication"],
            own_typical_seconds=own_seconds(one),
            peak_resident_bytes=1 << 20,
            **common,
        )
        for number, one in enumerate(parts)
    )
    return facts(run=RunFacts(steps=99, ranks=found))


EVEN = {"data": 0.002, "forward": 0.03, "backward": 0.05, "communication": 0.005}
WAITING = EVEN | {"communication": 0.025}
LATE_DATA = EVEN | {"data": 0.022}
EXCHANGING = EVEN | {"communication": 0.02}

# name -> (facts that fire, facts that do not)
CASES: dict[str, tuple[list[Facts], list[Facts]]] = {
    "no-step": ([facts(run=RunFacts(steps=0))], [facts(run=None)]),
    "rolled-back": ([facts(run=RunFacts(steps=9, rolled_back=(("bf16", "a loss differs"),)))], []),
    "missing-zero-grad": (
        [
            facts(behaviour=behaviour(accumulated_steps=40, zeroed_steps=0)),
            facts(behaviour=behaviour(accumulated_steps=58, zeroed_steps=2)),  # once an epoch
        ],
        [
            facts(behaviour=behaviour(accumulated_steps=2, zeroed_steps=0)),
            facts(behaviour=behaviour(accumulated_steps=30, zeroed_steps=10)),
        ],
    ),
    "parameters-not-in-optimizer": (
        [facts(behaviour=behaviour(outside_optimizer=ParametersSeen(names=("head.weight",), count=64, module="Net")))],
        [facts(behaviour=behaviour(outside_optimizer=None))],
    ),
    "modules-made-in-forward": (
        [facts(behaviour=behaviour(made_in_forward=(MadeSeen(kind="Linear", line=LINE, made=50, steps=50),)))],
        [facts(behaviour=behaviour(made_in_forward=(MadeSeen(kind="Linear", line=LINE, made=1, steps=1),)))],
    ),
    "training-in-eval-mode": (
        [
            facts(behaviour=behaviour(forwards=(replace(TRAINING, training=False),))),
            facts(behaviour=behaviour(forwards=(TRAINING, replace(TRAINING, training=False)))),
        ],
        [
            facts(behaviour=behaviour(forwards=(replace(TRAINING, training=False, mode_layers=()),))),
            facts(behaviour=behaviour(forwards=(replace(TRAINING, training=False, updated=False),))),
            facts(behaviour=behaviour(forwards=(TRAINING, replace(TRAINING, training=False, line=EVALUATION_LINE)))),
        ],
    ),
    "evaluation-in-train-mode": (
        [
            facts(behaviour=behaviour(forwards=(TRAINING, replace(EVALUATION, training=True)))),
            facts(behaviour=behaviour(forwards=(TRAINING, replace(EVALUATION, training=True, calls=4, longest_run=1)))),
            facts(behaviour=behaviour(forwards=(TRAINING, replace(EVALUATION, dropout_line=LINE)))),
        ],
        [
            facts(behaviour=behaviour(forwards=(TRAINING, EVALUATION))),
            facts(behaviour=behaviour(forwards=(TRAINING, replace(EVALUATION, dropout_line=LINE, calls=2)))),
            facts(behaviour=behaviour(forwards=(replace(EVALUATION, dropout_line=LINE),))),  # never trained here
            facts(behaviour=behaviour(forwards=(TRAINING, replace(EVALUATION, training=True, longest_run=1)))),
            facts(behaviour=behaviour(forwards=(TRAINING, replace(EVALUATION, training=True, recalibrates=True)))),
            facts(behaviour=behaviour(forwards=(TRAINING, replace(EVALUATION, training=True, mode_layers=())))),
        ],
    ),
    "evaluation-with-grad": (
        [facts(behaviour=behaviour(forwards=(TRAINING, replace(EVALUATION, grad=True, unused=40))))],
        [
            facts(behaviour=behaviour(forwards=(TRAINING, replace(EVALUATION, grad=True, used=1, unused=39)))),
            facts(behaviour=behaviour(forwards=(TRAINING, replace(EVALUATION, grad=True, unused=40, longest_run=1)))),
            facts(behaviour=behaviour(forwards=(replace(EVALUATION, grad=True, unused=40),))),
        ],
    ),
    "clip-before-backward": (
        [facts(behaviour=behaviour(clips=(ClipSeen(line=LINE, steps=40, before_backward=40),)))],
        [facts(behaviour=behaviour(clips=(ClipSeen(line=LINE, steps=40, before_backward=2),)))],
    ),
    "clip-before-unscale": (
        [facts(behaviour=behaviour(clips=(ClipSeen(line=LINE, steps=40, before_unscale=40),)))],
        [facts(behaviour=behaviour(clips=(ClipSeen(line=LINE, steps=40),)))],
    ),
    "fp16-without-scaler": (
        [facts(behaviour=behaviour(autocast_dtype="float16"))],
        [
            facts(behaviour=behaviour(autocast_dtype="float16", scaler=True)),
            facts(behaviour=behaviour(autocast_dtype="bfloat16")),
        ],
    ),
    "fused-sgd-in-16-bits": (
        [facts(behaviour=behaviour(untrained_dtypes=("bfloat16",)))],
        [facts(behaviour=behaviour(optimizer_dtypes=("bfloat16",)))],
    ),
    "half-weights": (
        [
            facts(behaviour=behaviour(optimizer_dtypes=("float16",))),
            facts(behaviour=behaviour(optimizer_dtypes=("bfloat16",), unchanged_share=0.8)),
        ],
        [
            facts(behaviour=behaviour(optimizer_dtypes=("bfloat16",), unchanged_share=0.2)),
            facts(
                behaviour=behaviour(optimizer_dtypes=("bfloat16",), unchanged_share=0.9, untrained_dtypes=("bfloat16",))
            ),
        ],
    ),
    "wrong-lstm-gradients": (
        [
            facts(behaviour=behaviour(recurrent=(WRONG_LSTM,)), observed=observed(autocast_in_script=True)),
            facts(behaviour=behaviour(recurrent=(replace(WRONG_LSTM, gradient_error=0.006), WRONG_LSTM))),
            facts(
                behaviour=behaviour(recurrent=(WRONG_LSTM,)), observed=observed(autocast_in_script=True), planned=True
            ),
        ],
        [
            facts(behaviour=behaviour(recurrent=(replace(WRONG_LSTM, gradient_error=0.006),))),
            facts(behaviour=behaviour(recurrent=(WRONG_LSTM,)), observed=observed(), planned=True),
            facts(behaviour=behaviour()),
        ],
    ),
    "accumulation-not-averaged": (
        [
            facts(behaviour=behaviour(backwards=FOUR), source=ACCUMULATING),
            facts(behaviour=behaviour(backwards=FOUR), source=source(REPEATING.format("_", ""))),
            facts(behaviour=behaviour(backwards=FOUR), source=source(GUARDED.format("done"))),
            facts(behaviour=behaviour(backwards=FOUR), source=source(GUARDED.format("seen == 4"))),
        ],
        [
            facts(behaviour=behaviour(backwards=FOUR), source=source(REPEATING.format("task", "[task]"))),
            facts(behaviour=behaviour(backwards=FOUR), source=DIVIDING),
            facts(behaviour=behaviour(backwards=FOUR), source=source(GUARDED.format("torch.isfinite(norm)"))),
            facts(behaviour=behaviour(backwards=FOUR), source=source(GUARDED.format("norm < 9"))),
            facts(behaviour=behaviour(backwards=FOUR), source=IN_THE_RATE),
            facts(behaviour=behaviour(backwards=(replace(FOUR[0], scaled=True),)), source=ACCUMULATING),
            facts(behaviour=behaviour(backwards=(replace(FOUR[0], reduction="sum"),)), source=ACCUMULATING),
            facts(behaviour=behaviour(backwards=(*FOUR, replace(FOUR[0], line=EVALUATION_LINE))), source=ACCUMULATING),
            facts(behaviour=behaviour(backwards=(replace(FOUR[0], callers=2),)), source=ACCUMULATING),
        ],
    ),
    "scheduler-order": (
        [
            facts(behaviour=behaviour(schedulers=(SchedulerSeen(line=LINE, calls=40, between=40),))),
            facts(behaviour=behaviour(schedulers=(SchedulerSeen(line=("train.py", 3, ""), calls=9),)), source=LATE),
            facts(behaviour=behaviour(schedulers=(SchedulerSeen(line=LINE, calls=2, warned=True),))),
            facts(behaviour=behaviour(schedulers=(SchedulerSeen(line=("train.py", 3, ""), calls=1),)), source=EARLY),
        ],
        [
            facts(behaviour=behaviour(schedulers=(SchedulerSeen(line=LINE, calls=40, between=1),))),
            facts(behaviour=behaviour(schedulers=(SchedulerSeen(line=LINE, calls=2, warned=True),), scaler=True)),
        ],
    ),
    "scheduler-never-steps": (
        [facts(behaviour=behaviour(idle_schedulers=(IDLE,)), source=NEVER)],
        [
            facts(behaviour=behaviour(idle_schedulers=(IDLE,)), source=source(f"{NEVER_TEXT}fit(opt, s)\n")),
            facts(behaviour=behaviour(idle_schedulers=(IDLE,)), source=source(f"{NEVER_TEXT}s.step()\n")),
            facts(behaviour=behaviour(idle_schedulers=(replace(IDLE, steps=2),)), source=NEVER),
            facts(behaviour=behaviour(), source=NEVER),
        ],
    ),
    "optimizer-made-in-each-step": (
        [facts(behaviour=behaviour(remade_optimizers=(REMADE,)))],
        [
            facts(behaviour=behaviour(remade_optimizers=(replace(REMADE, remade=9),))),
            facts(behaviour=behaviour(remade_optimizers=(replace(REMADE, remade=2, steps=3),))),
        ],
    ),
    "softmax-before-cross-entropy": (
        [facts(behaviour=behaviour(backwards=(replace(FOUR[0], graphs=8, softmax_twice=8),)))],
        [
            facts(behaviour=behaviour(backwards=(replace(FOUR[0], graphs=8, softmax_twice=4),))),
            facts(behaviour=behaviour(backwards=(replace(FOUR[0], graphs=2, softmax_twice=2),))),
        ],
    ),
    "loss-not-falling": (
        [
            facts(behaviour=behaviour(weights_move=False)),
            facts(behaviour=behaviour(losses=(0.7,) * 20)),
            facts(behaviour=behaviour(losses=(1.0, 2.0, *[None] * 9))),
            facts(behaviour=behaviour(losses=(1.0, 2.0, *[None] * 9), stops_where_converged=True)),
            facts(behaviour=behaviour(losses=RISING)),
            facts(behaviour=behaviour(losses=RISING, batch_shapes=4)),
            facts(behaviour=behaviour(losses=RISING, batch_shapes=2, backwards=(replace(BACKWARD, reduction="sum"),))),
            facts(behaviour=behaviour(losses=RISING, forwards=(TRAINING, EVALUATION))),
            facts(behaviour=behaviour(losses=RISING, forwards=(TRAINING, replace(TARGETS, weights=False)))),
            facts(behaviour=behaviour(losses=(0.7,) * 20, forwards=(TRAINING, TARGETS))),
            facts(behaviour=behaviour(losses=(0.7, 0.6), gradients=(DEAD,))),
            facts(behaviour=behaviour(broadcast_losses=(BROADCAST,))),
        ],
        [
            facts(behaviour=behaviour(losses=(0.0, 0.0), gradients=(DEAD,))),
            facts(behaviour=behaviour(losses=(0.7, 0.6), gradients=(replace(DEAD, largest_vectors=(0.1,) * 10),))),
            facts(behaviour=behaviour(losses=(0.7, 0.6), gradients=(replace(DEAD, norms=(0.0,) * 5),))),
            facts(behaviour=behaviour(losses=tuple(1.0 + 0.1 * (step % 7) for step in range(200)))),
            facts(behaviour=behaviour(losses=RISING[:40])),
            facts(behaviour=behaviour(losses=RISING, forwards=(TRAINING, TARGETS))),
            facts(behaviour=behaviour(losses=RISING, forwards=(TRAINING, replace(TARGETS, grad=True, unused=50)))),
            facts(behaviour=behaviour(losses=())),
            facts(behaviour=behaviour(losses=(0.0,) * 20)),
            facts(behaviour=behaviour(losses=(0.7,) * 20, weights_move=False, stops_where_converged=True)),
            facts(behaviour=behaviour(losses=RISING), source=POLICY),
            facts(behaviour=behaviour(losses=RISING, backwards=(replace(BACKWARD, callers=2),))),
            facts(behaviour=behaviour(losses=RISING, batch_shapes=4, backwards=(replace(BACKWARD, reduction="sum"),))),
        ],
    ),
    "exploding-gradients": (
        [
            facts(behaviour=behaviour(gradients=(gradients(nonfinite_steps=5, first_nonfinite="layer0"),))),
            facts(behaviour=behaviour(gradients=(gradients(norms=tuple(10.0**n for n in range(10))),))),
            facts(behaviour=behaviour(gradients=(gradients(norms=(1e6,) * 10, layers=layers(1e3, 10.0, 0.1, 1e-3)),))),
        ],
        [
            facts(behaviour=behaviour(gradients=(gradients(),))),
            facts(behaviour=behaviour(gradients=(gradients(nonfinite_steps=5),), scaler=True)),
            facts(
                behaviour=behaviour(
                    gradients=(gradients(norms=(1e6,) * 10, layers=layers(1e3, 10.0, 0.1, 1e-3)),),
                    clips=(ClipSeen(line=LINE, steps=40),),
                )
            ),
        ],
    ),
    "vanishing-gradients": (
        [
            facts(behaviour=behaviour(gradients=(gradients(layers=layers(1e-12, 1e-10, 1e-7, 1e-5, 1e-3, 1e-2)),))),
            facts(behaviour=behaviour(gradients=(gradients(layers=FAINT, largest_vectors=(0.1,) * 10),))),
            facts(behaviour=behaviour(gradients=(gradients(layers=layers(7e-13, 4e-13, 3e-13, 2e-13, 1e-9, 1e-5)),))),
        ],
        [
            facts(behaviour=behaviour(gradients=(gradients(layers=FAINT, largest_vectors=(1e-8,) * 10),))),
            facts(behaviour=behaviour(gradients=(gradients(layers=layers(1e-5, 1e-4, 1e-3, 1e-2)),))),
            facts(behaviour=behaviour(gradients=(gradients(layers=layers(0.0, 1e-4, 1e-3, 1e-2)),))),
            facts(behaviour=behaviour(gradients=(gradients(layers=layers(1e-3, 1e-2, 1e-12, 1e-11)),))),
        ],
    ),
    "memory-nearly-out": ([facts(run=RunFacts(steps=9, nearly_out=(12, 1 << 20, 1 << 30)))], []),
    "graph-kept-by-logging": ([facts(behaviour=behaviour(kept_steps=7))], [facts(behaviour=behaviour(kept_steps=2))]),
    "memory-leak": (
        [
            with_growth(40 << 20),
            facts(behaviour=behaviour(live_bytes=tuple(n << 20 for n in range(1, 11))), source=KEEPING),
        ],
        [
            with_growth(20 << 20),
            facts(behaviour=behaviour(live_bytes=tuple(n << 20 for n in range(1, 11))), source=BOUNDED),
            facts(behaviour=behaviour(live_bytes=tuple(n << 10 for n in range(1, 11))), source=KEEPING),
            facts(behaviour=behaviour(live_bytes=(1 << 20, 2 << 20) * 5), source=KEEPING),
        ],
    ),
    "model-on-cpu": ([facts(gpus=("H100",))], []),
    "mixed-devices": (
        [facts(behaviour=behaviour(devices={"cuda": 90, "cpu": 10}))],
        [facts(behaviour=behaviour(devices={"cuda": 90}))],
    ),
    "anomaly-mode": ([facts(behaviour=behaviour(anomaly=True))], []),
    "debug-mode": (
        [
            facts(behaviour=behaviour(debug=("CUDA_LAUNCH_BLOCKING=1",))),
            facts(behaviour=behaviour(), profile=profile(operators=FINITE, operator_calls=300.0)),
            facts(
                behaviour=behaviour(),
                profile=profile(operators=(replace(FINITE[0], seconds=0.02),), operator_calls=9e4),
            ),
        ],
        [
            facts(behaviour=behaviour(), profile=profile(operators=FINITE, operator_calls=9e4)),
            facts(behaviour=behaviour(), profile=profile(operators=(*FINITE, SOLVER), operator_calls=3100.0)),
            facts(behaviour=behaviour(anomaly=True), profile=profile(operators=FINITE, operator_calls=300.0)),
            facts(
                behaviour=behaviour(), profile=profile(operators=(replace(FINITE[0], line=""),), operator_calls=300.0)
            ),
            facts(behaviour=behaviour(), profile=profile(operators=(replace(FINITE[0], calls=1),), operator_calls=3.0)),
        ],
    ),
    "starved-loader": (
        [loading(), replace(loading(), contended=False)],
        [SLOW_STEPS, replace(loading(), contended=True)],
    ),
    "slow-transform": (
        [loading(times=(time_of("transform", 0.2), time_of("loader", 0.05)))],
        [loading(times=(time_of("transform", 0.02), time_of("loader", 0.2)))],
    ),
    "per-sample-fetch": (
        [loading()],
        [loading(observed=observed(loaders=(replace(TINY[0], batch_size=64, workers=2, fetch="batched"),)))],
    ),
    "worker-restart": (
        [
            facts(
                behaviour=behaviour(
                    workers=WorkersSeen(line=LINE, workers=2, starts=5, start_seconds=0.2, epoch_seconds=1.0)
                )
            )
        ],
        [
            facts(
                behaviour=behaviour(
                    workers=WorkersSeen(line=LINE, workers=2, starts=5, start_seconds=0.005, epoch_seconds=1.0)
                )
            )
        ],
    ),
    "plotting-time": (
        [
            facts(behaviour=behaviour(times=(time_of("plotting", 0.2),))),
            facts(behaviour=behaviour(times=(time_of("script", 0.2, ("train.py", 6, "")),)), source=WRITING),
        ],
        [facts(behaviour=behaviour(times=(time_of("plotting", 0.03),)))],
    ),
    "disk-time": (
        [facts(behaviour=behaviour(times=(time_of("script", 0.2, ("train.py", 5, "")),)), source=WRITING)],
        [facts(behaviour=behaviour(times=(time_of("disk", 0.2, samples=5),)))],
    ),
    "logging-time": (
        [
            facts(behaviour=behaviour(times=(time_of("script", 0.2, ("train.py", 4, "")),)), source=WRITING),
            facts(behaviour=behaviour(times=(time_of("disk", 0.2, ("train.py", 4, "")),)), source=WRITING),
        ],
        [facts(behaviour=behaviour(times=(time_of("logging", 0.01),)))],
    ),
    "python-time": (
        [
            facts(behaviour=behaviour(times=(time_of("script", 0.2),))),
            facts(profile=None, behaviour=None, observed=observed(breakdown_seconds={"other": 0.05, "forward": 0.05})),
            facts(behaviour=behaviour(forwards=(replace(LOSS, calls=50 * 64, seconds=1.0),))),
            facts(
                behaviour=behaviour(times=(time_of("script", 0.2),)),
                profile=profile(operators=(BY_ELEMENT,)),
            ),
            facts(
                behaviour=behaviour(times=(time_of("script", 0.2),)),
                profile=profile(operators=(operator(seconds=0.0001, line="train.py:12"),)),
                contended=True,
            ),
            facts(
                behaviour=behaviour(times=(time_of("script", 0.05), time_of("torch", 0.1))),
                profile=profile(operators=(UNBIND,)),
            ),
        ],
        [
            facts(behaviour=behaviour(forwards=(replace(LOSS, calls=50 * 64, seconds=0.4),))),
            facts(behaviour=behaviour(forwards=(replace(LOSS, calls=50 * 8, seconds=1.0),))),
            facts(profile=profile(timed_steps=3, parts={"other": 0.05}), behaviour=None),
            facts(
                behaviour=behaviour(times=(time_of("script", 0.2),)),
                profile=profile(operators=(operator(seconds=0.019, line="train.py:12"),)),
            ),
            facts(
                behaviour=behaviour(times=(time_of("script", 0.2),)),
                profile=profile(operators=(operator(seconds=0.001, line="train.py:12"),)),
                contended=True,
            ),
            facts(
                behaviour=behaviour(times=(time_of("script", 0.2),)),
                profile=profile(reasons={"lines": "unknown, because compiled code does not show its operators"}),
            ),
            facts(
                behaviour=behaviour(times=(time_of("script", 0.05), time_of("torch", 0.1))),
                profile=profile(operators=(replace(UNBIND, shapes="[100, 8]"),)),  # into vectors
            ),
            facts(behaviour=behaviour(times=(time_of("model", 0.6), time_of("backward", 0.3)))),
            facts(profile=None, behaviour=None, observed=observed(breakdown_seconds=FUNCTIONAL)),
            facts(profile=None, behaviour=None, observed=observed(breakdown_seconds=FUNCTIONAL | {"backward": 0.0})),
        ],
    ),
    "hidden-sync": (
        [on_gpu(profiled={"waits": (WAIT,), "idle_causes": (SYNC_IDLE,)})],
        [
            on_gpu(profiled={"waits": (WAIT,)}),
            on_gpu(profiled={"waits": (WAIT,), "idle_causes": (replace(SYNC_IDLE, cause="loader"),)}),
            on_gpu(profiled={"waits": (WAIT,), "idle_causes": (replace(SYNC_IDLE, seconds=0.001),)}),
        ],
    ),
    "pageable-copies": (
        [on_gpu(profiled={"kernels": (PAGEABLE,)})],
        [on_gpu(profiled={"kernels": (replace(PAGEABLE, name="Memcpy HtoD (Pinned -> Device)"),)})],
    ),
    "repeated-to": (
        [facts(behaviour=behaviour(calls=(CallSeen(method="to", line=LINE, calls=50, seconds=0.5, repeated=49),)))],
        [
            facts(behaviour=behaviour(calls=(CallSeen(method="to", line=LINE, calls=50, seconds=0.5, repeated=1),))),
            facts(behaviour=behaviour(calls=(CallSeen(method="to", line=LINE, calls=50, seconds=0.01, repeated=49),))),
        ],
    ),
    "straggler": (
        [ranks(WAITING, LATE_DATA), ranks(WAITING, WAITING, WAITING, LATE_DATA)],
        [
            ranks(EVEN, EVEN),
            ranks(WAITING, LATE_DATA, own_error_seconds=0.02),  # not beyond what steps vary by
            ranks(EVEN, LATE_DATA),  # the others do not wait for it
            ranks(WAITING, LATE_DATA, ranks=None),  # they train apart
            ranks(EVEN | {"communication": 0.009}, EVEN | {"data": 0.006}),  # a twentieth of a step
        ],
    ),
    "exposed-communication": (
        [ranks(EXCHANGING, EXCHANGING)],
        [ranks(EVEN, EVEN), ranks(WAITING, LATE_DATA)],  # waiting for a straggler is no communication
    ),
    "thread-oversubscription": ([facts(observed=observed(threads=4 * CORES))], []),
    "recompilations": (
        [
            facts(
                behaviour=behaviour(
                    compiled=CompileSeen(frames=9, versions_of_one=8, compiled_in_window=6, seconds_in_window=2.0)
                )
            ),
            facts(
                behaviour=behaviour(
                    compiled=CompileSeen(frames=9, versions_of_one=2, compiled_in_window=3, seconds_in_window=2.0)
                )
            ),
        ],
        [
            facts(
                behaviour=behaviour(  # a first evaluation, of a model in several graphs
                    compiled=CompileSeen(frames=6, versions_of_one=1, compiled_in_window=3, seconds_in_window=2.0)
                )
            ),
            facts(
                behaviour=behaviour(
                    compiled=CompileSeen(frames=3, versions_of_one=2, compiled_in_window=1, seconds_in_window=0.5)
                )
            ),
        ],
    ),
    "graph-breaks": (
        [
            facts(
                behaviour=behaviour(
                    compiled=CompileSeen(
                        frames=2, versions_of_one=1, compiled_in_window=0, seconds_in_window=0.0, breaks=(BREAK,)
                    )
                )
            ),
        ],
        [],
    ),
    "tiny-batch": (
        [facts(observed=observed(loaders=TINY), profile=SMALL_OPERATORS)],
        [
            facts(observed=observed(loaders=TINY)),
            facts(observed=observed(loaders=TINY, backwards_per_step=8.0), profile=SMALL_OPERATORS),
            facts(profile=SMALL_OPERATORS),
            facts(observed=observed(loaders=(replace(TINY[0], samples=10),)), profile=SMALL_OPERATORS),
        ],
    ),
    "padding-waste": (
        [facts(behaviour=behaviour(padding=PADDED))],
        [
            facts(behaviour=behaviour(padding=PADDED), source=RNN),
            facts(behaviour=behaviour(padding=replace(PADDED, share=0.2))),
        ],
    ),
    "unfused-attention": (
        [facts(observed=BY_HAND, profile=profile(modules=ATTENTION, operators=SCORES))],
        [
            facts(profile=profile(modules=ATTENTION, operators=SCORES)),
            facts(observed=BY_HAND, profile=profile(modules=ATTENTION, operators=(replace(SCORES[0], seconds=0.001),))),
            facts(observed=BY_HAND, profile=profile(modules=ATTENTION, operators=(*SCORES, TORCHS_ATTENTION))),
            facts(observed=BY_HAND, profile=profile(modules=ATTENTION, operators=(POINTWISE,))),
            facts(observed=BY_HAND, profile=profile(modules=AROUND, operators=AROUND_SCORES)),
        ],
    ),
    "hand-written-layer": (
        [facts(source=NORM, profile=profile(modules=NORMS))],
        [facts(source=NORM, profile=profile(modules=(SIMPLE_NORM,)))],
    ),
    "channels-last-missing": (
        [facts(behaviour=behaviour(channels_last=CHANNELS), profile=CONVOLUTION)],
        [
            facts(behaviour=behaviour(channels_last=replace(CHANNELS, low_ratio=1.05)), profile=CONVOLUTION),
            facts(behaviour=behaviour(channels_last=CHANNELS)),
        ],
    ),
    "fp32-matmul": (
        [
            facts(machine=MACHINE.with_ceilings(ceilings(fp32=1e11, bf16=5e11))),
            on_gpu(machine=GPU_MACHINE),
        ],
        [
            facts(machine=MACHINE.with_ceilings(ceilings(fp32=1e11, bf16=1.2e11))),
            facts(
                machine=MACHINE.with_ceilings(ceilings(fp32=1e11, bf16=5e11)),
                observed=observed(autocast_in_script=True),
            ),
            on_gpu(machine=GPU_MACHINE, profiled={"operators": CONVOLUTION.operators}),
        ],
    ),
    "denormals": (
        [facts(behaviour=behaviour(denormal_share=0.2, denormal_slowdown=10.0))],
        [
            facts(behaviour=behaviour(denormal_share=0.2, denormal_slowdown=1.0)),
            facts(behaviour=behaviour(denormal_share=1e-4, denormal_slowdown=10.0)),
            facts(
                behaviour=behaviour(denormal_share=0.2, denormal_slowdown=10.0), observed=observed(flush_denormals=True)
            ),
        ],
    ),
    "unaligned-shapes": (
        [on_gpu(profiled={"operators": (operator(shapes="[64, 128] [128, 50257]", dtype="bfloat16", seconds=0.05),)})],
        [on_gpu(profiled={"operators": (operator(shapes="[64, 128] [128, 50304]", dtype="bfloat16", seconds=0.05),)})],
    ),
    "huge-softmax": (
        [facts(profile=profile(operators=(WIDE_SCORES,)))],
        [
            facts(profile=profile(operators=(replace(WIDE_SCORES, shapes="[512, 1000]"),))),
            facts(profile=profile(operators=(LONG_ATTENTION,))),
        ],
    ),
    "allocator-churn": (
        [
            facts(observed=observed(page_faults_per_step=50_000.0)),
            on_gpu(behaved={"device_allocations": 200}),
        ],
        [
            on_gpu(behaved={"device_allocations": 3}),
            facts(observed=observed(page_faults_per_step=50_000.0), behaviour=behaviour(system_seconds=0.001)),
        ],
    ),
    "costly-checkpointing": (
        [facts(behaviour=behaviour(recomputed_seconds=0.02), profile=profile(peak_resident_bytes=1 << 28))],
        [
            facts(
                behaviour=behaviour(recomputed_seconds=0.02),
                profile=profile(peak_resident_bytes=MACHINE.memory_total_bytes // 2),
            ),
            facts(behaviour=behaviour(recomputed_seconds=0.001), profile=profile(peak_resident_bytes=1 << 28)),
        ],
    ),
    "bf16-lost-in-data-parallel": (
        [facts(behaviour=behaviour(parallel=(DP,), autocast_dtype="bfloat16"))],
        [
            facts(behaviour=behaviour(parallel=(DP,), autocast_dtype="float16")),
            facts(behaviour=behaviour(parallel=(replace(DP, devices=1),), autocast_dtype="bfloat16")),
            facts(behaviour=behaviour(parallel=(DDP,), autocast_dtype="bfloat16")),
        ],
    ),
    "data-parallel": (
        [facts(behaviour=behaviour(parallel=(DP,)))],
        [facts(behaviour=behaviour(parallel=(DDP,)))],
    ),
    "accumulation-without-no-sync": (
        [facts(behaviour=behaviour(parallel=(DDP,), backwards=FOUR))],
        [
            facts(behaviour=behaviour(parallel=(replace(DDP, synchronised_per_step=1.0),), backwards=FOUR)),
            facts(behaviour=behaviour(parallel=(DDP,))),
            facts(behaviour=behaviour(parallel=(DDP,), backwards=(replace(FOUR[0], callers=2),))),
        ],
    ),
    "needless-find-unused-parameters": (
        [facts(behaviour=behaviour(parallel=(replace(DDP, find_unused=True),)))],
        [
            facts(behaviour=behaviour(parallel=(replace(DDP, find_unused=True, unused_parameters=2),))),
            facts(behaviour=behaviour(parallel=(replace(DDP, find_unused=True),), zero_grad_fills=True)),
            facts(behaviour=behaviour(parallel=(DDP,))),
        ],
    ),
    "cudnn-benchmark-changing-shapes": (
        [on_gpu(seen={"cudnn_benchmark": True}, behaved={"batch_shapes": 9, "example_shapes": ("[4]",)})],
        [on_gpu(seen={"cudnn_benchmark": True}), facts(observed=observed(cudnn_benchmark=True))],
    ),
    "slower-on-gpu": (
        [
            on_gpu(
                profiled={"parts": {"idle": 0.08}, "flops": 1e6, "operators": (operator(seconds=0.001),)},
                machine=MACHINE.with_ceilings(ceilings(fp32=1e11)),
            )
        ],
        [
            on_gpu(
                profiled={"parts": {"idle": 0.08}, "flops": 1e13, "operators": (operator(seconds=0.001),)},
                machine=MACHINE.with_ceilings(ceilings(fp32=1e11)),
            )
        ],
    ),
    "evaluation": (
        [
            facts(profile=None, behaviour=None, observed=observed(breakdown_seconds={"evaluation": 0.05})),
            facts(observed=observed(breakdown_seconds={"evaluation": 0.15, "data": 0.0})),
        ],
        [
            facts(observed=observed(breakdown_seconds={"evaluation": 0.05, "data": 0.0})),
            facts(profile=None, behaviour=None, observed=observed(breakdown_seconds=WITH_EVALUATION)),  # in each step
        ],
    ),
    "zero-grad-fills": (
        [facts(behaviour=behaviour(zero_grad_fills=True, zero_grad_seconds=0.01, zero_grad_line=LINE))],
        [
            facts(behaviour=behaviour(zero_grad_fills=False, zero_grad_seconds=0.01)),
            facts(behaviour=behaviour(zero_grad_fills=True, zero_grad_seconds=1e-5)),
        ],
    ),
    "needless-retain-graph": (
        [facts(behaviour=behaviour(backwards=(BackwardSeen(line=LINE, calls=50, per_step=1.0, retained=50),)))],
        [
            facts(
                behaviour=behaviour(
                    backwards=(BackwardSeen(line=LINE, calls=50, per_step=1.0, retained=50, retained_needed=49),)
                )
            )
        ],
    ),
    "reserved-unused": (
        [on_gpu(behaved={"reserved_bytes": 20 << 30, "allocated_bytes": 5 << 30})],
        [on_gpu(behaved={"reserved_bytes": 20 << 30, "allocated_bytes": 18 << 30})],
    ),
    "no-seed": (
        [facts(behaviour=behaviour(seeded=False), source=source("for x in data:\n    loss.backward()\n"))],
        [facts(behaviour=behaviour(seeded=False)), facts(behaviour=behaviour(seeded=True), source=source("f()"))],
    ),
}


def check_of(name: str) -> Check:
    return next(one for one in CHECKS if one.name == name)


def test_there_is_a_case_for_every_check() -> None:
    assert {one.name for one in CHECKS} == set(CASES), "each check needs a case here that fires and one that does not"
    assert len({one.name for one in CHECKS}) == len(CHECKS) >= 40


@pytest.mark.parametrize("name", list(CASES))
def test_it_fires_on_a_fault(name: str) -> None:
    for given in CASES[name][0]:
        finding = check_of(name)(given)
        assert finding is not None
        assert finding.name == name
        assert finding.if_wrong
        assert finding.severity in ("note", "warning")
        known = finding.cost_seconds is not None or finding.cost_bytes is not None or finding.cost_share is not None
        no_cost = ("no-step", "rolled-back", "memory-nearly-out", "memory-leak")
        assert known or "unknown, because" in finding.evidence or name in no_cost
        assert Finding.from_json(json.loads(json.dumps(finding.to_json()))) == finding


@pytest.mark.parametrize("name", list(CASES))
def test_it_says_nothing_without_the_evidence(name: str) -> None:
    for given in [facts(), Facts(), *CASES[name][1]]:
        assert check_of(name)(given) is None


def test_a_healthy_script_has_no_findings() -> None:
    assert check_facts(facts()) == ()
    assert check_facts(Facts()) == ()


def test_a_cost_from_five_per_cent_is_a_warning() -> None:
    small, large = (
        check_of("zero-grad-fills")(facts(behaviour=behaviour(zero_grad_fills=True, zero_grad_seconds=seconds)))
        for seconds in (0.02 * STEP, 0.06 * STEP)
    )
    assert small is not None
    assert large is not None
    assert (small.severity, large.severity) == ("note", "warning")


@pytest.mark.parametrize(
    ("loaders", "words"),
    [
        ((), "where cores are free"),
        ((replace(TINY[0], fetch="batched"),), "fetch whole batches"),
        ((TINY[0],), "set num_workers=2 on the loader, or do less"),
        ((replace(TINY[0], workers=2),), "the 2 workers cannot keep up"),
    ],
)
def test_what_helps_a_starved_loader_depends_on_it(loaders: tuple[LoaderSeen, ...], words: str) -> None:
    found = check_of("starved-loader")(loading(observed=observed(loaders=loaders)))
    assert found is not None
    assert words in found.remedy
    assert ("whole batches" in found.remedy) == (words == "fetch whole batches")


@pytest.mark.parametrize(
    ("libraries", "title"),
    [
        (("", "spacy"), "the script's own Python takes 30% of the time"),
        (("spacy", ""), "calls of spacy take 30% of the time"),
        (("spacy", "spacy"), "calls of spacy take 30% of the time"),
    ],
)
def test_a_library_that_the_script_calls_is_named(libraries: Sequence[str], title: str) -> None:
    lines = [time_of("script", 0.2), time_of("script", 0.1, line=("train.py", 40, "score(text)"))]
    times = tuple(replace(one, library=library) for one, library in zip(lines, libraries, strict=True))
    found = check_of("python-time")(facts(behaviour=behaviour(times=times)))
    assert found is not None
    assert found.title == title
    assert ("call spacy once" in found.remedy) == ("spacy" in title)


def test_what_a_run_cannot_see_a_profile_shows() -> None:
    parts = observed(breakdown_seconds={"other": 0.05, "forward": 0.05})
    found = check_of("python-time")(facts(profile=None, behaviour=None, observed=parts, command="train.py"))
    assert found is not None
    assert found.next_command == "flatout profile train.py"


def test_a_loss_by_hand_is_named_where_the_difference_is_taken() -> None:
    row = operator(name="aten::sub", shapes="[80] [80, 1]", line="train.py:7", seconds=0.001)
    others = replace(row, line="train.py:8", shapes="[80] [80]"), replace(row, line="train.py:9", name="aten::add")
    seen = facts(profile=profile(operators=(row, *others)), behaviour=behaviour(broadcast_losses=(BROADCAST,)))
    found = check_of("loss-not-falling")(seen)
    assert found is not None
    assert [line[1] for line in found.lines] == [7, 12]


def test_a_trend_is_beyond_noise() -> None:
    assert trend(range(20)) > 3.3
    assert abs(trend([1.0, 2.0] * 60)) < 2
    assert trend([5.0] * 9) == 0.0
    assert trend([float(-n) for n in range(1000)]) < -3.3


def test_operators_that_took_longer_than_a_plain_step_are_compared_with_it_in_proportion() -> None:
    busier = profile(operators=(operator(seconds=0.15), operator(seconds=0.05)), modules=ATTENTION)
    found = busier.at_plain_speed()
    assert [one.seconds for one in found.operators] == pytest.approx([0.75 * STEP, 0.25 * STEP])
    assert found.modules[0].seconds == pytest.approx(0.5 * ATTENTION[0].seconds)
    assert (found.step_seconds, found.parts) == (busier.step_seconds, busier.parts)
    assert profile().at_plain_speed() == profile()
    assert SLOW_STEPS.profile is not None
    assert SLOW_STEPS.profile.at_plain_speed() == SLOW_STEPS.profile


def test_the_start_of_workers_is_told_as_a_part_of_a_step() -> None:
    workers = WorkersSeen(line=LINE, workers=2, starts=5, start_seconds=0.202, epoch_seconds=1.0)
    (finding,) = check_facts(facts(behaviour=behaviour(workers=workers)))
    assert finding.name == "worker-restart"
    assert finding.cost_share == pytest.approx(0.2)
    assert finding.cost_seconds == pytest.approx(0.2 * STEP)


def test_calls_that_alternate_with_updates_may_be_of_a_policy_that_acts() -> None:
    evaluation = replace(EVALUATION, training=True, longest_run=4)
    for calls, confidence in ((40, "certain"), (190, "likely")):
        forwards = (TRAINING, replace(evaluation, calls=calls))
        found = {one.name: one for one in check_facts(facts(behaviour=behaviour(forwards=forwards)))}
        assert found["evaluation-in-train-mode"].confidence == confidence
    chunks = replace(TRAINING, calls=200, used=200), replace(evaluation, calls=200)  # four in each of 50 steps
    found = {one.name: one for one in check_facts(facts(behaviour=behaviour(forwards=chunks)))}
    assert found["evaluation-in-train-mode"].confidence == "likely"


def test_without_a_step_only_the_main_thread_is_spoken_of() -> None:
    finding = check_of("no-step")(facts(run=RunFacts(steps=0)))
    assert finding is not None
    assert finding.evidence.endswith("in the main thread of this process")
    assert "training in another thread" in finding.remedy


def test_no_seed_names_a_line_that_draws_from_torchs_generator() -> None:
    text = "np.random.randn(4)\nrandint(0, 9)\nmodel = nn.Linear(4, 2)\nloss.backward()\n"
    finding = check_of("no-seed")(facts(behaviour=behaviour(seeded=False), source=source(text)))
    assert finding is not None
    assert [line for _, line, _ in finding.lines] == [3]


def test_the_advice_for_attention_does_not_make_it_causal_by_itself() -> None:
    given, *_ = CASES["unfused-attention"][0]
    found = check_of("unfused-attention")(given)
    assert found is not None
    assert "is_causal=True if later positions are masked" in found.remedy
