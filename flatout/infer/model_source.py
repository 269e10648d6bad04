"""A model from a command-line argument: `net.py:name`, `package.module:name`, or a Hugging Face folder.

    net.py:classifier          an nn.Module, or a function or class without required arguments that makes one
    net.py:nets.small          dots lead to attributes
    package.module:make        found as `python -m` would find it, starting from the current folder
    ./bert-base                a folder with config.json, read by transformers, offline

A function may return `(module, example_inputs)`; the second is what `flatout export` and the like run the model on.
Loading runs the user's file, as an import does. Its folder stays first on `sys.path`: a model may import a module next
to it as late as in its forward pass.

>>> load_model("flatout.models:MLP")[1] is None
True
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from torch import nn

from flatout.arguments import as_device, described
from flatout.errors import UsageError, said_by
from flatout.infer.user_lines import user_line

FORMS = "a model is named file.py:name, package.module:name or a folder with a Hugging Face config.json"
_FORMS = {
    "model": FORMS,
    "tokenizer": "a tokenizer is named file.py:name, package.module:name or a folder with a Hugging Face tokenizer",
}
"""Of other objects than these: a file or module, and a name in it."""
NAMES_LISTED = 6
T = TypeVar("T")


def load_model(spec: str, device: str | None = None) -> tuple[nn.Module, object]:
    """The module that `spec` names, in the mode it was created in, on `device`, and example inputs.

    device: 'cpu', 'cuda:1'; None: where it already is. Example inputs are not moved.

    The second value is None unless a function returned `(module, example_inputs)` or a Hugging Face model has dummy
    inputs. UsageError: no such file, module, name or device, the object is not a model, or the user's own code failed
    (with its line).
    """
    target = None if device is None else as_device(device, "--device")
    folder = Path(spec)
    model, inputs = _from_hugging_face(folder) if spec and folder.is_dir() else _made(load_object(spec, "model"), spec)
    return (model if target is None else model.to(target)), inputs


def load_object(spec: str, noun: str) -> object:
    """The object that `file.py:name` or `package.module:name` refers to; `noun` is used in errors."""
    source, name = name_of_object(spec, noun)
    module = _from_file(Path(source)) if source.endswith(".py") else _from_module(source, _forms(noun))
    return _attribute(module, name, source)


def name_of_object(spec: str, noun: str) -> tuple[str, str]:
    """(file or module, name in it). UsageError: it names none, or a file that does not exist. Nothing is loaded."""
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise UsageError(f"the {noun} is {spec!r}", limit=_forms(noun), remedy=_what_could_be_meant(spec))
    path = Path(source)
    if source.endswith(".py") and not path.is_file():
        what = f"{path} is a folder" if path.is_dir() else f"no such file: {path}"
        raise UsageError(what, limit=_forms(noun), remedy=f"looked in {Path.cwd()}")
    return source, name


def _forms(noun: str) -> str:
    return _FORMS.get(noun, "it is named file.py:name or package.module:name")


def _what_could_be_meant(spec: str) -> str:
    path = Path(spec.rstrip(":"))
    if path.name != spec and not path.exists():
        return f"there is no such file or folder in {Path.cwd()}"
    if path.suffix != ".py" or not path.is_file():
        return "name the object after a colon, as in net.py:model"
    try:
        names = [name for node in ast.parse(path.read_bytes()).body for name in _names_defined(node)]
    except (SyntaxError, ValueError):
        names = []
    one = names[-1] if names else "model"
    known = f"; the file defines {_listed(names)}" if names else ""
    return f"name the object after a colon, as in {path}:{one}{known}"


def _names_defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_LISTED} more" if len(names) > NAMES_LISTED else ""
    return ", ".join(names[:NAMES_LISTED]) + more


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    _let_import_from(path.parent)
    # Under its own name, so that a module next to it imports the same one; not where the name is taken (copy.py).
    taken = known is not None or path.stem in sys.stdlib_module_names or not path.stem.isidentifier()
    name = f"flatout_model_{path.stem}" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    loader = spec.loader if spec else None
    assert spec, "a .py file has a spec"
    assert loader, "and a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their own module up
    try:
        _run(lambda: loader.exec_module(module), f"loading {path.name}")
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _from_module(name: str, forms: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"no such file or module: {name!r}", limit=forms, remedy="a file's name ends in .py")
    _let_import_from(Path.cwd())
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:  # a parent package is missing, or one of its own imports is
        found = not (error.name and f"{name}.".startswith(f"{error.name}."))
    except Exception:  # the parent package fails to import: the import below reports it
        found = True
    if not found:
        remedy = f"looked from {Path.cwd()} and in the installed packages"
        raise UsageError(f"no module named {name!r}", limit=forms, remedy=remedy)
    module = _run(lambda: importlib.import_module(name), f"importing {name}")
    assert isinstance(module, ModuleType)
    return module


def _let_import_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _run(function: Callable[[], T], doing: str) -> T:
    """Call the user's code; any exception becomes a UsageError with the user's line."""
    try:
        return function()
    except UsageError:
        raise
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}" if error.filename else doing
        raise UsageError(f"{where}: {type(error).__name__}: {error.msg}", limit="Python cannot run it") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too, and what the user derives from nothing nearer
        line = user_line(error)
        said = f"{type(error).__name__}: {said_by(error)}".rstrip(": ")
        at = f" at {line}" if line else ""
        raise UsageError(f"{doing} failed{at}: {said}", remedy="make it work in plain Python first") from error


def _attribute(module: ModuleType, name: str, source: str) -> object:
    value: object = module
    for part in name.split("."):
        has_part = functools.partial(hasattr, value, part)
        if not _run(has_part, f"reading {name} of {source}"):  # a property, or the file's own __getattr__
            names = [one for one in vars(value) if not one.startswith("_")] if hasattr(value, "__dict__") else []
            close = difflib.get_close_matches(part, names, n=1)
            models = [one for one in names if _could_be_a_model(inspect.getattr_static(value, one, None), module)]
            remedy = f"did you mean {close[0]}?" if close else f"it has {_listed(models)}" if models else ""
            limit = "the name of an object in it follows the colon"
            raise UsageError(f"{source} has no {name!r}", limit=limit, remedy=remedy)
        value = getattr(value, part)
    return value


def _could_be_a_model(value: object, module: ModuleType) -> bool:
    if isinstance(value, nn.Module):
        return True
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _made(value: object, spec: str) -> tuple[nn.Module, object]:
    """The model that this value is or returns."""
    if not isinstance(value, nn.Module) and callable(value):
        value = called(value, spec, "model")
    example: object = None
    if isinstance(value, tuple) and len(value) == 2:
        value, example = value
    if not isinstance(value, nn.Module):
        limit = "it is an nn.Module, or a function that returns one or (module, example_inputs)"
        raise UsageError(f"{spec} gives {described(value)}", limit=limit, remedy="return the module")
    return value, example


def called(make: Callable[..., object], spec: str, noun: str) -> object:
    """What a function or class of the user's gives. UsageError where it needs arguments, or fails."""
    if needed := _required_arguments(make):
        example = "Net(width=64)" if noun == "model" else "Words()"
        remedy = f"name a function that makes the {noun}, as in: def {noun}(): return {example}"
        raise UsageError(f"{spec} needs {_listed(needed)}", limit="it is called without arguments", remedy=remedy)
    return _run(make, f"calling {spec}")


def _required_arguments(function: Callable[..., object]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C: calling it shows whether it needs arguments
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in kinds]


def _from_hugging_face(folder: Path) -> tuple[nn.Module, object]:
    config = folder / "config.json"
    if not config.is_file():
        raise UsageError(f"{folder} is a folder without config.json", limit=FORMS, remedy="name the file and the model")
    try:
        import transformers
    except ImportError:
        what, limit = f"{folder} is a Hugging Face model", "transformers is not installed"
        raise UsageError(what, limit=limit, remedy="pip install transformers") from None
    try:
        architectures = json.loads(config.read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{config} cannot be read: {error}", remedy="fetch the model again") from error
    kind = getattr(transformers, architectures[0], None) if architectures else None
    kind = kind or transformers.AutoModel
    model = _run(lambda: kind.from_pretrained(str(folder), local_files_only=True), f"reading {folder}")
    example = _run(lambda: dict(model.dummy_inputs), f"reading {folder}") if hasattr(model, "dummy_inputs") else None
    return model, example
