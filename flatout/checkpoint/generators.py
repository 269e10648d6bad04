"""The states of all random number generators: Python's, numpy's, torch's on the CPU and on every CUDA device.

A library that was never imported and a device that was never initialised have drawn no numbers: they are left alone.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flatout.errors import UsageError


def generator_states() -> dict[str, Any]:
    """What to give to `set_generators` for the same numbers to come again."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    initialised: Callable[[], bool] = torch.cuda.is_initialized
    if torch.cuda.is_available() and initialised():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def check_generators(states: Mapping[str, Any]) -> None:
    """Raises UsageError if `set_generators` would fail; tried on generators made for it."""
    try:
        random.Random().setstate(states["python"])
        torch.Generator().set_state(states["torch"])
        if "numpy" in states and "numpy" in sys.modules:
            sys.modules["numpy"].random.RandomState().set_state(states["numpy"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        what = f"the states of the random number generators do not fit: {error}"
        raise UsageError(what, remedy="pass generators=False to leave the generators as they are") from error


def set_generators(states: Mapping[str, Any]) -> None:
    """Let every generator go on from there. States of CUDA devices that are not here are left out."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        for index, one in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, index)
