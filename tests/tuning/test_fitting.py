"""`flatout tune --fit`: which combinations are weighed, which is kept, and what is said where none fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.errors import ScriptError, TrialError
from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import Choice
from flatout.levers.observed import ModuleSeen, Observed, OptimizerSeen
from flatout.machine.description import Machine
from flatout.machine.detect import detect
from flatout.plan import Plan
from flatout.report.tune_text import fit_lines, tune_text
from flatout.script.entry import Target
from flatout.script.trial.answers import TrialEnded
from flatout.tuning.fitting import Fit, combinations, fit
from flatout.tuning.results import SearchState, Tuned
from flatout.tuning.script_tuning import TuneRequest, tune_script
from tests.cli.in_process import said_by
from tests.tuning.test_for_memory import SCRIPT

MIB = 1 << 20
LEVER = {lever.plan_field: lever for lever in LEVERS}
LOSS = Choice(LEVER["loss"], "chunked")
BF16 = Choice(LEVER["precision"], "bf16")
BLOCK = Choice(LEVER["activation_checkpointing"], "block")
SAVED = {LOSS: 30, BF16: 20, BLOCK: 40}
"""MiB of the 100 of the plain step."""
SLOWER = {LOSS: 1.05, BF16: 0.6, BLOCK: 1.3}


class Process:
    """A trial whose steps hold and take what the tables say."""

    def __init__(self, **failing: Any) -> None:
        self.failing, self.asked, self.closed = failing, list[str](), 0

    def close(self) -> None:
        self.closed += 1

    def peak(self, choices: Sequence[Choice], *, steps: int = 2) -> Any:
        self.asked.append("+".join(choice.field for choice in choices))
        for choice in choices:
            found = self.failing.get(choice.field)
            if isinstance(found, list):
                found = found.pop(0) if found else None
            if isinstance(found, Exception):
                raise found
            if found is not None:
                return SimpleNamespace(peak_bytes=50 * MIB, incidents={choice.lever.name: found})
        return SimpleNamespace(peak_bytes=(100 - sum(SAVED[one] for one in choices)) * MIB, incidents={})

    def window(self, choices: Sequence[Choice], *, settle: int, steps: int) -> Any:
        seconds = 0.1
        for choice in choices:
            seconds *= SLOWER[choice]
        return SimpleNamespace(seconds=(seconds,) * steps)


ALL = [(LOSS,), (BF16,), (BLOCK,), (LOSS, BF16), (LOSS, BLOCK), (BF16, BLOCK), (LOSS, BF16, BLOCK)]


def fitted(limit_mib: int, process: Process | None = None, turns: int = 100, offered: Any = ALL) -> Fit:
    left = iter(range(turns))
    running: Any = process or Process()
    return fit(lambda: running, offered, limit_mib * MIB, 0.1, lambda: next(left, None) is not None, lambda text: None)


def test_what_fits_already_stays_as_it_is() -> None:
    found = fitted(100)
    assert (found.choices, found.trials, found.plain_bytes) == ((), (), 100 * MIB)


def test_the_fastest_that_fits_is_kept() -> None:
    process = Process()
    found = fitted(65, process)
    assert found.choices == (LOSS, BF16)  # 50 MiB, and faster than recomputing, which needs no other
    assert process.asked.count("loss+activation_checkpointing") == 0  # it would only save more than recomputing does
    told = {trial.label: (trial.outcome, trial.reason) for trial in found.trials}
    assert told[LOSS.label] == ("dropped", "too large")
    assert told[BLOCK.label] == ("dropped", f"fits, but is slower than {LOSS.label} + {BF16.label}")
    assert told[f"{LOSS.label} + {BF16.label}"] == ("kept", "the fastest that fits")
    assert (replace(found, planned_bytes=50 * MIB).holds, found.holds) == (True, False)


def test_where_nothing_fits_the_least_is_named() -> None:
    with pytest.raises(ScriptError, match=r"100 MiB, and 5 MiB are allowed; the lowest .* is 10 MiB, with .*; use a"):
        fitted(5)
    with pytest.raises(ScriptError, match="2 of 7 combinations; allow more time: --budget"):
        fitted(5, turns=2)
    with pytest.raises(ScriptError, match="it hangs; use a smaller batch"):
        fitted(65, Process(loss=TrialError("it hangs")), offered=[(LOSS,)])
    with pytest.raises(ScriptError, match="no lever that saves memory applies to this script"):
        fitted(5, offered=[])


def test_one_that_fails_or_takes_itself_back_is_passed_over() -> None:
    ended = [TrialEnded(0, "", 30)]  # the script came to its end: it is started again
    process = Process(loss=ended, precision="used by 'argmax'", activation_checkpointing=TrialError("it hangs"))
    found = fitted(75, process)
    assert found.choices == (LOSS,)
    assert process.asked[1:3] == ["loss", "loss"]
    assert process.closed == 2  # one that hangs would not answer any more
    told = {trial.label: (trial.outcome, trial.reason) for trial in found.trials}
    assert told[BF16.label] == ("dropped", "used by 'argmax'")
    assert told[BLOCK.label] == ("failed", "it hangs")
    assert len(told) == 3  # neither is tried again beside another


def test_memory_that_cannot_be_told_is_no_memory_that_fits() -> None:
    process: Any = SimpleNamespace(peak=lambda choices: SimpleNamespace(peak_bytes=None, incidents={}))
    with pytest.raises(ScriptError, match="cannot be measured here"):
        fitted(5, process)
    assert "nothing shows" in fit_lines(Fit(limit_bytes=1, plain_bytes=2))[0]
    assert "NOT within 1 B" in fit_lines(Fit(limit_bytes=1, plain_bytes=2, planned_bytes=2))[0]


def test_what_is_combined() -> None:
    model = ModuleSeen(
        kind="GPT", parameters=1000, convolutions=0, linears=9, dtypes=("float32",),
        repeated_block="Block", widest_output=50_000,
    )  # fmt: skip
    machine = detect()
    machine = replace(machine, cpu=replace(machine.cpu, fast_dtypes=("bf16",)))
    adam = OptimizerSeen(kind="Adam", parameters=9, fused=None, foreach=None, can_fuse=True, can_foreach=True)
    seen = Observed(modules=(model,), optimizers=(adam,))
    found = combinations(LEVERS, machine, seen, "reduced")
    assert {frozenset(choice.field for choice in one) for one in found} == {
        *map(frozenset, [["loss"], ["precision"], ["activation_checkpointing"]]),
        *map(frozenset, [["loss", "precision"], ["loss", "activation_checkpointing"]]),
        *map(frozenset, [["precision", "activation_checkpointing"], ["loss", "precision", "activation_checkpointing"]]),
    }
    exact = combinations(LEVERS, machine, seen, "bit-identical")
    assert {choice.field for one in exact for choice in one} == {"activation_checkpointing"}
    open_ones = replace(adam, low_bit_obstacle="")
    zeroed = replace(seen, optimizers=(open_ones,), reads_optimizer_state="", reads_gradients="", update_obstacle="")
    more = combinations(LEVERS, machine, zeroed, "reduced")
    assert len(more) == 4 * (len(found) + 1) - 1
    assert [one[0].field for one in more if len(one) == 1][-1] == "optimizer_state"  # it compiles: last of its kind
    on_gpu = combinations(LEVERS, machine, replace(seen, device="cuda:0"), "rounding")
    assert any({choice.field for choice in one} == {"activation_offload", "loss"} for one in on_gpu)
    assert not any({"activation_offload", "activation_checkpointing"} <= {c.field for c in one} for one in on_gpu)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials", "brief")
def test_a_script_is_made_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path.parent / "levers.py").write_text(
        "from flatout.levers.chunked_loss import ChunkedLoss\nFOR_MEMORY = (ChunkedLoss(),)\n"
    )
    levers = f"{tmp_path.parent / 'levers.py'}:FOR_MEMORY"
    request = TuneRequest(target=Target(path="train.py"), budget_seconds=300, levers=levers, fit_bytes=10 * MIB)
    found = tune_script(request, detect())
    assert found.plan.choices() == {"loss": "chunked"}
    assert found.proof is not None
    assert found.proof.verdict == "within rounding"
    assert found.state.fit is not None
    assert found.state.fit.holds
    assert found.state.fit.plain_bytes > 10 * MIB
    told = tune_text(found)
    assert "within 10 MiB" in told
    assert told.count("the fastest that fits") == 1


DEEP = """
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(256, 256), nn.ReLU())], nn.Linear(256, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
while True:
    x = torch.randn(16, 256)
    y = x[:, :10].argmax(1)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
"""
BYTES_A_COPY = 8 * 256 * 256 * 4
"""Of the weights: a step holds them, their gradients and two moments."""


@pytest.mark.usefixtures("forked_trials", "brief")
@pytest.mark.slow
def test_gradients_are_made_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with moments in 8 bits takes a minute: `python -m benchmarks.memory.fit_script`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(DEEP)
    levers = tmp_path.parent / "in_backward_alone.py"
    levers.write_text(
        "from flatout.levers.optimizer_in_backward import OptimizerInBackward\nFOR_MEMORY = (OptimizerInBackward(),)\n"
    )
    request = TuneRequest(
        target=Target(path="train.py"),
        budget_seconds=200,
        levers=f"{levers}:FOR_MEMORY",
        fit_bytes=int(3.6 * BYTES_A_COPY),
    )
    found = tune_script(request, detect())
    assert found.plan.choices() == {"optimizer_in_backward": True}
    assert found.state.fit is not None
    assert found.state.fit.plain_bytes > 3.9 * BYTES_A_COPY
    assert found.state.fit.holds
    assert found.proof is not None
    assert found.proof.verdict == "bit-identical"


@pytest.mark.parametrize(("planned", "code"), [(9 * MIB, 0), (11 * MIB, 1), (None, 1)])
def test_no_plan_is_left_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: int | None, code: int
) -> None:
    """As when the proof took out what made it fit."""
    state = SearchState(fit=Fit(limit_bytes=10 * MIB, plain_bytes=12 * MIB, planned_bytes=planned))

    def found(request: TuneRequest, machine: Machine, *_: Any) -> Tuned:
        assert request.fit_bytes == 10 * MIB
        return Tuned(
            subject=request.target,
            machine=machine,
            state=state,
            plan=Plan(),
            proof=None,
            final=None,
            budget_seconds=request.budget_seconds,
            seconds=1.0,
        )

    monkeypatch.setattr("flatout.application.tune.tune_script", found)
    (tmp_path / "train.py").write_text(SCRIPT)
    done = said_by(tmp_path, "tune", "--fit", "10MiB", "train.py")
    assert done.returncode == code
    assert (tmp_path / "flatout.toml").exists() is (code == 0)
    assert (tmp_path / "flatout-report.json").exists()
    assert ("and no plan: it would not fit" in done.stdout) is (code == 1)


def test_a_script_that_ends_while_its_plain_step_is_measured_is_started_again() -> None:
    class Ending(Process):
        ends = 1

        def peak(self, choices: Sequence[Choice], *, steps: int = 2) -> Any:
            if self.ends:
                self.ends -= 1
                raise TrialEnded(0, "", 30)
            return super().peak(choices, steps=steps)

    process = Ending()
    assert fitted(65, process).choices == (LOSS, BF16)
    assert process.closed == 1
