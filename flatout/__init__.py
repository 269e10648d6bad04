"""Flatout runs PyTorch flat out on the machine at hand, and proves it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.diagnose.finding import Finding
    from flatout.errors import FlatoutError, MachineError, PlanError, ScriptError, TrialError, UsageError
    from flatout.machine.description import Machine
    from flatout.plan import Plan
    from flatout.timing import Measurement

__version__ = "0.1.0"

__all__ = [
    "Finding",
    "FlatoutError",
    "Machine",
    "MachineError",
    "Measurement",
    "Plan",
    "PlanError",
    "ScriptError",
    "TrialError",
    "UsageError",
    "__version__",
]

_HOMES = {
    "Finding": "flatout.diagnose.finding",
    "FlatoutError": "flatout.errors",
    "Machine": "flatout.machine.description",
    "MachineError": "flatout.errors",
    "Measurement": "flatout.timing",
    "Plan": "flatout.plan",
    "PlanError": "flatout.errors",
    "ScriptError": "flatout.errors",
    "TrialError": "flatout.errors",
    "UsageError": "flatout.errors",
}


def __getattr__(name: str) -> Any:
    """Load a public name's module when the name is first used, so that `import flatout` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'flatout' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
