"""Peak, steps, lines and savings, computed from a timeline that was made by hand."""

from __future__ import annotations

import json

from flatout.memory.timeline import Allocation, Category, Phase, Timeline
from flatout.memory.use import MemoryUse, use_of


class Script:
    """Weights, then steps that each make a batch, an activation, a gradient and the optimizer's temporary."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.events: list[tuple[int, bool]] = []
        self.marks: list[int] = []
        self.step = -1

    def born(self, size: int, category: Category, phase: Phase, line: str, dtype: str = "float32") -> int:
        index = len(self.allocations)
        self.allocations.append(
            Allocation(
                size_bytes=size,
                born=len(self.events),
                phase=phase,
                step=self.step,
                line=line,
                shape=(size // 4,),
                dtype=dtype,
                category=category,
                operation="mm.default",
            )
        )
        self.events.append((index, True))
        return index

    def died(self, *indices: int) -> None:
        for index in indices:
            self.allocations[index].died = len(self.events)
            self.events.append((index, False))

    def use(self, first_event: int, *, one_backward: bool = True) -> MemoryUse:
        timeline = Timeline(self.allocations, self.events)
        return use_of(timeline, self.marks, first_event=first_event, warm_up=2, one_backward_a_step=one_backward)


def scripted(steps: int = 7) -> tuple[Script, int]:
    script = Script()
    script.born(1000, "weights", "forward", "train.py:1")
    first = len(script.events)
    before: list[int] = []
    for step in range(steps):
        script.step = step
        batch = script.born(100, "inputs", "forward", "train.py:5")
        out = script.born(400, "activations", "forward", "train.py:6")
        script.died(*before)  # the variables of the step before get their new values
        quarters = [script.born(250, "gradients", "backward", "train.py:6") for _ in range(4)]
        if step == 0:
            script.born(2000, "optimizer", "optimizer", "train.py:9")
        script.died(*quarters)
        before = [batch, out]
        script.marks.append(len(script.events))
    return script, first


def test_the_peak_says_when_where_and_what() -> None:
    script, first = scripted()
    use = script.use(first)
    peak = use.peak
    assert (peak.size_bytes, peak.step, peak.phase, peak.line) == (4500, 1, "optimizer", "train.py:9")
    assert (peak.operation, use.device) == ("mm", "cpu")
    assert {name: size for name, size in peak.categories.items() if size} == {
        "weights": 1000,
        "gradients": 1000,
        "optimizer": 2000,
        "inputs": 100,
        "activations": 400,
    }
    assert sum(peak.categories.values()) == peak.size_bytes
    assert [(step.peak_bytes, step.held_bytes) for step in use.steps[1:]] == [(4500, 3500)] * 6
    assert use.between_steps_bytes == 3500
    assert [(line.line, line.size_bytes) for line in use.lines][:2] == [("train.py:9", 2000), ("train.py:6", 1400)]
    assert (use.tensors[0].size_bytes, use.tensors[0].shape) == (2000, (500,))


def test_what_is_left_of_earlier_steps_is_other() -> None:
    script, first = scripted(3)
    script.step = 3
    script.born(9000, "temporaries", "forward", "train.py:7")
    script.marks.append(len(script.events))
    peak = script.use(first).peak
    assert (peak.step, peak.categories["other"], peak.categories["temporaries"]) == (4, 500, 9000)


def test_savings_are_arithmetic_on_the_timeline() -> None:
    script, first = scripted()
    savings = {saving.measure: saving for saving in script.use(first).savings}
    state = savings["optimizer state in bf16"]
    assert (state.certainty, state.held_bytes) == ("exact", 1000)
    assert (state.peak_before_bytes, state.peak_after_bytes) == (4500, 3500)
    early = savings["gradients freed in the backward pass"]
    assert (early.certainty, early.peak_after_bytes) == ("at most", 4000)  # two at a time
    unknown = savings["activations under bf16 autocast, or checkpointed"]
    assert (unknown.certainty, unknown.held_bytes, unknown.peak_after_bytes) == ("to be measured", None, None)


def test_variables_that_outlive_their_step_are_worth_deleting() -> None:
    script = Script()
    script.born(1000, "weights", "forward", "train.py:1")
    first, before = len(script.events), None
    for step in range(7):
        script.step = step
        out = script.born(4000, "activations", "forward", "train.py:6")
        if before is not None:
            script.died(before)
        before = out
        script.marks.append(len(script.events))
    (saving,) = [one for one in script.use(first).savings if one.measure.startswith("variables")]
    assert (saving.peak_before_bytes, saving.peak_after_bytes, saving.line) == (9000, 5000, "train.py:6")
    assert saving.certainty == "exact"


def test_no_figure_where_a_backward_pass_is_one_of_several() -> None:
    script, first = scripted()
    assert not [one for one in script.use(first, one_backward=False).savings if "backward pass" in one.measure]


def test_without_steps_the_whole_run_is_told() -> None:
    script = Script()
    script.died(script.born(100, "temporaries", "forward", "a.py:1"))
    use = script.use(0)
    assert (use.peak.size_bytes, use.peak.step, use.steps, use.between_steps_bytes) == (100, None, (), None)
    assert use.savings == ()


def test_it_travels_as_json() -> None:
    script, first = scripted()
    use = script.use(first)
    assert MemoryUse.from_json(json.loads(json.dumps(use.to_json()))) == use
