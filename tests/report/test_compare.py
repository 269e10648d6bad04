import json
import random
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import MachinesDiffer, UsageError
from flatout.private_details import arguments_digest
from flatout.report.compare import DocumentComparison, compare_sides, comparison_text
from flatout.report.document import Document, document
from flatout.timing import measurement

MACHINE = json.loads((Path(__file__).parents[1] / "recorded" / "machine_two_cores.json").read_text())


def run_document(
    seconds: float, *, seed: int = 0, machine: dict[str, Any] | None = None, script: str = "train.py"
) -> dict[str, Any]:
    rng = random.Random(seed)
    samples = [seconds * rng.lognormvariate(0, 0.02) for _ in range(40)]
    found = measurement("train.py", samples).to_json()
    return document("run", {"machine": machine or MACHINE, "script": {"name": script}, "measurement": found})


def compare_documents(a: Document, b: Document) -> DocumentComparison:
    return compare_sides([a], [b])


def test_a_gain_is_called_faster() -> None:
    found = compare_documents(run_document(0.012), run_document(0.010, seed=1))
    assert found.comparison.verdict == "faster"
    assert found.comparison.ratio == pytest.approx(1.2, rel=0.02)
    text = comparison_text(found)
    assert text.startswith("verdict    faster\nratio      x1.")
    assert "train.py: 12 ms a step" in text or "train.py: 11.9 ms a step" in text
    assert "drift" in found.caveats[0]
    assert json.loads(json.dumps(found.to_json()))["comparison"]["verdict"] == "faster"


def test_noise_is_not_significant() -> None:
    found = compare_documents(run_document(0.010), run_document(0.010, seed=1))
    assert found.comparison.verdict == "not significant"
    assert "not significant (the interval includes no change)" in comparison_text(found)


def test_a_run_that_is_on_both_sides_is_told() -> None:
    run = run_document(0.010)
    said = "a run is on both sides: it was compared with itself"
    assert said in compare_documents(run, run).caveats
    assert said not in compare_documents(run, run_document(0.010, seed=1)).caveats


def test_one_sample_is_too_few() -> None:
    one = run_document(0.010)
    one["measurement"]["samples_seconds"] = [0.01]
    text = comparison_text(compare_documents(run_document(0.010), one))
    assert "(1 sample is too few for 95% confidence)" in text
    assert "1 sample, too few for an interval" in text


def test_unlike_machines_are_refused_by_what_differs() -> None:
    other = {**MACHINE, "fingerprint": "other", "cpu": {**MACHINE["cpu"], "available_cores": 64}}
    with pytest.raises(MachinesDiffer, match="different machines; cores: 2 and 64; run both on the same machine"):
        compare_documents(run_document(1.0), run_document(1.0, machine=other))
    with pytest.raises(MachinesDiffer, match=r"the first \(run 1\) and second \(run 2\) are from different machines"):
        compare_sides(
            [run_document(1.0, seed=1), run_document(1.0, seed=2)],
            [run_document(1.0, seed=3), run_document(1.0, seed=4, machine=other)],
        )
    with pytest.raises(MachinesDiffer, match="fingerprints a and b"):
        compare_documents(
            run_document(1.0, machine={"fingerprint": "a"}), run_document(1.0, machine={"fingerprint": "b"})
        )


def test_another_torch_is_a_caveat() -> None:
    other = {**MACHINE, "versions": {**MACHINE["versions"], "torch": "2.12.0"}}
    found = compare_documents(run_document(1.0), run_document(1.0, machine=other))
    assert "torch differs: 2.13.0+cpu and 2.12.0" in found.caveats


def test_what_cannot_be_compared_is_refused() -> None:
    good = run_document(1.0)
    with pytest.raises(UsageError, match=r"second document \(a 'check'\) holds no measurement"):
        compare_documents(good, document("check", {"machine": MACHINE}))
    with pytest.raises(UsageError, match="first document's measurement is malformed"):
        compare_documents({**good, "measurement": {"name": "x"}}, good)
    with pytest.raises(UsageError, match="on which machine"):
        compare_documents(good, {**good, "machine": {}})
    with pytest.raises(UsageError, match="second document has no samples"):
        compare_documents(good, {**good, "measurement": {"name": "x", "samples_seconds": []}})


def test_a_run_among_competitors_proves_nothing() -> None:
    quiet, crowded = run_document(0.012), run_document(0.010, seed=1)
    crowded["measurement"]["contended"] = True
    found = compare_documents(quiet, crowded)
    assert found.comparison.verdict == "not significant"
    assert "others competed for the processor in the second" in (found.comparison.reason or "")
    assert comparison_text(found).startswith("verdict    undecided (others competed")


def test_several_runs_of_each_side_are_the_samples() -> None:
    slow, fast = ([run_document(seconds, seed=seed) for seed in seeds] for seconds, seeds in SIDES)
    found = compare_sides(slow, fast)
    assert (found.unit, found.comparison.verdict, found.comparison.pairs) == ("runs", "faster", 4)
    assert found.comparison.ratio == pytest.approx(1.2, rel=0.02)
    assert "taken in turns" in found.caveats[0]
    text = comparison_text(found)
    assert text.count("a step, middle half within") == 8
    assert len(json.loads(json.dumps(found.to_json()))["baseline"]) == 4
    few = compare_sides(slow[:2], fast[:1])
    assert few.comparison.verdict == "not significant"
    assert "2 and 1 runs are too few" in comparison_text(few)


SIDES = ((0.012, range(4)), (0.010, range(4, 8)))


def test_of_many_runs_the_warnings_are_counted() -> None:
    baseline, candidate = ([run_document(seconds, seed=seed) for seed in seeds] for seconds, seeds in SIDES)
    candidate[0]["measurement"] |= {"contended": True, "warnings": ["contended: others kept 1.0 of 2 cores busy"]}
    found = compare_sides(baseline, candidate)
    assert "contended: 1 of 8 runs" in found.caveats
    assert found.contended == ("second (run 1)",)
    assert found.comparison.verdict == "not significant"
    assert "in 1 of 8 runs: measure again on an idle machine" in (found.comparison.reason or "")


def test_a_run_given_twice_is_refused() -> None:
    run = run_document(0.01)
    with pytest.raises(UsageError, match="two results of the second side are the same run; pass each run once"):
        compare_sides([run], [run, run])


def test_another_script_is_a_caveat() -> None:
    found = compare_documents(run_document(1.0), run_document(1.0, seed=1, script="other.py"))
    assert "the script differs: train.py and other.py" in found.caveats
    assert found.name == "other.py"


def test_other_arguments_another_device_and_a_script_that_failed_are_caveats() -> None:
    def given(seed: int, device: str = "cpu", **script: Any) -> dict[str, Any]:
        doc = run_document(1.0, seed=seed)
        return {**doc, "script": {**doc["script"], **script}, "observed": {"device": device}}

    first, second = given(0, arguments=["--batch", "8"], status=0), given(1, arguments=["--batch", "9"], status=3)
    assert set(compare_documents(first, second).caveats[1:]) >= {
        "the script's arguments differ",
        "second: the script ended with status 3",
    }
    hidden = given(1, "cuda:0", arguments=None, arguments_digest=arguments_digest(["--batch", "8"]), status=None)
    caveats = compare_documents(first, hidden).caveats
    assert "the script's arguments differ" not in caveats
    assert "the device differs: cpu and cuda:0" in caveats
    assert "second: the script had not ended when this was written" in caveats
    several = compare_sides([first, given(2, status=3)], [given(3, status=0), given(4, status=3)])
    assert "the script ended with status 3: 2 of 4 runs" in several.caveats


@pytest.mark.parametrize("seconds", [0.0, -1.0, 5e-324, 1e300, 10**400])
def test_a_sample_that_no_clock_measured_is_refused(seconds: float) -> None:
    doc = run_document(1.0)
    wrong = {**doc, "measurement": {**doc["measurement"], "samples_seconds": [seconds] * 9}}
    with pytest.raises(UsageError, match=r"the second document has a sample of .* seconds; a step takes 1e-12 s to 1e"):
        compare_documents(doc, wrong)


def test_steps_of_unlike_batches_are_a_caveat() -> None:
    def of(samples: float, seed: int) -> dict[str, Any]:
        return {**run_document(1.0, seed=seed), "samples_per_step": samples}

    (caveat,) = [one for one in compare_documents(of(32, 0), of(64, 1)).caveats if "samples" in one]
    assert caveat.startswith("steps of unlike size: 32 and 64 samples a step")
    assert not [one for one in compare_documents(of(32, 0), of(31.9, 1)).caveats if "samples" in one]


def test_names_in_a_document_stay_on_their_line_and_drive_nothing() -> None:
    hostile = "a\x1b[2J\n::stop-commands::x"
    found = compare_documents(run_document(0.01, script=hostile), run_document(0.01, seed=1, script="train.py"))
    text = comparison_text(found)
    assert "\x1b" not in text
    assert "\n::" not in text
    assert found.scripts == ("a[2J::stop-commands::x", "train.py")


def test_whatever_a_document_says_stays_on_its_line_and_is_no_workflow_command() -> None:
    hostile = "::error::\x1b[31mx\n::stop-commands::x"
    first, second = run_document(0.01), run_document(0.01, seed=1, machine=with_torch(hostile))
    second["measurement"] |= {"name": hostile, "warnings": [hostile]}
    for sides in (([first], [second]), ([first, run_document(0.01, seed=2)], [second, run_document(0.01, seed=3)])):
        for side in (sides, sides[::-1]):
            text = comparison_text(compare_sides(*side))
            assert "\x1b" not in text
            assert all(line.isprintable() and not line.strip().startswith("::") for line in text.split("\n"))


def with_torch(version: object) -> dict[str, Any]:
    return {**MACHINE, "versions": {**MACHINE["versions"], "torch": version}}


@pytest.mark.parametrize(
    "changed",
    [
        {"name": None},
        {"name": [None]},
        {"samples_seconds": "0.1"},
        {"samples_seconds": ["0.1"]},
        {"samples_seconds": [-0.1] * 9},
        {"contended": "no"},
        {"warnings": [3]},
        {"warnings": None},
    ],
)
def test_a_malformed_measurement_is_refused(changed: dict[str, object]) -> None:
    doc = run_document(0.01)
    doc["measurement"] |= changed
    with pytest.raises(UsageError):
        compare_documents(doc, run_document(0.01, seed=1))


@pytest.mark.parametrize("measured", ["x", 3, [1]])
def test_what_is_no_measurement_at_all_is_refused(measured: object) -> None:
    with pytest.raises(UsageError, match="malformed"):
        compare_documents({**run_document(0.01), "measurement": measured}, run_document(0.01, seed=1))


def test_a_measurement_of_a_later_version_may_say_more() -> None:
    doc = run_document(0.01)
    doc["measurement"] |= {"new": 1}
    assert compare_documents(doc, run_document(0.01, seed=1)).comparison.verdict == "not significant"


@pytest.mark.parametrize("machine", [{**MACHINE, "versions": "x"}, *map(with_torch, (3, [], None, {"a": 1}))])
def test_a_version_that_is_no_text_is_unknown(machine: dict[str, Any]) -> None:
    found = compare_documents(run_document(0.01), run_document(0.01, seed=1, machine=machine))
    assert not any("torch" in caveat for caveat in found.caveats)


@pytest.mark.parametrize(
    "changed", [{"cpu": "z"}, {"cpu": {}}, {"memory_total_bytes": "much"}, {"devices": 3}, {"devices": [3]}]
)
def test_other_machines_differ_by_their_fingerprints_where_nothing_else_can_be_read(changed: dict[str, Any]) -> None:
    other = {**MACHINE, "fingerprint": "other\x1b", **changed}
    with pytest.raises(MachinesDiffer, match=r"fingerprints .* and other;"):
        compare_documents(run_document(0.01), run_document(0.01, seed=1, machine=other))
