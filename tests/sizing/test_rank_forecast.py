"""A forecast for one of several ranks that are not there."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import distributed, nn

import flatout
from flatout.errors import UsageError
from flatout.memory.forecast import MemoryForecast
from flatout.sizing.exchanges import all_reduced_bytes

NEWER_FSDP = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
"""It lets go of whole gradients before they are sent."""
PARAMETERS = 64 * 64 + 64 + 2 * (64 * 64 + 64) + 64 * 8 + 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def step_of(parallel: str | None, **options: Any) -> flatout.TrainStep:
    model = nn.Sequential(nn.Linear(64, 64), Block(), Block(), nn.Linear(64, 8))
    plan = flatout.Plan() if parallel is None else flatout.Plan(**{"parallel": parallel, **options})
    loss = flatout.supervised(nn.CrossEntropyLoss())
    return flatout.TrainStep(model, torch.optim.AdamW(model.parameters()), loss, plan)


def scored_tokens(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


BATCH = torch.zeros(16, 64), torch.zeros(16, dtype=torch.int64)


def forecast_of(parallel: str, ranks: int, **options: Any) -> MemoryForecast:
    return flatout.forecast(step_of(parallel, **options), BATCH, ranks=ranks)


def test_what_each_strategy_leaves_to_a_rank() -> None:
    hook = sys.excepthook
    found = {kind: forecast_of(kind, 4) for kind in ("ddp", "zero1", "fsdp")}
    held = {kind: one.categories["weights"] for kind, one in found.items()}
    assert held["ddp"] == held["zero1"] == 4 * PARAMETERS
    assert held["fsdp"] == pytest.approx(4 * PARAMETERS / 4, rel=0.01)  # FSDP pads what does not divide
    state = {kind: one.categories["optimizer"] for kind, one in found.items()}
    assert state["ddp"] == pytest.approx(8 * PARAMETERS, rel=0.01)  # and a counter for each parameter
    assert 8 * PARAMETERS // 4 <= state["zero1"] <= state["ddp"] // 2
    assert state["fsdp"] == pytest.approx(8 * PARAMETERS / 4, rel=0.02)
    assert found["fsdp"].peak_bytes < found["zero1"].peak_bytes < found["ddp"].peak_bytes
    assert {one.batch_size for one in found.values()} == {4}
    assert sys.excepthook is hook  # torch's own would name a rank in every traceback
    assert str(found["fsdp"]).startswith("batch 4 on cpu, rank 0 of 4: peak ")
    assert not distributed.is_initialized()


def test_the_peak_of_fsdp_is_what_is_held_when_gradients_are_scattered() -> None:
    model = nn.Sequential(nn.Linear(600, 600, bias=False))
    loss = flatout.supervised(nn.CrossEntropyLoss())
    step = flatout.TrainStep(model, torch.optim.AdamW(model.parameters()), loss, flatout.Plan(parallel="fsdp"))
    batch = torch.zeros(4, 600), torch.zeros(4, dtype=torch.int64)
    for ranks in (2, 4):
        parts = 4  # of the weights, both moments and the gradients
        whole = 2 if NEWER_FSDP else 3  # the gradients in the order of ranks, gloo's copy, and the gradients before
        peak = flatout.forecast(step, batch, ranks=ranks).peak_bytes
        assert peak == pytest.approx(4 * 600 * 600 * (parts / ranks + whole), rel=0.03), ranks


def test_streams_of_fsdp_have_segments_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(1200, 1200, bias=False))
    loss = flatout.supervised(nn.CrossEntropyLoss())
    step = flatout.TrainStep(model, torch.optim.AdamW(model.parameters()), loss, flatout.Plan(parallel="fsdp"))
    batch = torch.zeros(4, 1200), torch.zeros(4, dtype=torch.int64)
    segment = 20 * 2**20  # the least that torch asks the driver for where more than 1 MiB is wanted
    found = flatout.forecast(step, batch, ranks=2, device="cuda")
    assert found.peak_bytes >= found.tensor_bytes + 2 * segment - 2 * model[0].weight.nbytes  # gathered and scattered


def test_under_tensor_a_rank_has_its_part_of_the_layers_and_the_whole_batch() -> None:
    config = flatout.models.TransformerConfig(vocab_size=400, max_tokens=32, width=64, heads=4, layers=2)
    model = flatout.models.TransformerLM(config)
    plan = flatout.Plan(parallel="tensor", micro_batches=2)
    optimizer, loss = torch.optim.AdamW(model.parameters()), scored_tokens
    step = flatout.TrainStep(model, optimizer, loss, plan)
    alone = flatout.TrainStep(model, optimizer, loss, flatout.Plan(micro_batches=2))
    tokens = torch.zeros(8, 32, dtype=torch.int64)
    whole, half = flatout.forecast(alone, tokens), flatout.forecast(step, tokens, ranks=2)
    assert half.batch_size == whole.batch_size == 8
    assert 0.5 < half.categories["weights"] / whole.categories["weights"] < 0.55  # norms and positions are not cut
    assert 0.5 < half.categories["optimizer"] / whole.categories["optimizer"] < 0.55
    with pytest.raises(UsageError, match="has 4 heads, and 3 ranks share it"):
        flatout.forecast(step, tokens, ranks=3)


def pipeline_step(layers: int, micro_batches: int, vocabulary: int = 40) -> flatout.TrainStep:
    config = flatout.models.TransformerConfig(
        vocab_size=vocabulary, max_tokens=32, width=64, heads=4, layers=layers, dropout=0.0
    )
    model = flatout.models.TransformerLM(config)
    plan = flatout.Plan(parallel="pipeline", micro_batches=micro_batches)
    return flatout.TrainStep(model, torch.optim.AdamW(model.parameters()), scored_tokens, plan)


TOKENS = torch.zeros(8, 32, dtype=torch.int64)


@pytest.mark.slow
def test_of_a_pipeline_the_stage_that_holds_the_most_is_forecast() -> None:
    step = pipeline_step(layers=4, micro_batches=4)
    alone = flatout.forecast(step.with_plan(flatout.Plan(micro_batches=4)), TOKENS)
    found = {ranks: flatout.forecast(step, TOKENS, ranks=ranks) for ranks in (2, 4)}
    for ranks, one in found.items():
        each = 4 // ranks
        assert one.stages == tuple(range(0, 5, each))
        assert one.rank == 0  # which has as many blocks as the others, and the most parts of a batch under way
        assert f", rank 0 of {ranks} ({each} of 4 blocks, by counted work): peak " in str(one)
        around = 64 * 64 * 4  # the embedding, which is the last layer too
        of_blocks = alone.categories["weights"] - around
        assert one.categories["weights"] == pytest.approx(of_blocks / ranks + around, rel=0.05)
        assert one.categories["optimizer"] == pytest.approx(2 * (of_blocks / ranks + around), rel=0.05)
        assert one.batch_size == 8
    assert found[4].peak_bytes < found[2].peak_bytes < alone.peak_bytes * 1.2
    assert found[4].uncertainty < 0.1 < found[2].uncertainty  # with a block for each rank there are no other stages


def test_of_a_pipeline_with_a_large_vocabulary_the_last_stage_has_few_blocks_and_its_scores() -> None:
    found = flatout.forecast(pipeline_step(layers=4, micro_batches=2, vocabulary=4_000), TOKENS, ranks=2)
    assert found.stages == (0, 3, 4)
    assert found.rank == 1
    assert found.categories["temporaries"] + found.categories["activations"] > 4 * 32 * 4_000 * 4


def test_of_a_pipeline_a_rank_gives_up_what_it_sees_others_train() -> None:
    found = forecast_of("pipeline", 2, micro_batches=2)
    linear = 64 * 64 + 64
    assert (found.stages, found.rank) == ((0, 1, 2), 0)
    assert found.categories["weights"] == 4 * 2 * linear  # its block and what is before it, not the last layer
    assert found.categories["gradients"] == 4 * 2 * linear
    with pytest.raises(UsageError, match="the model has 2 repeated blocks, and there are 3 ranks"):
        forecast_of("pipeline", 3, micro_batches=3)


def test_a_step_of_a_sharded_model_leaves_nothing_else_behind() -> None:
    found = forecast_of("fsdp", 4)
    batch = sum(one.nbytes for one in BATCH) // 4
    parts = 4 * 4 * PARAMETERS / 4  # weights, gradients and two moments
    assert found.between_steps_bytes == pytest.approx(parts + batch, rel=0.02)


def test_where_each_rank_has_the_whole_model_before_its_part_that_is_the_peak() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(300, 300), nn.Tanh()) for _ in range(12)))
    loss = flatout.supervised(nn.CrossEntropyLoss())
    step = flatout.TrainStep(model, torch.optim.SGD(model.parameters()), loss, flatout.Plan(parallel="fsdp"))
    found = flatout.forecast(step, (torch.zeros(16, 300), torch.zeros(16, dtype=torch.int64)), ranks=16)
    whole = sum(one.nbytes for one in model.parameters())
    assert whole < found.peak_bytes < 1.1 * whole
    assert found.phase == "before"
    assert "; before the first step; not counted" in str(found)


@pytest.mark.parametrize("parallel", ["fsdp", None, "ddp", "tensor", "pipeline"])
@pytest.mark.first_case
def test_a_model_on_the_meta_device_is_forecast_as_one_with_memory(parallel: Any) -> None:
    def peak(device: str) -> int:
        with torch.device(device):
            model = flatout.models.TransformerLM(
                flatout.models.TransformerConfig(vocab_size=400, max_tokens=32, width=64, heads=4, layers=2)
            )
            tokens = torch.zeros(8, 32, dtype=torch.int64)
        plan = flatout.Plan() if parallel is None else flatout.Plan(parallel=parallel, micro_batches=2)
        step = flatout.TrainStep(model, torch.optim.AdamW(model.parameters()), scored_tokens, plan)
        found = flatout.forecast(step, tokens, device="h100", ranks=None if parallel is None else 2)
        assert {one.device.type for one in step.model.parameters()} == {device}
        return found.peak_bytes

    assert peak("meta") == peak("cpu")


def test_ranks_that_share_samples_are_counted_once() -> None:
    with pytest.raises(UsageError, match="the batch has 16 samples for 17 shares of 34 ranks"):
        flatout.forecast(step_of("fsdp", tensor_ranks=2), BATCH, ranks=34)


def test_more_ranks_hold_less_each() -> None:
    assert forecast_of("fsdp", 8).peak_bytes < forecast_of("fsdp", 2).peak_bytes


def test_options_of_fsdp_change_what_a_rank_holds() -> None:
    plain = forecast_of("fsdp", 4).peak_bytes
    gathered = forecast_of("fsdp", 4, fsdp_keep_gathered=True).peak_bytes
    assert gathered == plain if NEWER_FSDP else gathered > plain  # a single block is gathered at the peak anyway
    assert forecast_of("fsdp", 4, fsdp_dtype="bf16").peak_bytes < plain
    alone = flatout.forecast(step_of("fsdp", fsdp_dtype="bf16"), BATCH)  # without ranks nothing is sharded
    assert alone.peak_bytes == flatout.forecast(step_of(None), BATCH).peak_bytes


@pytest.mark.parametrize(
    ("parallel", "ranks", "said"),
    [
        (None, 2, "ranks is 2, and the plan has no parallel; it says what each of them holds"),
        ("fsdp", 17, "the batch has 16 samples for 17 ranks"),
        ("fsdp", 0, "ranks is 0"),
    ],
)
def test_what_cannot_be_forecast(parallel: str | None, ranks: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        flatout.forecast(step_of(parallel), BATCH, ranks=ranks)


def test_what_ranks_that_share_layers_add_up_is_counted() -> None:
    config = flatout.models.TransformerConfig(vocab_size=400, max_tokens=32, width=64, heads=4, layers=2)
    model = flatout.models.TransformerLM(config)
    step = flatout.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), scored_tokens)
    tokens = torch.zeros(8, 32, dtype=torch.int64)
    step = step.with_plan(flatout.Plan(parallel="tensor"))
    hidden, row = 8 * 32 * 64 * 4, 8 * 32 * 4
    # forward: the embedding, and of each block attention and feed-forward; backward: these two, and the last layer
    assert sorted(all_reduced_bytes(step, tokens, 2)) == [row, 2 * row] + [hidden] * (1 + 4 + 4 + 1)
    step = step.with_plan(flatout.Plan(parallel="fsdp", tensor_ranks=2))
    found = sorted(all_reduced_bytes(step, tokens, 4))
    assert found[-10:] == [hidden // 2] * 10  # a rank has half of the samples
    assert sum(found[:-10]) < 2 * row
    step.close()
    assert not distributed.is_initialized()
