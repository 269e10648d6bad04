"""How many devices: what is predicted, and what is chosen of what was tried, with groups of ranks that are stood in."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from flatout.decoding import decode
from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import Choice
from flatout.levers.observed import LoaderSeen, ModuleSeen, Observed
from flatout.machine.description import Machine
from flatout.plan import Plan
from flatout.report.devices_text import tuned_lines
from flatout.script.entry import Target
from flatout.script.trial.answers import TrialEnded
from flatout.script.trial.setup import TrialSetup
from flatout.search.deadline import BudgetSpent, Deadline
from flatout.statistics import Comparison
from flatout.tuning.devices import choosing, prediction
from flatout.tuning.devices.choosing import DevicesAsked, choose_devices
from flatout.tuning.devices.found import DevicesTuned, Exchange, with_devices
from flatout.tuning.devices.prediction import OneDevice, in_order_of_promise, predicted
from flatout.tuning.devices.ranks_trial import OneAndSeveral, RanksRefused, for_ranks
from flatout.tuning.devices_proof import DevicesProof
from flatout.tuning.outcome import Found
from flatout.tuning.results import SearchState
from flatout.tuning.short_budget import budget_option
from flatout.tuning.windows import Arm, Pairing

MACHINE = Machine.from_json(json.loads((Path(__file__).parents[1] / "recorded" / "machine_two_cores.json").read_text()))
LOADER = LoaderSeen(
    dataset="TensorDataset", samples=1000, batch_size=32, workers=0, pin_memory=False, persistent_workers=False
)
SEEN = Observed(
    step_seconds=0.1,
    breakdown_seconds={"data": 0.02, "forward": 0.03, "backward": 0.03, "optimizer": 0.01, "other": 0.01},
    loaders=(LOADER,),
    modules=(ModuleSeen(kind="Net", parameters=1_000_000, dtypes=("torch.float32",)),),
    operations_per_step=0,
    threads=4,
)
EXCHANGE = Exchange(ranks=2, size_bytes=4_000_000, all_reduce_seconds=0.004, small_seconds=0.001)
ONE = OneDevice(
    observed=SEEN, step_seconds=0.1, batch_size=32, fewer_threads={2: 1.5}, copy_bytes_per_second=16_000_000_000.0
)
PROOF = DevicesProof(
    verdict="equal to rounding",
    reason="",
    devices=2,
    steps=40,
    samples_equal=True,
    losses=(2.0, 1.0),
    losses_on_all=(2.0, 1.0),
    largest_loss_difference=1e-7,
    rounding_loss_difference=2e-7,
    largest_gradient_difference=1e-7,
    rounding_gradient_difference=2e-7,
)


# predictions


def test_a_step_is_the_share_what_every_rank_does_and_the_exchange() -> None:
    found = predicted(ONE, 2, EXCHANGE, None)
    best = 0.08 / 2 + 0.02 + 0.001 + 0.004 + 4 * 4e6 / 16e9
    assert found.most == pytest.approx(0.1 / best)
    assert found.least < found.expected < found.most
    assert found.step_seconds == pytest.approx(0.1 / found.expected)
    assert "50% of the 80 ms that a batch takes, 20 ms that every rank does, 6 ms to exchange" in found.reason


def test_a_share_is_that_of_the_rank_with_the_most_samples() -> None:
    three = predicted(replace(ONE, batch_size=4), 3, EXCHANGE.for_ranks(3), None)
    assert "50% of the" in three.reason


def test_ranks_on_a_cpu_have_fewer_threads_each() -> None:
    found = predicted(ONE, 2, EXCHANGE, 2)
    assert found.most == pytest.approx(0.1 / (1.5 * 0.06 + 0.006))
    assert "x1.50 as long with 2 threads a rank" in found.reason


def test_what_an_operation_takes_however_small_its_batch_does_not_shrink() -> None:
    """A step of many quick operations is predicted to gain less."""
    quick = replace(ONE, observed=replace(SEEN, operations_per_step=15_000))
    assert predicted(quick, 2, EXCHANGE, None).expected < predicted(ONE, 2, EXCHANGE, None).expected
    assert predicted(quick, 2, EXCHANGE, None).least < 1


def test_the_exchange_of_other_numbers_of_ranks_is_computed() -> None:
    four = EXCHANGE.for_ranks(4)
    assert four.small_seconds == pytest.approx(0.003)
    assert four.all_reduce_seconds == pytest.approx(0.003 + 0.003 * (3 / 4) / (1 / 2))
    assert EXCHANGE.for_ranks(2) == EXCHANGE


def test_the_fastest_comes_first_and_of_equals_the_fewer_devices() -> None:
    found = [predicted(ONE, devices, EXCHANGE.for_ranks(devices), None) for devices in (4, 2, 3)]
    assert [one.devices for one in in_order_of_promise(found)] == [4, 3, 2]
    equal = [replace(one, expected=1.0) for one in found]
    assert [one.devices for one in in_order_of_promise(equal)] == [2, 3, 4]


# the choice


def comparison(ratio: float, verdict: Any = None) -> Comparison:
    found = verdict or ("faster" if ratio > 1.1 else "slower" if ratio < 0.9 else "not significant")
    reason = "the interval includes no change" if found == "not significant" else None
    return Comparison(
        ratio=ratio, low=ratio - 0.05, high=ratio + 0.05, confidence=0.95, pairs=8, verdict=found, reason=reason
    )


def pairing(ratio: float) -> Pairing:
    return Pairing(
        comparison=comparison(ratio), baseline_seconds=0.1, candidate_seconds=0.1 / ratio, startup_seconds=None
    )


Choose = Callable[..., DevicesTuned]


@pytest.fixture
def choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """`choose(trials, ...)`: trials: devices -> the ratio that a trial shows, or what it raises."""

    def choose(
        trials: dict[int, Any],
        *,
        finals: dict[int, float] | None = None,
        proof: Any = PROOF,
        most: int = 2,
        budget_seconds: float = 1000.0,
        state: SearchState | None = None,
        tried: list[int] | None = None,
    ) -> DevicesTuned:
        def timed(self: Any, devices: int) -> Pairing:
            if tried is not None:
                tried.append(devices)
            found = trials[devices]
            if isinstance(found, BaseException):
                raise found
            return pairing(found)

        def final(sides: Any, *_: Any) -> Pairing:
            return pairing((finals or trials)[sides.devices])

        def proved(basis: Any, devices: int, in_ranks: Any) -> Any:
            return proof

        monkeypatch.setattr(prediction, "exchange_between", lambda *_: EXCHANGE)
        monkeypatch.setattr(prediction, "with_fewer_threads", lambda *_: {})
        monkeypatch.setattr(choosing._Choosing, "_timed", timed)
        monkeypatch.setattr(choosing, "proved", proved)
        monkeypatch.setattr(choosing, "compare_afresh", final)
        found = Found(
            state=state or SearchState(observed=SEEN, first_observed=SEEN, startup_seconds=1.0),
            proof=None,
            final=None,
            warnings=(),
        )
        setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path)
        said: list[str] = []
        return choose_devices(found, setup, MACHINE, DevicesAsked(most=most), Deadline(budget_seconds), said.append)

    return choose


def outcomes(found: DevicesTuned) -> dict[int, str]:
    return {one.devices: one.outcome for one in found.trials}


def test_what_is_faster_and_proved_is_chosen(choose: Choose) -> None:
    found = choose({2: 1.6})
    assert (found.chosen, found.proof, outcomes(found)) == (2, PROOF, {2: "kept"})
    text = "\n".join(line for _, line in tuned_lines(found, budget_option))
    assert "x1.60 ±0.05 on 2 devices over one (100 ms -> 62.5 ms" in text
    assert "equal to rounding: 40 steps on 2 devices train as on one" in text
    assert "predicted: a step of" in text


def test_one_device_is_chosen_where_it_is_faster(choose: Choose) -> None:
    found = choose({2: 0.83})
    assert (found.chosen, outcomes(found)) == (1, {2: "dropped"})
    assert ("result", "one device is faster here: 2 devices x0.83 ±0.05") in tuned_lines(found, budget_option)


def test_a_difference_that_is_not_significant_is_no_claim(choose: Choose) -> None:
    found = choose({2: 1.05})
    assert (found.chosen, found.reason) == (1, "one device: others were not shown to be faster")


def test_of_several_the_fastest_is_chosen(choose: Choose) -> None:
    found = choose({2: 1.3, 3: 1.5, 4: 1.2}, most=4)
    assert (found.chosen, outcomes(found)) == (3, {2: "dropped", 3: "kept", 4: "dropped"})
    assert found.trials[0].reason == "slower than 3 devices"


def test_a_gain_that_new_processes_do_not_confirm_is_dropped_for_the_next(choose: Choose) -> None:
    found = choose({2: 1.3, 3: 1.5}, finals={2: 1.3, 3: 1.0}, most=3)
    assert (found.chosen, outcomes(found)) == (2, {2: "kept", 3: "dropped"})
    assert found.trials[1].reason == "faster in the trial, not confirmed: x1.00 (0.95 to 1.05) in new processes"


@pytest.mark.parametrize(
    ("proof", "said"),
    [
        (replace(PROOF, verdict="different", reason="losses part"), "not proved: different: losses part"),
        ("not proved: the script failed on 2 devices", "not proved: the script failed on 2 devices"),
    ],
)
def test_what_is_not_proved_is_not_chosen(choose: Choose, proof: Any, said: str) -> None:
    found = choose({2: 1.6}, proof=proof)
    assert (found.chosen, found.proof) == (1, None)
    assert said in found.reason
    assert "flatout run --devices 2" in found.reason


def test_a_refusal_of_two_numbers_of_devices_holds_for_the_others(choose: Choose, monkeypatch: Any) -> None:
    refusal, tried = RanksRefused("1 of Net is a batch norm", remedy="use LayerNorm"), list[int]()
    clock = iter(range(1000))
    monkeypatch.setattr(Deadline, "elapsed_seconds", property(lambda self: float(next(clock)) / 100))
    found = choose(dict.fromkeys((2, 3, 4, 5), refusal), most=5, tried=tried)
    assert len(tried) == 2
    assert set(outcomes(found).values()) == {"refused"}
    assert "use LayerNorm" in found.trials[0].reason
    assert found.reason == "one device: no other number could be tried (refused)"


def test_a_script_that_fails_on_several_devices_says_how(choose: Choose) -> None:
    failed = TrialEnded(1, 'Traceback (most recent call last):\n  File "a.py"\nValueError: broken', 3, "rank 1")
    found = choose({2: failed})
    assert (found.chosen, outcomes(found)) == (1, {2: "failed"})
    assert found.trials[0].reason == "the script failed on rank 1: ValueError: broken"


def test_what_cannot_become_the_fastest_is_not_tried(choose: Choose, monkeypatch: Any) -> None:
    def told(one: Any, devices: int, *_: Any) -> Any:
        likely = predicted(ONE, 2, EXCHANGE, None)
        return replace(likely, devices=devices, most=1.799 - 0.2 * devices, expected=1 / devices)

    monkeypatch.setattr(prediction, "predicted", told)
    tried: list[int] = []
    found = choose({2: 1.2, 3: 1.1}, most=4, tried=tried)
    assert (tried, outcomes(found)) == ([2], {2: "kept", 3: "not tried", 4: "not tried"})
    assert found.trials[1].reason == "predicted to be at most x1.20, and x1.20 was measured"


@pytest.mark.parametrize(("ratio", "in_ranks"), [(0.8, []), (1.2, ["precision"])])
def test_levers_that_slow_ranks_down_are_left_out(
    choose: Choose, monkeypatch: Any, ratio: float, in_ranks: list[str]
) -> None:
    compared: list[Any] = []

    def arms(plain: Arm, planned: Arm, *_: Any) -> Pairing:
        compared.append((plain.choices, [one.field for one in planned.choices]))
        return pairing(ratio)

    candidate = choice("precision", "bf16")
    monkeypatch.setattr(choosing, "compare_arms", arms)
    monkeypatch.setattr(OneAndSeveral, "candidate", lambda self: nullcontext(Arm(cast("Any", None), self.in_ranks)))
    state = SearchState(observed=SEEN, first_observed=SEEN, startup_seconds=1.0, kept=[candidate])
    found = choose({2: 1.6}, state=state)
    assert compared == [((), ["precision"])]
    assert found.chosen == 2
    plan = with_devices(Plan(precision="bf16"), found)
    assert [name for name in plan.choices() if name != "devices"] == in_ranks


def test_batches_of_fewer_samples_than_devices_are_refused(choose: Choose) -> None:
    seen = replace(SEEN, loaders=(replace(LOADER, batch_size=2),))
    found = choose({2: 1.5}, most=3, state=SearchState(observed=seen, first_observed=seen, startup_seconds=1.0))
    assert outcomes(found) == {2: "kept", 3: "refused"}
    assert found.trials[1].reason == "batches of 2 samples, and each device takes at least one"


def test_what_there_is_no_time_for_is_not_reached_and_says_what_would_do(choose: Choose) -> None:
    tried: list[int] = []
    found = choose({2: 1.6}, budget_seconds=1.0, tried=tried)
    assert (tried, found.chosen, outcomes(found)) == ([], 1, {2: "not reached"})
    assert found.enough_seconds is not None
    assert found.enough_seconds > 10
    text = "\n".join(line for _, line in tuned_lines(found, budget_option))
    assert "a trial with its proof takes about" in text
    assert "try --budget" in text


def test_a_search_that_was_stopped_tries_no_devices(choose: Choose) -> None:
    tried: list[int] = []
    state = SearchState(observed=SEEN, first_observed=SEEN, startup_seconds=1.0, stopped_after_seconds=3.0)
    found = choose({2: 1.6}, state=state, tried=tried)
    assert (tried, found.chosen, found.trials[0].reason) == ([], 1, "the search was stopped")


def test_ctrl_c_in_a_trial_keeps_the_plan_for_one_device(choose: Choose) -> None:
    found = choose({2: BudgetSpent(None)})
    assert (found.chosen, outcomes(found)) == (1, {2: "not reached"})


# the plan


def choice(name: str, value: Any) -> Choice:
    return Choice(next(one for one in LEVERS if one.plan_field == name and one.takes(value)), value)


def test_levers_that_ranks_do_without_are_left_out() -> None:
    kept = [choice("threads", 1), choice("precision", "bf16"), choice("allocator", "retain")]
    on_cpu, left = for_ranks(kept, on_cpu=True)
    assert [one.field for one in on_cpu] == ["precision"]
    assert left == {"threads": "ranks share the cores", "allocator": "ranks do without it"}
    assert [one.field for one in for_ranks(kept, on_cpu=False)[0]] == ["threads", "precision"]


def test_the_plan_has_the_number_of_devices_and_what_its_ranks_apply(choose: Choose) -> None:
    found = replace(choose({2: 1.6}), left_out={"threads": "ranks share the cores"})
    plan = with_devices(Plan(threads=1, precision="bf16", exactness="reduced", speedup=1.5), found)
    assert plan.choices() == {"precision": "bf16", "devices": 2}
    assert plan.speedup == pytest.approx(1.5 * 1.6)
    assert plan.exactness == "reduced"
    assert "trains as one over 40 steps" in plan.reasons["devices"]
    assert with_devices(Plan(), found).exactness == "rounding"
    assert Plan.from_toml(plan.to_toml()) == plan


def test_the_plan_for_one_device_stays_where_that_is_chosen(choose: Choose) -> None:
    plan = Plan(threads=1, speedup=1.5)
    assert with_devices(plan, choose({2: 0.8})) is plan


def test_all_of_it_can_be_written_as_json(choose: Choose) -> None:
    found = choose({2: 1.6}).to_json()
    assert found["chosen"] == 2
    assert decode(DevicesProof, found["proof"]) == PROOF
    trial: Any = found["trials"][0]  # type: ignore[index]
    assert math.isclose(trial["comparison"]["ratio"], 1.6)
    assert trial["predicted"]["reason"]
