"""Example inputs from what a person types: `int64[2,16]<1000`, `mask=bool[2,16]`, or a file of tensors.

    float32[8,3,224,224]         standard normal
    int64[2,16]<1000             whole numbers from 0 to 999 (5..1000: also a lower end)
    bool[2,16]                   either
    input_ids=int64[2,16]<1000   by the name that `forward` has for it
    batch.safetensors            every tensor in the file, by name where `forward` knows the names (.npz, .pt too)

>>> inputs_from(["ids=int64[2,3]<5", "float32[2]"])[1].keys()
dict_keys(['ids'])
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.units import format_bytes

_SPEC = re.compile(r"(?:(?P<name>\w+)=)?(?P<dtype>\w+)\[(?P<shape>[\d,\s]*)\](?:(?P<low>-?\d+)\.\.|<)?(?P<high>-?\d+)?")
_FILES = (".safetensors", ".npz", ".pt", ".pth")
_WHOLE = ("int64", "int32", "int16", "int8", "uint8")
_DTYPES = ("float64", "float32", "float16", "bfloat16", "bool", *_WHOLE)
MOST_BYTES = 8 << 30
"""Of an example that is drawn: a file is checked on larger ones too."""
FORM = "an input is [name=]dtype[sizes], as in float32[8,3,32,32] or int64[2,16]<1000, or a file of tensors"


def inputs_from(
    specs: Sequence[str], names: Sequence[str] = (), seed: int = 0
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Positional and named inputs, drawn from `seed` or read. UsageError: a spec or a file that cannot be used.

    names: those that the model knows; a file's only tensor, where its name is none of them, is positional.
    """
    generator = torch.Generator().manual_seed(seed)
    args: list[object] = []
    kwargs: dict[str, object] = {}
    for spec in specs:
        given = _read(Path(spec)) if spec.endswith(_FILES) else [_drawn(spec, generator)]
        if spec.endswith(_FILES) and len(given) == 1 and given[0][0] not in names:
            given = [(None, given[0][1])]
        for name, value in given:
            if name in kwargs:
                raise UsageError(f"the input {name!r} is given twice", limit=FORM, remedy="leave one of them out")
            if name is None:
                args.append(value)
            else:
                kwargs[name] = value
    return tuple(args), kwargs


def example_inputs(model: nn.Module, specs: Sequence[str]) -> tuple[object, ...] | dict[str, object]:
    """The specs' inputs as `flatout.export` takes them: a tuple, or a dict of named ones.

    Positional ones that stand beside named ones get the names that `forward` has for them.
    """
    args, kwargs = inputs_from(specs, list(inspect.signature(model.forward).parameters))
    if not args:
        _check_names(model, kwargs)
        return kwargs
    if not kwargs:
        return args
    names = [name for name in inspect.signature(model.forward).parameters if name not in kwargs]
    if len(names) < len(args):
        limit = f"it is forward{inspect.signature(model.forward)}"
        raise UsageError(f"{len(args)} inputs have no name", limit=limit, remedy="name them all: name=dtype[..]")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _check_names(model: nn.Module, named: dict[str, object]) -> None:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(**named)
    except TypeError as error:
        what = f"forward does not take {', '.join(named)} ({error})"
        raise UsageError(what, limit=f"it is forward{signature}", remedy="name inputs as forward does") from None


def _drawn(spec: str, generator: torch.Generator) -> tuple[str | None, Tensor]:
    match = _SPEC.fullmatch(spec.replace(" ", ""))
    if match is None or match["dtype"] not in _DTYPES:
        known = "" if match is None else f"dtypes are {', '.join(_DTYPES)}"
        raise UsageError(f"the input is {spec!r}", limit=FORM, remedy=known)
    dtype: torch.dtype = getattr(torch, match["dtype"])
    shape = [int(size) for size in match["shape"].split(",") if size]
    if math.prod(shape) * dtype.itemsize > MOST_BYTES:
        limit = f"an example of at most {format_bytes(MOST_BYTES)} is drawn"
        raise UsageError(f"the input is {spec!r}", limit=limit, remedy="give smaller sizes: they may vary in the file")
    if match["dtype"] in _WHOLE:
        if match["high"] is None:
            what = f"{spec!r} does not say how large its numbers may be"
            raise UsageError(what, limit="an index past a table's end is an error", remedy=f"write {spec}<1000")
        low, high = int(match["low"] or 0), int(match["high"])
        bounds = torch.iinfo(dtype)
        if not bounds.min <= low < high <= bounds.max + 1:
            raise UsageError(f"{spec!r} leaves no number", limit=f"{match['dtype']} goes to {bounds.max}")
        drawn = torch.randint(low, high, shape, generator=generator, dtype=dtype, device="cpu")
    elif match["high"] is not None:
        raise UsageError(f"{spec!r} has an upper end", limit="only whole numbers have one", remedy="leave it out")
    elif dtype is torch.bool:
        drawn = torch.randint(0, 2, shape, generator=generator, device="cpu").bool()
    else:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    return match["name"], drawn


def _read(path: Path) -> Sequence[tuple[str | None, object]]:
    """(name, tensor) of all in the file; None: those of a .pt file may have no names."""
    if not path.is_file():
        raise UsageError(f"no such file: {path}", limit=FORM, remedy=f"looked in {Path.cwd()}")
    try:
        found = _content(path)
    except Exception as error:  # readers raise of many kinds on a damaged file
        said = str(error).strip().partition("\n")[0]
        raise UsageError(f"{path} cannot be read: {said}", limit=f"it is a {path.suffix} file of tensors") from error
    if isinstance(found, Tensor):
        return [(None, found)]
    if isinstance(found, list | tuple):
        return [(None, one) for one in found]
    if not isinstance(found, dict) or not found:
        kind = f"a {type(found).__name__}" if found else "nothing"
        raise UsageError(f"{path} holds {kind}", limit="it holds tensors, alone or in a tuple or dict")
    return [(str(name), value) for name, value in found.items()]


def _content(path: Path) -> object:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if path.suffix == ".npz":
        import numpy as np

        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    return torch.load(path, weights_only=True, map_location="cpu")
