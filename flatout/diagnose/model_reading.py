"""A model that was built, as ModelFacts: its modules and what the source of their classes says. Nothing is run.

>>> from torch import nn
>>> found = read_model(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
>>> found.parameters, [(one.first, one.second) for one in found.linear_pairs]
(58, [('Sequential.0', 'Sequential.1')])
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from flatout.diagnose.model_facts import LastLayer, ModelFacts, PairSeen, TensorSeen, UnregisteredSeen
from flatout.errors import UsageError
from flatout.infer.user_lines import is_users
from flatout.script.behaviour_seen import SourceLine
from flatout.script.source_facts import LayerFact, read_source
from flatout.torch_private.attributes import ORIGINAL_MODULE
from flatout.tracebacks import within

CONTAINERS = (list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict)
"""Exactly these: a class of the user's may do anything when it is iterated."""
DEEPEST, MOST_ITEMS = 3, 10_000
CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
SOFTMAXES = (nn.Softmax, nn.LogSoftmax)
_MODULES_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
MOVES = ("to", "cuda", "cpu", "type_as")
COPIES = ("new_tensor",)
"""Methods of another tensor that copy what they are given to its device."""
NO_COMPUTATION = (
    "shape", "size", "dim", "ndim", "numel", "nelement", "dtype", "device", "requires_grad", "is_cuda", "layout",
    "tolist", "item", "numpy",
)  # fmt: skip
NUMBERS = ("len", "int", "float", "bool")
"""What these give is the same wherever the tensor is."""
_SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def read_model(model: nn.Module, folder: str | None = None) -> ModelFacts:
    """Facts of a model whose parameters have shapes; of one that is compiled or wrapped for several devices, of the
    model inside. folder: source files in it are named relative to it; default: the current one. Raises UsageError for
    a ScriptModule."""
    inner = _unwrapped(model)
    if isinstance(inner, ScriptModule):
        raise UsageError(
            f"{type(inner).__name__} was not checked",
            limit="the checks read the Python source of the model's classes, and a ScriptModule has none",
            remedy="check the module that was given to torch.jit",
        )
    return _Reading(inner, os.getcwd() if folder is None else folder).facts()


def _unwrapped(model: nn.Module) -> nn.Module:
    while not isinstance(model, ScriptModule):
        name = "module" if isinstance(model, nn.DataParallel | DistributedDataParallel) else ORIGINAL_MODULE
        inner = model._modules.get(name)
        if inner is None:
            break
        model = inner
    return model


class _Reading:
    """Of one model."""

    def __init__(self, model: nn.Module, folder: str) -> None:
        self.model, self.folder = model, folder
        self.modules = dict(model.named_modules())
        held = [one for module in self.modules.values() for one in module._parameters.values() if one is not None]
        self.parameters = {id(one): one for one in held}
        self._of_classes: dict[type, ClassSource | None] = {}

    def facts(self) -> ModelFacts:
        parameters = list(self.parameters.values())
        by_dtype: dict[str, int] = {}
        for one in parameters:
            dtype = str(one.dtype).removeprefix("torch.")
            by_dtype[dtype] = by_dtype.get(dtype, 0) + _bytes(one)
        weights = [one.weight for one in self.modules.values() if isinstance(one, nn.Conv2d) and _has_format(one)]
        return ModelFacts(
            kind=type(self.model).__name__,
            parameters=sum(one.numel() for one in parameters),
            trainable=sum(one.numel() for one in parameters if one.requires_grad),
            bytes_by_dtype=by_dtype,
            buffer_bytes=self._buffer_bytes(),
            training=self.model.training,
            unregistered=tuple(self._unregistered()),
            tensors=tuple(self._tensors()),
            needless_biases=tuple(self._pairs(_needless_bias)),
            linear_pairs=tuple(self._pairs(_linear_pair)),
            last=self._last_layer() or self._last_function(),
            convolutions=len(weights),
            channels_last=any(one.is_contiguous(memory_format=torch.channels_last) for one in weights),
            by_hand=self._by_hand(),
            without_source=tuple(self._without_source()),
        )

    def _without_source(self) -> Iterator[str]:
        """The outermost of its modules that were compiled by torch.jit."""
        found: list[str] = []
        for path, module in self.modules.items():
            if isinstance(module, ScriptModule) and not any(path.startswith(f"{one}.") for one in found):
                found.append(path)
                yield self._shown(path)

    def _buffer_bytes(self) -> int | None:
        held = [one for module in self.modules.values() for one in module._buffers.values() if one is not None]
        buffers = {id(one): one for one in held}.values()
        return None if any(map(is_lazy, buffers)) else sum(map(_bytes, buffers))

    # what is not registered

    def _unregistered(self) -> Iterator[UnregisteredSeen]:
        kind = type(self.model)
        if kind.parameters is not nn.Module.parameters or kind.named_parameters is not nn.Module.named_parameters:
            return  # it says itself what its parameters are
        for path, name, value in self._own_attributes():
            if type(value) not in CONTAINERS:
                continue
            missed: dict[int, Tensor] = {}
            holds = []
            for one in _held(value):
                new = {
                    id(each): each for each in _trainable(one) if id(each) not in self.parameters.keys() | missed.keys()
                }
                if new:
                    missed |= new
                    holds.append(type(one).__name__)
            line = self._assignment(path, name)
            if missed and line is not None:
                yield UnregisteredSeen(
                    path=self._shown(path, name),
                    container=type(value).__name__,
                    holds=tuple(holds),
                    parameters=sum(one.numel() for one in missed.values()),
                    line=line,
                )

    def _tensors(self) -> Iterator[TensorSeen]:
        """Those that only __init__ assigns (others are a cache or a state) and that other methods use where they
        are."""
        for path, name, value in self._own_attributes():
            if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or not value.is_leaf or not value.dim():
                continue  # a number that is a tensor goes with tensors of any device; one with a graph is computed
            sources = self._sources(self.modules[path])
            places = [place for source in sources for place in source.assigned(name)]
            used = any(source.computes_with(name) for source in sources)
            moved = any(source.moves(name) for source in sources)
            if used and not moved and {method for method, _ in places} == {"__init__"}:
                yield TensorSeen(
                    path=self._shown(path, name),
                    shape=tuple(value.shape),
                    trained=value.requires_grad,
                    line=places[0][1],
                )

    def _own_attributes(self) -> Iterator[tuple[str, str, object]]:
        """(path of the module, name, value) of what the user's classes keep beside parameters, buffers and modules."""
        for path, module in self.modules.items():
            if self._sources(module):
                for name, value in vars(module).items():
                    if name not in _MODULES_OWN:
                        yield path, name, value

    # layers of a Sequential

    def _pairs(self, pair: Callable[[nn.Module, nn.Module], tuple[tuple[int, ...], int] | None]) -> Iterator[PairSeen]:
        for path, module in self.modules.items():
            if not _is_sequential(module) or not self._is_called(path):
                continue
            layers = [(name, one) for name, one in module._modules.items() if one is not None]  # each time it is called
            for (first_name, first), (second_name, second) in pairwise(layers):
                found = pair(first, second) if not _has_hooks(first) and not _has_hooks(second) else None
                if found is not None:
                    yield PairSeen(
                        first=self._shown(path, first_name),
                        second=self._shown(path, second_name),
                        sizes=found[0],
                        saved_bytes=found[1],
                        line=self._line(path),
                    )

    def _is_called(self, path: str) -> bool:
        """Is the Sequential there known to be called as a whole? A loop over its layers may do more between them."""
        if not path:
            return True
        above, _, name = path.rpartition(".")
        parent = self.modules.get(above)
        if parent is None:
            return False
        if _is_sequential(parent):
            return self._is_called(above)
        calls = [one for source in self._sources(parent) for one in source.calls(name)]
        return bool(calls) and all(calls)

    def _last_function(self) -> LastLayer | None:
        """Of a forward that ends in `torch.softmax(...)`."""
        source = next((one for one in self._sources(self.model) if one.method("forward") is not None), None)
        forward = source.method("forward") if source is not None else None
        if source is None or forward is None:
            return None
        values = [_value_of(node, forward) for node in ast.walk(forward) if isinstance(node, ast.Return)]
        if not values or not all(map(_is_softmax, values)):
            return None
        last = values[-1]
        assert last is not None
        return LastLayer(path=f"{self._shown()}.forward", kind="softmax", line=source.line(last))

    def _last_layer(self) -> LastLayer | None:
        path = "" if _is_sequential(self.model) else self._returned()
        module = None if path is None else self.modules.get(path)
        while path is not None and module is not None and _is_sequential(module) and len(module):
            name, last = list(module._modules.items())[-1]
            path, module = f"{path}.{name}".lstrip("."), last
        if path is None or type(module) not in SOFTMAXES:
            return None
        return LastLayer(path=self._shown(path), kind=type(module).__name__, line=self._line(path))

    def _returned(self) -> str | None:
        """The attribute that the outermost forward calls last, if that is all that it returns."""
        forwards = [forward for one in self._sources(self.model) if (forward := one.method("forward")) is not None]
        if not forwards or not forwards[0].args.args:
            return None
        own = forwards[0].args.args[0].arg
        names = {_called(node.value, own) for node in ast.walk(forwards[0]) if isinstance(node, ast.Return)}
        return names.pop() if len(names) == 1 else None

    # the source

    def _by_hand(self) -> tuple[LayerFact, ...]:
        sources = [one for module in self.modules.values() for one in self._sources(module)[:1]]
        places = {(one.file, one.tree.lineno) for one in sources}
        files = dict.fromkeys(one.path for one in sources)
        return tuple(one for one in read_source(files, self.folder).layers if one.line[:2] in places)

    def _sources(self, module: nn.Module) -> list[ClassSource]:
        """Of those of its classes that are the user's, the class itself first."""
        for kind in type(module).__mro__:
            if kind not in self._of_classes:
                self._of_classes[kind] = class_source(kind, self.folder)
        found = [self._of_classes[kind] for kind in type(module).__mro__]
        return [one for one in found if one is not None]

    def _assignment(self, path: str, name: str) -> SourceLine | None:
        module = self.modules.get(path)
        for source in self._sources(module) if module is not None else ():
            for _, line in source.assigned(name):
                return line
        return None

    def _line(self, path: str) -> SourceLine | None:
        """Where the module, or the innermost one around it of which that is known, is made."""
        names = path.split(".")
        for depth in range(len(names) - 1, -1, -1):
            found = self._assignment(".".join(names[:depth]), names[depth])
            if found is not None:
                return found
        return None

    def _shown(self, *names: str) -> str:
        return ".".join([type(self.model).__name__, *(one for one in names if one)])


def _held(value: object, depth: int = 0) -> Iterator[nn.Module | nn.Parameter]:
    if isinstance(value, nn.Module | nn.Parameter):
        yield value
    elif type(value) in CONTAINERS and depth < DEEPEST:
        assert isinstance(value, CONTAINERS)
        if len(value) <= MOST_ITEMS:
            for one in list(value.values() if isinstance(value, dict) else value):
                yield from _held(one, depth + 1)


def _trainable(one: nn.Module | nn.Parameter) -> list[Tensor]:
    """A frozen module may be kept out on purpose, and no optimizer misses it. One that cannot list its parameters, as
    its __init__ does not call that of nn.Module, has none."""
    try:
        parameters = list(one.parameters()) if isinstance(one, nn.Module) else [one]
    except Exception:
        return []
    return [each for each in parameters if each.requires_grad and not is_lazy(each)]


def _needless_bias(first: nn.Module, second: nn.Module) -> tuple[tuple[int, ...], int] | None:
    """A batch norm that uses its batch's mean subtracts what a bias added."""
    if type(second) not in NORMS or not second.training or type(first) not in (nn.Linear, *CONVOLUTIONS):
        return None
    bias, features = first.bias, first.weight.shape[0] if isinstance(first, nn.Linear) else first.out_channels
    if not isinstance(bias, Tensor) or not bias.requires_grad or second.num_features != features:
        return None
    return (bias.numel(),), _bytes(bias)


def _linear_pair(first: nn.Module, second: nn.Module) -> tuple[tuple[int, ...], int] | None:
    """Not where the width between is less than both others: a product of two narrow matrices is meant to be one."""
    if type(first) is not nn.Linear or type(second) is not nn.Linear:
        return None
    inputs, between, outputs = first.in_features, first.out_features, second.out_features
    if second.in_features != between or between < min(inputs, outputs):
        return None
    if not first.weight.requires_grad or not second.weight.requires_grad:
        return None  # one of them was trained before, so it is kept apart
    biased = first.bias is not None or second.bias is not None
    one = (inputs * outputs + outputs * biased) * first.weight.element_size()
    both = sum({id(each): _bytes(each) for layer in (first, second) for each in layer.parameters()}.values())
    return (inputs, between, outputs), max(0, both - one)


def _is_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _has_format(layer: nn.Conv2d) -> bool:
    """Do the two formats of its weight differ?"""
    return layer.weight.dim() == 4 and layer.weight.shape[1] > 1 and layer.weight.shape[2:].numel() > 1


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _value_of(returned: ast.Return, forward: ast.FunctionDef) -> ast.expr | None:
    """What it returns; of a name, what the statement right before it assigns."""
    if not isinstance(returned.value, ast.Name) or returned not in forward.body:
        return returned.value
    at = forward.body.index(returned)
    before = forward.body[at - 1] if at else None
    if not isinstance(before, ast.Assign) or len(before.targets) != 1 or not isinstance(before.targets[0], ast.Name):
        return returned.value
    return before.value if before.targets[0].id == returned.value.id else returned.value


def _is_softmax(node: ast.expr | None) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return (called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")) == "softmax"


def _called(node: ast.expr | None, own: str) -> str | None:
    """'head' of `self.head(x)`."""
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == own:
        return called.attr
    return None


# the source of a class: where it assigns an attribute, and what its methods do with it


@dataclass(frozen=True, kw_only=True)
class ClassSource:
    """Of one class, without what it inherits."""

    path: str
    """Of the file, in full."""
    file: str
    """The same as it is shown."""
    tree: ast.ClassDef
    lines: tuple[str, ...] = field(repr=False)
    """Of the whole file."""

    def line(self, node: ast.stmt | ast.expr) -> SourceLine:
        text = self.lines[node.lineno - 1].strip() if node.lineno <= len(self.lines) else ""
        return self.file, node.lineno, text[:200]

    def method(self, name: str) -> ast.FunctionDef | None:
        return next((one for one in self._methods() if one.name == name), None)

    def assigned(self, attribute: str) -> tuple[tuple[str, SourceLine], ...]:
        """(method, line) of each `self.attribute = ...`, also as one of several targets."""
        return tuple(
            (method.name, self.line(node))
            for method, node, _ in self._uses(attribute)
            if isinstance(node.ctx, ast.Store | ast.Del)
        )

    def calls(self, attribute: str) -> tuple[bool, ...]:
        """For each use of `self.attribute` in methods other than __init__: is it `self.attribute(...)`?"""
        return tuple(
            isinstance(around, ast.Call) and _attribute_name(around.func) == attribute
            for _, around in self._reads(attribute)
        )

    def computes_with(self, attribute: str) -> bool:
        """Does a method other than __init__ take more of it than its shape or its numbers, as `self.sizes.tolist()`?"""
        return not {node for node, _ in self._reads(attribute)} <= {
            one for method in self._methods() for node in ast.walk(method) for one in _plainly_read(node)
        }

    def moves(self, attribute: str) -> bool:
        """Does a method move it, or a part of it, as in `self.mask[:n].to(x.device)`?"""
        uses = {node for node, _ in self._reads(attribute)}
        return any(
            not uses.isdisjoint(one) for method in self._methods() for node in ast.walk(method) for one in _moved(node)
        )

    def _reads(self, attribute: str) -> Iterator[tuple[ast.expr, ast.AST]]:
        """(`self.attribute`, what is around it) where methods other than __init__ read it."""
        for method, node, around in self._uses(attribute):
            if isinstance(node.ctx, ast.Load) and method.name != "__init__":
                yield node, around

    def _methods(self) -> Iterator[ast.FunctionDef]:
        yield from (one for one in self.tree.body if isinstance(one, ast.FunctionDef))

    def _uses(self, attribute: str) -> Iterator[tuple[ast.FunctionDef, ast.Attribute, ast.AST]]:
        """(method, `self.attribute`, what is around it)."""
        for method in self._methods():
            if not method.args.args:
                continue
            own = method.args.args[0].arg
            for around in ast.walk(method):
                for node in ast.iter_child_nodes(around):
                    if isinstance(node, ast.Attribute) and node.attr == attribute and _is_name(node.value, own):
                        yield method, node, around


def class_source(kind: type, folder: str) -> ClassSource | None:
    """None where it is not the user's class, or where its source is not known for certain."""
    try:
        path = inspect.getsourcefile(kind)
    except (TypeError, OSError):  # written in C, or made at run time
        return None
    if not path or not is_users(path):
        return None
    linecache.checkcache(path)
    lines = linecache.getlines(path)
    try:
        found: list[ast.AST] = [ast.parse("".join(lines))]
    except (SyntaxError, ValueError, RecursionError):
        return None
    for part in kind.__qualname__.replace(".<locals>", "").split("."):
        inner = [node for one in found for node in ast.walk(one) if node is not one and isinstance(node, _SCOPES)]
        found = [node for node in inner if node.name == part]
    trees = [one for one in found if isinstance(one, ast.ClassDef)]
    if len(trees) != 1:  # defined twice, as under an `if`
        return None
    return ClassSource(path=path, file=within(path, folder), tree=trees[0], lines=tuple(lines))


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _chain(node: ast.expr) -> Iterator[ast.expr]:
    """What it is taken from: of `self.mask[:n].bool()` that itself, `self.mask[:n].bool`, `self.mask[:n]`..."""
    yield node
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
        yield node


def _plainly_read(node: ast.AST) -> Iterator[ast.expr]:
    """What `node` only takes the shape or the numbers of."""
    if isinstance(node, ast.Attribute) and node.attr in NO_COMPUTATION:
        yield from _chain(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NUMBERS:
        for one in node.args:
            yield from _chain(one)


def _moved(node: ast.AST) -> Iterator[Iterator[ast.expr]]:
    """What `node` moves: of `x.to(device)`, `torch.as_tensor(x, device=device)` and `y.new_tensor(x)` each time x."""
    if isinstance(node, ast.Attribute) and node.attr in MOVES:
        yield _chain(node.value)
    elif isinstance(node, ast.Call):
        copies = _attribute_name(node.func) in COPIES or any(one.arg == "device" for one in node.keywords)
        yield from (_chain(one) for one in (node.args if copies else ()))


def _attribute_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""
