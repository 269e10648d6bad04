"""Which matrices of which modules are cut over ranks.

A rule is that of a class of modules, wherever it occurs: from input that all ranks have, the ranks together compute
output that all have. So a model of any other class that consists of such modules can be trained too.

    columns    matrices whose outputs are shared by the ranks: queries, keys, values, the way up
    rows       matrices whose inputs are these outputs: the way out, the way down
    tokens     embeddings and last layers with a row for each token, shared where all that use such a matrix are listed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any  # Any: a module of the class that the rule is for

if TYPE_CHECKING:
    from torch.nn import Module


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How modules of one class are cut. Layers are named as in the module; '' is the module itself."""

    columns: dict[str, int] = field(default_factory=dict)
    """Of each, how many matrices it is in one: 3 for queries, keys and values."""
    rows: tuple[str, ...] = ()
    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules, and the arguments of their forward, that all ranks have and columns read."""
    head_width: Callable[[Any], int] | None = None
    """Of the module: outputs are cut between heads of this width; None: anywhere."""
    divided: tuple[tuple[str, str], ...] = ()
    """(module, attribute) of the numbers that get smaller with the number of ranks."""
    dropout: tuple[str, str] | None = None
    """(module, attribute): the share of a rank's own values, such as attention weights, that is dropped."""
    embeddings: tuple[str, ...] = ()
    """Tables with a row for each token."""
    scores: tuple[str, ...] = ()
    """Linear layers with an output for each token."""
    shared: tuple[str, ...] = ()
    """Parameters of the module itself that may be those of its scores, and are used by nothing else."""
    refused: tuple[tuple[str, object, str], ...] = ()
    """(attribute, value, what that means): modules that are not computed in this way."""


_ATTENTION = Rule(
    columns={"qkv": 3},
    rows=("out",),
    inputs={"": ("x",)},
    head_width=lambda attention: attention.out.in_features // attention.heads,
    divided=(("", "heads"),),
    dropout=("", "dropout"),
)
_FEED_FORWARD = Rule(columns={"up": 1}, rows=("down",), inputs={"": ("x",)})
_BERT = "transformers.models.bert.modeling_bert."
_GPT2 = "transformers.models.gpt2.modeling_gpt2."

RULES: dict[str, Rule] = {
    "flatout.models.attention.SelfAttention": _ATTENTION,
    "flatout.models.attention.CrossAttention": replace(
        _ATTENTION, columns={"q": 1, "kv": 2}, inputs={"": ("x", "memory")}
    ),
    "flatout.models.feed_forward.FeedForward": _FEED_FORWARD,
    "flatout.models.gpt2.GPT2": Rule(embeddings=("tokens",), scores=("head",)),
    "flatout.models.bert.Bert": Rule(embeddings=("tokens",)),
    "flatout.models.bert.BertMaskedLM": Rule(scores=("head",)),
    "flatout.models.transformer.Positioned": Rule(embeddings=("tokens",)),
    "flatout.models.transformer.TransformerLM": Rule(scores=("head",)),
    "flatout.models.transformer.Seq2SeqTransformer": Rule(scores=("head",)),
    f"{_GPT2}GPT2Attention": Rule(
        columns={"c_attn": 3},
        rows=("c_proj",),
        inputs={"": ("hidden_states",)},
        head_width=lambda attention: attention.head_dim,
        divided=(("", "num_heads"), ("", "split_size")),
        dropout=("attn_dropout", "p"),
        refused=(("is_cross_attention", True, "it attends to another sequence"),),
    ),
    f"{_GPT2}GPT2MLP": Rule(columns={"c_fc": 1}, rows=("c_proj",), inputs={"": ("hidden_states",)}),
    f"{_GPT2}GPT2Model": Rule(embeddings=("wte",)),
    f"{_GPT2}GPT2LMHeadModel": Rule(scores=("lm_head",)),
    "transformers.models.llama.modeling_llama.LlamaAttention": Rule(
        columns={"q_proj": 1, "k_proj": 1, "v_proj": 1},
        rows=("o_proj",),
        inputs={"": ("hidden_states",)},
        head_width=lambda attention: attention.head_dim,
        dropout=("", "attention_dropout"),
    ),
    "transformers.models.llama.modeling_llama.LlamaMLP": Rule(
        columns={"gate_proj": 1, "up_proj": 1}, rows=("down_proj",), inputs={"": ("x",)}
    ),
    "transformers.models.llama.modeling_llama.LlamaModel": Rule(embeddings=("embed_tokens",)),
    "transformers.models.llama.modeling_llama.LlamaForCausalLM": Rule(scores=("lm_head",)),
    f"{_BERT}BertAttention": Rule(
        columns={"self.query": 1, "self.key": 1, "self.value": 1},
        rows=("output.dense",),
        inputs={"self": ("hidden_states",)},
        head_width=lambda attention: attention.self.attention_head_size,
        divided=(("self", "num_attention_heads"), ("self", "all_head_size")),
        dropout=("self.dropout", "p"),
        refused=(("is_cross_attention", True, "it attends to another sequence"),),
    ),
    f"{_BERT}BertLayer": Rule(
        columns={"intermediate.dense": 1}, rows=("output.dense",), inputs={"intermediate": ("hidden_states",)}
    ),
    f"{_BERT}BertEmbeddings": Rule(embeddings=("word_embeddings",)),
    f"{_BERT}BertLMPredictionHead": Rule(scores=("decoder",), shared=("bias",)),
}
"""By the full name of the class, so that nothing is imported to find out."""

KNOWN = "GPT2, Bert, TransformerLM and Seq2SeqTransformer of flatout.models; GPT-2, Llama and BERT of transformers"
"""What they add up to, for messages."""


def rule_of(module: Module) -> Rule | None:
    """The rule of this module's class; None if there is none."""
    kind = type(module)
    return RULES.get(f"{kind.__module__}.{kind.__qualname__}")
