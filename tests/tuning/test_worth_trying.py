"""What is predicted of levers, and what follows from it: the order of trials, and what is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flatout.kernels import bf16_products
from flatout.levers import allocator
from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import Choice, Lever, Saving
from flatout.levers.observed import ModuleSeen, Observed
from flatout.search.deadline import Deadline
from flatout.search.trial import Trial
from flatout.statistics import Comparison
from flatout.tuning.history import History
from flatout.tuning.proposals import Proposals, SearchLimits, saving_per_second, worth_trying
from flatout.tuning.results import SearchState
from tests.levers.test_catalogue import AMX, CPU, LOADER, ON_GPU, OPTIMIZER, WITH_GPU

STEP = Observed(
    step_seconds=0.01,
    breakdown_seconds={"data": 0.001, "forward": 0.003, "backward": 0.005, "optimizer": 0.001},
    optimizers=(OPTIMIZER,),
    loaders=(LOADER,),
    modules=(ModuleSeen(kind="Net", parameters=1, convolutions=2, dtypes=("float32",)),),
    threads=4,
    flops_per_step=1e8,
    operations_per_step=100,
    denormal_share=0.0,
    page_faults_per_step=0.0,
)


def lever(name: str) -> Lever:
    return next(one for one in LEVERS if one.name == name)


@pytest.mark.parametrize("one", LEVERS, ids=lambda one: one.name)
@pytest.mark.parametrize("seen", [STEP, Observed(), ON_GPU, replace(STEP, page_faults_per_step=9e9)])
def test_every_prediction_is_an_interval_of_shares(one: Lever, seen: Observed) -> None:
    found = one.saving(WITH_GPU, seen)
    assert found.least <= found.expected <= found.most <= 1
    least, expected, most = found.ratios
    assert 0 < least <= expected <= most < float("inf")


def test_what_cannot_pay_is_left_out_and_says_what_bounds_it() -> None:
    less = replace(STEP, breakdown_seconds={**STEP.breakdown_seconds, "data": 3e-5, "optimizer": 2e-5})
    found = {one.name: worth_trying(one, CPU, less, "reduced").reason for one in LEVERS}
    assert found["batched fetch"] == "predicted to save at most 0.5% of a step: waiting for data is 0.3% of a step"
    assert found["optimizer"] == "predicted to save at most 0.2% of a step: the optimizer takes 0.2% of a step"
    assert found["flush denormals"] == "predicted to save at most 0.0% of a step: a step has no denormal numbers"
    assert not found["malloc retains memory"].startswith("predicted")  # the next process may have page faults
    long = replace(less, step_seconds=10.0)
    assert worth_trying(lever("threads"), CPU, long, "reduced").reason.endswith(": an operation takes 100 ms")
    for name in ("batched fetch", "optimizer", "threads"):
        assert worth_trying(lever(name), CPU, STEP, "reduced")


def test_levers_that_only_save_memory_name_the_command_or_the_function_that_uses_them() -> None:
    checkpointing = lever("activation checkpointing")
    seen = replace(STEP, modules=(replace(STEP.modules[0], repeated_block="Block", repeated_blocks=4),))
    of_step = worth_trying(checkpointing, CPU, seen, "reduced", kind="step")
    assert of_step.reason == "saves memory, costs time: use flatout.fit_to_memory"
    of_script = worth_trying(checkpointing, CPU, seen, "reduced")
    assert of_script.reason == "saves memory, costs time: use flatout tune --fit"


def test_what_is_asked_for_is_tried_whatever_is_predicted() -> None:
    assert not worth_trying(lever("flush denormals"), CPU, STEP, "reduced")
    assert worth_trying(lever("flush denormals"), CPU, STEP, "reduced", asked=True)
    assert worth_trying(lever("autocast"), AMX, STEP, "rounding", asked=True).reason.startswith("it is reduced")


def test_denormal_numbers_count_as_they_are_slow_here() -> None:
    met = replace(STEP, denormal_share=0.01, denormal_slowdown=101.0)
    found = lever("flush denormals").saving(CPU, met)
    assert found.expected == pytest.approx(0.5)
    assert found.most == pytest.approx(0.75)
    assert not worth_trying(lever("flush denormals"), CPU, replace(met, denormal_slowdown=1.01), "reduced")
    assert worth_trying(lever("flush denormals"), CPU, Observed(), "reduced")  # nobody has looked


def test_page_faults_cost_what_they_cost_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "page_fault_seconds", lambda: 2e-6)
    found = lever("malloc retains memory").saving(CPU, replace(STEP, page_faults_per_step=2000.0))
    assert found.expected == pytest.approx(0.7 * 0.4)
    assert found.most == pytest.approx(0.6)


def test_fewer_threads_are_expected_to_slow_down_large_products() -> None:
    """Measured with one thread of two: x0.6 to x0.7 where operations take 30 us or more, mostly x0.9 to x1.1 where
    they take 4 to 20 us."""
    small = replace(STEP, operations_per_step=1000)
    assert lever("threads").saving(CPU, small).expected > 0
    assert lever("threads").saving(CPU, replace(small, operations_per_step=100)).expected < -0.1


def test_calling_compiled_code_costs_a_small_step_more_than_it_saves() -> None:
    """Measured: x0.7 for networks with steps of 0.7 ms, x1.3 to x1.5 for transformers with steps of 12 to 25 ms."""
    parts = {name: 0.07 * seconds for name, seconds in STEP.breakdown_seconds.items()}
    small = replace(STEP, step_seconds=0.07 * 0.01, breakdown_seconds=parts)
    several = replace(STEP, modules=STEP.modules * 3)
    of_one, of_three, of_small = (lever("torch.compile").saving(CPU, seen).expected for seen in (STEP, several, small))
    assert of_one > of_three > 0 > of_small
    assert worth_trying(lever("torch.compile"), CPU, small, "reduced")


def test_bf16_kernels_get_what_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[bool] = []
    monkeypatch.setattr(bf16_products, "obstacle", lambda: built.append(True))  # on any processor
    seen = replace(STEP, modules=(replace(STEP.modules[0], convolutions=0, linears=4),), flops_per_step=3e9)
    all_large, some, none = (replace(seen, large_share=share) for share in (1.0, 0.5, 0.0))
    machine = replace(AMX, cpu=replace(AMX.cpu, features=(*AMX.cpu.features, "amx_bf16")))
    savings = [lever("bf16 kernels").saving(machine, one).expected for one in (all_large, some, none)]
    assert savings[0] > savings[1] > savings[2] == 0
    assert worth_trying(lever("bf16 kernels"), machine, none, "reduced").reason == (
        "none of a step's products is large enough"
    )
    assert not built, "the kernels were built for nothing"
    assert worth_trying(lever("bf16 kernels"), machine, some, "reduced")
    assert built


def test_a_loss_that_ignores_most_targets_promises_more_where_its_layer_is_large() -> None:
    seen = replace(STEP, modules=(replace(STEP.modules[0], widest_output=30_000),), flops_per_step=3e9)
    savings = [
        lever("fused linear + cross-entropy").saving(CPU, replace(seen, ignored_share=share)).expected
        for share in (None, 0.0, 0.1, 0.3)
    ]
    assert savings[0] == savings[1] < savings[2] < savings[3]


def test_a_gpu_is_left_alone_where_the_processor_cannot_be_faster() -> None:
    hidden = lever("trained on the CPU")
    on_gpu = replace(STEP, device="cuda:0", step_seconds=1e-3, operations_per_step=100)
    small, large = replace(on_gpu, flops_per_step=1e6), replace(on_gpu, flops_per_step=1e12)
    assert hidden.saving(CPU, small).expected > 0.3
    assert not worth_trying(hidden, CPU, large, "reduced")
    assert "at most 0.0%" in worth_trying(hidden, CPU, large, "reduced").reason
    assert worth_trying(hidden, CPU, small, "reduced").values == ("cpu",)


def test_the_device_is_decided_first_and_then_by_what_is_saved_per_second() -> None:
    assert [one.name for one in LEVERS if one.comes_first] == ["moved to the GPU", "trained on the CPU"]
    quick = promised("optimizer", STEP)
    assert quick > promised("torch.compile", STEP) > 0
    more = {**STEP.breakdown_seconds, "optimizer": 0.004}
    assert promised("optimizer", replace(STEP, breakdown_seconds=more)) > quick


def promised(name: str, seen: Observed) -> float:
    return saving_per_second(lever(name), lever(name).saving(CPU, seen).expected, seen, 1.0)


def test_what_is_expected_to_cost_time_comes_last_and_then_the_shortest_trial_first() -> None:
    costs = [saving_per_second(lever(name), -0.1, STEP, 1.0) for name in ("optimizer", "torch.compile")]
    assert promised("torch.compile", STEP) > costs[0] > costs[1]


def test_ratios_of_savings() -> None:
    assert Saving(expected=0.5, least=-1.0, most=1.0).ratios == (0.5, 2.0, 1000.0)


def test_another_value_of_what_is_kept_may_undo_what_that_saved() -> None:
    """Predictions are against the plain step; at worst it is that step again."""
    fused, foreach = Choice(lever("optimizer"), "fused"), Choice(lever("optimizer"), "foreach")
    faster = Comparison(ratio=1.3, low=1.2, high=1.4, confidence=0.95, pairs=20, verdict="faster")
    trial = Trial(
        label="fused",
        choices=fused.choices,
        exactness="rounding",
        outcome="kept",
        reason="faster",
        comparison=faster,
    )

    def saving(*kept: Choice) -> Saving:
        state = SearchState(kept=[*kept], trials=[trial], first_observed=STEP, observed=STEP)
        limits = SearchLimits(deadline=Deadline(1.0))
        return Proposals(LEVERS, CPU, state, limits, "script", History(), lambda choices: 0.0).saving(foreach)

    assert saving().least == pytest.approx(-0.1)
    assert saving(fused).expected <= 0.0
    assert saving(fused).least == pytest.approx(-0.4)
