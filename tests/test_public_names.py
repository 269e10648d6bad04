"""What `import flatout` offers, and that it does nothing else."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flatout
from tests.processes import Python

NOT_OURS = {"Any", "None", "Supervised", "OverAll", "Tensor"}
"""Supervised, OverAll: what `supervised` and `over_all` make is used, not named."""

FRESH = """
import json, logging, os, sys, threading, warnings

def state():
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [dict(os.environ), sys.path[:], len(warnings.filters), len(handlers), threading.active_count()]

before, modules = state(), set(sys.modules)
import flatout
foreign = {name.partition(".")[0] for name in set(sys.modules) - modules} - set(sys.stdlib_module_names)
print(json.dumps({"changed": state() != before, "modules": sorted(foreign)}))
"""


def test_public_names_are_sorted_and_listed() -> None:
    assert flatout.__all__ == sorted(set(flatout.__all__))
    assert dir(flatout) == flatout.__all__


def test_what_a_public_function_returns_is_public() -> None:
    """So that it can be written in an annotation; what is not ours (a tensor, a device) is left out."""
    missing = {}
    for name in flatout.__all__:
        function = getattr(flatout, name)
        returned = getattr(function, "__annotations__", {}).get("return", "") if inspect.isfunction(function) else ""
        words = set(re.findall(r"[A-Z]\w+", returned)) - NOT_OURS
        if hidden := words - set(flatout.__all__):
            missing[name] = hidden
    assert missing == {}


@pytest.mark.parametrize("name", [name for name in flatout.__all__ if name != "__version__"])
def test_each_public_name_explains_itself(name: str) -> None:
    value = getattr(flatout, name)
    doc = value.__doc__ or ""
    assert doc, "no docstring"
    assert not doc.startswith(f"{name}("), "a docstring that dataclass made, not a person"
    assert value.__name__ == name


EVERY_MODULE = """
import importlib, pkgutil, types
import flatout
for found in pkgutil.walk_packages(flatout.__path__, "flatout."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
modules = [name for name in flatout.__all__ if isinstance(getattr(flatout, name), types.ModuleType)]
assert not modules, modules
assert all(map(callable, (flatout.tune, flatout.run, flatout.check, flatout.export, flatout.predict)))
assert all(map(callable, (flatout.kernels.load, flatout.kernels.check)))
"""


def test_no_module_of_the_package_hides_a_public_name(python: Python) -> None:
    done = python("-c", EVERY_MODULE)
    assert done.returncode == 0, done.stderr


def test_kernels_has_names_of_its_own() -> None:
    assert flatout.kernels.__all__ == sorted(set(flatout.kernels.__all__)) == dir(flatout.kernels)
    for name in flatout.kernels.__all__:
        value = getattr(flatout.kernels, name)
        assert value.__name__ == name
        assert value.__doc__
        assert not value.__doc__.startswith(f"{name}(")
    with pytest.raises(AttributeError, match=r"'flatout\.kernels' has no attribute 'lood'"):
        flatout.kernels.lood  # noqa: B018


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'flatout' has no attribute 'Plam'"):
        flatout.Plam  # noqa: B018


def test_importing_does_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", FRESH]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"changed": False, "modules": ["flatout"]}
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_modules_of_the_package_load_when_they_are_first_used() -> None:
    program = "import flatout, sys; assert 'torch' not in sys.modules; flatout.models.MLP; flatout.plan.read_plan"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
