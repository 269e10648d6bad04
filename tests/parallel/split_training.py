"""What the tests of tensor and pipeline parallel run on each rank: 20 steps of small models, each then saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.train.conftest import RunRanks

MODELS = """
import copy, warnings
import flatout
from flatout import Plan, TrainStep, batches, models
from flatout.parallel.whole_tensors import local_part, whole
from flatout.errors import FlatoutError, UsageError
from torch.nn import functional as F
V = 37  # no multiple of the ranks
def ours(kind, drop=0.0, layers=2, heads=4):
    if kind == "one-block":
        kind, layers = "gpt2", 1
    sizes = dict(vocab_size=V, max_tokens=8, width=16, heads=heads, dropout=drop, vocab_multiple=1)
    if kind == "gpt2":
        sizes |= dict(embedding_dropout=drop, attention_dropout=drop)
        return models.GPT2(models.GPT2Config(**sizes, layers=layers))
    if kind == "bert":
        return models.BertMaskedLM(models.BertConfig(**sizes, layers=layers, attention_dropout=drop))
    if kind == "lm":
        return models.TransformerLM(models.TransformerConfig(**sizes, layers=layers))
    return models.Seq2SeqTransformer(models.Seq2SeqConfig(**sizes, encoder_layers=layers, decoder_layers=1))
def theirs(kind, layers=2):
    import transformers
    if kind == "hf-gpt2":
        config = transformers.GPT2Config(vocab_size=V, n_positions=8, n_embd=16, n_head=4, n_layer=layers,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=1)
        return transformers.GPT2LMHeadModel(config)
    if kind == "hf-llama":
        config = transformers.LlamaConfig(vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
            num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=8, pad_token_id=5)
        return transformers.LlamaForCausalLM(config)
    config = transformers.BertConfig(vocab_size=V, hidden_size=16, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=32, max_position_embeddings=8, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    return transformers.BertForMaskedLM(config)
def plan_of(parallel, **choices):
    both = dict(parallel="fsdp", tensor_ranks=2) if parallel == "fsdp+tensor" else dict(parallel=parallel)
    return Plan(**both, **choices)
def mean_of_ranks(figures):  # each rank's is its part of the mean, where they share a batch
    found = torch.tensor(figures, dtype=torch.float64)
    if ranks > 1:
        distributed.all_reduce(found)
    return (found / ranks).tolist()
class Loss:
    def __init__(self, kind):
        self.kind = kind
    def __call__(self, model, batch):
        x, y = batch
        scores = model(x, x) if self.kind == "seq" else model(input_ids=x) if self.kind.startswith("hf") else model(x)
        scores = getattr(scores, "logits", scores)
        right = (scores.argmax(-1) == y).float().sum() / self.count_terms(batch)  # the mean of as many as the loss
        return F.cross_entropy(scores.flatten(0, -2), y.flatten()), {"right": right}
    def count_terms(self, batch):
        return int((batch[1] != -100).sum())
numbers = torch.Generator().manual_seed(1)
x = torch.randint(0, V, (24, 7), generator=numbers)
y = (x + 1) % V
for i in range(24):
    y[i, 1 + i % 6 :] = -100  # ragged
"""

TRAIN = (
    MODELS
    + """
out, parallel, kinds, changed = sys.argv[4:8]
found = {}
for kind in kinds.split(","):
    torch.manual_seed(rank)  # ranks have to begin with rank 0's weights
    model = (theirs(kind) if kind.startswith("hf") else ours(kind)).train()
    if changed == "rounding":
        with torch.no_grad():
            for one in model.parameters():
                one.copy_(torch.nextafter(one, torch.full_like(one, float("inf"))))
    plan = plan_of(parallel, micro_batches=2)
    # not Adam: it turns a gradient that is nothing but rounding into a whole step
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 5))
    step = TrainStep(model, optimizer, Loss(kind), plan, clip_norm=0.5, scheduler=schedule)
    data = batches((x, y), 6, plan, seed=3)
    losses, norms, right = [], [], []
    while step.steps < 20:
        for batch in data:
            losses.append(float(step(batch)))
            norms.append(float(step.gradient_norm))
            right.append(float(step.figures["right"]))
    losses, right = mean_of_ranks(losses), mean_of_ranks(right)
    held = sum(local_part(one).untyped_storage().nbytes() // 4 for one in model.parameters())
    with torch.no_grad():
        after = float(Loss(kind)(model, (x, y))[0])
    state = {name: whole(one).clone() for name, one in model.state_dict().items()}
    moments = [whole(one["momentum_buffer"]).clone() for _, one in sorted(optimizer.state_dict()["state"].items())]
    # what was saved can be loaded, and a copy of the model has the same state
    optimizer.load_state_dict(optimizer.state_dict())
    again = [model]
    if parallel != "fsdp+tensor":  # FSDP2 takes no whole tensors, and its models have no copies
        model.load_state_dict(state)
        again.append(copy.deepcopy(model))
    for one in again:
        assert all(torch.equal(mine, whole(other)) for mine, other in zip(state.values(), one.state_dict().values()))
    found[kind] = dict(losses=losses, norms=norms, right=right, after=after, held=held, state=state, moments=moments)
    step.close()
torch.save(found, f"{out}.{rank}")
leave()
"""
)


def train(run_ranks: RunRanks, out: Path, parallel: str, kinds: str, ranks: int, changed: str = "") -> list[Any]:
    """Of each rank, {model: what its training came to}."""
    ended = run_ranks(TRAIN, ranks, out, parallel, kinds, changed)
    assert [code for code, _, _ in ended] == [0] * ranks, ended
    return [torch.load(f"{out}.{rank}") for rank in range(ranks)]


def check_equals_one_process(run_ranks: RunRanks, folder: Path, parallel: str, kinds: str, ranks: int) -> list[Any]:
    """The ranks' trainings differ from that of one process by no more than what a rounding of its weights changes."""
    alone = train(run_ranks, folder / "alone", parallel, kinds, 1)[0]
    rounded = train(run_ranks, folder / "rounded", parallel, kinds, 1, "rounding")[0]
    split = train(run_ranks, folder / "split", parallel, kinds, ranks)
    for kind in kinds.split(","):
        for rank in split:
            one, other, here = alone[kind], rounded[kind], rank[kind]
            assert list(here["state"]) == list(one["state"])
            for figure in ("losses", "norms", "right"):
                assert _far(one, here, figure) <= 8 * _far(one, other, figure) + 2e-6, (kind, figure)
            for figure in ("state", "moments"):
                assert _far(one, here, figure) <= 8 * _far(one, other, figure) + 1e-6, (kind, figure)
            assert abs(here["after"] - one["after"]) < 1e-5
            assert here["losses"] == split[0][kind]["losses"]
        assert one["losses"][0] - one["losses"][-1] > 0.01, kind  # it has learnt something
    return [alone, split]


def _far(one: dict[str, Any], other: dict[str, Any], figure: str) -> float:
    """The largest difference."""
    pairs = zip(_tensors(one[figure]), _tensors(other[figure]), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.is_floating_point())


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, dict):
        return list(values.values())
    return values if isinstance(values[0], torch.Tensor) else [torch.tensor(values)]
