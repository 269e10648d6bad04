"""A data set's own `__getitem__`, carried out for a whole batch at once.

The `__getitem__` of a data set in memory is often a few lines:

    def __getitem__(self, index):
        image, label = self.images[index], int(self.labels[index])
        if self.transform is not None:
            image = self.transform(image)          # torchvision's ToTensor, Normalize, Compose
        return image, label

Such code is parsed, not called: each statement is carried out on the rows of all samples together. Nothing is kept from
one batch to the next. Whatever the script changed since (values, lists, attributes, through any alias) is seen as the
code itself would see it. Only the operations listed here are carried out: no assignment to anything but local names, no
calls except of pure functions with exact types, so that no sample can affect the next one or the script. Anything else
raises `NotWholeBatch`, and the samples of the data set are fetched one by one.

    code = sample_code(dataset)              # raises NotWholeBatch with the reason
    code.batch(dataset, Indices([3, 1, 7]))  # as the loader's default_collate returns it
"""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import default_collate

from flatout.data.indices import Indices, NotWholeBatch

if TYPE_CHECKING:
    from numpy import generic
    from numpy.typing import NDArray

    from flatout.data.sources import Items

NUMBERS = (bool, int, float)
ARITHMETIC: dict[type[ast.operator], Callable[..., Tensor]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
"""They round an element alone as they do among others."""
TO_TENSOR = ("from_numpy", "as_tensor", "tensor")
CASTS = {"float": torch.float32, "double": torch.float64, "long": torch.int64, "int": torch.int32}
LARGEST_CUT = 2.0**31
"""Beyond it the result of converting a float to an int depends on the instruction."""
TRANSFORMS = ("Compose", "ToTensor", "Normalize")
IMAGE_MODES = {3: "L", 4: "RGB"}
"""Dimensions of a batch of images -> PIL's mode."""


@dataclass(frozen=True)
class Rows:
    """One value of every sample of a batch: a new tensor [batch, ...]."""

    kind: str
    """The type of one value: 'tensor', 'array' (numpy's), 'scalar' (numpy's), 'number' (Python's), 'image' (PIL's)."""
    values: Tensor


@dataclass(frozen=True)
class Plain:
    """Python objects, one per sample: numbers or strings from a list."""

    values: list[object]


class SampleCode:
    """The `__getitem__` of one class of data sets, as a syntax tree that was checked against the code that runs."""

    def __init__(self, function: FunctionType, tree: ast.FunctionDef) -> None:
        self.function, self.code = function, function.__code__
        self._body = tree.body
        self._self, self._index = (argument.arg for argument in tree.args.args)

    def batch(self, dataset: Items, wanted: Indices) -> object:
        """The samples `wanted` as `default_collate` would collate them. Raises NotWholeBatch."""
        function = _function_of(dataset)
        if function is not self.function or function.__code__ is not self.code:
            raise NotWholeBatch("its __getitem__ was replaced")
        run = _Run(dataset, function, wanted, names=(self._self, self._index))
        done, value = run.statements(self._body)
        if not done:
            raise NotWholeBatch("its __getitem__ returns nothing")
        return _collated(value, set())


def sample_code(dataset: Items) -> SampleCode:
    """The code of `dataset`'s `__getitem__`; raises NotWholeBatch if it cannot be known for certain."""
    function = _function_of(dataset)
    tree = _tree(function)
    arguments = tree.args
    if len(arguments.args) != 2 or arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
        raise NotWholeBatch("its __getitem__ takes more than an index")
    return SampleCode(function, tree)


def _function_of(dataset: Items) -> FunctionType:
    kind = type(dataset)
    function: object = kind.__getitem__
    get_attribute: object = kind.__getattribute__
    if not isinstance(function, FunctionType) or getattr(dataset, "__getitems__", None):
        raise NotWholeBatch("its samples are not fetched by a plain __getitem__")
    if get_attribute is not object.__getattribute__:
        raise NotWholeBatch("its attributes are computed")
    return function


def _tree(function: FunctionType) -> ast.FunctionDef:
    """The function's source, if it compiles to exactly the code that runs (a file may have been edited)."""
    code = function.__code__
    try:
        lines, _ = inspect.findsource(function)
        module = ast.parse("".join(lines))
        compiled = compile(module, code.co_filename, "exec", dont_inherit=True)
    except (OSError, TypeError, SyntaxError, ValueError):
        raise NotWholeBatch("the source of its __getitem__ is not available") from None
    trees = [one for one in ast.walk(module) if isinstance(one, ast.FunctionDef) and one.lineno == code.co_firstlineno]
    if len(trees) != 1 or trees[0].decorator_list or code not in _codes_in(compiled):
        raise NotWholeBatch("the source of its __getitem__ is not what runs")
    if code.co_freevars or code.co_cellvars:
        raise NotWholeBatch("its __getitem__ uses super() or variables of a function around it")
    return trees[0]


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _codes_in(one)


class _Run:
    """One batch in the making: local names and their values."""

    def __init__(self, dataset: Items, function: FunctionType, wanted: Indices, names: tuple[str, str]) -> None:
        self._dataset, self._globals, self._wanted = dataset, function.__globals__, wanted
        self._local = function.__code__.co_varnames
        self._index = Plain(list(wanted.numbers))
        self._names: dict[str, object] = {names[0]: dataset, names[1]: self._index}

    def statements(self, body: Sequence[ast.stmt]) -> tuple[bool, object]:
        """(did it return, the returned value)"""
        for statement in body:
            match statement:
                case ast.Return(value=ast.expr() as value):
                    return True, self.value(value)
                case ast.Assign(targets=[target], value=value):
                    self._assign(target, value)
                case ast.If(test=test):
                    done, result = self.statements(statement.body if self._holds(test) else statement.orelse)
                    if done:
                        return True, result
                case ast.Expr(value=ast.Constant()) | ast.Pass():
                    pass
                case _:
                    raise NotWholeBatch(f"its __getitem__ does more than return stored values: {_words(statement)}")
        return False, None

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Name(id=name), _:
                self._names[name] = self.value(value)
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                found = [self.value(one) for one in values]
                for one, each in zip(targets, found, strict=True):
                    if not isinstance(one, ast.Name):
                        raise NotWholeBatch(f"its __getitem__ writes to {_words(one)}")
                    self._names[one.id] = each
            case _:
                raise NotWholeBatch(f"its __getitem__ writes to {_words(target)}")

    def _holds(self, test: ast.expr) -> bool:
        """A condition on the data set's own attributes, the same for each sample."""
        match test:
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as how], comparators=[ast.Constant(value=None)]):
                value = self.value(left)
                return (value is None) is isinstance(how, ast.Is)
            case ast.Attribute():
                value = self.value(test)
                if value is None or type(value) is bool or _is_transform(value):
                    return value is not None and value is not False
        raise NotWholeBatch(f"its __getitem__ decides by {_words(test)}")

    def value(self, node: ast.expr) -> object:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.Name(id=name):
                return self._named(name)
            case ast.Attribute(value=owner, attr=name):
                return self._attribute(self.value(owner), name)
            case ast.Subscript(value=stored, slice=index) if self.value(index) is self._index:
                return self._rows(self.value(stored))
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return [self.value(part) for part in parts]
            case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
                return {key.value: self.value(one) for key, one in zip(keys, values, strict=True)}  # type: ignore[union-attr]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                return _arithmetic(ARITHMETIC[type(op)], self.value(left), self.value(right))
            case ast.Call():
                return self._call(node)
        raise NotWholeBatch(f"its __getitem__ computes {_words(node)}")

    def _named(self, name: str) -> object:
        if name in self._names:
            return self._names[name]
        if name not in self._local and name in self._globals:
            return self._globals[name]
        if name in ("int", "float") and vars(builtins)[name] in (int, float):
            return vars(builtins)[name]
        raise NotWholeBatch(f"its __getitem__ uses {name}")

    def _attribute(self, owner: object, name: str) -> object:
        if owner is self._dataset:
            above = next((vars(one)[name] for one in type(owner).__mro__ if name in vars(one)), None)
            if name in vars(owner) and not hasattr(type(above), "__set__"):
                return vars(owner)[name]
            if above is not None and name not in vars(owner) and not hasattr(type(above), "__get__"):
                return above
        elif isinstance(owner, ModuleType) and (owner is torch or owner.__name__ == "PIL.Image"):
            return getattr(owner, name, None)
        raise NotWholeBatch(f"its __getitem__ uses .{name}, which is not a plain attribute")

    def _rows(self, stored: object) -> Rows | Plain:
        """`stored[index]` of each sample."""
        if type(stored) is Tensor:
            return Rows("tensor", self._wanted.rows_of(stored))
        if _is_plain_array(stored) and stored.ndim and not stored.dtype.hasobject:
            taken = sys.modules["numpy"].take(stored, self._wanted.within(len(stored)).numpy(), axis=0)
            try:
                return Rows("array" if stored.ndim > 1 else "scalar", torch.from_numpy(taken))
            except TypeError as error:  # a type of numpy's that torch lacks
                raise NotWholeBatch(str(error)) from None
        if type(stored) is list or type(stored) is tuple:
            return Plain([stored[i] for i in self._wanted.numbers])
        raise NotWholeBatch(f"its __getitem__ takes samples from a {type(stored).__name__}")

    def _call(self, node: ast.Call) -> object:
        arguments = [self.value(argument) for argument in node.args]
        match node.func:
            case ast.Attribute(value=owner, attr=name):
                on = self.value(owner)
                if isinstance(on, Rows):
                    if not node.keywords:
                        return _method(on, name, arguments)
                elif on is torch and name in TO_TENSOR and isinstance(getattr(torch, name), BuiltinFunctionType):
                    return _to_tensor(name, arguments, self._dtype(node.keywords))
                elif isinstance(on, ModuleType) and on.__name__ == "PIL.Image" and name == "fromarray":
                    return _image(arguments, self._keywords(node))
                elif on is self._dataset and len(arguments) == 1 and not node.keywords:
                    return _transformed(self._attribute(on, name), arguments[0])
            case ast.Name(id=name):
                called = self._named(name)
                if _is_torchvisions(called, "_Image_fromarray"):
                    return _image(arguments, self._keywords(node))
                if called in (int, float) and len(arguments) == 1 and not node.keywords:
                    return _number(called, arguments[0])
        raise NotWholeBatch(f"its __getitem__ calls {_words(node.func)}")

    def _keywords(self, node: ast.Call) -> dict[str | None, object]:
        return {one.arg: self.value(one.value) for one in node.keywords}

    def _dtype(self, keywords: Sequence[ast.keyword]) -> torch.dtype | None:
        match keywords:
            case []:
                return None
            case [ast.keyword(arg="dtype", value=value)]:
                dtype = self.value(value)
                if isinstance(dtype, torch.dtype):
                    return dtype
        raise NotWholeBatch("its __getitem__ makes tensors in a way that is not known")


def _is_plain_array(value: object) -> TypeGuard[NDArray[generic]]:
    """An array of numpy's own class: a subclass may index otherwise."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def _arithmetic(operation: Callable[..., Tensor], left: object, right: object) -> Rows:
    """Each sample's tensor and a number."""
    rows, number = (left, right) if isinstance(left, Rows) else (right, left)
    if not isinstance(rows, Rows) or rows.kind != "tensor" or type(number) not in NUMBERS:
        raise NotWholeBatch("its __getitem__ computes with more than tensors and numbers")
    values = operation(rows.values, number) if rows is left else operation(number, rows.values)
    return Rows("tensor", values)


def _method(rows: Rows, name: str, arguments: list[object]) -> Rows:
    """A method of each sample's tensor."""
    if rows.kind == "tensor" and not arguments:
        if name in CASTS:
            return Rows("tensor", _cast(rows.values, CASTS[name]))
        if name == "numpy" and rows.values.device.type == "cpu" and rows.values.dim() > 1:
            return Rows("array", rows.values)
        if name == "item" and rows.values.dim() == 1 and rows.values.dtype is not torch.bool:
            return _number(float if rows.values.is_floating_point() else int, rows)
        if name == "clone":
            return rows
    if rows.kind == "tensor" and name == "unsqueeze" and len(arguments) == 1:
        dim = arguments[0]
        if type(dim) is int:
            return Rows("tensor", rows.values.unsqueeze(dim + (dim >= 0)))
    raise NotWholeBatch(f"its __getitem__ calls .{name}()")


def _to_tensor(name: str, arguments: list[object], dtype: torch.dtype | None) -> Rows:
    """torch.tensor, as_tensor or from_numpy of each sample's value."""
    if len(arguments) != 1 or (name == "from_numpy" and dtype is not None):
        raise NotWholeBatch(f"its __getitem__ calls torch.{name} in a way that is not known")
    value = arguments[0]
    if isinstance(value, Plain) and name != "from_numpy" and _all_numbers(value.values):
        return Rows("tensor", torch.tensor(value.values, dtype=dtype, device=_cpu()))
    if isinstance(value, Rows) and (value.kind == "array" or (value.kind == "scalar" and name != "from_numpy")):
        _cpu()
        return Rows("tensor", value.values if dtype is None else _cast(value.values, dtype))
    raise NotWholeBatch(f"its __getitem__ makes tensors with torch.{name} of what is not an array")


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    if values.is_complex() or dtype not in CASTS.values():
        raise NotWholeBatch(f"its __getitem__ converts to {dtype}")
    if values.is_floating_point() and not dtype.is_floating_point and not (values.abs() < LARGEST_CUT).all():
        raise NotWholeBatch("its __getitem__ converts fractions to whole numbers that are too large")
    return values.to(dtype)


def _cpu() -> str:
    if torch.get_default_device().type != "cpu":
        raise NotWholeBatch("the default device is not the CPU")
    return "cpu"


def _number(kind: type, value: object) -> Rows:
    """int() or float() of each sample's value, where neither rounds."""
    if isinstance(value, Rows) and value.kind in ("tensor", "scalar") and value.values.dim() == 1:
        values = value.values
        if kind is int and not values.is_floating_point() and not values.is_complex():
            return Rows("number", values.to(torch.int64))
        if kind is float and values.is_floating_point():
            return Rows("number", values.to(torch.float64))
    raise NotWholeBatch(f"its __getitem__ takes {kind.__name__}() of what is not a single value of that kind")


def _image(arguments: list[object], keywords: dict[str | None, object]) -> Rows:
    """PIL's Image.fromarray of each sample's uint8 array."""
    match arguments:
        case [Rows(kind="array", values=values)] if values.dtype is torch.uint8 and values.dim() in IMAGE_MODES:
            mode = IMAGE_MODES[values.dim()]
            fits = values.dim() == 3 or values.shape[-1] == 3
            if fits and set(keywords) <= {"mode"} and keywords.get("mode") in (None, mode):
                return Rows("image", values)
    raise NotWholeBatch("its __getitem__ makes images in a way that is not known")


def _is_torchvisions(value: object, *names: str) -> bool:
    """A class or function of torchvision with one of these names."""
    home = getattr(value, "__module__", None)
    return (
        isinstance(value, (type, FunctionType))
        and str(home).partition(".")[0] == "torchvision"
        and value.__name__ in names
    )


def _is_transform(value: object) -> bool:
    """One of the torchvision transforms known here, not changed by the script."""
    kind = type(value)
    called = [vars(kind)[name] for name in ("__call__", "forward") if name in vars(kind)]
    if not _is_torchvisions(kind, *TRANSFORMS) or not all(_is_torchvisions(one, one.__name__) for one in called):
        return False
    hooks = (vars(value).get(name) for name in ("_forward_hooks", "_forward_pre_hooks"))
    return not any(hooks) and "forward" not in vars(value)


def _transformed(transform: object, value: object) -> Rows:
    """torchvision's transform of each sample."""
    if not _is_transform(transform) or not isinstance(value, Rows):
        raise NotWholeBatch(f"its samples go through {type(transform).__name__}")
    settings = vars(transform)
    match type(transform).__name__:
        case "Compose":
            if type(settings["transforms"]) not in (list, tuple):
                raise NotWholeBatch("its transforms are not a list")
            for one in settings["transforms"]:
                value = _transformed(one, value)
            return value
        case "ToTensor":
            return Rows("tensor", _image_to_tensor(value))
    return Rows("tensor", _normalized(value, settings["mean"], settings["std"]))


def _image_to_tensor(value: Rows) -> Tensor:
    """uint8 [batch, height, width(, channels)] -> [batch, channels, height, width] between 0 and 1."""
    values = value.values
    if value.kind not in ("array", "image") or values.dtype is not torch.uint8 or values.dim() not in IMAGE_MODES:
        raise NotWholeBatch("ToTensor gets no uint8 image")
    _cpu()
    values = values.unsqueeze(1) if values.dim() == 3 else values.permute(0, 3, 1, 2).contiguous()
    return values.to(torch.get_default_dtype()).div(255)


def _normalized(value: Rows, mean: object, std: object) -> Tensor:
    values = value.values
    if value.kind != "tensor" or not values.is_floating_point() or values.dim() != 4:
        raise NotWholeBatch("Normalize gets no images")
    if not _is_list_of_numbers(mean) or not _is_list_of_numbers(std) or 0 in std:
        raise NotWholeBatch("Normalize has a mean or std of an unusual kind")
    middle, spread = (torch.as_tensor(one, dtype=values.dtype).view(-1, 1, 1) for one in (mean, std))
    return values.sub(middle).div(spread)


def _is_list_of_numbers(value: object) -> TypeGuard[Sequence[float]]:
    return (type(value) is list or type(value) is tuple) and _all_numbers(value)


def _all_numbers(values: Sequence[object]) -> bool:
    return set(map(type, values)) in ({bool}, {int}, {float})


def _collated(value: object, seen: set[int], texts: type = list) -> object:
    """As default_collate returns it: a value that comes twice in a sample is two tensors of the batch.

    `texts` is the container for strings: a list as the batch is, or a tuple where samples are sequences.
    """
    if isinstance(value, dict):
        return {key: _collated(one, seen) for key, one in value.items()}
    if isinstance(value, list):
        return [_collated(one, seen, tuple) for one in value]
    if isinstance(value, Plain):
        if not _all_numbers(value.values) and set(map(type, value.values)) != {str}:
            raise NotWholeBatch("it keeps more than numbers and strings in a list")
        return default_collate(texts(value.values))
    if not isinstance(value, Rows) or value.kind == "image":
        raise NotWholeBatch("its __getitem__ returns more than tensors, arrays and numbers")
    address = value.values.untyped_storage().data_ptr()
    if address in seen:
        return value.values.clone()
    seen.add(address)
    return value.values


def _words(node: ast.AST) -> str:
    return textwrap.shorten(ast.unparse(node), 60, placeholder=" ...")
