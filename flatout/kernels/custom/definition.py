"""The kernel to check, its reference and its inputs, as the user's file defines them.

    kernel = flatout.kernels.load("scale.cpp").scale     what is checked
    reference = lambda x, w: x * w                       plain PyTorch that computes the same
    inputs = ("float[rows, width]", "float[width]")      see argument_specs

and, where they are needed, the names of OPTIONAL. They are names of the file, or of the class or dict NAME in it.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from flatout.errors import FlatoutError, UsageError
from flatout.kernels.custom.argument_specs import FLOATS, FORM, Argument, TensorArgument, nearest, parse_argument
from flatout.tracebacks import is_users_file

REQUIRED = ("kernel", "reference", "inputs")
NEEDED = "it defines kernel, reference (plain PyTorch) and inputs"
OPTIONAL = {
    "dtypes": 'those of "float" inputs; by default ("float32", "bfloat16", "float16")',
    "sizes": 'what the kernel is restricted to: {"width": range(8, 4097, 8), "heads": (1, 2, 12)}',
    "layouts": 'what inputs may look like in memory, if not all of them: ("contiguous",)',
    "mutates": "the inputs that the kernel writes to, by position: (0,)",
    "tolerance": 'the largest error, as a share of the expected value: 1e-5, or {"bfloat16": 0.02}',
    "gradient": "True: it must have one; False: it has none; by default it is checked where there is one",
    "nonfinite": "False: what it makes of NaN and infinity is not compared with the reference",
    "compiles": "True: it must work in torch.compile(fullgraph=True); False: it need not",
    "timing": 'the sizes that are timed: {"rows": 4096, "width": 1024}',
}
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("contiguous", "transposed", "padded", "strided", "offset", "expanded")

Call = Callable[..., object]  # the user's own function; what it returns is checked
Sizes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A kernel and what it is checked against."""

    name: str
    kernel: Call
    reference: Call
    arguments: tuple[Argument, ...]
    labels: tuple[str, ...]
    """Of the arguments, from the reference's signature."""
    dtypes: tuple[str, ...] = DTYPES
    sizes: Sizes = field(default_factory=dict)
    """Those that a name may have; a name that is missing may have any."""
    layouts: tuple[str, ...] = LAYOUTS
    mutates: tuple[int, ...] = ()
    tolerance: Mapping[str, float] = field(default_factory=dict)
    """By dtype; without an entry it follows from the reference's own error."""
    gradient: bool | None = None
    nonfinite: bool | None = None
    compiles: bool | None = None
    timing: Mapping[str, int] = field(default_factory=dict)

    @property
    def size_names(self) -> tuple[str, ...]:
        """Of all arguments, in order."""
        return tuple(dict.fromkeys(name for one in self.tensors for name in one.names))

    @property
    def tensors(self) -> tuple[TensorArgument, ...]:
        return tuple(one for one in self.arguments if isinstance(one, TensorArgument))


def read_definition(target: str) -> Definition:
    """What `FILE.py` or `FILE.py:NAME` defines; this executes the file. UsageError: it cannot be used, and why."""
    file, name = split_target(target)
    found: object = execute_file(file)
    for part in name.split(".") if name else ():
        found = _attribute(found, part, file)
    return _definition(found, target)


def split_target(target: str) -> tuple[Path, str]:
    """'rms_norm.py:fused' -> the file and the name. UsageError: there is no such file."""
    text, colon, name = target.rpartition(":")
    if not colon or not text.endswith(".py"):
        text, name = target, ""
    file = Path(text)
    form = "a kernel is named FILE.py or FILE.py:NAME"
    if file.suffix != ".py":
        raise UsageError(f"the file is {target!r}", limit=form)
    if not file.is_file():
        what = f"{file} is a folder" if file.is_dir() else f"no such file: {file}"
        raise UsageError(what, limit=form, remedy=f"looked in {Path.cwd()}")
    return file, name


def execute_file(file: Path) -> ModuleType:
    """The module. UsageError: Python cannot run it, or it raises, with the user's line."""
    path = file.resolve()
    sys.path.insert(0, str(path.parent))
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names or not path.stem.isidentifier()
    name = f"flatout_kernel_{path.stem}" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec, "a .py file has a spec"
    assert spec.loader, "and a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, pickle and triton look their own module up
    try:
        spec.loader.exec_module(module)
    except FlatoutError:
        raise
    except SyntaxError as error:
        # of a file that is no text neither is known
        where = str(file) if error.lineno is None else f"{error.filename}, line {error.lineno}"
        raise UsageError(f"{where}: {type(error).__name__}: {error.msg}", limit="Python cannot run it") from error
    except ModuleNotFoundError as error:
        remedy = f"pip install {error.name}" if error.name == "triton" else "install it, or run where it is installed"
        raise UsageError(f"{file} fails{_at(error)}: no module named {error.name!r}", remedy=remedy) from error
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        raise UsageError(f"{file} fails{_at(error)}: {said}", remedy="make `python FILE.py` work first") from error
    return module


def line_of(error: BaseException) -> str | None:
    """'scale.py, line 12' for the innermost frame of the user's code; None if there is none."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if is_users_file(file):
            found = f"{Path(file).name}, line {traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def _at(error: BaseException) -> str:
    line = line_of(error)
    return f" at {line}" if line else ""


def _attribute(owner: object, name: str, file: Path) -> object:
    found = _names(owner)
    if name not in found:
        remedy = nearest(name, found) or (f"it has {', '.join(found)}" if found else "")
        raise UsageError(
            f"{file} has no {name!r}", limit="a kernel's class or dict is named after the colon", remedy=remedy
        )
    return found[name]


def _names(owner: object) -> dict[str, object]:
    """What a module, class, instance or dict holds, by name; without private names."""
    if isinstance(owner, Mapping):
        return {str(name): value for name, value in owner.items()}
    return {name: getattr(owner, name) for name in dir(owner) if not name.startswith("_")}


def _definition(owner: object, target: str) -> Definition:
    found = _names(owner)
    missing = [name for name in REQUIRED if name not in found]
    if missing:
        raise UsageError(f"{target} has no {' and no '.join(missing)}", limit=NEEDED, remedy=_guess(missing[0], found))
    if isinstance(owner, type):  # a function of a class is called without an instance
        found |= {name: inspect.getattr_static(owner, name) for name in ("kernel", "reference")}
        found |= {name: one.__func__ for name, one in found.items() if isinstance(one, staticmethod)}
    kernel, reference = _called(found["kernel"], "kernel"), _called(found["reference"], "reference")
    arguments = _arguments(found["inputs"])
    made = Definition(
        name=target,
        kernel=kernel,
        reference=reference,
        arguments=arguments,
        labels=_labels(reference, len(arguments)),
        dtypes=_dtypes(found.get("dtypes", DTYPES), arguments),
        sizes=_sizes(found.get("sizes", {})),
        layouts=_words(found.get("layouts", LAYOUTS), "layouts", LAYOUTS),
        mutates=_mutates(found.get("mutates", ()), arguments),
        tolerance=_tolerance(found.get("tolerance")),
        gradient=_flag(found.get("gradient"), "gradient"),
        nonfinite=_flag(found.get("nonfinite"), "nonfinite"),
        compiles=_flag(found.get("compiles"), "compiles"),
        timing=_timing(found.get("timing", {})),
    )
    for of, named in (("sizes", made.sizes), ("timing", made.timing)):
        _check_known(of, list(named), made.size_names)
    return made


def _guess(missing: str, found: Mapping[str, object]) -> str:
    holders = [name for name, value in found.items() if isinstance(value, type | dict) and "kernel" in _names(value)]
    return nearest(missing, found) or (f"name one of {', '.join(holders)} after a colon" if holders else "")


def _called(value: object, name: str) -> Call:
    if not callable(value):
        raise UsageError(f"{name} is {value!r}"[:120], limit="it is a function of the inputs")
    return value


def _arguments(value: object) -> tuple[Argument, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(f"inputs is {value!r}"[:120], limit="it is a tuple with one element an input", remedy=FORM)
    found = tuple(parse_argument(one) for one in value)
    if not any(isinstance(one, TensorArgument) for one in found):
        raise UsageError(f"inputs is {value!r}"[:120], limit="at least one of them is a tensor", remedy=FORM)
    return found


def _labels(reference: Call, count: int) -> tuple[str, ...]:
    """The reference's parameters. UsageError: it does not take that many."""
    try:
        signature = inspect.signature(reference)
        signature.bind(*[None] * count)
        names = list(signature.parameters)
    except TypeError as error:
        limit = f"reference is called with {count} positional inputs"
        raise UsageError(f"reference{inspect.signature(reference)} does not take them: {error}", limit=limit) from error
    except ValueError:  # written in C: it has no signature
        names = []
    return tuple(names[:count]) if len(names) >= count else tuple(f"x{number}" for number in range(count))


def _dtypes(value: object, arguments: Sequence[Argument]) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    named = tuple(str(one).removeprefix("torch.") for one in value) if isinstance(value, Sequence) else ()
    found = _words(named or value, "dtypes", FLOATS)
    varies = any(isinstance(one, TensorArgument) and one.dtype == "float" for one in arguments)
    return found if varies else found[:1]


def _words(value: object, name: str, known: Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    words = tuple(value) if isinstance(value, Sequence) else ()
    wrong = [one for one in words if one not in known]
    if wrong or not words:
        shown = wrong[0] if wrong else value
        limit = f"it is some of {', '.join(known)}"
        raise UsageError(f"{name} has {shown!r}", limit=limit, remedy=nearest(str(shown), known))
    return words


def _sizes(value: object) -> Sizes:
    limit = OPTIONAL["sizes"]
    if not isinstance(value, Mapping):
        raise UsageError(f"sizes is {value!r}"[:120], limit=limit)
    found: dict[str, Sequence[int]] = {}
    for name, allowed in value.items():
        one = (allowed,) if isinstance(allowed, int) else allowed
        whole = isinstance(one, range | tuple | list) and all(
            isinstance(size, int) and size >= 0 for size in one[:1000]
        )
        if not whole or not len(one):
            raise UsageError(f"sizes has {name}: {allowed!r}"[:160], limit=limit)
        found[str(name)] = one if isinstance(one, range) else tuple(sorted(one))
    return found


def _mutates(value: object, arguments: Sequence[Argument]) -> tuple[int, ...]:
    found = (value,) if isinstance(value, int) else value
    limit = OPTIONAL["mutates"]
    if not isinstance(found, tuple | list):
        raise UsageError(f"mutates is {value!r}"[:120], limit=limit)
    for one in found:
        if not (isinstance(one, int) and 0 <= one < len(arguments) and isinstance(arguments[one], TensorArgument)):
            raise UsageError(f"mutates has {one!r}", limit=limit)
    return tuple(found)


def _tolerance(value: object) -> Mapping[str, float]:
    found = dict.fromkeys(FLOATS, value) if isinstance(value, int | float) else {} if value is None else value
    limit = OPTIONAL["tolerance"]
    if not isinstance(found, Mapping):
        raise UsageError(f"tolerance is {value!r}"[:120], limit=limit)
    made = {str(name).removeprefix("torch."): one for name, one in found.items()}
    _check_known("tolerance", list(made), FLOATS)
    if not all(isinstance(one, int | float) and one >= 0 for one in made.values()):
        raise UsageError(f"tolerance is {value!r}"[:120], limit=limit)
    return made


def _flag(value: object, name: str) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}"[:120], limit=OPTIONAL[name])
    return value


def _timing(value: object) -> Mapping[str, int]:
    if not isinstance(value, Mapping) or not all(isinstance(size, int) and size > 0 for size in value.values()):
        raise UsageError(f"timing is {value!r}"[:120], limit=OPTIONAL["timing"])
    return {str(name): size for name, size in value.items()}


def _check_known(of: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            limit = f"known are {', '.join(known) or 'none'}"
            raise UsageError(f"{of} has {name!r}", limit=limit, remedy=nearest(name, known))
