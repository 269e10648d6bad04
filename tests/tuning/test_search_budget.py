"""What a search says and does when its time is short. No script is run to its end here."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import ScriptError
from flatout.levers.allocator import PreloadedAllocator
from flatout.levers.autocast import Autocast
from flatout.levers.catalogue import LEVERS
from flatout.levers.compile import Compile
from flatout.levers.denormals import FlushDenormals
from flatout.levers.first_compilation import seconds_to_compile_again, usual_compile_seconds
from flatout.levers.fused_optimizer import FusedOptimizer
from flatout.levers.lever import Choice, Lever
from flatout.levers.observed import ModuleSeen, Observed
from flatout.levers.threads import Threads
from flatout.script.entry import Target
from flatout.script.trial.answers import TrialEnded, TrialHangs, Window
from flatout.script.trial.process import TrialProcess
from flatout.script.trial.setup import TrialSetup
from flatout.search.deadline import BudgetSpent, Deadline
from flatout.terminal import Notice
from flatout.tuning import verifier
from flatout.tuning.proposals import SearchLimits
from flatout.tuning.short_budget import no_step
from flatout.tuning.training_search import TrainingSearch
from tests.levers.test_catalogue import AMX, CPU
from tests.tuning.test_worth_trying import STEP

pytestmark = pytest.mark.usefixtures("forked_trials")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def search(folder: Path, clock: Clock, *levers: Lever) -> TrainingSearch:
    whole = Deadline(10.0, clock=clock)
    setup = TrialSetup(target=Target(path="train.py"), work_folder=folder)
    return TrainingSearch(setup, CPU, levers, SearchLimits(deadline=whole.reserving(4.0)))


def test_a_slow_start_is_blamed_and_not_the_steps(tmp_path: Path) -> None:
    clock = Clock()
    asked = search(tmp_path, clock)
    asked.state.startup_seconds = clock.now = 9.0
    with pytest.raises(ScriptError) as refused:
        asked._affordable_steps(0.02)
    assert str(refused.value) == (
        "train.py: starting it takes 9 s, and a step 20 ms; trying one lever takes about 79 steps, and nothing of the "
        "budget of 10 s is left for that, apart from the proof; try --budget 40s (in Python: seconds=40)"
    )


def test_long_steps_are_blamed_where_they_are_long(tmp_path: Path) -> None:
    clock = Clock()
    asked = search(tmp_path, clock)
    asked.state.startup_seconds = clock.now = 2.0
    with pytest.raises(ScriptError, match=r"a step 1 s; .* 4 s of the budget of 10 s is .* make .* steps smaller"):
        asked._affordable_steps(1.0)


def test_a_search_leaves_time_for_the_proof_however_short_its_own_is(tmp_path: Path) -> None:
    clock = Clock()
    asked = search(tmp_path, clock)
    clock.now = 1.0
    asked.state.startup_seconds = 1.2
    asked._keep_back(0.0)
    starts = 0.6 * 4 + 1  # of the proof, of which two go on at once, and of the one new pair of the last comparison
    assert asked._remaining() == pytest.approx(10 - 1.0 - starts * 1.2)
    before = asked._remaining()
    asked._keep_back(0.005)
    assert asked._remaining() < before
    asked._keep_back(1e9)  # long steps are not all paid for by the search
    assert asked._remaining() == pytest.approx(10 - 1.0 - starts * 1.2 - 0.4 * 10)
    asked.state.startup_seconds = 2.0
    asked._keep_back(0.001)
    with pytest.raises(
        ScriptError, match=r"nothing of the budget of 10 s is left .* try --budget 30s \(in Python: seconds=30\)$"
    ):
        asked._affordable_steps(0.001)


class Stepping:
    """A process whose steps take this long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def window(self, choices: object, *, settle: int, steps: int) -> Window:
        return Window(seconds=(self.seconds,) * steps, settle_seconds=(), apply_seconds=0.0, resident_bytes=0)


def test_with_long_steps_the_proof_goes_over_the_budget_where_a_trial_fits(tmp_path: Path) -> None:
    clock = Clock()
    said: list[str] = []
    setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path)
    limits = SearchLimits(deadline=Deadline(60.0, clock=clock).reserving(24.0))
    asked = TrainingSearch(setup, CPU, (), limits, said.append)
    asked.state.startup_seconds, clock.now = 4.5, 12.0
    process: Any = Stepping(1.4)
    assert asked._affordable_of_first(process, 1.4) == 2
    (line,) = said
    assert line.startswith("steps of 1.4 s: this tune will take about ")
    assert isinstance(line, Notice)
    assert 33.0 < asked._remaining() < 34.0
    asked._keep_back(1.4)  # as after a trial
    assert 33.0 < asked._remaining() < 34.0
    clock.now = 24.0  # there is room for one trial only
    late = TrainingSearch(setup, CPU, (), limits, said.append)
    late.state.startup_seconds = 4.5
    late._affordable_of_first(process, 1.4)
    assert len(said) == 2
    assert late._remaining() == pytest.approx(33.6)
    clock.now = 38.0
    last = TrainingSearch(setup, CPU, (), limits, said.append)
    last.state.startup_seconds = 4.5
    last._affordable_of_first(process, 1.4)
    assert last._remaining() == pytest.approx(22.0)
    process.seconds = 4.0
    other = TrainingSearch(setup, CPU, (), limits, said.append)
    other.state.startup_seconds = 4.5
    with pytest.raises(ScriptError, match="a step 4 s"):
        other._affordable_of_first(process, 4.0)
    assert len(said) == 3


def test_no_budget_is_refused_for_a_first_step_alone_while_there_is_time_for_another(tmp_path: Path) -> None:
    """A script may evaluate in its first steps."""
    clock = Clock()
    asked = search(tmp_path, clock)
    asked.state.startup_seconds, clock.now = 1.0, 2.0
    process: Any = Stepping(0.5)
    with pytest.raises(ScriptError, match="a step 500 ms"):
        asked._affordable_of_first(process, 6.0)
    clock.now = 5.0
    with pytest.raises(ScriptError, match="a step 6 s"):
        asked._affordable_of_first(process, 6.0)


def test_no_start_is_begun_that_ends_after_the_time(tmp_path: Path) -> None:
    clock = Clock()
    asked = search(tmp_path, clock)
    asked.state.startup_seconds = 2.0
    clock.now = 4.5
    lever = PreloadedAllocator()
    assert lever.switch != "live"
    assert not asked._try(Choice(lever, "jemalloc"))
    assert [one.label for one in asked.state.not_tried] == [lever.label("jemalloc")]


def test_a_script_that_ends_with_a_code_of_its_own_is_said_to(tmp_path: Path) -> None:
    """Perhaps because something is wrong with it: it prints what that is, and nobody reads it."""
    asked = search(tmp_path, Clock())
    for _ in range(2):
        asked._note_length(TrialEnded(0, "", 50), 0.01)
    assert asked.state.warnings == []
    for _ in range(2):
        asked._note_length(TrialEnded(3, "", 1200), 0.01)
    assert asked.state.warnings == ["train.py exits with code 3 by itself, after 1,200 steps"]


def test_a_search_that_is_stopped_says_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    clock = Clock()
    asked = search(tmp_path, clock)
    clock.now = 3.0
    assert not asked.stop()
    asked.state.kept = [Choice(Compile(), "default")]
    assert asked.stop()
    assert asked._remaining() == 0
    assert not asked._try(Choice(PreloadedAllocator(), "jemalloc"))
    assert [one.reason for one in asked.state.not_tried] == ["not reached before the search was stopped"]
    assert asked.state.stopped_after_seconds == 3.0
    assert asked._enough_seconds() is None


def test_silence_is_told_with_the_budget_that_was_given() -> None:
    error = no_step("train.py", TrialHangs(6.0), None, Deadline(10.0, clock=Clock()))
    assert str(error).startswith(
        "train.py: no step in 6 s; the budget is 10 s; allow more time: --budget (in Python: seconds=)"
    )
    located = no_step("train.py", TrialHangs(6.0, "train.py:9 in evaluate"), None, Deadline(10.0, clock=Clock()))
    assert str(located).startswith("train.py: no step in 6 s; last at train.py:9 in evaluate; the budget is 10 s")


def test_what_the_time_did_not_suffice_for_is_listed_once(tmp_path: Path) -> None:
    clock = Clock()
    lever = Compile()
    asked = search(tmp_path, clock, lever)
    asked.state.kept = [Choice(lever, "default")]
    asked.state.observed = Observed(device="cuda:0", modules=(ModuleSeen(kind="Net", parameters=1),))
    clock.now = 10.0
    asked._propose(lever.name)
    listed = list(asked.state.not_tried)
    assert [one.label for one in listed][:2] == ["torch.compile", "torch.compile reduce-overhead"]
    asked._second_look()
    assert asked.state.not_tried == listed


STEPS = """
import time, torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10_000):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
    time.sleep(1000 if step == 5 else 0)
"""


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.slow
def test_a_silent_trial_ends_soon_after_the_search_was_stopped(tmp_path: Path) -> None:
    deadline = Deadline(1000.0)
    (tmp_path / "train.py").write_text(STEPS)
    setup = TrialSetup(target=Target(path=str(tmp_path / "train.py")), work_folder=tmp_path, deadline=deadline)
    with TrialProcess(setup) as trial:
        trial.start(120)
        threading.Timer(0.2, lambda: setattr(deadline, "stopped", True)).start()
        with pytest.raises(BudgetSpent):
            trial.window([], settle=0, steps=100)


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.slow
def test_steps_are_interrupted_soon_after_the_time_is_over(tmp_path: Path) -> None:
    clock = Clock()
    deadline = Deadline(10.0, clock=clock)
    (tmp_path / "train.py").write_text(STEPS)
    target = Target(path=str(tmp_path / "train.py"))
    setup = TrialSetup(target=target, work_folder=tmp_path, deadline=deadline)
    with TrialProcess(setup) as trial:
        clock.now = 10.4  # what is begun now has some grace
        assert not deadline.seconds_left
        trial.interruptible = True
        trial.start(120)
        clock.now = 10.6
        with pytest.raises(BudgetSpent, match="the budget of 10 s is spent"):
            trial.window([], settle=0, steps=100)
    late = TrialProcess(setup)
    late.interruptible = True
    with pytest.raises(BudgetSpent):
        late.start(120)


def test_while_nothing_is_kept_little_time_is_kept_back_for_a_proof(tmp_path: Path) -> None:
    setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path)
    asked = TrainingSearch(setup, AMX, LEVERS, SearchLimits(deadline=Deadline(60.0, clock=Clock()).reserving(24.0)))
    asked.state.startup_seconds = 0.1
    asked._keep_back(0.001)
    assert 0.5 < asked._deadline.reserved_seconds < 12.0
    asked.state.kept = [Choice(FlushDenormals(), True)]
    asked._keep_back(0.001)
    assert asked._deadline.reserved_seconds == pytest.approx(24.0)


def test_once_something_is_kept_the_whole_time_of_its_proof_and_last_comparison_is_kept_back(tmp_path: Path) -> None:
    """Of long steps, which take more than the share of the budget that is kept back for nothing yet."""
    setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path)
    asked = TrainingSearch(setup, AMX, LEVERS, SearchLimits(deadline=Deadline(60.0, clock=Clock()).reserving(6.0)))
    asked.state.startup_seconds = 0.1
    asked._keep_back(0.5)
    before = asked._deadline.reserved_seconds
    assert before < verifier.least_seconds(0.5, asked.state, asked.trials, 60.0, math.inf) - 5.0
    asked.state.kept = [Choice(FlushDenormals(), True)]
    asked._keep_back(0.5)
    whole = verifier.least_seconds(0.5, asked.state, asked.trials, 60.0, math.inf)
    assert asked._deadline.reserved_seconds == pytest.approx(whole)


def test_levers_that_are_predicted_to_help_are_tried_at_once_where_there_is_no_time_for_a_few(tmp_path: Path) -> None:
    clock = Clock()
    setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path)
    asked = TrainingSearch(setup, AMX, LEVERS, SearchLimits(deadline=Deadline(60.0, clock=clock).reserving(24.0)))
    parts = {"data": 0.04, "forward": 0.1, "backward": 0.2, "optimizer": 0.08}
    asked.state.observed = asked.state.first_observed = replace(STEP, step_seconds=0.42, breakdown_seconds=parts)
    bundle = asked.bundle()
    assert {"optimizer", "memory_format"} <= {choice.field for choice in bundle}
    assert all(choice.lever.switch == "live" and not choice.lever.compiles for choice in bundle)
    assert "threads" not in {choice.field for choice in bundle}  # nobody knows whether fewer would help
    masked = (replace(STEP.modules[0], widest_output=30_000),)
    asked.state.observed = replace(asked.state.observed, modules=masked, flops_per_step=1e12, ignored_share=0.3)
    assert "loss" in {choice.field for choice in asked.bundle()}, "it is there for memory, and here saves time too"
    quick = {name: seconds / 100 for name, seconds in parts.items()}
    asked.state.observed = asked.state.first_observed = replace(STEP, step_seconds=0.0042, breakdown_seconds=quick)
    assert asked.bundle() == ()


def test_a_value_for_which_there_is_time_comes_before_one_that_would_be_too_late(tmp_path: Path) -> None:
    clock = Clock()
    asked = search(tmp_path, clock, Compile())
    blocks = ModuleSeen(kind="Net", parameters=10, repeated_block="Block", repeated_blocks=4)
    seen = Observed(step_seconds=0.02, device="cpu", modules=(blocks,), operations_per_step=600)
    asked.state.observed = asked.state.first_observed = seen
    asked._deadline = Deadline(600.0, clock=clock)
    assert [one.value for one in asked.proposal("torch.compile").candidates] == ["default", "regional"]
    regional, whole = (asked.needed_seconds([Choice(Compile(), value)]) for value in ("regional", "default"))
    clock.now = 600.0 - (regional + whole) / 2
    assert [one.value for one in asked.proposal("torch.compile").candidates] == ["regional", "default"]


def test_another_value_of_what_is_kept_is_expected_to_save_nothing(tmp_path: Path) -> None:
    asked = search(tmp_path, Clock(), *LEVERS)
    asked.state.observed = asked.state.first_observed = STEP
    fused, foreach = asked.proposal("optimizer").candidates
    assert asked.predicted([foreach]).expected > 0  # type: ignore[union-attr]
    asked.state.kept = [fused]
    assert asked.predicted([foreach]).expected == 0  # type: ignore[union-attr]


def test_a_value_that_another_one_surpasses_is_not_tried_once_that_is_kept(tmp_path: Path) -> None:
    """Foreach was never faster than fused, nor blocks compiled each for itself faster than the whole model."""
    asked = search(tmp_path, Clock(), *LEVERS)
    blocks = ModuleSeen(kind="Net", parameters=10, repeated_block="Block", repeated_blocks=4)
    asked.state.observed = asked.state.first_observed = replace(STEP, modules=(blocks,))
    for name, first in (("optimizer", "fused"), ("torch.compile", "default")):
        best, other = sorted(asked.proposal(name).candidates, key=lambda one: one.value != first)
        asked.state.kept = [other]
        assert best in asked.proposal(name).candidates
        asked.state.kept = [best]
        assert other not in asked.proposal(name).candidates


@pytest.mark.parametrize("worth_more", [False, True], ids=["others save less", "others save more"])
def test_what_saves_much_is_tried_while_there_is_still_time_for_it(tmp_path: Path, worth_more: bool) -> None:
    """Not where those that there would be no time for are expected to save more together."""
    clock = Clock()
    asked = search(tmp_path, clock, *(LEVERS if worth_more else (Compile(), Threads(), FusedOptimizer())))
    asked.state.observed = asked.state.first_observed = STEP
    asked._deadline = Deadline(600.0, clock=clock)

    def first() -> str:
        return max((name for name in asked.names() if asked.proposal(name).candidates), key=asked.promise)

    assert first() != "torch.compile"  # the others take less time
    needed = asked.needed_seconds([asked.proposal("torch.compile").candidates[0]])
    clock.now = 600.0 - needed - 1.0
    assert (first() == "torch.compile") is not worth_more
    clock.now = 600.0 - needed + 1.0
    assert first() != "torch.compile"


def test_a_small_gain_is_not_confirmed_at_the_cost_of_a_larger_one(tmp_path: Path) -> None:
    """A cheap lever that looks a little faster would take up to three shares of the time to be sure of it."""
    clock = Clock()
    asked = search(tmp_path, clock, Compile(), FusedOptimizer())
    asked.state.observed = asked.state.first_observed = STEP
    asked._deadline, asked._left = Deadline(60.0, clock=clock), 8
    needed = asked.needed_seconds([asked.proposal("torch.compile").candidates[0]])

    def longest(seconds_left: float) -> float:
        clock.now = 60.0 - seconds_left
        return asked._pace([Choice(FusedOptimizer(), "fused")]).longest_seconds

    assert longest(needed + 4.0) == pytest.approx(4.0)
    assert asked._share(60.0) < 4.0
    assert longest(needed + 1.0) == asked._share(60.0)  # less would decide nothing
    assert longest(needed - 1.0) > 4.0  # too late for compiling
    asked._begun["torch.compile"] = {"torch.compile"}  # it was tried
    assert longest(needed + 4.0) > 4.0


def test_nothing_is_compiled_that_proof_and_comparison_could_not_compile_again(tmp_path: Path) -> None:
    """The trial's own compilation and two more have to fit; then the other levers get the time."""
    clock = Clock()
    asked = search(tmp_path, clock)
    asked._deadline = Deadline(60.0, clock=clock).reserving(5.0)
    asked.state.first_observed, asked.state.startup_seconds = Observed(step_seconds=0.02), 0.5
    compiled, other = Choice(Compile(), "default"), Choice(FlushDenormals(), True)
    needed = asked.needed_seconds([compiled])
    assert needed > usual_compile_seconds(asked.state.first_observed) + 0.5
    started = 0.5 + asked.usual_trial_seconds
    assert asked.needed_seconds([other]) == started
    asked.state.kept, asked._compile_seconds = [compiled], 20.0
    assert asked.needed_seconds([compiled, other]) == started + seconds_to_compile_again(20.0)
    assert asked.needed_seconds([Choice(Compile(), "regional")]) > 5.0  # that is compiled too
    assert asked.needed_seconds([compiled, Choice(Threads(), 1)]) > 5.0  # under which code is compiled again
    asked.state.kept = []
    # The proof compiles without bf16 only where there is time for that.
    assert asked.needed_seconds([Choice(Autocast(), "bf16"), compiled]) == pytest.approx(needed)
    clock.now = 55.0 - needed + 1
    asked._try(compiled)
    assert asked.state.not_tried[-1].for_lack_of_time


def test_a_bundle_that_looks_faster_gets_most_of_the_time(tmp_path: Path) -> None:
    """Without a verdict on it, its members would be tried one by one in what is left."""
    asked = search(tmp_path, Clock())
    asked.state.observed = replace(asked.state.observed, step_seconds=0.25)
    alone, together = asked._pace(), asked._pace([Choice(FusedOptimizer(), "fused"), Choice(Autocast(), "bf16")])
    assert together.seconds == alone.seconds
    assert alone.longest_seconds <= asked._remaining() / 2 < together.longest_seconds < asked._remaining()


def test_ctrl_c_is_not_lost_while_more_is_kept_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = search(tmp_path, Clock())
    reserving = Deadline.reserving

    def pressed(deadline: Deadline, seconds: float) -> Deadline:
        asked.stop()
        return reserving(deadline, seconds)

    monkeypatch.setattr(Deadline, "reserving", pressed)
    asked._keep_back(0.1)
    assert asked._remaining() == 0
