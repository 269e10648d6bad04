"""Scripts of a few steps, whose runs are compared whole. The trials are pretended, but for the last test's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flatout.errors import ScriptError, TrialError
from flatout.levers.lever import Choice, Lever, Verdict, offer
from flatout.levers.observed import Observed, StepWork
from flatout.machine.description import Machine
from flatout.machine.detect import detect
from flatout.plan_choices import Exactness
from flatout.report.tune_text import tune_document, tune_text
from flatout.script.entry import Target
from flatout.script.trial.answers import Peak, TrialEnded, Window, explain_end
from flatout.script.trial.setup import TrialSetup
from flatout.search.deadline import Deadline
from flatout.tuning.last_comparison import PlainAndPlanned, compare_afresh
from flatout.tuning.proposals import SearchLimits
from flatout.tuning.prover import Pattern, Prover
from flatout.tuning.results import SearchState, Tuned
from flatout.tuning.script_tuning import TuneRequest, tune_script
from flatout.tuning.training_search import TrainingSearch
from flatout.tuning.verifier import least_seconds
from flatout.tuning.windows import Arm, FewSteps, RolledBackInside, compare_whole_runs, few_steps
from tests.levers.test_catalogue import CPU

FEW = FewSteps(steps=5, compared=4)


class Faster(Lever):
    name, plan_field, factor = "faster", "memory_format", 0.5
    exactness: Exactness = "bit-identical"

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        return offer(True, reason="")


class Slower(Faster):
    name, plan_field, factor = "slower", "optimizer", 1.5


class Useless(Faster):
    name, plan_field, factor = "useless", "flush_denormals", 1.0


class FromStart(Faster):
    name, plan_field, factor, switch = "from start", "threads", 0.8, "once"


class Reducing(Faster):
    name, plan_field = "reducing", "precision"
    exactness: Exactness = "reduced"


class Compiling(Faster):
    name, plan_field, compiles = "compiling", "compile", True


class Run:
    """A run of `script.steps` steps, the first of which has been made when it has started."""

    interruptible, first_steps_seconds = False, 0.0
    isolation: ClassVar[dict[str, Any]] = {}
    deadline: Deadline | None = None
    expected_step_seconds: float | None = None

    def __init__(self, script: Pretended, choices: Sequence[Choice]) -> None:
        self.script, self.from_start = script, list(choices)
        self.waiting_seconds = 0.0 if script.runs else script.first_waits_seconds
        self.startup_seconds = self.start_seconds = script.start_seconds + self.waiting_seconds
        self.left, self.alive, self.first = 0, False, True

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.alive, self.script.running = False, False

    def spawn(self) -> None:
        """Nothing can be done ahead."""

    def start(self, timeout_seconds: float = 0.0) -> None:
        self.script.now += self.start_seconds
        self.script.runs.append([])
        self.alive, self.left = True, self.script.steps - 1
        self.script.running = True
        self.made = self.script.runs[-1]

    def take(self, steps: int, what: str, seconds: float | None = None) -> None:
        """So many steps, if there are as many."""
        self.script.now += min(steps, self.left) * (self.script.step_seconds if seconds is None else seconds)
        if steps > self.left:
            self.alive = False
            raise TrialEnded(0, "", self.script.steps)
        self.left -= steps
        self.made.append((what, steps))

    def describe(self) -> Observed:
        return Observed()

    def breakdown(self, choices: Sequence[Choice], *, steps: int) -> Observed:
        self.take(steps, "breakdown")
        return Observed(step_seconds=self.script.step_seconds, operations_per_step=100)

    def work(self) -> StepWork:
        self.take(1, "work")
        return StepWork(flops_per_step=None, operations_per_step=100, denormal_share=None, denormal_slowdown=None)

    def peak(self, choices: Sequence[Choice], *, steps: int = 2) -> Peak:
        self.take(2, "peak")
        return Peak(peak_bytes=1 << 20, resident_bytes=1 << 30)

    def window(self, choices: Sequence[Choice], *, settle: int, steps: int, suspended: bool = False) -> Window:
        seconds = self.script.step_seconds
        for choice in (*self.from_start, *choices):
            seconds *= getattr(choice.lever, "factor", 1.0)
        seconds *= 1 + 1e-3 * (len(self.script.runs) % 3)
        self.take(settle + steps, "+".join(choice.label for choice in (*self.from_start, *choices)) or "plain", seconds)
        all_seconds = [seconds] * (settle + steps)
        if choices and self.first:
            all_seconds[0] += self.script.lever_start_seconds
        self.first = False
        return Window(
            seconds=tuple(all_seconds[settle:]),
            settle_seconds=tuple(all_seconds[:settle]),
            apply_seconds=0.0,
            resident_bytes=0,
            rolled_back=self.script.rolled_back if choices else {},
        )


class Pretended:
    """Trials of a script. `runs` has what each was asked for, and how many steps that took."""

    name, kind, afresh, starts_overlap = "train.py", "script", "in new processes", False

    def __init__(self, folder: Path, steps: int, step_seconds: float = 0.01) -> None:
        self.work_folder, self.shared_folder, self.steps, self.step_seconds = folder, folder, steps, step_seconds
        self.running = False
        self.start_seconds, self.lever_start_seconds, self.now = 0.2, 0.0, 0.0
        self.first_waits_seconds = 0.0
        self.rolled_back: dict[str, str] = {}
        self.runs: list[list[tuple[str, int]]] = []

    def trial(self, choices: Sequence[Choice] = (), *, label: str = "trial") -> Any:
        return Run(self, choices)

    def spared_seconds(self, choices: Sequence[Choice] = ()) -> float:
        return 0.0

    def from_the_start(self) -> Pretended:
        return self

    def in_new_processes(self) -> Pretended:
        return self


def searched(script: Pretended, *levers: Lever, budget_seconds: float = 100.0, **limits: Any) -> SearchState:
    deadline = Deadline(budget_seconds, clock=lambda: script.now)
    asked = SearchLimits(deadline=deadline.reserving(0.4 * budget_seconds), **limits)
    state: SearchState = TrainingSearch(script, CPU, levers, asked).run()
    return state


@pytest.mark.parametrize(
    ("steps", "step_seconds", "whole"),
    [
        *((3, 0.001, True), (11, 0.001, True), (11, 0.05, True), (13, 0.001, True), (14, 0.001, False)),
        (14, 0.055, False),
        *((8, 1.0, True), (9, 1.0, False)),  # one pair of single steps fits
        *((6, 2.0, True), (7, 2.0, False), (5, 60.0, True), (6, 60.0, False), (3, 60.0, True)),
    ],
)
def test_whole_runs_are_compared_where_nothing_smaller_fits(steps: int, step_seconds: float, whole: bool) -> None:
    assert (few_steps(TrialEnded(0, "", steps), step_seconds) is not None) is whole


def test_steps_that_passed_before_it_was_certain_what_a_step_is_are_the_scripts_all_the_same() -> None:
    assert few_steps(TrialEnded(0, "", 6, script_steps=8), 0.01) == FewSteps(steps=8, compared=5)


def compared(script: Pretended, lever: Lever) -> Any:
    choice = Choice(lever, True)

    @contextlib.contextmanager
    def run(choices: list[Choice]) -> Iterator[Arm]:
        assert not script.running
        with script.trial() as process:
            process.start()
            yield Arm(process, choices)

    return compare_whole_runs(lambda: run([]), lambda: run([choice]), FEW, FEW.pace, choice)


def test_each_side_of_a_pair_is_a_run_of_its_own_from_its_first_step_to_its_last(tmp_path: Path) -> None:
    script = Pretended(tmp_path, 5)
    found = compared(script, Faster())
    assert (found.comparison.verdict, found.comparison.pairs) == ("faster", 3)
    assert found.baseline_seconds == pytest.approx(0.01, rel=0.01)
    assert found.candidate_seconds == pytest.approx(0.005, rel=0.01)
    plain, faster = [("plain", 4)], [("faster", 4)]
    assert script.runs == [plain, faster, faster, plain, plain, faster]


def test_what_a_lever_costs_to_start_is_part_of_its_run(tmp_path: Path) -> None:
    script = Pretended(tmp_path, 5)
    script.lever_start_seconds = 0.1
    found = compared(script, Faster())
    assert found.startup_seconds is None
    assert found.candidate_seconds == pytest.approx((4 * 0.005 + 0.1) / 4, rel=0.01)
    assert (found.comparison.verdict, found.comparison.pairs) == ("slower", 2)


@pytest.mark.parametrize(("time_left", "pairs", "verdict"), [(0, 3, "not significant"), (9, 6, "faster")])
def test_a_gain_that_a_few_more_pairs_will_show_is_waited_for(time_left: int, pairs: int, verdict: str) -> None:
    """Of runs that differ, when the comparison's time is over."""
    seconds = iter([1.0, 0.75, 0.55, 1.0] * 10)  # the order of sides changes from pair to pair
    left = iter(range(time_left))

    class Noisy:
        def window(self, choices: Any, *, settle: int, steps: int, suspended: bool = False) -> Window:
            assert (settle, steps) == (0, 1)
            return Window(seconds=(next(seconds),), settle_seconds=(), apply_seconds=0.0, resident_bytes=0)

    process: Any = Noisy()
    sides = (lambda: contextlib.nullcontext(Arm(process))), (lambda: contextlib.nullcontext(Arm(process)))
    few = FewSteps(steps=2, compared=1)
    pace = replace(few.pace, seconds=0.0)
    found = compare_whole_runs(*sides, few, pace, None, lambda: next(left, None) is not None)
    assert (found.comparison.pairs, found.comparison.verdict) == (pairs, verdict)


def test_a_lever_that_was_taken_back_in_its_run_is_named(tmp_path: Path) -> None:
    script = Pretended(tmp_path, 5)
    script.rolled_back = {"faster": "no such thing"}
    with pytest.raises(RolledBackInside, match="no such thing"):
        compared(script, Faster())


def test_a_search_over_whole_runs_keeps_what_is_faster(tmp_path: Path) -> None:
    script = Pretended(tmp_path, 5)
    state = searched(script, Faster(), Slower(), Useless(), FromStart())
    assert state.few_steps == FEW
    assert state.total_steps == 5
    assert state.short_run_steps == 5  # 0.05 s, and starting takes 0.2 s
    assert [choice.label for choice in state.kept] == ["faster", "from start"]
    trials = {trial.label: trial for trial in state.trials}
    assert trials["slower"].reason == "slower"
    assert trials["useless"].outcome == "dropped"
    assert trials["faster"].startup_seconds is None
    assert script.runs[1] == [("breakdown", 3), ("work", 1)]
    assert {run[0][1] for run in script.runs[2:]} == {4}


def test_what_is_not_faster_was_so_in_pairs_of_whole_runs(tmp_path: Path) -> None:
    class ALittleSlower(Faster):
        name, factor = "a little slower", 1.003

    state = searched(Pretended(tmp_path, 5), ALittleSlower())
    assert "pairs of whole runs" in state.trials[0].reason or state.trials[0].reason == "slower"


@pytest.mark.parametrize("steps", [1, 2])
def test_a_script_too_short_for_a_proof_is_refused(tmp_path: Path, steps: int) -> None:
    said = rf"train.py ended after {steps} steps?; .* after a script's first step, and a proof needs 2 steps .*; let it"
    with pytest.raises(ScriptError, match=said):
        searched(Pretended(tmp_path, steps), Faster())


@pytest.mark.parametrize("steps", [5, 10_000])
def test_a_first_start_that_waited_for_the_disk_is_not_taken_for_later_ones(tmp_path: Path, steps: int) -> None:
    """Proof and comparison take nine starts or so at the least: as slow as the first, they would fill the minute."""
    script = Pretended(tmp_path, steps)
    script.start_seconds, script.first_waits_seconds = 1.0, 9.0
    state = searched(script, Faster(), budget_seconds=60.0)
    assert state.startup_seconds == 1.0
    assert [choice.label for choice in state.kept] == ["faster"]


@pytest.mark.parametrize(("start_seconds", "waits_seconds"), [(9.0, 2.0), (0.1, 0.5)])
def test_a_start_that_computed_or_was_short_is_not_made_twice(
    tmp_path: Path, start_seconds: float, waits_seconds: float
) -> None:
    script = Pretended(tmp_path, 10_000)
    script.start_seconds, script.first_waits_seconds = start_seconds, waits_seconds
    state = searched(script, Faster(), budget_seconds=300.0)
    assert state.startup_seconds == start_seconds + waits_seconds
    assert len(script.runs) == 1


def test_a_script_that_grows_shorter_is_told_so() -> None:
    assert "it had more in the run before" in str(explain_end(TrialEnded(0, "", 7), "train.py"))


def test_a_budget_too_short_for_whole_runs_is_refused_with_one_that_would_do(tmp_path: Path) -> None:
    said = (
        r"train.py has 3 steps: starting it takes 200 ms including the first, and each of the others 3 s; "
        r"trying one lever takes 6 whole runs, about 37\.2 s, and .* of the budget of 1 min 20 s is left .*; "
        r"let it run more steps .*, or try --budget 4m \(in Python: seconds=240\)$"
    )
    with pytest.raises(ScriptError, match=said):
        searched(Pretended(tmp_path, 3, 3.0), Faster(), budget_seconds=80.0)
    assert searched(Pretended(tmp_path, 3, 3.0), Faster(), budget_seconds=240.0).kept


def test_steps_for_which_the_time_is_over_after_the_first_are_refused_after_the_second(tmp_path: Path) -> None:
    script = Pretended(tmp_path, 4, 24.0)
    script.start_seconds = 34.0
    with pytest.raises(
        ScriptError, match=r"starting it takes 34 s, and a step 24 s; .* nothing of the budget of 1 min .*"
    ):
        searched(script, Faster(), budget_seconds=60.0)
    assert script.runs == [[("plain", 1)]]


def test_memory_of_few_steps_is_not_fitted(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"train.py has 5 steps; a memory limit"):
        searched(Pretended(tmp_path, 5), Faster(), fit_bytes=1)


def test_what_few_steps_cannot_prove_or_repay_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.levers.first_compilation.headers_are_compiled", lambda: True)
    told = {entry.label: entry.reason for entry in searched(Pretended(tmp_path, 4), Reducing(), Compiling()).not_tried}
    assert told["reducing"] == "reduced is proved by the losses of 4 steps with it, and there are 3"
    assert told["compiling"] == "compiling usually takes 6.55 s, and all steps of a run 30 ms"
    state = searched(Pretended(tmp_path, 5, 5.0), Reducing(), Compiling(), budget_seconds=10_000.0)
    assert {trial.label for trial in state.trials} == {"reducing", "compiling"}


def test_a_length_that_shows_in_a_comparison_makes_it_one_of_whole_runs(tmp_path: Path) -> None:
    """Of long steps so few are watched that a script's end may come only later."""
    script = Pretended(tmp_path, 6, 1.5)
    state = searched(script, Faster(), budget_seconds=40.0)
    assert script.runs[0] == [("plain", 2), ("breakdown", 2), ("work", 1)]
    assert state.few_steps == FewSteps(steps=6, compared=5)
    assert [choice.label for choice in state.kept] == ["faster"]
    assert script.runs[-1] == [("breakdown", 5)]


def test_long_steps_of_which_windows_fit_are_compared_in_one_run(tmp_path: Path) -> None:
    script = Pretended(tmp_path, 9, 1.0)
    state = searched(script, Faster(), budget_seconds=1000.0)
    assert (state.few_steps, state.total_steps, state.short_run_steps) == (None, 9, None)
    assert [choice.label for choice in state.kept] == ["faster"]
    assert any(("faster", 2) in run and ("plain", 2) in run for run in script.runs)


@pytest.mark.parametrize(("steps", "step_seconds"), [(14, 0.055), (14, 0.001), (100, 0.001)])
def test_windows_are_as_short_as_the_script_wants_them(tmp_path: Path, steps: int, step_seconds: float) -> None:
    script = Pretended(tmp_path, steps, step_seconds)
    state = searched(script, Faster(), total_steps=100_000)
    assert state.few_steps is None
    assert [choice.label for choice in state.kept] == ["faster"]


def test_a_choice_that_is_no_longer_needed_is_found_by_whole_runs(tmp_path: Path) -> None:
    script = Pretended(tmp_path, 5)
    search = TrainingSearch(script, CPU, (), SearchLimits(deadline=Deadline(100.0, clock=lambda: script.now)))
    search.state.few_steps = FEW
    faster, slower = Choice(Faster(), True), Choice(Slower(), True)
    search.state.kept = [faster, slower]
    found = search.without(slower, [faster])
    assert found is not None
    assert found.verdict == "faster"


def test_memory_of_few_steps_is_measured_in_runs_of_their_own(tmp_path: Path) -> None:
    class ForMemory(Faster):
        name, aim = "for memory", "memory"

    script = Pretended(tmp_path, 3)
    search = TrainingSearch(script, CPU, (), SearchLimits(deadline=Deadline(100.0, clock=lambda: script.now)))
    search.state.few_steps = FewSteps(steps=3, compared=2)
    assert search._peaks([Choice(ForMemory(), True)], Choice(ForMemory(), True)) is not None
    assert script.runs == [[("peak", 2)], [("peak", 2)]]


def test_the_last_comparison_takes_no_fewer_than_three_pairs_of_runs(tmp_path: Path) -> None:
    script = Pretended(tmp_path, 5)
    deadline = Deadline(0.1, clock=lambda: script.now)
    found = compare_afresh(PlainAndPlanned(script, [Choice(Faster(), True)]), FEW.pace, deadline, 0.0, FEW)
    assert (found.comparison.verdict, found.comparison.pairs) == ("faster", 3)
    assert found.startup_seconds is None
    plain, faster = [("plain", 4)], [("faster", 4)]
    assert script.runs == [plain, faster, faster, plain, plain, faster]


def test_a_proof_of_few_steps_compares_all_of_them(tmp_path: Path) -> None:
    setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path)
    pattern = Pattern(step_seconds=60.0, total_steps=5, epoch_steps=1, few=FEW)
    with Prover(setup, pattern, Deadline(1.0)) as prover:
        assert prover._wanted_steps([Choice(Faster(), True)]) == 4
        checks = {steps: prover._check_steps(steps) for steps in (2, 3, 4, 7)}
    assert checks == {2: (0, 1), 3: (0, 2), 4: (0, 2, 3), 7: (0, 2, 4, 6)}


class Forked(Pretended):
    """Each is a copy of a process that is there already."""

    def spared_seconds(self, choices: Sequence[Choice] = ()) -> float:
        return 10.0

    def from_the_start(self) -> Pretended:
        return Pretended(self.shared_folder, self.steps)


def test_once_trials_are_not_forked_a_start_counts_for_what_it_takes(tmp_path: Path) -> None:
    limits = SearchLimits(deadline=Deadline(100.0))
    search = TrainingSearch(Forked(tmp_path, 100), CPU, [FromStart()], limits)
    search.state.startup_seconds = 10.0
    (name,) = search.names()
    forked = search.promise(name)
    assert search._goes_on_without_forks(TrialError("a fork failed"))
    assert search.promise(name) < forked


def test_all_that_the_verifier_needs_is_kept_back(tmp_path: Path) -> None:
    script: Any = Pretended(tmp_path, 5)
    proof, last = 4 * (2.0 + 1.5 * 4 * 10.0), 3 * (2 * 2.0 + 2 * 4 * 10.0)
    assert least_seconds(10.0, SearchState(startup_seconds=2.0, few_steps=FEW), script, 60.0) == pytest.approx(
        proof + last
    )
    three = FewSteps(steps=3, compared=2)  # nothing reduced is tried: one run less
    state = SearchState(startup_seconds=2.0, few_steps=three)
    assert least_seconds(0.0, state, script, 60.0) == pytest.approx(3 * 2.0 + 3 * 2 * 2.0)


SLEEPING = """
import time, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
x, y = torch.randn(16, 8), torch.randn(16, 4)
def closure():
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    return loss
for epoch in range(4):
    optimizer.step(closure)
    time.sleep(0.05)
open("written-by-the-script.txt", "w").write("x")
"""


@pytest.mark.usefixtures("forked_trials", "brief")
@pytest.mark.slow
def test_a_script_of_four_steps_with_closures_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.tuning.script_tuning.own_start_seconds", lambda folder: 0.5)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SLEEPING)
    levers = f"{Path(__file__).parent / 'planted_levers.py'}:HELPING"
    result = tune_script(TuneRequest(target=Target(path="train.py"), budget_seconds=200, levers=levers), detect())
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.py"]
    assert list(result.plan.choices()) == ["cudnn_benchmark"]
    assert result.proof is not None
    assert (result.proof.verdict, result.proof.steps) == ("bit-identical", 3)
    assert result.final is not None
    assert result.final.comparison.verdict == "faster"
    assert result.whole is not None
    assert result.whole.steps == 4
    text, document = tune_text(result), tune_document(result)
    assert "4 steps, too few to switch levers within a run: whole runs were compared" in text
    assert "each over its last 3 steps" in text
    assert "pairs of whole runs)" in text
    assert "for Flatout, earned back after" in text
    assert document["few_steps"] == {"steps": 4, "compared": 3}
    assert "whole runs" not in tune_text(_in_windows(result))


def _in_windows(result: Tuned) -> Tuned:
    return replace(result, state=replace(result.state, few_steps=None))
