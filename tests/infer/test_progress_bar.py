"""The bar: on a terminal alone, and never in the way of the results."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import flatout
from flatout.infer.progress_bar import progress_bar


def test_off_a_terminal_nothing_is_shown(capsys: Any) -> None:
    with progress_bar(3) as show:
        show(2, "words")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("total", [100, None])
def test_predictions_pass_through_it(total: int | None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    inputs: Any = [torch.full((3,), float(index)) for index in range(100)]
    model = nn.Linear(3, 1)
    found = list(flatout.predict(model, inputs if total else iter(inputs), progress=True))
    expected = model(torch.stack(inputs)).detach()
    torch.testing.assert_close(torch.stack(found), expected)
    assert capsys.readouterr().out == ""
