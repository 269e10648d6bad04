"""Where one training step ends and the next begins, from nothing but the calls that a script makes.

Rules, in this order:
1. optimizers: a step ends when the *leader* has stepped. The leader is the optimizer that was seen first most
   recently: in a GAN the generator's after the discriminator's, with several optimizers for one model the last one.
   A leader that has not stepped for many turns (a warm-up phase that ended) loses its place.
2. manual updates: no optimizer has ever stepped, and the weights changed between two backward passes.
3. bare gradients: no optimizer, and the weights cannot be followed (`torch.autograd.grad`, functional updates):
   after several passes each one is a step.
"""

from __future__ import annotations

from typing import Literal

StepKind = Literal["optimizer", "manual", "gradient"]

PATIENCE_TURNS = 64
"""Optimizer turns without the leader after which another one takes its place (WGAN trains 5, at times 25, critics)."""

MANUAL_CONFIRMATIONS = 2
GRADIENT_CONFIRMATIONS = 8


class StepFinder:
    """Feed it the ends of optimizer steps and of backward passes; it answers whether a step has just ended."""

    def __init__(self) -> None:
        self.kind: StepKind | None = None
        self._known: set[int] = set()
        self._leader: int | None = None
        self._turns_without_leader = 0
        self._passes = 0
        self._manual_changes = 0

    @property
    def needs_weight_changes(self) -> bool:
        """True while it would help to know whether the weights change between backward passes."""
        return self.kind is None and not self._known

    def optimizer_stepped(self, identity: int) -> bool:
        self.kind = "optimizer"
        if identity not in self._known:
            self._known.add(identity)
            self._leader = identity
        if identity == self._leader:
            self._turns_without_leader = 0
            return True
        self._turns_without_leader += 1
        if self._turns_without_leader > PATIENCE_TURNS:
            self._leader, self._turns_without_leader = identity, 0
            return True
        return False

    def weights_changed(self) -> None:
        """The weights differ from what they were at the end of the last backward pass, and no optimizer stepped."""
        self._manual_changes += 1
        if self.kind is None and self._manual_changes >= MANUAL_CONFIRMATIONS:
            self.kind = "manual"

    def backward_ended(self) -> bool:
        if self.kind == "optimizer":
            return False
        self._passes += 1
        if self.kind is None and self._passes >= GRADIENT_CONFIRMATIONS:
            self.kind = "gradient"
        return self.kind is not None
