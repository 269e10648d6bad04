"""Samples and tokens of a step, from what a loader hands out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from flatout.levers.subject import Subject
from flatout.script.batch_count import NO_LOADER, NO_TENSOR, NO_TOKENS, BatchCount

EMBEDDING = nn.Sequential(nn.Embedding(10, 4))
"""Kept: a Subject holds its models weakly."""
IMAGES = (torch.zeros(8, 3, 4, 4), torch.zeros(8, dtype=torch.long))
TOKENS = {"labels": torch.zeros(8, dtype=torch.long), "input_ids": torch.zeros(8, 32, dtype=torch.long)}


def counted(batches: list[object], *, steps: int = 3, known: bool = True) -> BatchCount:
    subject = Subject()
    subject.modules.add(EMBEDDING)
    loader: DataLoader[object] = DataLoader([torch.zeros(1)])
    if known:
        subject.loaders.add(loader)
    count = BatchCount(subject)
    for _ in range(steps):
        for batch in batches:
            count.batch(loader, batch)
        count.step_ended()
    return count


@pytest.mark.parametrize(
    ("batches", "samples", "tokens"),
    [
        ([IMAGES], 8, None),
        ([IMAGES, IMAGES], 16, None),
        ([TOKENS], 8, 256),
        ([torch.zeros(4, 16, dtype=torch.int32)], 4, 64),
        ([torch.zeros(4, 16, dtype=torch.bool)], 4, None),
    ],
)
def test_samples_and_tokens(batches: list[object], samples: float, tokens: float | None) -> None:
    found = counted(batches)
    assert (found.samples_per_step, found.tokens_per_step) == (samples, tokens)
    assert found.reasons() == ({} if tokens else {"tokens_per_step": NO_TOKENS})


def test_what_is_unknown_has_a_reason() -> None:
    assert counted([IMAGES], known=False).reasons() == {"samples_per_step": NO_LOADER, "tokens_per_step": NO_LOADER}
    assert counted([["a", "b"]]).reasons()["samples_per_step"] == NO_TENSOR


def test_a_loader_for_evaluation_does_not_change_the_median() -> None:
    found = counted([IMAGES], steps=5)
    for _ in range(9):
        found.batch(None, IMAGES)
    found.step_ended()
    assert found.samples_per_step == 8
