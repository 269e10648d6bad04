"""The levers that are currently on, and how they are turned on and off.

applied = Applied(subject)
applied.set([Choice(lever, value), ...])     # exactly these, from now on
applied.set([])
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.errors import describe_error
from flatout.levers.lever import Choice
from flatout.levers.subject import Subject


@dataclass(frozen=True)
class RolledBack:
    """A choice that could not be applied, and why."""

    choice: Choice
    reason: str


class Applied:
    """Turns choices on and off for one subject. They are undone last to first."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._active: list[tuple[Choice, contextlib.ExitStack]] = []
        self.rolled_back: list[RolledBack] = []

    @property
    def choices(self) -> list[Choice]:
        return [choice for choice, _ in self._active]

    def set(self, choices: Sequence[Choice]) -> None:
        """Make `choices` the active ones: undo those that are not among them, then apply the missing ones in order.

        A choice that could not be applied before stays off. Those that wrap the calls of blocks are undone and applied
        again together, as each wraps what it finds there.
        """
        barred = [entry.choice for entry in self.rolled_back]
        wanted = [choice for choice in choices if choice not in barred]
        changed = [one for one in (*wanted, *self.choices) if (one in wanted) != (one in self.choices)]
        rewraps = any(one.lever.wraps_blocks(one.value) for one in changed)

        def stays(choice: Choice) -> bool:
            return choice in wanted and not (rewraps and choice.lever.wraps_blocks(choice.value))

        for choice, stack in reversed(self._active):
            if not stays(choice):
                stack.close()
        self._active = [entry for entry in self._active if stays(entry[0])]
        for choice in wanted:
            if choice in self.choices:
                continue
            if nothing := self._nothing_to_do(choice):
                self.rolled_back.append(RolledBack(choice, nothing))
                continue
            stack = contextlib.ExitStack()
            try:
                stack.enter_context(choice.lever.apply(self._subject, choice.value))
            except Exception as error:
                stack.close()
                self.rolled_back.append(RolledBack(choice, f"could not be applied: {describe_error(error)}"))
                continue
            self._active.append((choice, stack))

    def _nothing_to_do(self, choice: Choice) -> str:
        """Why a choice would change nothing, where all models are known; '' where it may, or they are not."""
        if self._subject.any_model:
            return ""
        found = [choice.lever.nothing_in(model, choice.value) for model in self._subject.modules]
        return found[0] if found and all(found) else ""
