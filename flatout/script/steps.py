"""Where one training step ends and the next begins, from the calls that a script makes.

Rules, in this order:
1. optimizers: a step ends when the *leader* has stepped. The leader is the optimizer that was seen first most
   recently: in a GAN the generator's after the discriminator's, with several optimizers for one model the last one.
   A leader that has not stepped for many turns (a warm-up phase that ended) loses its place.
2. manual updates: no optimizer has ever stepped, and the weights changed between two backward passes.
3. bare gradients: no optimizer, and the weights cannot be followed (`torch.autograd.grad`, functional updates that
   make new leaves): after several passes each one is a step. Passes that only accumulate into the same unchanged
   weights are not, unless there are hundreds of them: scripts do not accumulate that many.

Sometimes the meaning of a boundary only becomes clear later (a discriminator's first steps belong to the generator's
first turn); `steps` is corrected in hindsight, so it is right even where a boundary was not.
"""

from __future__ import annotations

from typing import Literal

StepKind = Literal["optimizer", "manual", "gradient"]

PATIENCE_TURNS = 128
"""Optimizer turns without the leader after which another one takes its place (WGAN trains 5, at times 100, critics)."""

MANUAL_CONFIRMATIONS = 2
GRADIENT_CONFIRMATIONS = 8
ACCUMULATION_LIMIT = 512


class StepFinder:
    """Given the ends of optimizer steps and of backward passes, it returns whether a step has just ended."""

    def __init__(self) -> None:
        self.kind: StepKind | None = None
        self.steps = 0
        self._counted: dict[int, int] = {}  # optimizer: its steps that were counted
        self.leader: int | None = None
        """The identity of the optimizer whose steps are counted."""
        self.replaced_leaders = 0
        """How often an optimizer took the lead from one that is still there. Boundaries before may have been inside a
        step, as where each parameter has an optimizer of its own that is made when it is first used."""
        self._leader_steps = 0
        self._turns_without_leader = 0
        self._passes = 0
        self._fresh_passes = 0
        self._manual_changes = 0

    @property
    def needs_weight_changes(self) -> bool:
        """True while it would help to know whether the weights change between backward passes."""
        return self.kind is None

    def optimizer_stepped(self, identity: int) -> bool:
        if self.kind == "gradient":
            self.steps = 0  # they only accumulated, for very long
        elif self.kind == "manual":
            self.steps -= 1  # the last pass was this step's
        self.kind = "optimizer"
        if identity not in self._counted or self.leader is None:
            self._counted[identity] = 0
            self.replaced_leaders += self.leader is not None
            self._lead(identity)
        if identity == self.leader:
            self.leader_passed(1)
            return True
        self._turns_without_leader += 1
        if self._turns_without_leader > PATIENCE_TURNS:
            self.steps += self._turns_without_leader
            self._lead(identity)
            return True
        if self._leader_steps == 1 and self._counted[identity] <= PATIENCE_TURNS:
            self.steps -= self._counted[identity]  # it takes turns with the leader: those were part of the first turn
            self._counted[identity] = 0
        return False

    @property
    def leader_is_new(self) -> bool:
        """True until the leader has stepped twice: another optimizer may still turn out to end the steps."""
        return self.kind == "optimizer" and self._leader_steps < 2

    def may_lead(self, identity: int) -> bool:
        """May this optimizer turn out to end the steps, now that it steps? It is a new one, or there is no other whose
        steps are known to end them."""
        return self.leader is None or self.leader_is_new or identity not in self._counted

    @property
    def optimizers(self) -> int:
        """How many have stepped, and are not gone."""
        return len(self._counted)

    def forget(self, identity: int) -> None:
        """This optimizer is gone; a new one may have its identity."""
        self._counted.pop(identity, None)
        if identity == self.leader:
            self.leader = None

    def leader_passed(self, steps: int) -> None:
        """The leader made this many more steps since its last one that was reported."""
        self.steps += steps
        if steps and self.leader is not None:
            self._turns_without_leader = 0
            self._leader_steps += steps
            self._counted[self.leader] += steps

    def _lead(self, identity: int) -> None:
        self.leader, self._leader_steps, self._turns_without_leader = identity, 0, 0

    def weights_changed(self) -> None:
        """The weights have changed since the end of the last backward pass, and no optimizer stepped."""
        self._manual_changes += 1
        if self.kind is None and self._manual_changes >= MANUAL_CONFIRMATIONS:
            self.kind = "manual"

    def backward_ended(self, *, fresh: bool) -> bool:
        """`fresh`: nothing was accumulated into a gradient that an earlier pass has seen."""
        if self.kind == "optimizer":
            return False
        self._passes += 1
        self._fresh_passes += fresh
        if self.kind is None and (self._fresh_passes >= GRADIENT_CONFIRMATIONS or self._passes >= ACCUMULATION_LIMIT):
            self.kind = "gradient"
        if self.kind is None:
            return False
        self.steps = self._passes
        return True
