"""What the source of a script says, from the syntax trees of its own files; nothing is run or imported.

A run says what happens; the source names the line, and what a window of a few steps cannot show: whether a list is ever
cleared, whether a loss is divided anywhere.

    source = SourceFacts.of({"train.py": text})
    source.lines_calling("clip_grad_norm_")        # (("train.py", 41, "..."),)
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeGuard

from flatout.script.behaviour_seen import SourceLine
from flatout.script.layer_source import layer_of_torch
from flatout.script.scheduler_source import first_in_epochs, optimizers_of, unused_schedulers
from flatout.tracebacks import within

MOST_FILES = 64
MOST_FILE_BYTES = 2 << 20
LOGGING = ("print", "tqdm.write", "add_scalar", "add_scalars", "add_histogram", "add_image", "add_figure", "pprint")
LOGGERS = ("logging", "logger", "log", "wandb", "writer", "mlflow", "console", "logs")
PLOTTING = ("savefig", "imshow", "show", "subplots", "figure", "plot", "scatter", "hist", "tight_layout", "draw")
PLOTTERS = ("plt", "pyplot", "matplotlib", "ax", "axes", "fig", "sns", "seaborn", "plotly", "axs")
DISK = (
    "open", "torch.save", "torch.load", "write", "flush", "fsync", "dump", "savez", "savez_compressed", "tofile",
    "savetxt", "to_csv", "writerow", "write_text", "write_bytes", "read_text", "read_bytes", "save_file", "np.save",
    "numpy.save", "np.load", "numpy.load", "save_checkpoint", "copyfile", "read", "readline",
)  # fmt: skip
SHRINKING = ("clear", "pop", "popleft", "popitem", "remove")
NUMBERS = ("item", "tolist", "float", "int", "len", "round", "time", "perf_counter", "str", "format")
"""Calls that return no tensor."""
Kind = Literal["plotting", "logging", "disk", "script"]


@dataclass(frozen=True, kw_only=True)
class CallFact:
    """One call in the source."""

    name: str
    """Dotted, as it is written: 'torch.nn.utils.clip_grad_norm_', 'self.optimizer.step', 'print'; a name that is the
    result of a call or an index is '()' or '[]'."""
    line: SourceLine
    in_training_loop: bool = False
    """Is it in the innermost loop around an optimizer's step or a backward pass, or in a function that such a loop
    calls?"""
    guarded: bool = False
    """Is it under an `if` of a counter inside its loop, such as once in 50 steps?"""
    repeats: bool = False
    """Is it in a loop that only counts, `for _ in range(8)`, and does the same again in every turn, without a step of
    the optimizer?"""
    options: Mapping[str, object] | None = None
    """Keyword -> constant; None where there are none."""
    arguments: tuple[str, ...] = ()

    @property
    def last(self) -> str:
        """'clip_grad_norm_' of 'torch.nn.utils.clip_grad_norm_'."""
        return self.name.rpartition(".")[2]

    @property
    def owner(self) -> str:
        """'optimizer' of 'self.optimizer.step'; '' for a plain name."""
        return self.name.rpartition(".")[0].rpartition(".")[2]


@dataclass(frozen=True, kw_only=True)
class KeptFact:
    """A value that is added to something that outlives the step: `losses.append(loss)`, `total += loss`."""

    line: SourceLine
    container: str
    value: str
    bounded: bool
    """Is the container cleared, cut or reassigned in a loop, or limited by its type?"""
    is_sum: bool = False
    detached: bool = False
    """Does the value hold no graph, as after `.detach()`?"""


@dataclass(frozen=True, kw_only=True)
class LayerFact:
    """A module class of the script whose forward computes what a layer of torch.nn computes."""

    name: str
    line: SourceLine
    torchs: str
    """'LayerNorm'."""


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """Facts of all files together."""

    files: tuple[str, ...] = ()
    calls: tuple[CallFact, ...] = ()
    kept: tuple[KeptFact, ...] = ()
    layers: tuple[LayerFact, ...] = ()
    scheduler_first: tuple[tuple[SourceLine, SourceLine], ...] = ()
    """(scheduler's step, step of its optimizer) where the first stands before the second in the same block. Of several
    optimizers, its own is the one that it is made with."""
    scheduler_first_in_epoch: tuple[tuple[SourceLine, SourceLine], ...] = ()
    """(scheduler's step, statement with the optimizer's steps) where the first stands before the second in the body of
    a loop over epochs."""
    unused_schedulers: tuple[SourceLine, ...] = ()
    """Where schedulers are made that nothing in the files steps, or is given."""
    loss_divided: tuple[SourceLine, ...] = ()
    """Divisions and products of something called a loss, or of gradients; gradients that a backward pass is given; and
    learning rates divided by what turns are counted by."""
    settings: tuple[tuple[str, SourceLine], ...] = ()
    """Attributes that are assigned: ('torch.backends.cudnn.benchmark', line)."""
    names: tuple[str, ...] = ()
    """All names in the files, lower case."""

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> SourceFacts:
        """texts: name of each file -> its source."""
        by_name: dict[str, _Reader] = {}
        for name, text in texts.items():
            with contextlib.suppress(SyntaxError, ValueError, RecursionError):
                by_name[name] = _Reader(name, text)
        readers = by_name.values()
        all_read = len(by_name) == len(texts)
        unused = unused_schedulers({name: reader.tree for name, reader in by_name.items()}) if all_read else []
        return cls(
            files=tuple(texts),
            calls=tuple(one for reader in readers for one in reader.calls()),
            kept=tuple(one for reader in readers for one in reader.kept()),
            layers=tuple(one for reader in readers for one in reader.layers()),
            scheduler_first=tuple(one for reader in readers for one in reader.scheduler_first()),
            scheduler_first_in_epoch=tuple(
                (reader.line(early), reader.line(steps))
                for reader in readers
                for early, steps in first_in_epochs(reader.tree)
            ),
            unused_schedulers=tuple(by_name[name].line(call) for name, call in unused),
            loss_divided=tuple(one for reader in readers for one in reader.loss_divided()),
            settings=tuple(one for reader in readers for one in reader.settings()),
            names=tuple(sorted({name.lower() for reader in readers for name in reader.names()})),
        )

    def calling(self, *names: str, in_training_loop: bool = False) -> tuple[CallFact, ...]:
        """Calls whose name is one of these, or ends with '.' and one of them."""
        return tuple(
            one
            for one in self.calls
            if any(one.name == name or one.name.endswith("." + name) for name in names)
            and (one.in_training_loop or not in_training_loop)
        )

    def lines_calling(self, *names: str, in_training_loop: bool = False) -> tuple[SourceLine, ...]:
        return tuple(dict.fromkeys(one.line for one in self.calling(*names, in_training_loop=in_training_loop)))

    def lines_setting(self, attribute: str) -> tuple[SourceLine, ...]:
        """Assignments to this attribute, whatever it is an attribute of: 'cudnn.benchmark'."""
        return tuple(line for name, line in self.settings if name == attribute or name.endswith("." + attribute))

    def with_option(self, option: str, value: object) -> tuple[CallFact, ...]:
        """Calls with this keyword and this constant."""
        return tuple(one for one in self.calls if one.options is not None and one.options.get(option) == value)

    def mentions(self, word: str) -> bool:
        """Does any name in the files contain it?"""
        return any(word in name for name in self.names)

    def kind_of(self, line: SourceLine) -> Kind:
        """What the calls of a line are for."""
        here = [one for one in self.calls if one.line[:2] == line[:2]]
        for one in here:
            if one.owner in PLOTTERS or (one.last in PLOTTING and one.last != "show"):
                return "plotting"
        for one in here:
            if one.last in LOGGING or one.name in LOGGING or one.owner in LOGGERS:
                return "logging"
        for one in here:
            if one.name in DISK or one.last in DISK or one.name.endswith(DISK[1:3]):
                return "disk"
        return "script"


def read_source(files: Iterable[str], folder: str) -> SourceFacts:
    """Facts of these files; names are relative to `folder`. Files that cannot be read are left out."""
    texts: dict[str, str] = {}
    for file in list(files)[:MOST_FILES]:
        path = Path(file)
        try:
            if path.stat().st_size <= MOST_FILE_BYTES:
                texts[within(str(path), folder)] = path.read_text(encoding="utf-8-sig", errors="replace")
        except OSError:
            continue
    return SourceFacts.of(texts)


TOO_DEEP = "..."


def _written(node: ast.AST) -> str:
    """As source; TOO_DEEP where it is nested so, as a sum of hundreds of texts is."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return TOO_DEEP


_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class _Reader:
    """One file."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self._lines = name, text.split("\n")  # as Python counts: a form feed ends no line
        self.tree = ast.parse(text)
        self._parents: dict[ast.AST, ast.AST] = {}
        self._order: list[ast.AST] = []
        todo: list[ast.AST] = [self.tree]
        while todo:
            node = todo.pop()
            self._order.append(node)
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
                todo.append(child)
        self._calls = [node for node in self._order if isinstance(node, ast.Call)]
        self._loops = self._training_loops()
        self._called = self._functions_called_in_loops()
        self._called_classes = self._classes_called_in_loops()
        self._hooks = self._functions_as_hooks()
        self._optimizer_of = optimizers_of(self.tree)
        steppers = {_stepper(node) for node in self._calls}
        self._optimizers_stepped = {name for name in steppers if name and not _is_schedulers_name(name)}
        self._repeated = {_last(node.func) for node in self._calls if self._innermost(node, _LOOPS) is not None}
        """Functions that are called in some loop."""
        self._counters = self._names_that_count()
        self._assigned: dict[str, list[ast.expr]] = {}
        """Name -> what it is given anywhere."""
        for node in self._order:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assigned.setdefault(_dotted(target), []).append(node.value)

    def line(self, node: ast.AST) -> SourceLine:
        number = getattr(node, "lineno", 0)
        text = self._lines[number - 1].strip() if 0 < number <= len(self._lines) else ""
        return (self.name, number, text[:200])

    def names(self) -> Iterator[str]:
        for node in self._order:
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.arg | ast.keyword) and node.arg:
                yield node.arg
            elif isinstance(node, ast.alias):
                yield node.name

    def settings(self) -> Iterator[tuple[str, SourceLine]]:
        for node in self._order:
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Attribute):
                    yield _dotted(target), self.line(node)

    def calls(self) -> Iterator[CallFact]:
        for node in sorted(self._calls, key=lambda one: (one.lineno, one.col_offset)):
            loop = self._innermost(node, _LOOPS)
            function = self._innermost(node, _FUNCTIONS)
            options = {
                one.arg: one.value.value
                for one in node.keywords
                if one.arg is not None and isinstance(one.value, ast.Constant)
            }
            yield CallFact(
                name=_dotted(node.func),
                line=self.line(node),
                in_training_loop=self._is_in_training(node) or getattr(function, "name", None) in self._called,
                guarded=self._is_guarded(node, loop),
                repeats=self._repeats(node),
                options=options or None,
                arguments=tuple(_written(one)[:80] for one in node.args[:4]),
            )

    def kept(self) -> Iterator[KeptFact]:
        """Values that hold a graph, as far as names tell, kept in the loop that trains."""
        for node in self._order:
            found = stored = _stored(node)
            if stored is None and isinstance(node, ast.AugAssign | ast.Assign):
                found = self._summed(node)
            if found is None or _is_plain_value(found[1]):
                continue
            container, value = found
            if self._is_in_training(node) if stored is None else self._runs_in_training(node):
                yield KeptFact(
                    line=self.line(node),
                    container=container,
                    value=_written(value)[:80],
                    bounded=self._is_reset_in(node, container) if stored is None else self._is_bounded(container),
                    is_sum=stored is None,
                    detached=_is_detached(value),
                )

    def _summed(self, node: ast.AugAssign | ast.Assign) -> tuple[str, ast.expr] | None:
        """(name, what is added) of `total += loss` and `total = total + loss`."""
        if isinstance(node, ast.AugAssign):
            return (_dotted(node.target), node.value) if isinstance(node.op, ast.Add) else None
        if len(node.targets) != 1 or not isinstance(node.value, ast.BinOp) or not isinstance(node.value.op, ast.Add):
            return None
        name = _dotted(node.targets[0])
        if isinstance(node.value.left, ast.Name | ast.Attribute) and _dotted(node.value.left) == name:
            return name, node.value.right
        return None

    def layers(self) -> Iterator[LayerFact]:
        for node in self._order:
            if isinstance(node, ast.ClassDef) and (torchs := layer_of_torch(node)):
                yield LayerFact(name=node.name, line=self.line(node), torchs=torchs)

    def scheduler_first(self) -> Iterator[tuple[SourceLine, SourceLine]]:
        for node in self._order:
            if isinstance(node, _LOOPS):
                for block in (node.body, node.orelse):
                    yield from self._scheduler_first_in(block)

    def _scheduler_first_in(self, block: list[ast.stmt]) -> Iterator[tuple[SourceLine, SourceLine]]:
        early: dict[str, ast.stmt] = {}
        stepped: list[str] = []
        for statement in block:
            owner = _stepper(statement.value) if isinstance(statement, ast.Expr) else None
            if owner is None:
                continue
            if _is_schedulers_name(owner):
                if not any(self._belong_together(owner, one) for one in stepped):
                    early.setdefault(owner, statement)
            else:
                own = [one for name, one in early.items() if self._belong_together(name, owner)]
                if own:
                    yield self.line(own[0]), self.line(statement)
                    return
                stepped.append(owner)

    def _belong_together(self, scheduler: str, optimizer: str) -> bool:
        """Where it is not known what a scheduler is made with, the only optimizer there is."""
        known = self._optimizer_of.get(scheduler)
        return len(self._optimizers_stepped) == 1 if known is None else known == optimizer

    def loss_divided(self) -> Iterator[SourceLine]:
        for node in self._order:
            found: ast.AST | None = None
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
                found = node if _is_loss(node.left) or _is_loss(node.right) else None
            elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult):
                found = node if _is_loss(node.target) else None
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                divides = node.func.attr in ("div", "div_", "mul", "mul_", "true_divide")
                found = node if (divides and _is_loss(node.func.value)) or _is_given_gradient(node) else None
            if found is not None:
                yield self.line(found)
        yield from map(self.line, self._rates_divided())

    def _rates_divided(self) -> Iterator[ast.AST]:
        """`SGD(parameters, 0.1 / micro)`, `rate = 0.1 / micro` where `(step + 1) % micro` or `range(micro)` counts."""
        counts = {_written(node.right) for node in self._order if _is_remainder(node)}
        counts |= {_written(one) for node in self._calls if _dotted(node.func) == "range" for one in node.args}
        counts.discard(TOO_DEEP)
        for node in self._order:
            if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
                by = node.value if isinstance(node, ast.AugAssign) else node.right
                if _written(by) in counts and self._is_rate(node):
                    yield node

    def _is_rate(self, node: ast.AST) -> bool:
        """Does it become a learning rate, by the name that it is given, or as an optimizer's second argument?"""
        above = self._parents.get(node)
        while isinstance(above, ast.BinOp):
            node, above = above, self._parents.get(above)
        if isinstance(node, ast.AugAssign):
            return _is_rates_name(node.target)
        if isinstance(above, ast.Call):
            return node in above.args[1:2] and _last(above.func)[:1].isupper()
        if isinstance(above, ast.Assign):
            return any(map(_is_rates_name, above.targets))
        return isinstance(above, ast.keyword) and above.arg == "lr"

    # where a node is

    def _innermost(self, node: ast.AST, kinds: tuple[type, ...]) -> ast.AST | None:
        return next((one for one in self._around(node) if isinstance(one, kinds)), None)

    def _training_loops(self) -> set[ast.AST]:
        """Those around a backward pass or an optimizer's step, also where it is in a function that they call."""
        loops: set[ast.AST] = set()
        todo = [node for node in self._calls if _trains(node)]
        functions: set[str] = set()
        while todo:
            node = todo.pop()
            around = self._innermost(node, (*_LOOPS, *_FUNCTIONS))
            if isinstance(around, _LOOPS):
                loops.add(around)
            name = getattr(around, "name", None)
            if name is not None and name not in functions:
                functions.add(name)
                todo += [one for one in self._calls if _last(one.func) == name]
        return loops

    def _functions_called_in_loops(self) -> set[str]:
        return {_last(node.func) for node in self._calls if any(loop in self._loops for loop in self._around(node))}

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        at = self._parents.get(node)
        while at is not None:
            yield at
            at = self._parents.get(at)

    def _classes_called_in_loops(self) -> set[str]:
        """Of `features = Features(...)` and `features(x)` in the loop: 'Features'."""
        return {
            _last(node.value.func)
            for node in self._order
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for target in node.targets
            if _last(target) in self._called
        }

    def _is_in_training(self, node: ast.AST) -> bool:
        return any(one in self._loops for one in self._around(node))

    def _runs_in_training(self, node: ast.AST) -> bool:
        """Is it in a training loop, in a function or an object that one calls, or in a hook?"""
        around = self._innermost(node, _FUNCTIONS)
        function = getattr(around, "name", "")
        if self._is_in_training(node) or function in self._called or function in self._hooks:
            return True
        kind = None if around is None else self._parents.get(around)
        return (
            function in ("__call__", "forward") and isinstance(kind, ast.ClassDef) and kind.name in self._called_classes
        )

    def _functions_as_hooks(self) -> set[str]:
        """Of `layer.register_forward_hook(remember)`: 'remember'; of `...(remember_as("x"))`: what that returns."""
        hooks: set[str] = set()
        for node in self._calls:
            if isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_hook"):
                for one in node.args[:1]:
                    hooks.add(_last(one.func if isinstance(one, ast.Call) else one))
        inner = (one for one in self._order if isinstance(one, ast.FunctionDef))
        return hooks | {one.name for one in inner if getattr(self._innermost(one, _FUNCTIONS), "name", "") in hooks}

    def _is_guarded(self, node: ast.AST, loop: ast.AST | None) -> bool:
        for one in self._around(node):
            if one is loop or isinstance(one, _FUNCTIONS):
                return False
            if isinstance(one, ast.If) and self._counts(one.test):
                return True
        return False

    def _counts(self, test: ast.expr) -> bool:
        """Is it a test of a counter: of a remainder, or of what a loop counts or a line adds 1 to?"""
        names = {_dotted(node) for node in ast.walk(test) if isinstance(node, ast.Name | ast.Attribute)}
        tests = [test, *(value for name in names for value in self._assigned.get(name, ()))]
        if any(_is_remainder(node) for one in tests for node in ast.walk(one)):
            return True
        compares = any(isinstance(node, ast.Compare) for one in tests for node in ast.walk(one))
        return compares and not names.isdisjoint(self._counters)

    def _names_that_count(self) -> set[str]:
        counters = {
            _dotted(node.target)
            for node in self._order
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub)
            and isinstance(node.value, ast.Constant)
        }  # fmt: skip
        for node in self._order:
            if isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
                called = _last(node.iter.func)
                if called in ("range", "trange", "enumerate", "count"):
                    target = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
                    counters.add(_dotted(target))
        return counters

    def _repeats(self, node: ast.AST) -> bool:
        loop = self._innermost(node, (*_LOOPS, *_FUNCTIONS))
        if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name):
            return False
        counts = isinstance(loop.iter, ast.Call) and _dotted(loop.iter.func) in ("range", "trange")
        inside = [one for statement in loop.body for one in ast.walk(statement)]
        if any((owner := _stepper(one)) and not _is_schedulers_name(owner) for one in inside):
            return False  # its turns are steps
        return counts and not any(isinstance(one, ast.Name) and one.id == loop.target.id for one in inside)

    def _is_bounded(self, container: str) -> bool:
        """Is there anything that makes it smaller, empties it, or limits it?"""
        for node in self._order:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in SHRINKING and _name(node.func.value) == container:
                    return True
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if container not in [_dotted(one) for one in targets]:
                    continue
                value = node.value
                if isinstance(value, ast.Call) and any(one.arg == "maxlen" for one in value.keywords):
                    return True
                if isinstance(value, ast.Subscript) or self._innermost(node, _LOOPS) is not None:
                    return True  # cut, or made anew, such as in each epoch
                function = getattr(self._innermost(node, _FUNCTIONS), "name", "")
                if function in self._repeated or ("." in container and function not in ("", "__init__")):
                    return True  # made anew by a function that is called for each epoch, or that resets it
            elif isinstance(node, ast.Delete) and any(
                isinstance(one, ast.Subscript) and _dotted(one.value) == container for one in node.targets
            ):
                return True
        return False

    def _is_reset_in(self, addition: ast.AST, name: str) -> bool:
        """Is the sum started anew inside the loop that it is added up in?"""
        loop = self._innermost(addition, _LOOPS)
        for node in ast.walk(loop) if loop is not None else ():
            if isinstance(node, ast.Assign) and node is not addition and name in [_dotted(one) for one in node.targets]:
                return True
        return False


def _trains(node: ast.Call) -> bool:
    """Is it a backward pass, or an optimizer's step?"""
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in ("step", "backward"):
        return False
    owner = _dotted(node.func.value).lower()
    return node.func.attr == "backward" or "opt" in owner or "scaler" in owner or "trainer" in owner


def _stored(node: ast.AST) -> tuple[str, ast.expr] | None:
    """(container, value) of `kept.append(value)` and `kept[key] = value`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 1:
        if node.func.attr in ("append", "extend", "add", "appendleft"):
            return _name(node.func.value), node.args[0]
    elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
        key = node.targets[0].slice
        if not any(isinstance(one, ast.Slice | ast.Constant) for one in ast.walk(key)):
            return _name(node.targets[0].value), node.value
    return None


def _name(node: ast.expr) -> str:
    """'kept' of `kept` and of `kept[key]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return _dotted(node)


def _last(node: ast.AST) -> str:
    """'step' of `self.optimizer.step`."""
    return _dotted(node).rpartition(".")[2]


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return "()"
    return "[]" if isinstance(node, ast.Subscript) else "?"


def _stepper(call: ast.AST) -> str | None:
    """'scheduler' of `scheduler.step()`, whatever its arguments, and 'optimizer' of `scaler.step(optimizer)`; None for
    what is neither a scheduler nor an optimizer, by its name."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return None
    owner = _last(call.func.value)
    if _is_schedulers_name(owner) or "opt" in owner.lower():
        return owner
    if "scaler" not in owner.lower():
        return None
    return _last(call.args[0]) if call.args else "optimizer"


def _is_schedulers_name(name: str) -> bool:
    return "sched" in name.lower() or name.lower().startswith("lr")


def _is_loss(node: ast.AST) -> bool:
    name = _dotted(node).lower()
    return "loss" in name or name.endswith(".grad") or name in ("l", "err", "error", "cost", "nll", "objective")


def _is_given_gradient(node: ast.Call) -> bool:
    """`loss.backward(gradient=torch.tensor(1 / 4))`: what the loss is multiplied with, unless it is all ones."""
    assert isinstance(node.func, ast.Attribute)
    if node.func.attr != "backward" or _last(node.func.value) == "autograd":
        return False
    given = [*node.args[:1], *(one.value for one in node.keywords if one.arg == "gradient")]
    ones = [one for one in given if isinstance(one, ast.Call) and "ones" in _dotted(one.func)]
    return any(one not in ones and not isinstance(one, ast.Constant) for one in given)


def _is_remainder(node: ast.AST) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant)


def _is_rates_name(node: ast.AST) -> bool:
    name = _dotted(node.value if isinstance(node, ast.Subscript) else node).lower().rpartition(".")[2]
    key = node.slice if isinstance(node, ast.Subscript) else None
    return name in ("lr", "rate", "learning_rate") or (isinstance(key, ast.Constant) and key.value == "lr")


def _is_plain_value(node: ast.expr) -> bool:
    """Is it a number, a text or something taken out of a graph? A bare name or attribute may be a tensor."""
    if isinstance(node, ast.Constant | ast.JoinedStr):
        return True
    if isinstance(node, ast.Dict):
        return all(_is_plain_value(one) for one in node.values)
    if isinstance(node, ast.Name | ast.Attribute):
        return False
    if isinstance(node, ast.BinOp):
        return _is_plain_value(node.left) or _is_plain_value(node.right)
    if isinstance(node, ast.Tuple | ast.List):
        plain = [one for one in node.elts if _is_plain_value(one)]
        return len(plain) == len(node.elts) or any(isinstance(one, ast.Call) for one in plain)
    if isinstance(node, ast.Call):
        return _last(node.func) in NUMBERS
    return True


def _is_detached(node: ast.expr) -> bool:
    """Is it taken out of its graph, or made where there is none?"""
    called = [_last(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)]
    return any(name in ("detach", "numpy", "rand", "randn", "zeros", "ones", "empty", "tensor") for name in called)
