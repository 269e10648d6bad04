"""What tunes leave for later ones, and what those make of it: made-up trials, nothing is run."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import MachineError
from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import Choice, Saving
from flatout.levers.observed import Observed
from flatout.machine.description import Machine
from flatout.script.entry import Target
from flatout.script.trial.setup import TrialSetup
from flatout.search.deadline import Deadline
from flatout.search.lines import trial_lines
from flatout.search.trial import Measured, Trial
from flatout.statistics import Comparison
from flatout.tuning import history, outcome
from flatout.tuning.history import REPEAT_ERROR, Earlier, History, Training, corrected, forget_tunes, load_history
from flatout.tuning.proposals import SearchLimits
from flatout.tuning.step_tuning import StepTrials
from flatout.tuning.training_search import TrainingSearch
from tests.levers.test_catalogue import CPU
from tests.tuning.test_worth_trying import STEP

OWN = Saving(expected=0.1, least=-0.1, most=0.3, why="the optimizer takes 30% of a step")
HERE, ELSEWHERE = Training(digest="a", device="cpu"), Training(digest="b", device="cpu")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file, in a cache of its own, with the history on."""
    monkeypatch.delenv("FLATOUT_NO_HISTORY")
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tunes.json"


LAST = Earlier(
    machine=CPU.fingerprint,
    versions="",
    training="a",
    device="cpu",
    choice="fused optimizer",
    predicted=1.0,
    measured=1.0,
    low=None,
    high=None,
    at="2026-11-20T10:00:00+00:00",
)


def earlier(ratio: float, **changes: Any) -> Earlier:
    """One of the choice 'fused optimizer' that was predicted to be no faster."""
    measured: dict[str, Any] = {"measured": ratio, "low": ratio * 0.98, "high": ratio * 1.02}
    return replace(LAST, **{**measured, **changes})


KEPT = Trial(label="", choices={}, exactness="rounding", outcome="kept", reason="faster", predicted=OWN)


def trial(label: str, ratio: float, **changes: Any) -> Trial:
    compared = Comparison(ratio=ratio, low=ratio * 0.98, high=ratio * 1.02, confidence=0.95, pairs=8, verdict="faster")
    tried = replace(KEPT, label=label, comparison=compared, baseline_seconds=ratio, candidate_seconds=1.0)
    return replace(tried, **changes)


def one_tune(measured: Mapping[str, float], training: Training = HERE, machine: Machine = CPU) -> History:
    found = load_history(machine)
    for label, ratio in measured.items():
        found.note(trial(label, ratio), training)
    found.save()
    return found


def logs(saving: Saving) -> tuple[float, ...]:
    return tuple(math.log(ratio) for ratio in saving.ratios)


# what it predicts


def test_what_was_measured_here_takes_the_place_of_the_prediction() -> None:
    found = corrected(OWN, "fused optimizer", HERE, [earlier(1.31)])
    assert found.earlier == "measured x1.31 here on 2026-11-20"
    assert found.own_expected == OWN.expected
    assert found.why == OWN.why
    assert found.ratios == pytest.approx(
        (1.31 * 0.98 / math.exp(REPEAT_ERROR), 1.31, 1.31 * 1.02 * math.exp(REPEAT_ERROR))
    )


def test_of_several_tunes_the_median_counts_and_the_interval_holds_all() -> None:
    later = earlier(1.1, at="2026-11-22T10:00:00+00:00")
    found = corrected(OWN, "fused optimizer", HERE, [earlier(1.2), later, earlier(1.6)])
    assert found.earlier == "measured x1.20 here, the median of 3, last on 2026-11-22"
    assert found.ratios == pytest.approx(
        (1.1 * 0.98 / math.exp(REPEAT_ERROR), 1.2, 1.6 * 1.02 * math.exp(REPEAT_ERROR))
    )


def test_too_few_pairs_for_an_interval_leave_the_levers_own() -> None:
    found = corrected(OWN, "fused optimizer", HERE, [earlier(0.7, low=None, high=None)])
    least, expected, most = found.ratios
    assert expected == pytest.approx(0.7)
    assert least < 0.7
    assert most > OWN.ratios[2]


def test_an_interval_that_says_nothing_leaves_the_levers_own() -> None:
    found = corrected(OWN, "fused optimizer", HERE, [earlier(1.31, low=0.002, high=1000.0)])
    _, expected, most = found.ratios
    assert expected == pytest.approx(1.31)
    assert logs(found)[0] == pytest.approx(logs(OWN)[0] - REPEAT_ERROR)
    assert most == pytest.approx(max(1.31, OWN.ratios[2]) * math.exp(REPEAT_ERROR))


def test_other_trainings_shift_the_prediction_and_never_narrow_it() -> None:
    known = [earlier(1.2, training="b"), earlier(1.4, training="c")]
    found = corrected(OWN, "fused optimizer", HERE, known)
    shift = (math.log(1.2) + math.log(1.4)) / (2 + history.SHRINKAGE)
    assert logs(found) == pytest.approx([one + shift for one in logs(OWN)])
    assert found.earlier == "shifted x1.14 by 2 other trainings"


def test_a_training_that_was_tuned_often_counts_once() -> None:
    once, often = ([earlier(1.4, training="b")] * times for times in (1, 5))
    assert corrected(OWN, "fused optimizer", HERE, once) == corrected(OWN, "fused optimizer", HERE, often)


def test_one_absurd_ratio_counts_as_twice_as_fast() -> None:
    absurd, twice = (corrected(OWN, "fused optimizer", HERE, [earlier(one, training="b")]) for one in (60.0, 2.0))
    assert logs(absurd) == pytest.approx(logs(twice))
    assert logs(twice) == pytest.approx([one + math.log(2) / (1 + history.SHRINKAGE) for one in logs(OWN)])


def test_a_shift_of_nothing_is_none() -> None:
    assert corrected(OWN, "fused optimizer", HERE, [earlier(1.001, training="b")]) == OWN
    assert corrected(OWN, "fused optimizer", HERE, []) == OWN


@pytest.mark.parametrize("changes", [{"device": "cuda"}, {"choice": "foreach optimizer"}])
def test_another_device_or_value_says_nothing(changes: dict[str, str]) -> None:
    assert corrected(OWN, "fused optimizer", HERE, [earlier(3.0, **changes)]) == OWN


@pytest.mark.parametrize("ratio", [1e-3, 0.3, 5.0, 1000.0])
def test_a_correction_is_an_interval_of_shares_too(ratio: float) -> None:
    for own in (OWN, Saving(expected=0.0, least=-2.0, most=1.0)):
        for training in ("a", "b"):
            found = corrected(own, "fused optimizer", HERE, [earlier(ratio, training=training)])
            assert found.least <= found.expected <= found.most <= 1


def test_a_training_is_the_same_only_where_what_decides_its_speed_is() -> None:
    seen = Observed(loaders=STEP.loaders, threads=2, flops_per_step=1.04e9)
    same = Training.of("script", "Net of 10 weights", seen, "cuda:0")
    assert same == Training.of("script", "Net of 10 weights", replace(seen, flops_per_step=1.01e9), "cuda:1")
    assert same.device == "cuda"
    others = [
        Training.of("step", "Net of 10 weights", seen, "cuda:0"),
        Training.of("script", "Net of 11 weights", seen, "cuda:0"),
        Training.of("script", "Net of 10 weights", seen, "cpu"),
        Training.of("script", "Net of 10 weights", replace(seen, threads=1), "cuda:0"),
        Training.of("script", "Net of 10 weights", replace(seen, flops_per_step=2e9), "cuda:0"),
        Training.of("script", "Net of 10 weights", replace(seen, loaders=()), "cuda:0"),
    ]
    assert same.digest not in {one.digest for one in others}


# what is kept


def test_a_later_tune_knows_what_an_earlier_one_measured(cache: Path) -> None:
    assert one_tune({"fused optimizer": 1.3}).warning == ""
    found = load_history(CPU)
    assert found.corrected(OWN, "fused optimizer", HERE).ratios[1] == pytest.approx(1.3)
    assert found.corrected(OWN, "fused optimizer", ELSEWHERE).earlier.startswith("shifted x1.05")
    assert [one.name for one in cache.parent.iterdir()] == ["tunes.json"]  # and nothing half-written


def test_errors_do_not_add_up_as_corrected_predictions_are_kept_uncorrected(cache: Path) -> None:
    one_tune({"fused optimizer": 1.3}, ELSEWHERE)
    found = load_history(CPU)
    found.note(trial("fused optimizer", 1.3, predicted=found.corrected(OWN, "fused optimizer", HERE)), HERE)
    found.save()
    kept = json.loads(cache.read_text())["trials"]
    assert [one["predicted"] for one in kept] == pytest.approx([OWN.ratios[1]] * 2)


def test_a_tune_is_not_corrected_by_itself(cache: Path) -> None:
    found = load_history(CPU)
    found.note(trial("fused optimizer", 1.3), HERE)
    assert found.corrected(OWN, "fused optimizer", HERE) == OWN


def test_what_was_not_compared_or_failed_is_not_kept(cache: Path) -> None:
    found = load_history(CPU)
    found.note(trial("a + b", 1.3, predicted=None), HERE)
    found.note(trial("c", 1.3, comparison=None, outcome="dropped"), HERE)
    found.note(trial("d", 1.3, outcome="failed"), HERE)
    found.save()
    assert not cache.exists()


def test_an_infinite_interval_is_kept_as_none(cache: Path) -> None:
    found = load_history(CPU)
    few = Comparison(ratio=0.7, low=0.0, high=math.inf, confidence=0.95, pairs=2, verdict="slower")
    found.note(trial("torch.compile", 0.7, comparison=few), HERE)
    found.save()
    kept = json.loads(cache.read_text())["trials"][0]
    assert (kept["measured"], kept["low"], kept["high"]) == (0.7, None, None)
    assert load_history(CPU).warning == ""


def test_other_machines_and_versions_are_kept_and_not_used(cache: Path) -> None:
    one_tune({"fused optimizer": 1.3}, machine=replace(CPU, fingerprint="another"))
    one_tune({"fused optimizer": 1.3}, machine=replace(CPU, versions=replace(CPU.versions, torch="9.9")))
    assert load_history(CPU).corrected(OWN, "fused optimizer", HERE) == OWN
    assert len(json.loads(cache.read_text())["trials"]) == 2


def test_the_oldest_go_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_TRIALS", 3)
    one_tune({"a": 1.1, "b": 1.1})
    one_tune({"c": 1.1, "d": 1.1})
    assert [one["choice"] for one in json.loads(cache.read_text())["trials"]] == ["b", "c", "d"]


def test_of_two_tunes_that_end_at_once_both_are_kept(cache: Path) -> None:
    ending = [load_history(CPU) for _ in range(12)]
    for place, found in enumerate(ending):
        found.note(trial(f"lever {place}", 1.1), HERE)
    threads = [threading.Thread(target=found.save) for found in ending]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = {one["choice"] for one in json.loads(cache.read_text())["trials"]}
    assert kept == {f"lever {place}" for place in range(12)}
    assert {found.warning for found in ending} == {""}


def test_a_tune_that_holds_the_lock_for_long_is_not_waited_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LOCK_SECONDS", 0.02)
    cache.parent.mkdir()
    with history._locked(cache.parent):
        assert one_tune({"a": 1.1}).warning == ""
    assert cache.exists()


def test_nothing_of_what_trains_can_be_read_from_the_file(cache: Path) -> None:
    one_tune({"fused optimizer": 1.3}, Training.of("script", "SecretNet of 10 weights", STEP, "cpu"))
    assert "SecretNet" not in cache.read_text()
    assert {*json.loads(cache.read_text())["trials"][0]} == {*asdict(LAST)}


def test_where_the_user_wants_none_nothing_is_read_or_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_tune({"fused optimizer": 1.3})
    before = cache.read_text()
    monkeypatch.setenv("FLATOUT_NO_HISTORY", "1")
    found = one_tune({"fused optimizer": 2.0})
    assert found.corrected(OWN, "fused optimizer", HERE) == OWN
    assert cache.read_text() == before


def test_forgetting_deletes_the_file(cache: Path) -> None:
    assert forget_tunes() is None  # not even a folder
    one_tune({"fused optimizer": 1.3})
    assert forget_tunes() == cache
    assert not cache.exists()
    assert forget_tunes() is None
    cache.mkdir()
    with pytest.raises(MachineError, match=r"cannot delete .*tunes.json: Is a directory; delete it yourself"):
        forget_tunes()


# what goes wrong


NOT_JSON = ("", "{", "\x00\xff", "[" * 100_000)
OF_ANOTHER_SHAPE = (
    "[]",
    "{}",
    "null",
    '{"schema": 1}',
    '{"schema": "1", "trials": []}',
    '{"schema": 1, "trials": [1]}',
)
NO_TRIALS = ({"measured": 0}, {"measured": math.nan}, {"low": "x"}, {"at": "today"}, {"choice": 1})


@pytest.mark.parametrize(
    "text",
    [
        *NOT_JSON,
        *OF_ANOTHER_SHAPE,
        *(json.dumps({"schema": 1, "trials": [{**asdict(LAST), **wrong}]}) for wrong in NO_TRIALS),
    ],
    ids=range(15),
)
def test_a_damaged_file_is_begun_anew_with_a_word(cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text, encoding="latin-1")
    assert one_tune({"fused optimizer": 1.3}).warning == (
        f"what earlier tunes measured is not used: {cache} is corrupt and will be overwritten"
    )
    assert len(json.loads(cache.read_text())["trials"]) == 1
    assert load_history(CPU).warning == ""


def test_an_unknown_field_is_named(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(json.dumps({"schema": 1, "trials": [{**asdict(LAST), "more": 1}]}))
    warning = one_tune({"fused optimizer": 1.3}).warning
    assert warning.endswith("is corrupt (unknown field 'more') and will be overwritten")


def test_a_file_of_a_newer_flatout_is_left_as_it_is(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text('{"schema": 2, "tunes": {}}')
    assert one_tune({"fused optimizer": 1.3}).warning == (
        f"what earlier tunes measured is not used: {cache} was written by a newer Flatout "
        "(schema 2; this one reads 1); upgrade Flatout, or delete it: flatout check --forget-tunes"
    )
    assert cache.read_text() == '{"schema": 2, "tunes": {}}'


def test_a_cache_that_cannot_be_written_spoils_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    found = one_tune({"fused optimizer": 1.3})
    assert found.warning == f"what earlier tunes measured cannot be kept in {cache}: No space left on device"
    assert list(cache.parent.iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "file"))
    found = one_tune({"fused optimizer": 1.3})
    assert found.warning.endswith(f"cannot be read from {tmp_path / 'file' / 'tunes.json'}: Not a directory")


# what a search makes of it


def search(
    folder: Path, measured: Mapping[str, float], training: Training | None = None, *, seen: Observed = STEP
) -> TrainingSearch:
    """With what an earlier tune of the same training measured, or one of another."""
    setup = TrialSetup(target=Target(path="train.py"), work_folder=folder)
    limits = SearchLimits(deadline=Deadline(20.0, clock=lambda: 0.0))
    one_tune(measured, training or Training.of(setup.kind, None, seen, seen.device))
    found = TrainingSearch(setup, CPU, LEVERS, limits, history=load_history(CPU))
    found.state.observed = found.state.first_observed = seen
    return found


def labels(*names: str) -> list[str]:
    return [one.label(value) for one in LEVERS if one.name in names for value in one.applies(CPU, STEP).values]


def order(found: TrainingSearch) -> list[str]:
    return sorted((name for name in found.names() if found.proposal(name).candidates), key=found.promise)[::-1]


@pytest.mark.parametrize("training", [None, ELSEWHERE])
def test_no_lever_is_left_out_for_what_was_measured(cache: Path, tmp_path: Path, training: Training | None) -> None:
    fresh = search(tmp_path, {})
    known = search(tmp_path, dict.fromkeys(labels(*fresh.names()), 0.01), training)
    for name in fresh.names():
        before, after = fresh.proposal(name), known.proposal(name)
        assert {one.label for one in before.candidates} == {one.label for one in after.candidates}
        assert before.reason == after.reason


def test_what_helped_here_comes_first_and_what_did_not_comes_later(cache: Path, tmp_path: Path) -> None:
    first, *_, last = order(search(tmp_path, {}))
    of_first, of_last = (labels(name) for name in (first, last))
    after = order(search(tmp_path, {**dict.fromkeys(of_first, 0.5), **dict.fromkeys(of_last, 100.0)}))
    assert after[0] == last
    assert after.index(first) > len(after) / 2


def test_the_value_that_was_measured_to_be_better_is_tried_first(cache: Path, tmp_path: Path) -> None:
    fresh, known = search(tmp_path, {}), search(tmp_path, {"foreach optimizer": 1.5, "fused optimizer": 1.1})
    assert [one.label for one in fresh.proposal("optimizer").candidates] == ["fused optimizer", "foreach optimizer"]
    assert [one.label for one in known.proposal("optimizer").candidates] == ["foreach optimizer", "fused optimizer"]


def test_what_is_tried_at_once_is_what_helped_here(cache: Path, tmp_path: Path) -> None:
    long = {name: seconds * 25 for name, seconds in STEP.breakdown_seconds.items()}
    slow = replace(STEP, step_seconds=0.25, breakdown_seconds=long)
    fresh = {one.label for one in search(tmp_path, {}, seen=slow).bundle()}
    measured = {"fused optimizer": 0.9, "foreach optimizer": 0.9, "threads 2": 1.2}
    known = {one.label for one in search(tmp_path, measured, seen=slow).bundle()}
    assert fresh - known == {"fused optimizer"}
    assert known - fresh == {"threads 2"}


def test_a_report_says_what_earlier_tunes_made_of_a_prediction() -> None:
    predicted = corrected(OWN, "fused optimizer", HERE, [earlier(1.31)])
    (line,) = trial_lines([trial("fused optimizer", 1.3, predicted=predicted)])
    assert "x1.30 ±0.03 (predicted 1.10 to 1.55, measured x1.31 here on 2026-11-20)" in line


class MadeUp(TrainingSearch):
    """Of STEP, with one lever that helps; trials take no time."""

    def observe(self) -> None:
        self.state.loop, self.state.observed, self.state.first_observed = "Net", STEP, STEP

    def measure(self, wanted: Sequence[Choice], tried: Sequence[Choice]) -> Measured:
        ratio = 1.3 if tried[0].label == "malloc retains memory" else 0.97
        outcome: Any = "kept" if ratio > 1 else "dropped"
        return Measured(outcome=outcome, reason="", comparison=trial("", ratio).comparison)

    def on_kept(self, wanted: Sequence[Choice], tried: Sequence[Choice]) -> None:
        pass


def test_a_second_tune_tries_first_what_helped_in_the_first(cache: Path, tmp_path: Path) -> None:
    def tuned() -> list[Trial]:
        known = load_history(CPU)
        setup = TrialSetup(target=Target(path="train.py"), work_folder=tmp_path)
        limits = SearchLimits(deadline=Deadline(60.0, clock=lambda: 0.0))
        found: list[Trial] = MadeUp(setup, CPU, LEVERS, limits, history=known).run().trials
        known.save()
        return found

    first, second = tuned(), tuned()
    labels = [one.label for one in second]
    assert first[0].label != "malloc retains memory" == labels[0]
    assert {one.label for one in first} == {*labels}
    assert all(one.predicted is None or one.predicted.earlier.startswith("measured x") for one in second)
    again = {one.label: one.predicted for one in tuned()}["malloc retains memory"]
    assert again is not None
    assert "measured x1.30 here, the median of 2" in again.earlier


def test_ctrl_c_keeps_what_was_measured_until_then(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(self: TrainingSearch) -> None:
        self.after_trial(trial("fused optimizer", 1.3), [])
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingSearch, "observe", observe)
    trials = StepTrials(step=None, batches=[], shared_folder=cache.parent)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        outcome.search_and_prove(trials, CPU, LEVERS, SearchLimits(deadline=Deadline(60.0)), lambda text: None)
    assert [one["choice"] for one in json.loads(cache.read_text())["trials"]] == ["fused optimizer"]


def test_a_search_beside_busy_processes_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(self: TrainingSearch) -> None:
        self.after_trial(trial("threads 1", 60.0), [])
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingSearch, "observe", observe)
    monkeypatch.setattr(outcome, "busy", lambda load, when: [f"other processes kept 1.9 of 2 cores busy during {when}"])
    trials = StepTrials(step=None, batches=[], shared_folder=cache.parent)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        outcome.search_and_prove(trials, CPU, LEVERS, SearchLimits(deadline=Deadline(60.0)), lambda text: None)
    assert not cache.exists()
