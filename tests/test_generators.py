"""Every generator's state is kept, put back and seeded; those of libraries that nobody loaded are left alone."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from flatout.generators import (
    drawn_since,
    generator_states,
    generators_kept,
    seed_generators,
    set_generators,
    torch_generator_states,
    undrawn_on_failure,
)


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_the_same_numbers_come_again() -> None:
    states = generator_states()
    first = draws()
    set_generators(states)
    assert draws() == first
    set_generators(states)
    with generators_kept() as changed:
        assert not changed()
    seed_generators(5)
    seeded = draws()
    assert seeded != first
    seed_generators(5)
    assert draws() == seeded


def test_only_torchs() -> None:
    states = torch_generator_states()
    first = draws()
    set_generators(states)
    again = draws()
    assert again[0] == first[0]
    assert again[1] != first[1]


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, np.random.rand])
def test_a_draw_is_seen_and_taken_back(draw: Any) -> None:
    before = generator_states()
    with generators_kept() as changed:
        draw()
        assert changed()
    set_generators(before)
    first = draws()
    set_generators(before)
    with generators_kept():
        draw()
    assert draws() == first


@pytest.mark.slow
def test_numpy_is_left_alone_where_nobody_loaded_it() -> None:
    script = (
        "import sys, torch\n"
        "from flatout.generators import *\n"
        "sys.modules.pop('numpy', None)\n"
        "assert 'numpy' not in generator_states()\n"
        "seed_generators(1)\n"
        "with generators_kept() as changed: assert not changed()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=200)


def test_what_is_drawn_for_a_failure_was_not_drawn() -> None:
    with undrawn_on_failure() as before:
        assert not drawn_since(before)
        draws()
        assert drawn_since(before)
    before = generator_states()

    def fail() -> None:
        with undrawn_on_failure():
            draws()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not drawn_since(before)
