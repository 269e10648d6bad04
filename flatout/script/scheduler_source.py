"""What the source says of learning rate schedulers: those that nothing uses, and those that step first in an epoch.

    trees = {"train.py": ast.parse(text)}
    unused_schedulers(trees)              # [("train.py", <the call that makes it>)]
    first_in_epochs(trees["train.py"])    # [(scheduler.step(), the statement with optimizer.step())]

Names are followed within one file by how they are assigned; what cannot be followed counts as used.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import TypeGuard

SCHEDULERS = (
    "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "SequentialLR",
    "CosineAnnealingLR", "ChainedScheduler", "ReduceLROnPlateau", "CyclicLR", "CosineAnnealingWarmRestarts",
    "OneCycleLR", "PolynomialLR", "SWALR",
)  # fmt: skip
READS = ("get_last_lr", "get_lr", "state_dict", "load_state_dict", "last_epoch", "optimizer", "print_lr", "base_lrs")
"""What is asked of a scheduler without stepping it."""
LOOKUPS = ("locals", "globals", "vars", "eval", "exec", "getattr")
"""They reach names that the source does not show."""
PLAIN_BASES = ("object", "Module", "ABC")
"""Classes outside of the script that step no scheduler."""
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def unused_schedulers(trees: Mapping[str, ast.Module]) -> list[tuple[str, ast.Call]]:
    """(file, call that makes it) of schedulers that are stored under a name, or not at all, and never given to
    anything or stepped."""
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    if any(isinstance(node, ast.Name) and node.id in LOOKUPS for node in nodes):
        return []
    used = _used_names(nodes)
    elsewhere = _kept_by_other_classes(nodes)
    return [
        (file, call)
        for file, tree in trees.items()
        for name, call in _made(tree)
        if name not in used and call not in elsewhere
    ]


def _made(tree: ast.Module) -> Iterator[tuple[str | None, ast.Call]]:
    """(last part of the name, call); no name: the result is dropped."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr | ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if not _makes_scheduler(node.value):
            continue
        if isinstance(node, ast.Expr):
            yield None, node.value
        elif len(node.targets) == 1 and (name := last_part(node.targets[0])):
            yield name, node.value


def optimizers_of(tree: ast.Module) -> dict[str, str]:
    """Name of each scheduler that is made here -> name of the optimizer that it is made with, both without what they
    are attributes of."""
    return {name: optimizer for name, call in _made(tree) if name and (optimizer := _optimizer_given(call))}


def _optimizer_given(call: ast.Call) -> str:
    given = call.args[:1] or [one.value for one in call.keywords if one.arg == "optimizer"]
    return last_part(given[0]) if given else ""


def _makes_scheduler(call: ast.Call) -> bool:
    """A given last_epoch goes on from elsewhere."""
    goes_on = any(one.arg in (None, "last_epoch") for one in call.keywords)
    return last_part(call.func) in SCHEDULERS and not goes_on


def _used_names(nodes: list[ast.AST]) -> set[str]:
    """Last parts of names that are read for anything but READS; `lr_scheduler.StepLR` is the module."""
    only_read = {node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr in (*READS, *SCHEDULERS)}
    return {
        last_part(node)
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load) and node not in only_read
    }


def _kept_by_other_classes(nodes: list[ast.AST]) -> set[ast.expr]:
    """What becomes an attribute that code outside of the files may step: of an object whose class is not known, or
    derives from one of a library, such as a Trainer."""
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    own = {
        inner
        for kind in classes.values()
        if _is_whole(kind, classes)
        for inner in ast.walk(kind)
        if isinstance(inner, ast.Assign) and _is_of_self(inner.targets[0])
    }
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute) and node not in own
    }


def _is_of_self(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"


def _is_whole(kind: ast.ClassDef, classes: Mapping[str, ast.ClassDef], below: tuple[str, ...] = ()) -> bool:
    """Is all that its methods do in the files?"""
    below = (*below, kind.name)
    return all(
        last_part(base) in PLAIN_BASES
        or (
            isinstance(base, ast.Name)
            and base.id in classes
            and base.id not in below
            and _is_whole(classes[base.id], classes, below)
        )
        for base in kind.bases
    )


def first_in_epochs(tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.stmt]]:
    """(the scheduler's step, the statement in which the optimizer steps many times) of loops over epochs in which the
    first stands before the second. A step that is told its epoch is meant to come first."""
    schedulers = {name for name, _ in _made(tree) if name}
    names, optimizers = _OptimizerSteps(tree), optimizers_of(tree)
    for node in ast.walk(tree):
        if not isinstance(node, _LOOPS) or schedulers.isdisjoint(map(_stepped_name, node.body)) or names.before(node):
            continue
        early: tuple[str, ast.stmt] | None = None
        for statement in node.body:
            name = _stepped_name(statement)
            if early is None and name in schedulers:
                early = name, statement
            elif names.many(statement):
                if early is not None and not names.are_others(statement, optimizers.get(early[0])):
                    yield early[1], statement
                break
            elif names.some(statement):
                break


class _OptimizerSteps:
    """Where a file steps its optimizers."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)}
        made = (node for node in ast.walk(tree) if isinstance(node, ast.Assign) and len(node.targets) == 1)
        self._optimizers = {last_part(node.targets[0]) for node in made if _is_of_torch_optim(node.value)}

    def some(self, node: ast.AST) -> bool:
        """Does it step an optimizer, itself or in a function of the file that it calls?"""
        return any(self._is_step(one) for one in self._reached(node))

    def many(self, statement: ast.stmt) -> bool:
        """Does it so in a loop?"""
        return any(isinstance(one, _LOOPS) and self.some(one) for one in self._reached(statement))

    def before(self, loop: ast.stmt) -> bool:
        """Has an optimizer stepped earlier in the same function, so that the loop is not the first that trains?"""
        for node in ast.walk(self._tree):
            for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
                if isinstance(block, list) and loop in block:
                    earlier = block[: block.index(loop)]
                    return any(self.some(one) for one in earlier if not isinstance(one, (*_FUNCTIONS, ast.ClassDef)))
        return False

    def are_others(self, statement: ast.stmt, optimizer: str | None) -> bool:
        """Are the optimizers that step in it made in this file, and none of them this one? A function may call an
        optimizer that it is given by another name."""
        stepped = {_optimizer_stepped(one) for one in self._reached(statement) if self._is_step(one)}
        return optimizer in self._optimizers and optimizer not in stepped and stepped <= self._optimizers

    def _reached(self, node: ast.AST) -> Iterator[ast.AST]:
        """What is in it, and in the functions of the file that it calls, up to three deep."""
        inside: set[ast.AST] = {node}
        seen: set[ast.AST] = set()
        for _ in range(4):
            found = [one for outer in inside for one in ast.walk(outer)]
            yield from found
            called = {self._functions.get(last_part(one.func)) for one in found if isinstance(one, ast.Call)}
            seen |= inside
            inside = {one for one in called if one is not None and one not in seen}

    def _is_step(self, node: ast.AST) -> TypeGuard[ast.Call]:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "step":
            return False
        owner = last_part(node.func.value)
        return owner in self._optimizers or any(part in owner.lower() for part in ("opt", "scaler"))


def _is_of_torch_optim(node: ast.expr) -> bool:
    """Of `torch.optim.SGD(...)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return last_part(node.func.value) == "optim"


def _optimizer_stepped(call: ast.Call) -> str:
    """Of `optimizer.step()` and of `scaler.step(optimizer)`."""
    assert isinstance(call.func, ast.Attribute)
    owner = last_part(call.func.value)
    return last_part(call.args[0]) if "scaler" in owner.lower() and call.args else owner


def _stepped_name(statement: ast.stmt) -> str:
    """'scheduler' of the statement `scheduler.step()`; '' of one with arguments, and of any other."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return ""
    return "" if call.args or call.keywords else last_part(call.func.value)


def last_part(node: ast.AST) -> str:
    """'scheduler' of `self.scheduler`; '' of what is no name."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
