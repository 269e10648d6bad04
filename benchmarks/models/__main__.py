"""`python -m benchmarks.models`: our models beside transformers' with the same random weights (needs transformers).

For each case a transformers model is made with random weights (biases and norms too, which it would start at 0 and 1),
its state dict and config are loaded into ours, and both read the same tokens in fp32 in eval mode. Shown is the
largest absolute difference where tokens are real, beside the largest absolute output. Their attention
is the eager one, so that the two do not share a kernel; small models get large weights, so that attention is far from
even and a wrong mapping shows. No network, no downloads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from flatout.models import GPT2, Bert, BertConfig, BertMaskedLM, GPT2Config

TOLERANCE = 1e-5
"""Largest difference allowed, as a share of the largest output (at least of 1): fp32 sums in another order."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    case: str
    compared: str
    parameters: int
    largest_output: float
    largest_difference: float
    gradient_difference: float | None = None
    """Of the token embedding's gradient; None if not compared."""

    @property
    def within(self) -> bool:
        return self.largest_difference <= TOLERANCE * max(1.0, self.largest_output)


def gpt2(case: str, *, batch: int, tokens: int, padded: bool = False, bare: bool = False, **fields: Any) -> Outcome:
    """padded: the peer gets a mask for padding on the right, ours none. bare: from a GPT2Model, without a head."""
    config = transformers.GPT2Config(bos_token_id=None, eos_token_id=None, attn_implementation="eager", **fields)
    peer = _randomised((transformers.GPT2Model if bare else transformers.GPT2LMHeadModel)(config))
    ours = GPT2.from_hugging_face(peer.state_dict(), GPT2Config.from_hugging_face(config.to_dict())).eval()
    ids, real = _tokens(config.vocab_size, batch, tokens, padded)
    mask = real.long() if padded else None
    theirs = peer(ids, attention_mask=mask)
    with_head = theirs.last_hidden_state @ ours.tokens.weight[: config.vocab_size].T if bare else theirs.logits
    mine = ours(ids)
    gradients = None
    if not bare:
        target = torch.randn_like(mine) * real[..., None]
        (mine * target).sum().backward()
        (with_head * target).sum().backward()
        expected = peer.transformer.wte.weight.grad
        assert ours.tokens.weight.grad is not None
        gradients = _difference(ours.tokens.weight.grad[: config.vocab_size], expected) / float(expected.abs().max())
    return _outcome(case, "logits", ours, mine[real], with_head[real], gradients)


def bert(case: str, *, batch: int, tokens: int, padded: bool, **fields: Any) -> Outcome:
    """Encoder output and pooled output together, with token types."""
    config = transformers.BertConfig(attn_implementation="eager", **fields)
    peer = _randomised(transformers.BertModel(config))
    ours = Bert.from_hugging_face(peer.state_dict(), BertConfig.from_hugging_face(config.to_dict())).eval()
    ids, real = _tokens(config.vocab_size, batch, tokens, padded)
    types = torch.randint(config.type_vocab_size, ids.shape)
    theirs = peer(ids, token_type_ids=types, attention_mask=real.long())
    by_length = ours(ids, types, real.sum(1) if padded else None)
    by_mask = ours(ids, types, real)
    mine = torch.cat([*(output.hidden[real].flatten() for output in (by_length, by_mask)), by_length.pooled.flatten()])
    expected = torch.cat([theirs.last_hidden_state[real].flatten()] * 2 + [theirs.pooler_output.flatten()])
    return _outcome(case, "hidden, pooled", ours, mine, expected)


def masked_lm(case: str, *, batch: int, tokens: int, padded: bool, pretraining: bool = False, **fields: Any) -> Outcome:
    """pretraining: from a BertForPreTraining, whose other head is left out."""
    config = transformers.BertConfig(attn_implementation="eager", **fields)
    peer = _randomised((transformers.BertForPreTraining if pretraining else transformers.BertForMaskedLM)(config))
    ours = BertMaskedLM.from_hugging_face(peer.state_dict(), BertConfig.from_hugging_face(config.to_dict())).eval()
    ids, real = _tokens(config.vocab_size, batch, tokens, padded)
    theirs = peer(ids, attention_mask=real.long())
    expected = theirs.prediction_logits if pretraining else theirs.logits
    return _outcome(case, "logits", ours, ours(ids, valid=real.sum(1))[real], expected[real])


SMALL_GPT2 = {"n_positions": 64, "n_embd": 48, "n_head": 3, "n_layer": 3, "initializer_range": 0.2}
SMALL_BERT = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 100,
    "initializer_range": 0.2,
}

CASES: tuple[Callable[[], Outcome], ...] = (
    lambda: gpt2("GPT-2 tiny, odd vocabulary", batch=3, tokens=17, vocab_size=101, **SMALL_GPT2),
    lambda: gpt2("GPT-2 tiny, one token", batch=1, tokens=1, vocab_size=101, **SMALL_GPT2),
    lambda: gpt2("GPT-2 tiny, longest", batch=2, tokens=64, vocab_size=64, **SMALL_GPT2),
    lambda: gpt2("GPT-2 tiny, right padding", batch=4, tokens=33, padded=True, vocab_size=101, **SMALL_GPT2),
    lambda: gpt2("GPT-2 tiny, no head", batch=2, tokens=9, bare=True, vocab_size=77, **SMALL_GPT2),
    lambda: gpt2("GPT-2 tiny, untied", batch=2, tokens=9, vocab_size=77, tie_word_embeddings=False, **SMALL_GPT2),
    lambda: gpt2(
        "GPT-2 tiny, relu, n_inner 70", batch=2, tokens=9, vocab_size=77, activation_function="relu", n_inner=70,
        **SMALL_GPT2
    ),
    lambda: gpt2("GPT-2 124M", batch=2, tokens=130, padded=True),
    lambda: bert("BERT tiny, odd vocabulary", batch=3, tokens=17, padded=False, vocab_size=101, **SMALL_BERT),
    lambda: bert("BERT tiny, one token", batch=1, tokens=1, padded=False, vocab_size=101, **SMALL_BERT),
    lambda: bert("BERT tiny, padding, types", batch=5, tokens=40, padded=True, vocab_size=101, **SMALL_BERT),
    lambda: bert(
        "BERT tiny, 5 types, gelu_new", batch=4, tokens=12, padded=True, vocab_size=99, type_vocab_size=5,
        hidden_act="gelu_new", layer_norm_eps=1e-6, **SMALL_BERT
    ),
    lambda: bert("BERT-base", batch=3, tokens=100, padded=True),
    lambda: masked_lm("BERT MLM tiny, padding", batch=4, tokens=20, padded=True, vocab_size=101, **SMALL_BERT),
    lambda: masked_lm(
        "BERT MLM tiny, untied", batch=2, tokens=20, padded=True, vocab_size=101, tie_word_embeddings=False,
        **SMALL_BERT
    ),
    lambda: masked_lm(
        "BERT pretraining tiny", batch=2, tokens=20, padded=True, pretraining=True, vocab_size=130, **SMALL_BERT
    ),
    lambda: masked_lm("BERT-base MLM", batch=2, tokens=60, padded=True),
    lambda: masked_lm(
        "BERT-large MLM", batch=2, tokens=30, padded=True, hidden_size=1024, num_hidden_layers=24,
        num_attention_heads=16, intermediate_size=4096
    ),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, fp32 on the CPU, seed {seed}\n")
    print(f"{'case':<30} {'parameters':>12} {'compared':<15} {'largest':>8} {'difference':>11} {'gradient':>9}")
    worst = 0
    for case in CASES:
        torch.manual_seed(seed)
        outcome = case()
        worst += not outcome.within
        gradient = "" if outcome.gradient_difference is None else f"{outcome.gradient_difference:9.1e}"
        print(
            f"{outcome.case:<30} {outcome.parameters:>12,} {outcome.compared:<15} {outcome.largest_output:8.2f} "
            f"{outcome.largest_difference:11.1e} {gradient:>9}{'' if outcome.within else '  TOO FAR'}",
            flush=True,
        )
    print(f"\n{len(CASES) - worst} of {len(CASES)} within {TOLERANCE:.0e} of the largest output (at least of 1)")
    print("gradient: largest difference of the token embedding's gradient, as a share of its largest value")
    return 1 if worst else 0


def _randomised(peer: Any) -> Any:
    """Norms and biases too: where they are 1 and 0, a wrong mapping would not show."""
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if parameter.ndim == 1:
                is_scale = name.endswith("weight")  # the only vectors of this name are the norms'
                parameter.normal_(1.0 if is_scale else 0.0, 0.1)
    return peer.eval()


def _tokens(vocabulary: int, batch: int, tokens: int, padded: bool) -> tuple[Tensor, Tensor]:
    """Token numbers and where they are real, both [batch, tokens]; at least one sequence is full."""
    ids = torch.randint(vocabulary, (batch, tokens))
    lengths = torch.randint(1, tokens + 1, (batch,)) if padded else torch.full((batch,), tokens)
    lengths[0] = tokens
    return ids, torch.arange(tokens) < lengths[:, None]


def _difference(mine: Tensor, expected: Tensor) -> float:
    return float((mine - expected).detach().abs().max())


def _outcome(
    case: str, compared: str, model: torch.nn.Module, mine: Tensor, expected: Tensor, gradients: float | None = None
) -> Outcome:
    return Outcome(
        case=case,
        compared=compared,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        largest_output=float(expected.detach().abs().max()),
        largest_difference=_difference(mine, expected),
        gradient_difference=gradients,
    )


if __name__ == "__main__":
    sys.exit(main())
