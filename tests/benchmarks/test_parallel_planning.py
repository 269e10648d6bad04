"""The planner beside published runs: what is fitted says so, the rest is computed from shapes and data sheets."""

from __future__ import annotations

import json

import pytest

from benchmarks.parallel import planning
from benchmarks.parallel.published_runs import LLAMA_8B, LLAMA_70B, RUNS, workload


def test_the_shapes_are_those_of_the_published_models() -> None:
    assert LLAMA_8B.parameters == 8_030_261_248
    assert LLAMA_70B.parameters == 70_553_706_496


def test_operations_are_torchtitans_but_for_what_a_causal_mask_saves() -> None:
    """Its count: 6 for each parameter but the embedding's, and 12 * layers * width * length of attention."""
    work = workload(LLAMA_8B, checkpointing="none")
    products = 6 * (LLAMA_8B.parameters - LLAMA_8B.vocabulary * LLAMA_8B.width)
    attention = 12 * 32 * 4096 * 8192 / 2
    assert work.flops_per_sample / 8192 == pytest.approx(products + attention, rel=1e-4)


def test_every_row_says_what_it_is() -> None:
    found = planning.planned()
    labels = [one["label"] for one in found["published"]]
    assert labels.count("fitted") == len(found["efficiencies"]) == 2
    for run, one in zip(RUNS, found["published"], strict=True):
        assert ("planned" in one) == (run.precision == "bf16" and not run.async_tensor_parallel)
        if one["label"] == "fitted":
            assert one["errors"]["tokens_per_second"] == pytest.approx(0, abs=1e-6)
    assert {run.gpus for run in RUNS} >= {8, 128, 256}
    assert "fitted" in planning.published_text(found["published"])
    json.dumps(found, allow_nan=False)
