"""Everything Flatout raises on purpose.

    FlatoutError                 the root; `except FlatoutError` catches all of ours and nothing of the user's
    ├── UsageError (ValueError)  an input that cannot be used: says value, limit and remedy
    │   ├── PlanError            a plan with an unknown, malformed or contradictory choice
    │   └── MachinesDiffer       results of different machines, whose ratio says nothing about the code
    ├── MachineError             this machine lacks something that is needed
    ├── ScriptError              the user's script cannot be used (it failed, makes no step, reads from a terminal)
    ├── TrialError               a trial process died, hung or broke its protocol
    └── NumericsError            a loss, gradient or weight is not finite

>>> raise UsageError("batch size is 0", limit="it must be at least 1", remedy="pass --batch-size 32")
Traceback (most recent call last):
flatout.errors.UsageError: batch size is 0; it must be at least 1; pass --batch-size 32
"""

from __future__ import annotations


class FlatoutError(Exception):
    """What is wrong (with the value), the limit it breaks, and what to do about it."""

    exit_code = 1

    def __init__(self, what: str, *, limit: str = "", remedy: str = "") -> None:
        self.what, self.limit, self.remedy = what, limit, remedy
        super().__init__("; ".join(part for part in (what, limit, remedy) if part))


class UsageError(FlatoutError, ValueError):
    """An input that cannot be used."""

    exit_code = 2


class PlanError(UsageError):
    """A plan with an unknown, malformed or contradictory choice."""


class MachinesDiffer(UsageError):
    """Results that were measured on different machines."""

    exit_code = 5


class MachineError(FlatoutError):
    """This machine lacks something that is needed."""


class ScriptError(FlatoutError):
    """The user's script cannot be used."""


class TrialError(FlatoutError):
    """A trial process died, hung or broke its protocol."""


class NumericsError(FlatoutError, ArithmeticError):
    """A loss, gradient or weight is inf or NaN."""


def said_by(error: BaseException) -> str:
    """Its text; '' where it has none, or cannot give it: `__str__` of a user's exception may fail too."""
    try:
        return str(error)
    except Exception:
        return ""


def describe_error(error: BaseException) -> str:
    """Type and first line, to recognize an error by."""
    lines = [line.strip() for line in said_by(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
