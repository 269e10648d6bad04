"""Times of a made-up recording are brought together with made-up followed operators."""

from __future__ import annotations

import pytest

from flatout.profiling.attribution import AUTOGRAD, MOST_ROWS, OTHERS, attribute, flops_by_shapes, lines_of, modules_of
from flatout.profiling.following import FollowedModule, FollowedOperator, Origin
from flatout.profiling.profile import OperatorRow, Phase
from flatout.profiling.recorded_events import Event, Kernel, Recording

MM = ((8, 16), (16, 4))


def followed(
    name: str,
    shapes: tuple[tuple[int, ...], ...],
    line: int,
    *,
    phase: Phase = "forward",
    module: str = "Net.fc",
    flops: float | None = None,
) -> FollowedOperator:
    origin = Origin(module=module, line=f"/work/train.py:{line}", function="forward")
    return FollowedOperator(
        name=name, shapes=shapes, dtype="float32", flops=flops, size_bytes=64.0, phase=phase, origin=origin
    )


def event(
    name: str,
    begin: float,
    end: float,
    parent: int | None = None,
    shapes: tuple[tuple[int, ...], ...] = (),
    *,
    annotation: bool = False,
    backward: bool = False,
    device_seconds: float = 0.0,
) -> Event:
    return Event(
        name=name,
        begin=begin,
        end=end,
        parent=parent,
        shapes=shapes,
        annotation=annotation,
        backward=backward,
        device_seconds=device_seconds,
    )


ONE_STEP = (followed("aten::mm", MM, 10, flops=1024.0), followed("aten::mm", MM, 20, flops=1024.0))


def two_steps() -> Recording:
    """Each: two products of the same shapes, of 1 and 3 seconds, inside `aten::linear`; the second in two operators."""
    events: list[Event] = []
    for step in range(2):
        at, first = 10.0 * step, len(events)
        events += [
            event("ProfilerStep#0", at, at + 9, annotation=True),
            event("aten::linear", at, at + 1.5, first, MM),
            event("aten::mm", at + 0.5, at + 1.5, first + 1, MM),
            event("aten::mm", at + 2, at + 5, first, MM),
            event("aten::empty", at + 2, at + 2.5, first + 3),
        ]
    return Recording(events=tuple(events))


def test_equal_calls_keep_their_order() -> None:
    found = attribute(two_steps(), ONE_STEP, steps=2, on_gpu=False, folder="/work")
    rows = {(row.name, row.line): row for row in found.operators}
    assert rows["aten::mm", "train.py:10"].seconds == pytest.approx(1.0)
    assert rows["aten::mm", "train.py:20"].seconds == pytest.approx(3.0)  # with what it runs inside
    assert rows["aten::linear", "train.py:10"].seconds == pytest.approx(0.5)  # what is left of it
    assert ("aten::empty", "") not in rows
    assert rows["aten::mm", "train.py:10"].calls == 1
    assert rows["aten::mm", "train.py:10"].flops == 1024.0
    assert (found.by_name_share, found.unknown_share) == (0, 0)


def test_backward_operators_belong_to_the_line_of_the_forward() -> None:
    backward = followed("aten::mm", MM, 10, phase="backward", flops=1024.0)
    recording = Recording(
        events=(
            event("autograd::engine::evaluate_function: MmBackward0", 0, 4, backward=True),
            event("MmBackward0", 1, 4, 0, backward=True),
            event("aten::mm", 2, 4, 1, MM),
        )
    )
    found = attribute(recording, [*ONE_STEP, backward], steps=1, on_gpu=False, folder="/work")
    assert {(row.name, row.phase, row.line, row.seconds) for row in found.operators} == {
        ("aten::mm", "backward", "train.py:10", 2.0),
        (AUTOGRAD, "backward", "train.py:10", 2.0),
    }


def test_other_shapes_are_matched_by_name_and_counted_by_their_own() -> None:
    recording = Recording(events=(event("aten::mm", 0, 1, None, ((2, 16), (16, 4))),))
    found = attribute(recording, ONE_STEP, steps=1, on_gpu=False)
    (row,) = found.operators
    assert (row.module, row.flops, row.bytes) == ("Net.fc", 2 * 2 * 16 * 4, None)
    assert (found.by_name_share, found.unknown_share) == (1, 0)


def test_under_vmap_the_operator_on_the_whole_batch_counts() -> None:
    batch = ((8, 2, 16), (8, 16, 4))
    recording = Recording(
        events=(
            event("aten::mm", 0, 4, None, ((2, 16), (16, 4))),  # of one example
            event("aten::matmul", 1, 4, 0, batch),
            event("aten::bmm", 1, 3, 1, batch),
        )
    )
    found = attribute(recording, [followed("aten::bmm", batch, 10, flops=2048.0), *ONE_STEP], steps=1, on_gpu=False)
    rows = {row.name: row for row in found.operators}
    assert (rows["aten::bmm"].flops, rows["aten::bmm"].seconds) == (2048.0, 2.0)
    assert (rows["aten::mm"].flops, rows["aten::mm"].seconds) == (None, 1.0)  # what is left of it
    assert {row.line.rpartition(":")[2] for row in found.operators} == {"10"}
    assert (found.by_name_share, found.unknown_share) == (0, 0)


def test_what_nothing_matches_has_the_phase_of_its_label() -> None:
    recording = Recording(
        events=(
            event("Optimizer.step#Adam.step", 0, 5, annotation=True),
            event("aten::add_", 1, 2, 0),
            event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 6, 8, annotation=True),
            event("aten::stack", 6, 7, 2),
            event("aten::relu", 9, 10),
        )
    )
    found = attribute(recording, (), steps=1, on_gpu=False)
    assert {row.name: row.phase for row in found.operators} == {
        "aten::add_": "optimizer",
        "aten::stack": "data",
        "aten::relu": "other",
    }


def test_times_on_a_gpu_are_those_of_kernels() -> None:
    recording = Recording(
        events=(
            event("aten::mm", 0, 1, None, MM),
            event("aten::addmm_inner", 0, 0.5, 0, device_seconds=7.0),
            event("aten::view", 2, 3),
        ),
        kernels=(
            Kernel(name="sgemm", begin=1, end=8, kind="kernel", operator=1),
            Kernel(name="Memcpy HtoD (Pageable -> Device)", begin=7, end=9, kind="copy", size_bytes=4e9),
        ),
    )
    found = attribute(recording, ONE_STEP, steps=1, on_gpu=True)
    rows = {row.name: row for row in found.operators}
    assert (rows["aten::mm"].seconds, rows["aten::mm"].host_seconds, rows["aten::mm"].device) == (7.0, 1.0, "cuda")
    assert (rows["aten::view"].seconds, rows["aten::view"].host_seconds, rows["aten::view"].device) == (0.0, 1.0, "cpu")
    assert found.busy_seconds == 8.0  # they overlap for one second
    assert found.busy_by_phase == {"forward": 7.0, "copies": 1.0}
    assert next((row.name, row.operator, row.seconds) for row in found.kernels) == ("sgemm", "aten::mm", 7.0)
    assert found.kernels[1].bytes == 4e9


def test_a_long_list_of_rows_is_cut_and_still_adds_up() -> None:
    calls = [event("aten::mm", n, n + 0.5, None, ((n + 1, 2), (2, 2))) for n in range(MOST_ROWS + 100)]
    found = attribute(Recording(events=tuple(calls)), (), steps=1, on_gpu=False)
    assert len(found.operators) == MOST_ROWS + 1
    assert found.operators[-1].name == OTHERS
    assert sum(row.seconds for row in found.operators) == pytest.approx(0.5 * (MOST_ROWS + 100))


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("aten::mm", [[3, 5], [5, 7]], 2 * 3 * 5 * 7),
        ("aten::addmm", [[7], [3, 5], [5, 7]], 2 * 3 * 5 * 7),
        ("aten::bmm", [[2, 3, 5], [2, 5, 7]], 2 * 2 * 3 * 5 * 7),
        ("aten::relu", [[3, 5]], None),
        ("aten::mm", [[3, 5]], None),
    ],
)
def test_flops_by_shapes(name: str, shapes: list[list[int]], flops: float | None) -> None:
    assert flops_by_shapes(name, shapes) == flops


def row(seconds: float, *, module: str = "", line: str = "", phase: Phase = "forward") -> OperatorRow:
    return OperatorRow(
        name="aten::mm",
        operator_class="matmul",
        calls=1,
        seconds=seconds,
        host_seconds=seconds,
        phase=phase,
        module=module,
        line=line,
        device="cpu",
    )


def test_lines_add_up_their_operators() -> None:
    rows = [row(1, line="train.py:3"), row(2, line="train.py:9"), row(4, line="train.py:3", phase="backward"), row(1)]
    first, second = lines_of(rows, lambda file, line: f"{file} {line}", {"train.py:3": "forward"})
    assert (first.place, first.seconds, first.share, first.text, first.function) == (
        *("train.py:3", 5, 5 / 8, "train.py 3", "forward"),
    )
    assert second.place == "train.py:9"


def test_modules_contain_what_is_inside_them() -> None:
    modules = {
        path: FollowedModule(path=path, kind=kind, depth=path.count("."), calls=1)
        for path, kind in (("Net", "Net"), ("Net.blocks.0", "Block"), ("Net.blocks.0.fc", "Linear"), ("Loss", "Loss"))
    }
    rows = [row(1, module="Net"), row(2, module="Net.blocks.0.fc"), row(4, module="Net.blocks.0.fc", phase="backward")]
    found = {one.path: one for one in modules_of([*rows, row(9, module="Net", phase="optimizer")], modules)}
    assert list(found) == ["Net", "Net.blocks.0", "Net.blocks.0.fc", "Loss"]
    assert (found["Net"].forward_seconds, found["Net"].backward_seconds) == (3, 4)
    assert (found["Net.blocks.0"].forward_seconds, found["Loss"].seconds) == (2, 0)
