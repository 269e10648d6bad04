"""Values of many steps, read together."""

from __future__ import annotations

import torch

from flatout.train.readings import STEPS_PER_READING, HostCopy, Readings


def test_values_of_any_kind_come_in_order_and_late() -> None:
    taken: list[tuple[int, list[float]]] = []
    readings: Readings[int] = Readings(lambda key, values: taken.append((key, values)))
    expected = []
    for i in range(STEPS_PER_READING + 3):
        assert taken == []
        values = [torch.tensor(i), torch.tensor([i / 2], dtype=torch.bfloat16), 0.1 * i, torch.tensor(i / 4)][i % 3 :]
        expected.append((i, [float(one) for one in values]))
        readings.add(i, values)
        if i + 1 == STEPS_PER_READING:
            assert taken == expected
            taken.clear()
            expected.clear()
    readings.read()
    assert taken == expected
    readings.read()
    assert len(taken) == 3


def test_a_copy_on_the_host_is_there_at_once() -> None:
    for values, expected in ((torch.tensor(2.0), [2.0]), (torch.tensor([1.0, 3.0]), [1.0, 3.0])):
        copy = HostCopy(values)
        assert copy.arrived()
        assert copy.values() == expected
