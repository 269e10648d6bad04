"""Ceilings that were measured in a busy minute are measured again by the next tune; in tests they are kept at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from flatout.machine import with_ceilings
from flatout.machine.ceilings import Ceilings
from flatout.machine.description import Machine
from flatout.machine.kept_ceilings import save_ceilings


def keep_busy_ceilings(replace: Callable[[Any, str, Any], None]) -> None:
    """replace: `setattr`, or a test's own, which is taken back."""
    replace(with_ceilings, "save_ceilings", _save)


def _save(machine: Machine, ceilings: Ceilings) -> Path:
    return save_ceilings(machine, changed(ceilings, contended=False))
