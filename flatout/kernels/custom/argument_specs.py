"""What a kernel takes, written as types with named sizes.

    "float[rows, width]"      floating point, in each dtype that is checked
    "float32[rows, 4]"        always float32; the last size is always 4
    "int64[rows] < width"     whole numbers from 0 to width - 1, such as indices
    "int64[rows] 1..9"        whole numbers from 1 to 8
    "float[rows] 0..1"        floating point from 0 up to 1
    "bool[rows]"              either
    1e-5, True, None          a constant, passed as it is

>>> parse_argument("int64[rows] < width").dims
('rows',)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from flatout.errors import UsageError

FLOATS = ("float32", "bfloat16", "float16", "float64")
WHOLE = ("int64", "int32", "int16", "int8", "uint8")
_DTYPES = ("float", *FLOATS, *WHOLE, "bool")
_END = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
_FORM = re.compile(
    rf"(?P<dtype>\w+)\[(?P<dims>[^\[\]]*)\](?:<(?P<below>\d+|[A-Za-z_]\w*)|(?P<low>{_END})\.\.(?P<high>{_END}|[A-Za-z_]\w*))?"
)
FORM = "an input is written as 'float[rows, width]', 'int64[rows] < width' or 'float32[rows] 0..1', or is a constant"

Size: TypeAlias = int | str
"""A number, or the name of a size."""


@dataclass(frozen=True, kw_only=True)
class TensorArgument:
    """A tensor that is drawn anew for each case."""

    text: str
    dtype: str
    """'float' stands for each dtype that is checked."""
    dims: tuple[Size, ...]
    low: float | None = None
    high: float | Size | None = None
    """Values are below it; None: normally distributed."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of sizes in it, in order."""
        named = [one for one in (*self.dims, self.high) if isinstance(one, str)]
        return tuple(dict.fromkeys(named))


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Passed as it is."""

    value: bool | int | float | str | None


Argument: TypeAlias = TensorArgument | Constant


def parse_argument(spec: object) -> Argument:
    """One element of `inputs`. UsageError: it is neither a spec nor a constant."""
    if spec is None or isinstance(spec, bool | int | float):
        return Constant(value=spec)
    if not isinstance(spec, str):
        raise UsageError(f"an input is {type(spec).__name__} {spec!r}"[:120], limit=FORM)
    match = _FORM.fullmatch(spec.replace(" ", ""))
    if match is None:
        raise UsageError(f"the input is {spec!r}", limit=FORM)
    if match["dtype"] not in _DTYPES:
        remedy = nearest(match["dtype"], _DTYPES) or f"dtypes are {', '.join(_DTYPES)}"
        raise UsageError(f"the input {spec!r} has the dtype {match['dtype']!r}", limit=FORM, remedy=remedy)
    high = _end(match["below"] or match["high"])
    low = float(match["low"]) if match["low"] else 0.0 if match["below"] else None
    found = TensorArgument(text=spec, dtype=match["dtype"], dims=_dims(spec, match["dims"]), low=low, high=high)
    _check_range(found)
    return found


def nearest(word: str, known: Iterable[str]) -> str:
    """'did you mean float32?'; '' where nothing is spelt much like it."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else ""


def _end(text: str | None) -> float | Size | None:
    if text is None or not re.fullmatch(_END, text):
        return text
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _dims(spec: str, text: str) -> tuple[Size, ...]:
    if not text:
        return ()
    found: list[Size] = []
    for part in text.split(","):
        if not (part.isdecimal() or part.isidentifier()):
            limit = "a size is a whole number or a name"
            raise UsageError(f"the input {spec!r} has the size {part!r}", limit=limit, remedy=FORM)
        found.append(int(part) if part.isdecimal() else part)
    return tuple(found)


def _check_range(found: TensorArgument) -> None:
    if found.dtype in WHOLE and found.high is None:
        limit = "an index past a table's end is an error"
        remedy = f"write '{found.text} < 1000', or the name of a size in place of 1000"
        raise UsageError(f"{found.text!r} does not say how large its numbers may be", limit=limit, remedy=remedy)
    if found.dtype == "bool" and found.high is not None:
        raise UsageError(f"{found.text!r} has an upper end", limit="only numbers have one", remedy="leave it out")
    if isinstance(found.high, int | float) and found.low is not None and found.low >= found.high:
        raise UsageError(f"{found.text!r} leaves no number", limit="the lower end is below the upper one")
