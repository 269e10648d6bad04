"""Runs a model by its own forward pass, for models whose weights generation does not read itself.

In evaluation mode without gradients, whatever mode the model and the caller are in; both are restored. The model is
held by a weak reference, so that the prepared form can be kept as long as the model lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from flatout.errors import FlatoutError, PlanError, UsageError
from flatout.evaluation_mode import evaluating
from flatout.plan import Plan
from flatout.precision.matmul import current_matmul_precision

Output: TypeAlias = Any  # of a model unknown here
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_LONGEST = (
    *("max_position_embeddings", "n_positions", "max_tokens", "block_size", "max_seq_len", "max_seq_length"),
    *("max_sequence_length", "context_length", "n_ctx"),
)
"""Config names for the maximum sequence length."""
FULL_CLOSENESS, HALF_CLOSENESS = 2e-3, 0.15
"""In fp32, and where products use fewer bits."""


class OwnForward:
    """A model as the plan runs it. PlanError for a plan that only weights read here can follow.

    why: why the model's weights cannot be read, for errors.
    """

    def __init__(self, model: nn.Module, plan: Plan, why: str) -> None:
        self._model = weakref.ref(model)
        settings = type(getattr(model, "generation_config", None))
        of_transformers = any(base.__module__.partition(".")[0] == "transformers" for base in settings.__mro__)
        self.from_transformers = of_transformers and hasattr(model, "config")
        first = next(model.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device
        kinds = {one.dtype for one in model.parameters() if one.is_floating_point()}
        self.dtype = kinds.pop() if len(kinds) == 1 else torch.float32
        self._autocast: torch.dtype | None = None
        self._check_plan(plan, why)
        self.longest = longest_text(model)
        """Tokens of the longest text that the model's config says it reads; None if it says nothing."""

    @property
    def storage(self) -> str:
        """The numbers that products are made of: fp32, bf16, fp16 or fp64."""
        return _NAMES.get(self._autocast or self.dtype, str(self.dtype))

    @property
    def closeness(self) -> float:
        """The most by which logits computed in two ways may differ, as a share of their spread; see `difference`."""
        exact = self.storage in ("fp32", "fp64") and current_matmul_precision() == "highest"
        rounded = self.device.type == "cuda" and torch.backends.cudnn.allow_tf32  # on by default for recurrent layers
        return FULL_CLOSENESS if exact and not rounded else HALF_CLOSENESS

    @property
    def model(self) -> nn.Module:
        found = self._model()
        assert found is not None, "the generator holds the model"
        return found

    def __call__(self, *given: object, **named: object) -> Output:
        """The model's output. UsageError if it fails on this text."""
        return self.call("forward", *given, **named)

    def call(self, method: str, /, *given: object, **named: object) -> Output:
        """The output of one of its methods; for "get_encoder()" of the module that it returns."""
        model = self.model
        call = model if method == "forward" else getattr(model, method.removesuffix("()"))
        call = call() if method.endswith("()") else call
        # The plan's precision, and not that of an autocast around the call.
        numbers = torch.autocast(self.device.type, dtype=self._autocast, enabled=self._autocast is not None)
        with evaluating(model), torch.no_grad(), numbers:
            try:
                return call(*given, **named)
            except (FlatoutError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # a user's model may raise anything
                shape = next((list(one.shape) for one in (*given, *named.values()) if isinstance(one, Tensor)), [])
                what = f"the model fails on tokens {shape}: {type(error).__name__}: {error}"
                limit = "it is called with token ids, int64 [batch, tokens]"
                remedy = "if the text became too long for it, pass a smaller max_new_tokens"
                raise UsageError(what, limit=limit, remedy=remedy) from error

    def _check_plan(self, plan: Plan, why: str) -> None:
        here = f"the model is run by its own forward pass: {why}"
        if plan.weights is not None:
            limit = f"fewer bits are for models whose weights are read and run here, and {here}"
            raise PlanError(f"the plan's weights is {plan.weights!r}", limit=limit, remedy="set precision = 'bf16'")
        if plan.precision == "bf16" and self.dtype != torch.bfloat16:
            self._autocast = torch.bfloat16
        elif plan.precision not in (None, _NAMES.get(self.dtype)):
            limit = f"the weights are {_NAMES.get(self.dtype, self.dtype)}, and {here}"
            remedy = "leave precision out, or convert the model: model.float(), model.bfloat16()"
            raise PlanError(f"the plan's precision is {plan.precision!r}", limit=limit, remedy=remedy)


def longest_text(model: object) -> int | None:
    """The maximum sequence length from the model or its config; None if neither states one."""
    config = getattr(model, "config", None)
    places = [vars(one) for one in (config, model) if hasattr(one, "__dict__")]
    for place in [config] if isinstance(config, Mapping) else places:
        for name in _LONGEST:
            value = place.get(name)
            if name == "n_positions" and "relative_attention_num_buckets" in place:
                continue  # T5: the length it was trained on, which relative positions do not end at
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def logits_of(found: object, tokens: Tensor, model: object, places: int | None = None) -> Tensor:
    """The logits [batch, tokens, vocabulary] of what a model gave for tokens [batch, tokens].

    They may be all that it gave, its `logits`, or the first of several things; of the last token alone, [batch, 1,
    vocabulary], if it gives no others. places: of how many tokens they were asked for, if not of all. UsageError for
    anything else.
    """
    logits: object = found
    if isinstance(found, Mapping) and "logits" in found:
        logits = found["logits"]
    elif not isinstance(found, Tensor) and hasattr(found, "logits"):
        logits = found.logits
    elif isinstance(found, tuple | list) and type(found) in (tuple, list) and found:
        logits = found[0]  # the fields of a named tuple have other names
    batch, count = len(tokens), places or tokens.shape[1]
    if (
        not isinstance(logits, Tensor)
        or logits.dim() != 3
        or logits.shape[0] != batch
        or logits.shape[1] not in (1, count)
        or not logits.is_floating_point()
    ):
        given = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        what = f"the {type(model).__name__} gives {given} for tokens [{batch}, {count}]"
        limit = f"generating needs logits [{batch}, {count}, vocabulary]: all that it gives, its .logits, or the first"
        raise UsageError(what, limit=limit, remedy="wrap it in a module whose forward gives those")
    return logits


def trial_tokens(model: nn.Module, vocabulary: int, count: int, seed: int = 1) -> Tensor:
    """Ids int64 [count], which every embedding of the model has."""
    rows = [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(min([vocabulary, *rows]), (count,), generator=generator, device="cpu")
