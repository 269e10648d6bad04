"""`flatout.whatif` and `flatout whatif`: what they predict, what they leave alone, what they refuse."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import flatout
from flatout import Plan, TrainStep
from flatout.application.whatif import WhatIfRequest, check_precision
from flatout.errors import UsageError
from flatout.models import GPT2, MLP, GPT2Config, MLPConfig
from flatout.precision.matmul import matmul_precision
from flatout.predicted_time import predicting, replayed
from flatout.predicted_time.predicting import USUAL_DEVICES
from flatout.predicted_time.replayed import followed
from flatout.profiling import following
from flatout.profiling.following import FollowedOperator, OperatorFollower, Origin
from flatout.profiling.step_operators import Operator, StepOperators, as_one, marked
from flatout.script.entry import Target
from flatout.sizing.forecasting import fake_step
from flatout.sizing.training import Training
from flatout.timing import Load


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def mlp_step(plan: Plan | None = None) -> tuple[TrainStep, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = MLP(MLPConfig(inputs=16, hidden=(32,)))
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-2), loss, plan)
    return step, (torch.randn(8, 16), torch.randint(10, (8,)))


def gpt_step(dropout: float = 0.0) -> tuple[TrainStep, tuple[Tensor, Tensor]]:
    sizes: dict[str, Any] = {"vocab_size": 32, "max_tokens": 16, "width": 16, "heads": 2, "layers": 2}
    config = GPT2Config(**sizes, dropout=dropout, embedding_dropout=dropout, attention_dropout=dropout)
    torch.manual_seed(0)
    model = GPT2(config)
    tokens = torch.randint(32, (4, 16))
    return TrainStep(model, torch.optim.AdamW(model.parameters()), loss), (tokens, tokens)


def test_usual_gpus_the_fastest_first() -> None:
    step, batch = mlp_step()
    before = [one.clone() for one in step.model.parameters()]
    found = flatout.whatif(step, batch)
    assert {one.device for one in found.predictions} == set(USUAL_DEVICES)
    seconds = [one.step_seconds or math.inf for one in found.predictions]
    assert seconds == sorted(seconds)
    assert all(torch.equal(one, other) for one, other in zip(step.model.parameters(), before, strict=True))
    h100 = found["h100"]
    # 30 % too high and 30 % too low
    assert h100.step_seconds == pytest.approx(1.3 * h100.low_seconds)  # type: ignore[operator]
    assert h100.step_seconds == pytest.approx(0.7 * h100.high_seconds)  # type: ignore[operator]
    assert h100.samples == 8
    assert h100.bound == "host"
    assert h100.fits
    assert h100.peak_bytes
    with pytest.raises(KeyError):
        found["t4"]
    text = found.summary()
    assert "predicted, not measured" in text
    assert "bound by" in text
    assert "the host" in text
    json.dumps(found.to_json())


def test_a_larger_batch_takes_longer_and_more_memory() -> None:
    step, batch = gpt_step()
    small, large = (flatout.whatif(step, batch, devices=["h100"], batch_size=size)["h100"] for size in (4, 400_000))
    assert small.samples == 4
    assert large.step_seconds > 2 * small.step_seconds  # type: ignore[operator]
    assert large.peak_bytes > 100 * small.peak_bytes  # type: ignore[operator]
    assert small.bound == "host"
    assert large.bound != "host"


def test_prices() -> None:
    step, batch = mlp_step()
    found = flatout.whatif(step, batch, devices=["h100", "l4"], prices={"h100": 3.6})
    priced = found["h100"]
    assert priced.price_per_million_samples == pytest.approx(3.6 / 3600 * priced.step_seconds / 8 * 1e6)  # type: ignore[operator]
    assert found["l4"].price_per_million_samples is None
    assert "of a million samples" in str(found)


def test_the_precision_of_the_process_and_of_the_weights_counts() -> None:
    step, batch = mlp_step()
    plain = flatout.whatif(step, batch, devices=["h100"], batch_size=4096)
    with matmul_precision("high"):
        found = flatout.whatif(step, batch, devices=["h100"], batch_size=4096)
        assert found.precision == "TF32 where the GPU has it"
        same = flatout.whatif(step, batch, devices=["h100"], batch_size=4096, plan=Plan(matmul_precision="highest"))
    assert found["h100"].by_kind.keys() != plain["h100"].by_kind.keys()
    assert same["h100"].by_kind == plain["h100"].by_kind
    assert (plain.precision, same.precision) == ("fp32", "fp32")
    step.model.to(torch.bfloat16)
    found = flatout.whatif(step, (batch[0].bfloat16(), batch[1]), devices=["h100"])
    assert found.precision == "bf16"
    assert "matmul, half" in found["h100"].by_kind


def test_a_part_of_a_step_predicts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MOST_OPERATORS", 5)
    with pytest.raises(UsageError, match="a step has more than 5 operators"):
        flatout.whatif(*mlp_step(), devices=["h100"])


def test_operators_of_extensions_are_predicted_by_their_bytes_and_said() -> None:
    one = FollowedOperator(
        name="mylib::attention", shapes=((8, 8),), dtype="bfloat16", flops=None, size_bytes=3.35e9, phase="forward",
        origin=Origin(),
    )  # fmt: skip
    step = StepOperators(
        operators=as_one([one, replace(one, name="prim::device")]), samples=1, device="cpu", tf32=False, fault="",
        rolled_back={},
    )  # fmt: skip
    found = predicting.of_script(step, name="train.py", devices=["h100"], tf32=False, peak_bytes=None, prices=None)
    assert found["h100"].step_seconds == pytest.approx(1e-3 / 0.708, rel=0.1)
    assert found.notes[0] == "predicted by their bytes alone, as their FLOPs are unknown: mylib::attention"


def test_a_precision_that_a_script_overrides_is_refused() -> None:
    half = Operator(
        name="aten::mm", operator_class="matmul", part="forward", dtype="float16", calls=1, flops=1, bytes=1
    )
    step = StepOperators(operators=(half,), samples=1, device="cpu", tf32=False, fault="", rolled_back={})
    request = WhatIfRequest(target=Target.from_command(["train.py"]), precision="tf32")
    with pytest.raises(UsageError, match="itself computes products in fp16"):
        check_precision(request, step)
    check_precision(replace(request, precision="bf16"), step)
    check_precision(request, replace(step, operators=()))


def test_a_precision_that_a_gpu_lacks_is_unknown() -> None:
    step, batch = mlp_step()
    found = flatout.whatif(step, batch, devices=["t4", "h100"], plan=Plan(precision="bf16"))
    assert found.predictions[-1].device == "t4"
    assert found["t4"].step_seconds is None
    assert found["t4"].samples_per_second is None
    assert "no rate of T4 in bf16" in found["t4"].reason
    assert "unknown, because no rate" in str(found)


def test_compiling_is_not_predicted_and_said() -> None:
    step, batch = mlp_step()
    found = flatout.whatif(step, batch, devices=["h100"], plan=Plan(compile="default"))
    assert any("torch.compile" in note for note in found.notes)


def test_choices_that_are_not_predicted_are_said() -> None:
    step, batch = mlp_step()
    found = flatout.whatif(step, batch, devices=["h100"], plan=Plan(attention="fused", matmul_precision="high"))
    assert "not predicted, so as without: attention" in found.notes


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators and steps are timed for as short as it goes: the test does not ask how well."""
    monkeypatch.setattr(replayed, "OPERATOR_SECONDS", 0.0)
    monkeypatch.setattr(replayed, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(replayed, "FAR_APART", math.inf)


@pytest.mark.usefixtures("quick")
def test_this_machine_under_other_settings() -> None:
    step, batch = mlp_step()
    before = [one.clone() for one in step.model.parameters()]
    threads, numbers = torch.get_num_threads(), torch.get_rng_state()
    found = flatout.whatif(step, batch, devices=["cpu"], plan=Plan(precision="bf16"), batch_size=16, threads=1)["cpu"]
    assert found.step_seconds
    assert found.samples == 16
    assert found.peak_bytes
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(one, other) for one, other in zip(step.model.parameters(), before, strict=True))


class Watched:
    """A LoadWatch on a machine that others keep this busy."""

    others = 0.0

    def read(self) -> Load:
        return Load(own_cores=2.0 - self.others, others_cores=self.others, logical_cores=2)


@pytest.mark.usefixtures("quick")
def test_the_present_step_is_predicted_as_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicting, "LoadWatch", Watched)
    monkeypatch.setattr(predicting, "MATERIAL_DOUBT", math.inf)
    found = flatout.whatif(*mlp_step(), devices=["cpu"])
    cpu = found["cpu"]
    assert cpu.step_seconds == pytest.approx(cpu.present_seconds)
    assert cpu.step_seconds == pytest.approx(1.2 * cpu.low_seconds)  # type: ignore[operator]
    assert not cpu.notes
    assert "now       the present step took" in found.summary()


@pytest.mark.usefixtures("quick")
def test_a_busy_machine_is_said_and_widens_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicting, "LoadWatch", Watched)
    monkeypatch.setattr(Watched, "others", 1.0)
    found = flatout.whatif(*mlp_step(), devices=["cpu"], batch_size=16)
    cpu = found["cpu"]
    assert cpu.step_seconds >= 1.49 * cpu.low_seconds  # type: ignore[operator]
    assert cpu.high_seconds >= 1.99 * cpu.step_seconds  # type: ignore[operator]
    assert "others kept 1.0 of 2 cores busy" in found.summary()


def test_times_that_should_be_equal_and_differ_are_said() -> None:
    uncertainty, notes = predicting._doubts(0.6, None)
    assert uncertainty == pytest.approx(0.8)
    assert "differed by 60%" in notes[0]
    assert predicting._doubts(0.1, None) == (predicting.UNCERTAINTY_HERE, ())


def test_operators_that_take_far_longer_than_their_step_predict_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed, "OPERATOR_SECONDS", 0.0)
    monkeypatch.setattr(replayed, "_measured", lambda training: 1e-9)
    found = flatout.whatif(*mlp_step(), devices=["cpu"])["cpu"]
    assert found.step_seconds is None
    assert "one by one" in found.reason


def test_recurrent_layers_are_not_timed_one_by_one() -> None:
    """Their backward operator would read addresses from a workspace of zeros."""
    config = flatout.models.RecurrentClassifierConfig(
        cell="lstm", vocab_size=16, embedding_width=8, hidden_width=8, classes=3, layers=1
    )
    model = flatout.models.RecurrentClassifier(config)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss)
    batch = torch.randint(16, (4, 6)), torch.randint(3, (4,))
    found = flatout.whatif(step, batch, devices=["cpu", "h100"])
    assert found["cpu"].step_seconds is None
    assert "recurrent" in found["cpu"].reason
    assert found["h100"].step_seconds


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": ["h1000"]}, "nearest by name"),
        ({"devices": "h100"}, "a list of names"),
        ({"devices": []}, "devices is empty"),
        ({"devices": [3]}, "devices has 3 in it"),
        ({"threads": 2}, "for the device 'cpu'"),
        ({"devices": ["cpu"], "threads": 0}, "at least 1"),
        ({"batch_size": 0}, "at least 1"),
        ({"prices": {"h100": 0}}, "above 0"),
        ({"prices": {"h100": True}}, "above 0"),
        ({"prices": [2.5]}, "of an hour by device"),
        ({"prices": []}, "of an hour by device"),
        ({"prices": {1: 2.0}}, "prices has the key 1; it is a dict, of an hour by device"),
        ({"devices": ["h100"], "prices": {"t4": 1.0}}, "devices asked for: h100"),
        ({"plan": "bf16"}, "flatout.Plan"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], words: str) -> None:
    step, batch = mlp_step()
    with pytest.raises(flatout.FlatoutError, match=words):
        flatout.whatif(step, batch, **options)


def test_a_step_that_depends_on_values() -> None:
    model = nn.Linear(4, 3)

    def reads(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = loss(model, batch)
        return value * 2 if value.item() > 1e9 else value

    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), reads)
    with pytest.raises(UsageError, match="cannot be followed on fake tensors"):
        flatout.whatif(step, (torch.randn(4, 4), torch.randint(3, (4,))), devices=["h100"])


def test_what_is_no_step() -> None:
    with pytest.raises(UsageError, match="TrainStep"):
        flatout.whatif(nn.Linear(2, 2), torch.zeros(2, 2))  # type: ignore[arg-type]


def test_operators_as_on_cuda() -> None:
    step, batch = gpt_step(dropout=0.1)
    found = followed(Training.of(step, batch), 6, as_on_cuda=True)
    attention = [one for one in found if one.operator_class == "attention"]
    assert sum(one.calls for one in attention if one.part == "forward") == 2
    assert all(one.name.startswith("aten::_foreach_") for one in found if one.part == "optimizer")
    products = [one for one in found if one.operator_class == "matmul" and one.part == "forward"]
    tokens, width = 6 * 16, 16
    per_layer = 2 * tokens * width * (3 * width + width + 4 * width + 4 * width)
    head = 2 * tokens * width * len(step.model.head.weight)  # type: ignore[union-attr, arg-type]
    assert sum(one.flops for one in products) == 2 * per_layer + head


def test_a_step_on_a_cpu_as_on_cuda() -> None:
    """Attention with dropout is a dozen operators on a CPU and one on CUDA; so is dropout."""
    step, batch = gpt_step(dropout=0.1)
    training = Training.of(step, batch)
    follower = OperatorFollower()
    with training.on_same_memory() as real:
        own = real.make_step()
        own(real.batch)
        with follower, marked(follower):
            own(real.batch)
        own.close()
    assert not follower.fault
    found = as_one(follower.operators)
    as_on_cuda = followed(training, 4, as_on_cuda=True)
    for part in ("forward", "backward"):
        ours, theirs = (
            sum(one.calls for one in rows if one.part == part and one.operator_class == "attention")
            for rows in (found, as_on_cuda)
        )
        assert ours == theirs == 2
        counts = [sum(one.calls for one in rows if one.part == part) for rows in (found, as_on_cuda)]
        assert counts[0] == pytest.approx(counts[1], rel=0.35)


def test_attention_that_one_module_calls_twice_counts_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = self.layer(x)
                x = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
            return x

    model = Twice()
    follower = OperatorFollower()
    with follower, marked(follower):
        model(torch.randn(2, 4, 8)).sum().backward()
    calls = dict.fromkeys(("forward", "backward"), 0.0)
    for one in as_one(follower.operators):
        if one.operator_class == "attention":
            calls[one.part] += one.calls
    assert calls == {"forward": 2, "backward": 2}


def test_nothing_of_a_fake_step_is_computed() -> None:
    step, batch = mlp_step()
    before = [one.clone() for one in step.model.parameters()]
    with fake_step(Training.of(step, batch), 8) as (fake, samples):
        fake(samples)
    assert all(torch.equal(one, other) for one, other in zip(step.model.parameters(), before, strict=True))
    assert not step.optimizer.state


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(320, 12), torch.randint(3, (320,))), batch_size=32)
model = nn.Sequential(nn.Linear(12, 24), nn.Dropout(0.1), nn.ReLU(), nn.Linear(24, 3))
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(100):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
open("written.txt", "w").write("done")
"""

SHORT = """
import torch
weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
weight.sum().backward()
optimizer.step()
"""

COMPUTES = SHORT + "while True: pass\n"


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flatout", "whatif", *words], cwd=folder, capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = command(tmp_path, "--device", "h100", "--device", "t4", "--price", "t4=0.35", "--json", "train.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["samples"] == 32
    assert {one["device"] for one in found["predictions"]} == {"h100", "t4"}
    assert all(one["step_seconds"] > 0 and one["peak_bytes"] > 0 for one in found["predictions"])
    assert not (tmp_path / "written.txt").exists()
    text = command(tmp_path, "--device", "h100", "--precision", "bf16", "train.py").stdout
    assert "bf16 where it casts" in text


@pytest.mark.parametrize(
    ("words", "script", "code", "said"),
    [
        (["--device", "h1000"], SCRIPT, 2, "nearest by name"),
        (["--price", "h100"], SCRIPT, 2, "for example h100=2.49"),
        (["--device", "cpu"], SCRIPT, 2, "GPUs of the catalogue"),
        (["--patience", "1s"], "import time\ntime.sleep(600)", 1, "that is the timeout; allow more with --patience 2h"),
        pytest.param(["--patience", "12s"], COMPUTES, 1, "train.py: no step in 1", marks=pytest.mark.slow),
        ([], "print('no training')", 1, "ended without a single step"),
        pytest.param([], "import torch\nraise ValueError('bad data')", 1, "bad data", marks=pytest.mark.slow),
        pytest.param(
            *([], SHORT, 1, "train.py ended after 1 step; a step after the first is followed operator by operator"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bad_input(tmp_path: Path, words: list[str], script: str, code: int, said: str) -> None:
    (tmp_path / "train.py").write_text(script)
    done = command(tmp_path, *words, "train.py")
    assert done.returncode == code
    assert said in done.stderr
    assert "flatout/" not in done.stderr
