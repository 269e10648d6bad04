"""A script that is watched in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flatout.script.watch import Watch


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    made.install(torch)
    yield made
    made.uninstall()
    assert "grad" not in vars(torch.nn.Parameter)
