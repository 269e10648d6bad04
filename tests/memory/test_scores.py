"""What a timeline says of a last layer's scores."""

from __future__ import annotations

from flatout.kernels.linear_cross_entropy import CHUNK_BYTES
from flatout.memory.savings import savings_of
from flatout.memory.scores import chunked_sizes
from flatout.memory.timeline import Allocation, Category, Timeline

ROWS, CLASSES, FEATURES = 65_536, 4096, 8
SCORES = ROWS * CLASSES * 4


def allocation(operation: str, born: int, category: Category = "temporaries", classes: int = CLASSES) -> Allocation:
    shape = (CLASSES, FEATURES) if category == "weights" else (ROWS, classes)
    phase = "backward" if "backward" in operation else "forward"
    one = Allocation(
        4 * shape[0] * shape[1],
        born,
        phase,
        0,
        operation=f"{operation}.default",
        shape=shape,
        category=category,
        dtype="float32",
    )
    one.died = None if category == "weights" else 9
    return one


def timeline(*, classes: int = CLASSES, weights: bool = True) -> Timeline:
    kinds = ("mm", "_log_softmax", "nll_loss_backward", "_log_softmax_backward_data")
    made = [allocation("empty", 0, "weights")] if weights else []
    made += [allocation(kind, 1 + number, classes=classes) for number, kind in enumerate(kinds)]
    return Timeline(made, [(index, True) for index in range(len(made))] + [(len(made) - 1, False)] * 5)


def test_copies_of_the_scores_are_counted_out_and_the_chunks_in() -> None:
    found = timeline()
    sizes = chunked_sizes(dict(enumerate(found.allocations)))
    gradients = 4 * FEATURES * (ROWS + CLASSES)
    assert sizes == {1: 0, 2: 2 * CHUNK_BYTES + gradients, 3: 0, 4: gradients}
    (saving, *_) = savings_of(found, [len(found.events)], "cpu", warm_up=0, one_backward_a_step=False)
    assert saving.measure == "scores never held whole"
    assert saving.certainty == "at most"
    assert saving.held_bytes == 4 * SCORES - 2 * CHUNK_BYTES - 2 * gradients
    assert saving.peak_before_bytes is not None
    assert saving.peak_after_bytes == saving.peak_before_bytes - saving.held_bytes


def test_few_classes_and_unknown_weights_say_nothing() -> None:
    for found in (timeline(classes=1000), timeline(weights=False)):
        assert chunked_sizes(dict(enumerate(found.allocations))) == {}
