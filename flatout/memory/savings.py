"""What a change would save, where it follows from the timeline of a run by arithmetic; nothing is estimated.

The effect of a measure that changes which tensors there are (autocast, checkpointing) does not follow from a timeline:
it is named without a figure, with the way to measure it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.memory.scores import chunked_sizes
from flatout.memory.timeline import Timeline, by_category

SMALLEST_SHARE = 0.01
"""Of the peak: less is not worth a line."""

Certainty = Literal["exact", "at most", "to be measured"]


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One measure. A figure that cannot be computed is None."""

    measure: str
    certainty: Certainty
    held_bytes: int | None = None
    """By how much less is held where the measure acts."""
    peak_before_bytes: int | None = None
    peak_after_bytes: int | None = None
    """The peak of the judged steps."""
    line: str = ""
    how: str = ""


def savings_of(
    timeline: Timeline, marks: Sequence[int], device: str, *, warm_up: int, one_backward_a_step: bool
) -> tuple[Saving, ...]:
    """For the steps after the warm-up; empty without any."""
    if len(marks) <= warm_up or not marks[-1]:
        return ()
    judged = _Judged(timeline, marks, device, warm_up)
    found = [judged.chunked_loss(), judged.optimizer_in_bf16(), judged.late_gradients(), judged.leftovers()]
    if one_backward_a_step:
        found.append(judged.gradients_in_backward())
    found.append(judged.activations())
    return tuple(saving for saving in found if saving is not None)


class _Judged:
    """The judged part of a timeline, and its peak under changes."""

    def __init__(self, timeline: Timeline, marks: Sequence[int], device: str, warm_up: int) -> None:
        self.timeline, self.marks, self.device = timeline, marks, device
        self.start, self.end = (marks[warm_up - 1] if warm_up else 0), marks[-1]
        self.indices = [
            index
            for index, one in enumerate(timeline.allocations)
            if one.device == device and one.born < self.end and (one.died is None or one.died >= self.start)
        ]
        self.peak_bytes, self.peak_event = self.peak({}, {})

    def peak(self, sizes: Mapping[int, int], deaths: Mapping[int, int]) -> tuple[int, int]:
        """The peak if these allocations had other sizes or ended at other times."""
        changes = [0] * (self.end + 1)
        for index in self.indices:
            one = self.timeline.allocations[index]
            size = sizes.get(index, one.size_bytes)
            changes[min(one.born, self.end)] += size
            died = deaths.get(index, one.died)
            if died is not None and died < self.end:
                changes[max(died, one.born)] -= size
        best, at, held = 0, -1, 0
        for event in range(self.end):
            held += changes[event]
            if event >= self.start and held > best:
                best, at = held, event
        return best, at

    def chunked_loss(self) -> Saving | None:
        """The last layer's scores and their copies, if the loss took them in chunks."""
        allocations = self.timeline.allocations
        sizes = chunked_sizes(dict(enumerate(allocations)))  # of all: judged steps may hold earlier scores
        saved = sum(allocations[index].size_bytes - size for index, size in sizes.items() if self._at_peak(index))
        how = 'flatout run with loss = "chunked" under [plan], where nothing else uses the scores'
        return self._saving("scores never held whole", "at most", saved, self.peak(sizes, {})[0], how=how)

    def optimizer_in_bf16(self) -> Saving | None:
        sizes = {
            index: one.size_bytes // 2
            for index in self.indices
            if (one := self.timeline.allocations[index]).category == "optimizer"
            and one.dtype == "float32"
            and one.shape
            and (one.died is None or one.died >= self.end)
        }
        saved = sum(sizes.values())
        after = self.peak(sizes, {})[0]
        return self._saving("optimizer state in bf16", "exact", saved, after, how="in place of float32")

    def late_gradients(self) -> Saving | None:
        """Gradients of the last step that are still held while the next forward runs."""
        deaths = self._until_step_ends("gradients")
        saved = self._most_at_an_end(deaths)
        how = "optimizer.zero_grad() right after optimizer.step()"
        return self._saving("gradients freed when the step ends", "exact", saved, self.peak({}, deaths)[0], how=how)

    def leftovers(self) -> Saving | None:
        """Outputs, losses and batches that variables hold until the next step replaces them."""
        deaths = self._until_step_ends("inputs", "activations", "temporaries")
        if not deaths:
            return None
        largest = max(deaths, key=lambda index: self.timeline.allocations[index].size_bytes)
        saved = self._most_at_an_end(deaths)
        return self._saving(
            "variables deleted when the step ends",
            "exact",
            saved,
            self.peak({}, deaths)[0],
            line=self.timeline.allocations[largest].line,
            how="`del` what the line made, at the end of the loop's body",
        )

    def gradients_in_backward(self) -> Saving | None:
        """Each parameter updated and its gradient freed as soon as it is computed; not with gradient clipping."""
        born = sorted(
            (one.born, index)
            for index in self.indices
            if (one := self.timeline.allocations[index]).category == "gradients"
        )
        deaths = {}
        for (_, index), (following, _) in itertools.pairwise(born):
            one = self.timeline.allocations[index]
            died = self.end if one.died is None else min(one.died, self.end)
            if died == self.end and one.step < len(self.marks) - 1:
                return None  # they are zeroed, not freed: then freeing them is the first measure to take
            deaths[index] = min(died, following + 1)
        saved = sum(self.timeline.allocations[index].size_bytes for index in deaths if self._at_peak(index))
        return self._saving(
            "gradients freed in the backward pass",
            "at most",
            saved,
            self.peak({}, deaths)[0],
            how="an optimizer step in each parameter's hook; not together with clipping by the norm of all",
        )

    def activations(self) -> Saving | None:
        alive = [self.timeline.allocations[index] for index in self.indices if self._at_peak(index)]
        held = by_category(alive)["activations"]
        if held < SMALLEST_SHARE * self.peak_bytes:
            return None
        return Saving(
            measure="activations under bf16 autocast, or checkpointed",
            certainty="to be measured",
            how="not known from a timeline; measure with flatout.forecast",
        )

    def _until_step_ends(self, *categories: str) -> dict[int, int]:
        deaths = {}
        for index in self.indices:
            one = self.timeline.allocations[index]
            step = one.step
            if one.category not in categories or one.died is None or not 0 <= step < len(self.marks) - 1:
                continue
            if self.marks[step] <= one.died <= self.marks[step + 1] and one.born < self.marks[step]:
                deaths[index] = self.marks[step]
        return deaths

    def _most_at_an_end(self, deaths: Mapping[int, int]) -> int:
        sums: dict[int, int] = {}
        for index, mark in deaths.items():
            sums[mark] = sums.get(mark, 0) + self.timeline.allocations[index].size_bytes
        return max(sums.values(), default=0)

    def _at_peak(self, index: int) -> bool:
        one = self.timeline.allocations[index]
        return one.born <= self.peak_event and (one.died is None or one.died > self.peak_event)

    def _saving(
        self, measure: str, certainty: Certainty, saved: int, after: int, *, line: str = "", how: str = ""
    ) -> Saving | None:
        lasting = measure.startswith("optimizer")  # it is held all the time, so a smaller one counts at any moment
        if (saved if lasting else self.peak_bytes - after) < max(1, SMALLEST_SHARE * self.peak_bytes):
            return None
        return Saving(
            measure=measure,
            certainty=certainty,
            held_bytes=saved,
            peak_before_bytes=self.peak_bytes,
            peak_after_bytes=after,
            line=line,
            how=how,
        )
