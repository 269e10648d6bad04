"""Autocast around the calls of the model that train.

Under `flatout run` autocast is around the model alone, and what the model returns is fp32 again before the loss. The
same in the source, in the shortest form that has the same numbers:

- a loss that autocast computes in fp32 by itself is inside with the model's call;
- what the model returns is cast by `.float()`, where the source shows that it is a tensor;
- otherwise by a function of a few lines, which is added to the file.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.plan_choices import ChoiceValue
from flatout.source_patch.edits import Changed, Hoisting, InContext, NoSourceForm, Replacement
from flatout.source_patch.known_calls import (
    FACTORIES,
    LOSS_CLASSES,
    REARRANGING,
    TENSOR_ATTRIBUTES,
    TENSOR_METHODS,
    is_loss,
)
from flatout.source_patch.setting_forms import Notes
from flatout.source_patch.source_file import Block, SourceFile, called, dotted, walk, walk_own
from flatout.source_patch.sources import Sources, returned
from flatout.source_patch.training_step import TrainingStep, root_class, training_step
from flatout.source_patch.tuned_loop import TunedLoop

TO_FP32 = '''def {name}(value):
    """The bf16 tensors in `value` as fp32."""
    import copy
    import dataclasses

    if isinstance(value, {torch}.Tensor):
        return value.float() if value.dtype == {torch}.bfloat16 else value
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map({name}, value))
    if type(value) in (tuple, list):
        return type(value)(map({name}, value))
    if isinstance(value, dict):
        changed = copy.copy(value)
        for key, one in value.items():
            changed[key] = {name}(one)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(changed, field.name, {name}(getattr(value, field.name)))
        return changed
    return value
'''
SAME_IN_BF16 = frozenset(("argmax", "argmin", "size", "shape", "dim", "numel", "ndim"))
"""Of a tensor, the same whether it is bf16 or the same values in fp32."""
UNCHANGED = frozenset(("to", "cuda", "cpu", "float", "long", "size", "dim", "mean", "sum", "item", "argmax", "argmin"))
"""Methods that are the same inside of autocast, where their tensor is."""
INNOCENT = frozenset(("len", "int", "float", "range"))


def precision(sources: Sources, choice: str, value: ChoiceValue, tuned: TunedLoop) -> Notes:
    """`with torch.autocast(...)` around each statement that calls the model to train."""
    if value != "bf16":
        raise NoSourceForm("fp16 needs a scaled loss, in the script's own update")
    if not tuned.device:
        raise NoSourceForm("the plan does not say on which device it was tuned, which torch.autocast has to be told")
    if tuned.device == "cpu" and sources.mentions("LSTM"):
        raise NoSourceForm(
            "flatout run keeps an LSTM in fp32 where oneDNN's 16-bit gradients are wrong; autocast does not"
        )
    form = _Form(sources, choice, training_step(sources, tuned.trained), tuned.device)
    for call in form.step.calls:
        form.wrap(call)
    return ()


class _Form:
    def __init__(self, sources: Sources, choice: str, step: TrainingStep, device: str) -> None:
        self.sources, self.choice, self.step, self.file = sources, choice, step, step.file
        self.torch = sources.torch_name(step.file, choice)
        self.context = f'{self.torch}.autocast("{device}", dtype={self.torch}.bfloat16)'
        self._wrapped: set[cst.CSTNode] = set()
        self._helper = ""

    def wrap(self, call: cst.Call) -> None:
        """Its statement, or the call alone."""
        statement, file = self.file.statement_of(call), self.file
        place = file.place(call)
        if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) > 1:
            raise NoSourceForm(f"{place}: the model's call shares its line with other statements")
        if any(one is self.step.backward for one in walk(statement)):
            raise NoSourceForm(f"{place}: the model is called in the line of backward")
        if self._within(call, (cst.Lambda, cst.ListComp, cst.GeneratorExp, cst.IfExp, cst.BooleanOperation), statement):
            raise NoSourceForm(f"{place}: the model is called within an expression that may run it more or less often")
        if not all(self._is_unchanged(one) for one in self._computed_in(call.args)):
            raise NoSourceForm(f"{place}: what is computed for the model's arguments would be inside of autocast too")
        small = statement.body[0]
        if isinstance(small, cst.Assign) and small.value is call:
            self._assigned(call, small, statement)
        elif self._ends_in_loss(call, statement):
            self._around(statement, statement)
        else:
            self._hoisted(call, statement, place)

    # `output = model(x)`

    def _assigned(self, call: cst.Call, small: cst.Assign, statement: cst.SimpleStatementLine) -> None:
        target = small.targets[0].target
        if len(small.targets) == 1 and isinstance(target, (cst.Tuple, cst.List)):
            needed = [place for place, one in enumerate(target.elements) if self._is_needed(dotted(one.value), target)]
            if not all(self._is_fp32(place) for place in needed):
                self._cast(call, self._to_fp32())
            self._around(statement, statement)
            return
        name = dotted(target) if len(small.targets) == 1 else ""
        if name and name == self.step.loss and self._is_fp32(None):
            self._around(statement, statement)
            return
        following = self._next(statement)
        if name and following is not None and self._is_loss_of(name, following):
            others = [one for one in self._uses(name, target) if not self._inside(one, following)]
            if all(self._is_same_in_bf16(one) for one in others):
                self._around(statement, following)
                return
        shown = bool(name) and any(self._shows_tensor(one) for one in self._uses(name, target))
        self._cast(call, ".float" if shown else self._to_fp32())
        self._around(statement, statement)

    def _cast(self, call: cst.Call, function: str) -> None:
        self.sources.edits.add(Replacement(file=self.file, node=call, choice=self.choice, change=_casting(function)))

    def _around(self, first: cst.SimpleStatementLine, last: cst.SimpleStatementLine) -> None:
        if first not in self._wrapped:
            self._wrapped.add(first)
            self.sources.edits.add(
                InContext(file=self.file, node=first, last=last, choice=self.choice, context=self.context)
            )

    def _hoisted(self, call: cst.Call, statement: cst.SimpleStatementLine, place: str) -> None:
        """The call before its statement: everything else in that line stays outside of autocast."""
        start = self.file.positions[call].start
        for one in self.file.find(cst.Call, statement):
            ended = self.file.positions[one].end
            if (ended.line, ended.column) <= (start.line, start.column):
                raise NoSourceForm(f"{place}: another call comes before the model's in one expression")
        name = self.sources.fresh_name(self.file, "model_output")
        use = f"{name}.float()" if self._shows_tensor(call) else f"{self._to_fp32()}({name})"
        self.sources.edits.add(
            Hoisting(
                file=self.file,
                node=call,
                choice=self.choice,
                statement=statement,
                context=self.context,
                name=name,
                use=use,
            )
        )

    def _to_fp32(self) -> str:
        """The name of the function that casts whatever a model returns; it is added to the file once."""
        if not self._helper:
            self._helper = self.sources.fresh_name(self.file, "to_fp32")
            top: cst.CSTNode = self.step.backward
            for one in self.file.ancestors(self.step.backward):
                if not isinstance(one, cst.Module):
                    top = one
            code = TO_FP32.format(name=self._helper, torch=self.torch)
            self.sources.edits.insert(self.file, top, self.choice, code, blank_lines=2)
        return self._helper

    # what the source shows

    def _is_needed(self, name: str, target: cst.CSTNode) -> bool:
        return not name or any(not self._is_same_in_bf16(use) for use in self._uses(name, target))

    def _uses(self, name: str, target: cst.CSTNode) -> list[cst.BaseExpression]:
        """Of a name in the function, beside the assignments to it."""
        found: list[cst.BaseExpression] = []
        inside = walk_own(self.file.tree) if self.step.function is None else walk(self.step.scope)
        for node in inside:
            if not isinstance(node, (cst.Name, cst.Attribute)) or dotted(node) != name:
                continue
            parent = self.file.parents.get(node)
            is_part = isinstance(parent, cst.Attribute) and parent.attr is node
            is_keyword = isinstance(parent, cst.Arg) and parent.keyword is node
            if not is_part and not is_keyword and not self._is_target(node):
                found.append(node)
        return found

    def _is_target(self, node: cst.CSTNode) -> bool:
        parent = self.file.parents.get(node)
        while isinstance(parent, (cst.Element, cst.Tuple, cst.List)):
            parent = self.file.parents.get(parent)
        return isinstance(parent, cst.AssignTarget)

    def _is_same_in_bf16(self, use: cst.CSTNode) -> bool:
        parent = self.file.parents[use]
        if isinstance(parent, cst.Attribute) and parent.value is use:
            return parent.attr.value in SAME_IN_BF16
        call = self.file.parents.get(parent)
        return isinstance(parent, cst.Arg) and isinstance(call, cst.Call) and called(call) == "len"

    def _shows_tensor(self, use: cst.CSTNode) -> bool:
        """Is it used as only a tensor can be?"""
        parent = self.file.parents[use]
        if isinstance(parent, cst.Attribute) and parent.value is use:
            return parent.attr.value in TENSOR_METHODS | TENSOR_ATTRIBUTES
        if isinstance(parent, (cst.BinaryOperation, cst.UnaryOperation)):
            return True
        call = self.file.parents.get(parent)
        if not isinstance(parent, cst.Arg) or not isinstance(call, cst.Call):
            return False
        if parent.value is use and self._is_loss_call(call):
            return True
        names = self.file.qualified(call.func)
        return any(name.startswith(("torch.nn.functional.", "torch.")) and name != "torch.save" for name in names)

    def _is_fp32(self, place: int | None) -> bool:
        """Is what the model returns at this place of its tuple (None: alone) a loss that autocast computes in fp32?"""
        made = self.sources.values(self.file, self.step.calls[0].func) or ()  # what the called name may stand for
        kinds = {root_class(self.sources, one) for one in made}
        classes = [self.sources.classes(kind) for kind in kinds]
        return bool(classes) and all(len(one) == 1 and self._returns_loss(*one[0], place) for one in classes)

    def _returns_loss(self, file: SourceFile, kind: cst.ClassDef, place: int | None) -> bool:
        forward = next((one for one in file.find(cst.FunctionDef, kind) if one.name.value == "forward"), None)
        results = [] if forward is None else returned(forward)
        for result in results:
            one: cst.BaseExpression = result
            if place is not None:
                if not isinstance(result, cst.Tuple) or place >= len(result.elements):
                    return False
                one = result.elements[place].value
            values = self.sources.values(file, one)
            if not values:
                return False
            for value in values:
                node = value.node
                is_none = isinstance(node, cst.Name) and node.value == "None"
                if not is_none and not (isinstance(node, cst.Call) and is_loss(value.file.qualified(node.func))):
                    return False
        return bool(results)

    def _is_loss_call(self, call: cst.Call) -> bool:
        """Does it compute a loss that autocast casts to fp32?"""
        if is_loss(self.file.qualified(call.func)):
            return True
        if isinstance(call.func, cst.Call):  # nn.CrossEntropyLoss()(output, target)
            return bool(self.file.qualified(call.func.func) & LOSS_CLASSES)
        values = self.sources.values(self.file, call.func) if dotted(call.func) else None
        return bool(values) and all(root_class(self.sources, one) in LOSS_CLASSES for one in values or ())

    def _ends_in_loss(self, call: cst.Call, statement: cst.SimpleStatementLine) -> bool:
        """Is its result only rearranged on its way into such a loss, in a statement that computes nothing else?"""
        return self._reaches_loss(call) and self._is_plain(statement, call)

    def _reaches_loss(self, use: cst.CSTNode) -> bool:
        """Only rearranged, and then an argument of a loss."""
        parent = self.file.parents[use]
        while True:
            if isinstance(parent, cst.Arg):
                outer = self.file.parents[parent]
                return isinstance(outer, cst.Call) and parent in outer.args and self._is_loss_call(outer)
            if not isinstance(parent, cst.Attribute) or parent.attr.value not in REARRANGING:
                return False
            outer = self.file.parents[parent]
            if not isinstance(outer, cst.Call) or outer.func is not parent:
                return False
            parent = self.file.parents[outer]

    def _is_plain(self, statement: cst.SimpleStatementLine, mine: cst.Call | None) -> bool:
        """Is nothing computed but losses, the model's own call, and what autocast leaves as it is?"""
        return all(one is mine or self._is_unchanged(one) for one in self._computed_in([statement]))

    def _computed_in(self, nodes: Sequence[cst.CSTNode]) -> list[cst.CSTNode]:
        """Calls and matrix products."""
        return [one for node in nodes for one in walk(node) if isinstance(one, (cst.Call, cst.MatrixMultiply))]

    def _is_unchanged(self, node: cst.CSTNode) -> bool:
        """Does this give the same inside of autocast?"""
        if not isinstance(node, cst.Call):
            return False
        if isinstance(node.func, cst.Attribute) and node.func.attr.value in REARRANGING | UNCHANGED:
            return True
        names = self.file.qualified(node.func)
        return self._is_loss_call(node) or bool(names & (LOSS_CLASSES | FACTORIES)) or dotted(node.func) in INNOCENT

    def _is_loss_of(self, name: str, statement: cst.SimpleStatementLine) -> bool:
        """Does the statement compute a loss of `name`, and nothing else?"""
        small = statement.body[0]
        if len(statement.body) > 1 or not isinstance(small, cst.Assign) or not self._is_plain(statement, None):
            return False
        uses = [one for one in self._uses(name, small) if self._inside(one, statement)]
        return bool(uses) and all(self._reaches_loss(one) or self._is_same_in_bf16(one) for one in uses)

    def _next(self, statement: cst.SimpleStatementLine) -> cst.SimpleStatementLine | None:
        block = self.file.parents[statement]
        assert isinstance(block, Block)
        body = list(block.body)
        place = body.index(statement) + 1
        following = body[place] if place < len(body) else None
        if not isinstance(following, cst.SimpleStatementLine):
            return None
        return None if any(one is self.step.backward for one in walk(following)) else following

    def _inside(self, node: cst.CSTNode, statement: cst.CSTNode) -> bool:
        return any(one is statement for one in self.file.ancestors(node))

    def _within(self, node: cst.CSTNode, kinds: tuple[type[cst.CSTNode], ...], statement: cst.CSTNode) -> bool:
        for one in self.file.ancestors(node):
            if one is statement:
                return False
            if isinstance(one, kinds):
                return True
        return False


def _casting(function: str) -> Changed:
    """`call` as `call.float()`, or as `function(call)`."""

    def change(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.BaseExpression)
        if function == ".float":
            return cst.Call(func=cst.Attribute(value=node, attr=cst.Name("float")))
        return cst.Call(func=cst.Name(function), args=[cst.Arg(node)])

    return change
