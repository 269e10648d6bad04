"""Several tokens from one pass of the model: guess them, verify them all in one pass, keep the correct ones.

One row's decoding reads every weight for a single token, so a pass over k + 1 tokens costs little more than one over
one. Guesses come from the text itself (`Lookup`: what followed the last time) or from a smaller model. The judgement
(`accept`) leaves the distribution of the text exactly the model's (Leviathan et al., "Fast Inference from Transformers
via Speculative Decoding", 2023). Whether guessing pays is `throttle`'s business.

>>> lookup = Lookup([5, 6, 7, 8, 5, 6])
>>> lookup.propose(3)
[7, 8, 5]
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.infer.generation.sampling import draw

NOTHING = -1
"""Stands in `proposed` where a row has fewer guesses than the widest one."""


class Lookup:
    """Guesses that the text goes on as it did after the last occurrence of its latest tokens.

    Of the latest `longest` down to `shortest` tokens the first run that came before decides. A run that reaches into
    itself is continued with its period, so that a loop is guessed to any length. Time: a few dictionary entries a
    token; memory: one a token and length of run.
    """

    def __init__(self, tokens: Iterable[int] = (), *, longest: int = 3, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            what = f"runs of {shortest} to {longest} tokens"
            raise UsageError(what, limit="1 <= shortest <= longest", remedy="leave them out for 2 to 3")
        self._sizes = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # run -> where the text went on after its last occurrence
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Tokens that belong to the text for good: the prompt's, later those accepted."""
        for token in tokens:
            # The run that ends the text is entered once something follows it, so that it does not find itself.
            for size in self._sizes:
                if size <= len(self._tokens):
                    self._after[tuple(self._tokens[-size:])] = len(self._tokens)
            self._tokens.append(token)

    def propose(self, limit: int) -> list[int]:
        """At most `limit` tokens; none if nothing like the end of the text came before."""
        for size in self._sizes:
            if size > len(self._tokens):
                continue
            start = self._after.get(tuple(self._tokens[-size:]))
            if start is not None:
                known = self._tokens[start : start + limit]
                return (known * -(-limit // len(known)))[:limit]
        return []


def accept_equal(own: Tensor, proposed: Tensor) -> tuple[Tensor, Tensor]:
    """How many guesses are what the model itself says, and the token after them. Waits for no device.

    `own` is int64 [..., k + 1]: the model's token at each position, by `next_tokens`, greedy or drawn; `proposed` is
    int64 [..., k], NOTHING where there is none. Returns (accepted, next token), int64 [...] each: the text goes on with
    proposed[:accepted] and the next token.

    For guesses made without chance this is exact speculative sampling: a guess x is accepted with probability p(x), as
    min(1, p / q) demands for q = 1 at x, and a token drawn from p that is not x follows max(p - q, 0). And as the token
    comes from p by its own uniform number, the text is identical to the one without guessing, whatever was guessed.
    """
    accepted = (own[..., :-1] == proposed).long().cumprod(-1).sum(-1)
    return accepted, own.gather(-1, accepted[..., None])[..., 0]


def accept(
    target_probs: Tensor,
    proposed: Tensor,
    draft_probs: Tensor | None = None,
    *,
    draws: Tensor,
    acceptances: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact speculative sampling: how many guesses are accepted, and the token after them. Waits for no device.

    `target_probs` is fp32 [..., k + 1, vocabulary]: what the model would draw from at each position, truncations
    included. `proposed` is int64 [..., k], NOTHING where there is none. `draft_probs` is fp32 [..., k, vocabulary]:
    what each guess was drawn from, by uniform numbers independent of those here (Uniforms.proposals); None for guesses
    made without chance. `draws` is fp64 [..., k + 1] and `acceptances` fp64 [..., k], needed with `draft_probs`: the
    columns of Uniforms from the first guess's position on. Returns (accepted, next token), int64 [...] each.

    A guess x drawn from q is accepted with probability min(1, p(x) / q(x)); the first one refused is replaced by a draw
    from max(p - q, 0), normalised. For the proof see Leviathan et al., appendix A.1.
    """
    if draft_probs is None:
        flat = draw(target_probs.reshape(-1, target_probs.shape[-1]), draws.reshape(-1))
        return accept_equal(flat.view(draws.shape), proposed)
    assert acceptances is not None, "guesses drawn from a distribution are accepted by chance"
    made = proposed != NOTHING
    tokens = proposed.clamp(min=0)[..., None]
    target = target_probs[..., :-1, :].gather(-1, tokens)[..., 0].double()
    draft = draft_probs.gather(-1, tokens)[..., 0].double()
    accepted = (made & (acceptances * draft < target)).long().cumprod(-1).sum(-1)
    # After the last guess, and where a row has no guess, nothing was refused: q is 0 there, and the draw is from p.
    refused = torch.cat([draft_probs * made[..., None], torch.zeros_like(target_probs[..., :1, :])], -2)
    at = accepted[..., None, None].expand(*accepted.shape, 1, target_probs.shape[-1])
    wanted = target_probs.gather(-2, at)[..., 0, :]
    rest = (wanted - refused.gather(-2, at)[..., 0, :]).clamp(min=0)
    # p and q equal but for rounding can leave nothing at all; then refusing was rounding too, and p is as good.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, wanted)
    last = draw(rest.reshape(-1, rest.shape[-1]), draws.gather(-1, accepted[..., None]).reshape(-1))
    return accepted, last.view(accepted.shape)
