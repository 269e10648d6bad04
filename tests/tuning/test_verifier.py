"""What fresh processes decide about a search's result, with recorded numbers in their place."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.levers.lever import Choice, Graph, choices_of_plan, graph_of
from flatout.levers.observed import Observed
from flatout.plan_choices import Exactness
from flatout.script.entry import Target
from flatout.script.trial.setup import TrialSetup
from flatout.search.deadline import Deadline
from flatout.search.trial import Trial
from flatout.sequential import compare_so_far
from flatout.tuning import verifier as verifier_module
from flatout.tuning.fitting import Fit
from flatout.tuning.last_comparison import Started
from flatout.tuning.results import SearchState
from flatout.tuning.verifier import Verifier, gain_of_all_steps
from flatout.tuning.windows import Pairing
from tests.tuning.test_proof import NOISY, PLAIN, with_gradient
from tests.tuning.test_prover import BITS, REDUCES, ROUNDED, Claiming, Recorded

FASTER = Pairing(
    comparison=compare_so_far([(2.0, 1.0)] * 8, least_gain=0.01),
    baseline_seconds=2.0,
    candidate_seconds=1.0,
    startup_seconds=0.0,
)
WRONG = with_gradient(NOISY, PLAIN.parameters[0], error=0.5, product=0.5)


class OfAnotherField(Claiming):
    plan_field = "memory_format"


ROUNDS = Choice(OfAnotherField("rounds", "rounding"), True)


def verified(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    results: dict[tuple[str, ...], Any],
    exactness: Exactness = "reduced",
    final: Pairing = FASTER,
    kept: Sequence[Choice] = (BITS, ROUNDS),
    compiled_graphs: Collection[Graph] = (),
    startup_seconds: float = 0.0,
    displaced: Sequence[tuple[Choice, tuple[Choice, ...]]] = (),
) -> tuple[SearchState, Any]:
    """What was kept; `results` are the numbers of the runs with it, and `final` is the last comparison."""
    setup = TrialSetup(target=Target(path="train.py"), work_folder=folder)
    trials = [
        Trial(
            label=choice.label,
            choices=choice.choices,
            exactness=choice.exactness,
            outcome="kept",
            reason="faster",
            startup_seconds=startup_seconds,
        )
        for choice in kept
    ]
    for choice, _ in displaced:
        dropped = Trial(label=choice.label, choices=choice.choices, exactness="rounding", outcome="dropped", reason="")
        trials.append(dropped)
    state = SearchState(kept=[*kept], trials=trials, startup_seconds=1.0, compiled_graphs={*compiled_graphs})
    state.displaced += displaced
    monkeypatch.setattr(verifier_module, "Prover", lambda *_: Recorded(folder, results))
    verifier = Verifier(setup, state, Deadline(100.0), lambda text: None, exactness)
    monkeypatch.setattr(verifier, "_final_comparison", lambda: final)
    return state, verifier.run()[0]


def test_a_lever_that_rounds_too_much_is_proved_reduced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state, proof = verified(monkeypatch, tmp_path, {("bits",): PLAIN, ("bits", "rounds"): NOISY})
    assert proof.verdict == "reduced"
    assert state.kept == [BITS, Choice(ROUNDS.lever, True, relaxed=True)]
    trial = state.trials[-1]
    assert (trial.outcome, trial.exactness) == ("kept", "reduced")
    assert trial.reason.startswith("beyond rounding: ")


class OfAThirdField(Claiming):
    plan_field = "precision"


OTHER = Choice(OfAThirdField("other", "rounding"), True)


@pytest.mark.parametrize(("because_of", "time_left"), [(REDUCES, True), (OTHER, True), (REDUCES, False)])
def test_what_the_wrong_lever_made_redundant_is_kept_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, because_of: Choice, time_left: bool
) -> None:
    monkeypatch.setattr(Recorded, "has_time_for", lambda *_: time_left)
    results = {("reduces",): WRONG, ("rounds",): ROUNDED}
    state, proof = verified(monkeypatch, tmp_path, results, kept=[REDUCES], displaced=[(ROUNDS, (because_of,))])
    if because_of is REDUCES and time_left:
        assert proof.verdict == "within rounding"
        assert state.kept == [ROUNDS]
        assert [trial.outcome for trial in state.trials] == ["failed", "kept"]
        assert state.trials[1].reason == "faster; needed again without reduces"
    else:
        assert state.kept == []


@pytest.mark.parametrize(("numbers", "kept"), [(NOISY, 3), (WRONG, 1)])
def test_where_no_time_is_left_to_find_the_lever_all_are_proved_reduced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, numbers: Any, kept: int
) -> None:
    """And with numbers that are wrong, none of them is kept."""
    monkeypatch.setattr(Recorded, "has_time_for", lambda *_: False)
    results = {("rounds", "other"): numbers, ("rounds", "other", "reduces"): numbers, ("reduces",): NOISY}
    state, proof = verified(monkeypatch, tmp_path, results, kept=(ROUNDS, OTHER, REDUCES))
    assert proof.verdict == "reduced"
    assert len(state.kept) == kept
    assert [choice.relaxed for choice in state.kept] == [True, True, False][-kept:]


def test_why_levers_that_were_tried_together_are_relaxed_is_said_once(tmp_path: Path) -> None:
    choices = ROUNDS.choices | OTHER.choices
    trial = Trial(label="both", choices=choices, exactness="rounding", outcome="kept", reason="faster")
    state = SearchState(kept=[ROUNDS, OTHER], trials=[trial], startup_seconds=1.0)
    setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path)
    verifier = Verifier(setup, state, Deadline(100.0), lambda text: None)
    for choice in (ROUNDS, OTHER):
        verifier._claim_reduced(choice, "beyond rounding: a gradient differs")
    assert [one.relaxed for one in state.kept] == [True, True]
    assert [one.reason for one in state.trials] == ["beyond rounding: a gradient differs; faster"]


class CompilesAt16Bit(OfAThirdField):
    acts_on_forward = True


class Compiling(Claiming):
    plan_field = "compile"
    acts_on_forward = compiles = True


@pytest.mark.parametrize(
    ("compile_seconds", "compiled_without", "relaxed"), [(5.0, False, False), (80.0, False, True), (80.0, True, False)]
)
def test_a_compiled_model_is_proved_without_reduced_levers_where_there_is_time_to_compile_it_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compile_seconds: float, compiled_without: bool, relaxed: bool
) -> None:
    compiled = Choice(Compiling("compiled", "rounding"), True)
    reduced = Choice(CompilesAt16Bit("16-bit", "reduced"), True)
    graphs = {graph_of([compiled, reduced])} | ({graph_of([compiled])} if compiled_without else set())
    results = {("compiled",): ROUNDED, ("compiled", "16-bit"): NOISY}
    state, proof = verified(
        monkeypatch,
        tmp_path,
        results,
        kept=(compiled, reduced),
        compiled_graphs=graphs,
        startup_seconds=compile_seconds,
    )
    assert proof.verdict == "reduced"
    assert [claim.levers for claim in proof.claims] == (
        [("compiled", "16-bit")] if relaxed else [("compiled",), ("16-bit",)]
    )
    assert state.kept == [replace(compiled, relaxed=relaxed), reduced]
    said = "proved with 16-bit: compiling it without takes 1 min 20 s; faster"
    assert state.trials[0].reason == (said if relaxed else "faster")


def test_not_where_reduced_numbers_are_not_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = {("bits",): PLAIN, ("bits", "rounds"): NOISY}
    state, proof = verified(monkeypatch, tmp_path, results, "rounding")
    assert state.kept == [BITS]
    assert proof.verdict == "bit-identical"


def test_what_is_wrong_is_not_relaxed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state, proof = verified(monkeypatch, tmp_path, {("bits",): PLAIN, ("bits", "rounds"): WRONG})
    assert state.kept == [BITS]
    assert proof.verdict == "bit-identical"
    assert state.trials[-1].outcome == "failed"


@pytest.mark.parametrize(
    ("ratio", "low", "high", "said"),
    [
        (1.08, 0.92, 1.27, "not confirmed in new processes: x1.08 (0.92 to 1.27)"),
        (0.9, 0.88, 0.93, "slower in new processes: x0.90 (0.88 to 0.93)"),
        (1.2, 0.0, math.inf, "not confirmed in new processes: x1.20"),
    ],
)
def test_a_gain_that_new_processes_do_not_show_is_dropped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ratio: float, low: float, high: float, said: str
) -> None:
    found = replace(FASTER.comparison, ratio=ratio).with_interval(low, high, 0.01)
    results = {("bits",): PLAIN, ("bits", "rounds"): PLAIN}
    state, _ = verified(monkeypatch, tmp_path, results, final=replace(FASTER, comparison=found))
    assert state.kept == []
    assert [(trial.outcome, trial.reason) for trial in state.trials] == [
        ("dropped", f"faster in the search, {said}")
    ] * 2


@pytest.mark.parametrize(
    ("left", "claim", "start_seconds", "kept_pairs", "forked"),
    [
        (3000.0, REDUCES, 2.0, 0, True),
        (150.0, REDUCES, 2.0, 1, True),
        (40.0, REDUCES, 2.0, 2, False),
        (40.0, REDUCES, 9.0, 1, True),
        (40.0, ROUNDS, 2.0, 1, True),
    ],
)
def test_the_shorter_the_time_the_more_processes_of_the_proof_are_compared(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    left: float,
    claim: Choice,
    start_seconds: float,
    kept_pairs: int,
    forked: bool,
) -> None:
    """Without any new ones only where the proof runs the plan twice, and in no forks, as these are compared: where such
    starts do not take longer than the steps."""
    server: Any = SimpleNamespace(is_ready=lambda: True, load_seconds=1.5)
    setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path, fork_server=server)
    proved_with: list[TrialSetup] = []
    monkeypatch.setattr(verifier_module, "Prover", lambda trials, *_: proved_with.append(trials) or SimpleNamespace())
    compared: list[Started] = []
    monkeypatch.setattr(verifier_module, "compare_afresh", lambda *given: compared.append(given[-2]) or FASTER)
    state = SearchState(
        kept=[claim], trials=[], startup_seconds=start_seconds, first_observed=Observed(step_seconds=1.0)
    )
    deadline = Deadline(3000.0, clock=lambda: 0.0).within(left)
    verifier = Verifier(setup, state, deadline, lambda text: None)
    prover: Any = verifier._prover
    assert prover.keeps_pairs == kept_pairs
    assert (proved_with[0].fork_server is not None) is forked
    for pairs in (["a pair of arms"], ["a pair of arms", "another"]):
        prover.arms = lambda choices, pairs=pairs: pairs
        assert verifier._final_comparison() is FASTER
        assert compared[-1].pairs == pairs
        assert compared[-1].come_first is (len(pairs) == 2)  # one alone would seldom decide


def test_where_numbers_do_not_hold_the_next_that_fits_takes_the_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def weighed(*choices: Choice, seconds: float) -> Trial:
        label = " + ".join(choice.label for choice in choices)
        names = {choice.field: choice.value for choice in choices}
        return Trial(
            label=label, choices=names, exactness="rounding", outcome="dropped", reason="", candidate_seconds=seconds
        )

    both, other = weighed(BITS, ROUNDS, seconds=1.0), weighed(BITS, seconds=2.0)
    fit = Fit(limit_bytes=10, plain_bytes=12, fitting=((BITS, ROUNDS), (BITS,)), trials=(both, other))
    first = replace(both, outcome="kept")
    state = SearchState(kept=[BITS, ROUNDS], for_memory=[BITS, ROUNDS], trials=[first], startup_seconds=1.0, fit=fit)
    results = {("bits",): PLAIN, ("bits", "rounds"): WRONG}
    monkeypatch.setattr(verifier_module, "Prover", lambda *_: Recorded(tmp_path, results))
    setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path)
    verifier = Verifier(setup, state, Deadline(100.0), lambda text: None)
    monkeypatch.setattr(verifier, "_final_comparison", lambda: None)  # slower: it is for memory
    proof, _ = verifier.run()
    assert proof is not None
    assert (proof.verdict, state.kept, state.for_memory) == ("bit-identical", [BITS], [BITS])
    assert state.fit is not None
    assert state.fit.choices == (BITS,)
    told = {(trial.label, trial.outcome) for trial in state.trials}
    assert ("bits", "kept") in told
    assert any(outcome == "failed" for _, outcome in told)
    assert "of those whose numbers hold" in state.trials[-1].reason


def test_a_plan_says_which_of_its_choices_are_weaker_than_their_kind() -> None:
    chosen = choices_of_plan({ROUNDS.field: True}, [ROUNDS.lever], (ROUNDS.field,))
    assert [choice.exactness for choice in chosen] == ["reduced"]
    assert [choice.exactness for choice in choices_of_plan({ROUNDS.field: True}, [ROUNDS.lever])] == ["rounding"]


@pytest.mark.parametrize("second", [None, 0.97])
def test_what_is_left_for_memory_has_figures_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, second: float | None
) -> None:
    """Where it could not be measured again, those of the plan with levers that were given back were shown for it."""
    state = SearchState(kept=[BITS, ROUNDS], for_memory=[BITS], startup_seconds=1.0)
    results = {("bits",): PLAIN, ("bits", "rounds"): PLAIN}
    monkeypatch.setattr(verifier_module, "Prover", lambda *_: Recorded(tmp_path, results))
    verifier = Verifier(
        TrialSetup(target=Target(path="train.py"), work_folder=tmp_path), state, Deadline(100.0), lambda text: None
    )

    def found(ratio: float | None) -> Pairing | None:
        if ratio is None:
            return None
        comparison = replace(FASTER.comparison, ratio=ratio).with_interval(0.9, 1.1, 0.01)
        return replace(FASTER, comparison=comparison)

    finals = [found(1.05), found(second)]
    monkeypatch.setattr(verifier, "_final_comparison", lambda: finals.pop(0))
    proof, final = verifier.run()
    assert state.kept == [BITS]
    assert proof is not None
    assert proof.verdict == "bit-identical"
    assert (final and final.comparison.ratio) == second


def test_nothing_is_kept_without_a_proof_where_memory_levers_do_not_hold_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next combination that fits took their place, and nobody proved it."""
    fit = Fit(limit_bytes=10, plain_bytes=12, fitting=((ROUNDS,), (BITS,)))
    state = SearchState(kept=[ROUNDS, OTHER], for_memory=[ROUNDS], startup_seconds=1.0, fit=fit)
    results = {("rounds", "other"): ROUNDED, ("rounds",): WRONG, ("bits",): replace(PLAIN, weight_digest="x")}
    prover = Recorded(tmp_path, results)
    monkeypatch.setattr(verifier_module, "Prover", lambda *_: prover)
    verifier = Verifier(
        TrialSetup(target=Target(path="train.py"), work_folder=tmp_path), state, Deadline(100.0), lambda text: None
    )
    monkeypatch.setattr(verifier, "_final_comparison", lambda: None)
    assert verifier.run() == (None, None)
    assert state.kept == []
    assert ("bits", "free", "none") in prover.made


@pytest.mark.parametrize(
    ("mean_seconds", "said"),
    [((6.0, 5.5), True), ((2.1, 1.05), False), ((6.0, 3.2), False), ((6.0, 1.1), False), (None, False)],
)
def test_a_gain_of_typical_steps_alone_is_said_to_be_one(mean_seconds: tuple[float, float] | None, said: bool) -> None:
    """As where every fourth step waits for the workers of a loader."""
    final = replace(FASTER, mean_seconds=mean_seconds)
    warnings = gain_of_all_steps(final)
    assert warnings == (
        [
            "x2.00 is the gain of a typical step; some take far longer (waiting for data, evaluation, checkpoints): "
            "the mean of all steps in the last comparison was x1.09 as fast"
        ]
        if said
        else []
    )
