"""The training step in a script's source: its backward pass, the loop around it, and the calls of the model before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from flatout.source_patch.edits import NoSourceForm
from flatout.source_patch.known_calls import PLACES, is_loss
from flatout.source_patch.source_file import SourceFile, called, dotted, unwrapped, walk, walk_own
from flatout.source_patch.sources import Sources, Value

OF_A_MODEL = frozenset(("parameters", "named_parameters", "train", "eval", "state_dict", "load_state_dict"))
WITHOUT_GRADIENTS = ("no_grad", "inference_mode")


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingStep:
    """Where a script trains."""

    file: SourceFile
    backward: cst.Call
    function: cst.FunctionDef | None
    """None: at the top level of the file."""
    loops: Sequence[cst.For | cst.While]
    """Around the backward pass, within the function; innermost first."""
    calls: Sequence[cst.Call]
    """Of the model, before the backward pass."""
    model: str
    """What the model is called there: 'model', 'self.net'."""

    @property
    def scope(self) -> cst.CSTNode:
        return self.file.tree if self.function is None else self.function.body

    @property
    def loss(self) -> str:
        """The name whose `backward` is called; '' if it is no name."""
        return dotted(self.backward.func.value) if isinstance(self.backward.func, cst.Attribute) else ""


def training_step(sources: Sources, trained: frozenset[str] | None) -> TrainingStep:
    """The one training step of the script. trained: classes of the modules that were seen to train, with weights; None:
    not known. Raises NoSourceForm where there is none, or more than one.
    """
    found = [(file, call) for file, call in sources.calls() if _is_backward(file, call)]
    if len(found) != 1:
        lines = ", ".join(file.place(call) for file, call in found)
        raise NoSourceForm(f"backward is called in {len(found)} places ({lines})" if found else "no call of backward")
    file, backward = found[0]
    function = file.function_of(backward)
    loops = []
    for one in file.ancestors(backward):
        if one is function:
            break
        if isinstance(one, (cst.For, cst.While)):
            loops.append(one)
    inside: list[cst.CSTNode] = [loop.body for loop in loops]
    for place in [*inside, file.tree if function is None else function.body]:
        calls = [call for call in _before(file, place, backward) if is_model(sources, file, call, trained)]
        if calls:
            break
    else:
        raise NoSourceForm(f"no call of the model was found beside backward in {file.path.name}")
    names = {dotted(call.func) for call in calls}
    if len(names) > 1:
        raise NoSourceForm(f"several models are called in one step: {', '.join(sorted(names))}")
    return TrainingStep(file=file, backward=backward, function=function, loops=loops, calls=calls, model=names.pop())


def _is_backward(file: SourceFile, call: cst.Call) -> bool:
    return called(call) == "backward" and isinstance(call.func, cst.Attribute) and not file.qualified(call.func)


def _before(file: SourceFile, place: cst.CSTNode, backward: cst.Call) -> Iterator[cst.Call]:
    """Calls that are made with gradients before the backward pass; those of a name or an attribute of one."""
    last = file.positions[backward].start
    for node in walk_own(place):
        if not isinstance(node, cst.Call) or not dotted(node.func) or node is backward:
            continue
        start = file.positions[node].start
        if (start.line, start.column) <= (last.line, last.column) and not without_gradients(file, node):
            yield node


def without_gradients(file: SourceFile, node: cst.CSTNode) -> bool:
    """Is it inside `with torch.no_grad():`?"""
    for one in file.ancestors(node):
        if isinstance(one, cst.With) and any(_turns_off(item.item) for item in one.items):
            return True
    return False


def _turns_off(context: cst.BaseExpression) -> bool:
    return isinstance(context, cst.Call) and called(context) in WITHOUT_GRADIENTS


def is_model(sources: Sources, file: SourceFile, call: cst.Call, trained: frozenset[str] | None) -> bool:
    """Is it the call of a module with weights?"""
    if file.qualified(call.func) or not dotted(call.func):
        return False
    values = sources.values(file, call.func)
    kinds = [root_class(sources, value) for value in values or ()]
    if kinds and all(kinds):
        return any(_has_weights(kind, trained) for kind in kinds)
    return used_as_model(file, call)


def used_as_model(file: SourceFile, call: cst.Call) -> bool:
    """Is what is called used as a module elsewhere in the function: `model.train()`, `model.parameters()`?"""
    name, function = dotted(call.func), file.function_of(call)
    inside = file.tree if function is None else function.body
    for one in walk(inside):
        if not isinstance(one, cst.Call) or not isinstance(one.func, cst.Attribute):
            continue
        if dotted(one.func.value) == name and one.func.attr.value in OF_A_MODEL:
            return True
    return False


def root_class(sources: Sources, value: Value) -> str:
    """The class of the object that an expression makes: 'Net' of `Net(3).to(device)`, 'torch.nn.Linear'; '' if
    unknown."""
    node = unwrapped(value.node, PLACES)
    if not isinstance(node, cst.Call):
        return ""
    names = {name for name in value.file.qualified(node.func) if name.startswith("torch.")}
    if names:
        return sorted(names)[0]
    name = dotted(node.func).rpartition(".")[2]
    return name if sources.classes(name) else ""


def _has_weights(kind: str, trained: frozenset[str] | None) -> bool:
    if is_loss({kind}) or kind.endswith(("Loss", "Criterion")):
        return False
    return trained is None or kind.rpartition(".")[2] in trained
